"""Layout problems to test with, and slow, obvious answers to compare with."""

import random
from itertools import permutations

from hypothesis import settings
from hypothesis import strategies as st

from roamc.solvers.layout.problem import Gap, LayoutProblem, make_problem

PROPERTY = settings(derandomize=True, max_examples=100, deadline=None)


@st.composite
def problems(draw: st.DrawFn, most_storages: int = 16, most_steps: int = 12) -> LayoutProblem:
    """Small random problems: sizes of zero and off the alignment, gaps in time, equal storages."""
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 1, 3, 8, 9, 16, 40, 100]),
                st.integers(0, most_steps - 1),
                st.integers(1, most_steps),
            ),
            max_size=most_storages,
        )
    )
    return make_problem(
        size=[size for size, _, _ in rows],
        born=[born for _, born, _ in rows],
        dead=[born + life for _, born, life in rows],
        alignment=draw(st.sampled_from([1, 8, 64])),
    )


@st.composite
def special_problems(draw: st.DrawFn, most_storages: int = 10) -> LayoutProblem:
    """Small random problems in which storages have alignments of their own, hints, gaps, windows, fixed places."""
    plain = draw(problems(most_storages=most_storages))
    count, unit = plain.num_storages, plain.alignment
    maybe = st.lists(st.integers(-6, 6), min_size=count, max_size=count)
    fixed = [-1] * count
    top = 0
    for storage, place in enumerate(draw(maybe)):
        if place > 4:  # one above the other, with holes between
            fixed[storage] = top + unit * (place - 5)
            top = fixed[storage] + room(plain)[storage]
    alignments = draw(st.lists(st.sampled_from([1, 3, 2 * unit]), min_size=count, max_size=count))
    gaps = []
    for storage, cut in enumerate(draw(maybe)):
        born, dead = int(plain.born[storage]), int(plain.dead[storage])
        if 0 < cut < dead - born:
            size = int(plain.size[storage])
            high = draw(st.integers(0, size))
            gaps.append(Gap(storage, born + cut, draw(st.integers(born + cut + 1, dead)), high // 2, high))
    return make_problem(
        plain.size,
        plain.born,
        plain.dead,
        unit,
        own_alignment=[1 if at >= 0 else own for at, own in zip(fixed, alignments, strict=True)],
        fixed=fixed,
        hint=[max(-1, place * unit) for place in draw(maybe)],
        gaps=gaps,
    )


@st.composite
def tiny_problems(draw: st.DrawFn) -> LayoutProblem:
    """A few storages of a few bytes, with everything that a storage may have."""
    count = draw(st.integers(1, 4))
    size = [draw(st.integers(1, 3)) for _ in range(count)]
    born = [draw(st.integers(0, 3)) for _ in range(count)]
    dead = [first + draw(st.integers(1, 4)) for first in born]
    fixed = [-1] * count
    fixed[0] = draw(st.integers(-1, 4))
    gaps = []
    for storage in range(count):
        if dead[storage] - born[storage] > 2 and draw(st.booleans()):
            high = draw(st.integers(0, size[storage]))
            gaps.append(Gap(storage, born[storage] + 1, dead[storage] - 1, draw(st.integers(0, high)), high))
    own = [1] + [draw(st.integers(1, 3)) for _ in range(count - 1)]
    return make_problem(size, born, dead, 1, own_alignment=own, fixed=fixed, gaps=gaps)


def training_problem(layers: int, seed: int = 0) -> LayoutProblem:
    """Saved activations with nested lives, short temporaries, weight gradients and the steps of their updates."""
    dice = random.Random(seed)
    rows: list[tuple[int, int, int]] = []
    saved: list[tuple[int, int]] = []
    width, tokens = dice.choice([256, 512, 768]), dice.choice([128, 512])
    one = width * tokens
    sizes = [4 * one, 2 * one, one, 12 * one, 16 * one, 32 * tokens * tokens, 4 * tokens, 4 * width]
    step = 0
    for step in range(6 * layers):
        size = dice.choice(sizes)
        if dice.random() < 0.6:
            saved.append((size, step))
        else:
            rows.append((size, step, step + dice.choice([2, 2, 3, 5])))
    rows.append((50_000 * tokens, step + 1, step + 3))
    step += 2
    gradients: list[tuple[int, int]] = []
    for size, born in reversed(saved):
        rows.append((size, born, step + dice.choice([1, 1, 2])))
        rows.append((dice.choice(sizes), step, step + dice.choice([2, 2, 3])))
        if dice.random() < 0.4:
            gradients.append((dice.choice([4 * width * width, 16 * width * width, 4 * width]), step))
        step += 1
    for size, born in gradients:
        rows += [(size, born, step + 3), (size, step + 1, step + 3), (size, step + 2, step + 3)]
        step += 2
    return make_problem([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


def hard_problem(storages: int = 60, seed: int = 0) -> LayoutProblem:
    """Storages cut out of one full rectangle of bytes and steps: a layout without any loss exists, if hidden."""
    dice = random.Random(seed)
    blocks = [(0, 1000, 0, 40)]
    while len(blocks) < storages:
        low, high, born, dead = blocks.pop(dice.randrange(len(blocks)))
        if dice.random() < 0.5 and high - low > 20:
            cut = dice.randrange(low + 10, high - 9)
            blocks += [(low, cut, born, dead), (cut, high, born, dead)]
        elif dead - born > 1:
            cut = dice.randrange(born + 1, dead)
            blocks += [(low, high, born, cut), (low, high, cut, dead)]
        else:
            blocks.append((low, high, born, dead))
    dice.shuffle(blocks)
    return make_problem([b[1] - b[0] for b in blocks], [b[2] for b in blocks], [b[3] for b in blocks], 1)


def bytes_used(problem: LayoutProblem, storage: int, step: int) -> range:
    """Which bytes of itself a storage needs at a step."""
    if not problem.born[storage] <= step < problem.dead[storage]:
        return range(0)
    for gap in problem.gaps:
        if gap.storage == storage and gap.born <= step < gap.dead:
            return range(gap.low, gap.high)
    return range(int(problem.size[storage]))


def is_valid(problem: LayoutProblem, offset: list[int]) -> bool:
    """Whether all offsets are as demanded and no two storages share a byte at a step: every pair, by sets."""
    used: set[tuple[int, int]] = set()
    wanted = 0
    demands = zip(offset, problem.own_alignment.tolist(), problem.fixed.tolist(), strict=True)
    if any(at < 0 or at % unit or (fixed >= 0 and at != fixed) for at, unit, fixed in demands):
        return False
    for storage, at in enumerate(offset):
        for step in range(problem.born[storage], problem.dead[storage]):
            needed = bytes_used(problem, storage, step)
            used |= {(step, at + byte) for byte in needed}
            wanted += len(needed)
    return len(used) == wanted


def room(problem: LayoutProblem) -> list[int]:
    """Padded sizes, one by one."""
    return [-(-size // problem.alignment) * problem.alignment for size in problem.size.tolist()]


def lowest_arena(problem: LayoutProblem) -> int:
    """The smallest arena of any layout of plain storages: some sequence, each as low as it can, gives it."""
    size, born, dead = room(problem), problem.born.tolist(), problem.dead.tolist()
    unit = problem.own_alignment.tolist()
    storages = [i for i in range(len(size)) if size[i]]
    best = sum(size) + sum(unit)
    for sequence in permutations(storages):
        at: dict[int, int] = {}
        for i in sequence:
            others = [j for j in at if born[i] < dead[j] and born[j] < dead[i]]
            at[i] = min(
                place
                for place in [0, *(-(-(at[j] + size[j]) // unit[i]) * unit[i] for j in others)]
                if all(place + size[i] <= at[j] or at[j] + size[j] <= place for j in others)
            )
            if at[i] + size[i] >= best:
                break
        else:
            best = max((at[i] + size[i] for i in storages), default=0)
    return best


def lowest_by_trial(problem: LayoutProblem) -> int:
    """The smallest arena of any layout, by every offset of every storage. For problems of a few bytes."""
    size = room(problem)
    storages = [i for i in range(len(size)) if size[i]]
    for arena in range(sum(size) + int(problem.fixed.max(initial=0)) + int(problem.own_alignment.sum()) + 1):
        offset = [max(fixed, 0) for fixed in problem.fixed.tolist()]
        if _completed(problem, storages, offset, set(), arena):
            return arena
    raise AssertionError("one above the other is always a layout")


def _completed(
    problem: LayoutProblem, left: list[int], offset: list[int], used: set[tuple[int, int]], arena: int
) -> bool:
    if not left:
        return True
    storage, fixed = left[0], int(problem.fixed[left[0]])
    highest = arena - room(problem)[storage]
    places = [fixed] if fixed >= 0 else range(0, highest + 1, int(problem.own_alignment[storage]))
    for place in places:
        mine = {
            (step, place + byte)
            for step in range(problem.born[storage], problem.dead[storage])
            for byte in bytes_used(problem, storage, step)
        }
        if place <= highest and not mine & used and _completed(problem, left[1:], offset, used | mine, arena):
            return True
    return False

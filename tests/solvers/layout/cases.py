"""Layout problems to test with, and slow, obvious answers to compare with."""

import random
from itertools import permutations

from hypothesis import settings
from hypothesis import strategies as st

from roamc.solvers.layout.problem import LayoutProblem, make_problem

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


def is_valid(problem: LayoutProblem, offset: list[int]) -> bool:
    """Whether all offsets are aligned and no two storages share a byte at a step: every pair, by sets."""
    used: set[tuple[int, int]] = set()
    wanted = 0
    rows = zip(problem.size.tolist(), problem.born.tolist(), problem.dead.tolist(), offset, strict=True)
    for size, born, dead, at in rows:
        if at < 0 or at % problem.alignment:
            return False
        used |= {(step, byte) for step in range(born, dead) for byte in range(at, at + size)}
        wanted += size * (dead - born)
    return len(used) == wanted


def room(problem: LayoutProblem) -> list[int]:
    """Padded sizes, one by one."""
    return [-(-size // problem.alignment) * problem.alignment for size in problem.size.tolist()]


def lowest_arena(problem: LayoutProblem) -> int:
    """The smallest arena of any layout: some sequence, each storage as low as it can, gives it."""
    size, born, dead = room(problem), problem.born.tolist(), problem.dead.tolist()
    storages = [i for i in range(len(size)) if size[i]]
    best = sum(size)
    for sequence in permutations(storages):
        at: dict[int, int] = {}
        for i in sequence:
            others = [j for j in at if born[i] < dead[j] and born[j] < dead[i]]
            at[i] = min(
                place
                for place in [0, *(at[j] + size[j] for j in others)]
                if all(place + size[i] <= at[j] or at[j] + size[j] <= place for j in others)
            )
            if at[i] + size[i] >= best:
                break
        else:
            best = max((at[i] + size[i] for i in storages), default=0)
    return best

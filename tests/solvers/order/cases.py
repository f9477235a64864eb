"""Ordering problems to test with, and slow, obvious answers to compare with."""

import random
from functools import cache

from hypothesis import settings
from hypothesis import strategies as st

from roamc.solvers.order.problem import OrderProblem, consumers, make_problem, reusables

PROPERTY = settings(derandomize=True, max_examples=100, deadline=None)


@st.composite
def problems(draw: st.DrawFn, most_ops: int = 14, stages: int = 3) -> OrderProblem:
    """Small random problems: stages, edges, kept buffers, buffers nobody reads, workspace, sizes of zero, reuse."""
    num_ops = draw(st.integers(1, most_ops))
    stage = sorted(draw(st.lists(st.integers(0, stages - 1), min_size=num_ops, max_size=num_ops)))
    size = st.sampled_from([0, 1, 2, 3, 5, 8, 100])
    workspace = draw(st.lists(st.sampled_from([0, 0, 0, 4]), min_size=num_ops, max_size=num_ops))
    buffers = []
    for _ in range(draw(st.integers(0, 2 * num_ops))):
        producer = draw(st.integers(0, num_ops - 1))
        readers = draw(st.lists(st.integers(producer, num_ops - 1), max_size=3))
        buffers.append((draw(size), producer, readers, draw(st.integers(0, 9)) == 0))
    pairs = draw(st.lists(st.tuples(st.integers(0, num_ops - 1), st.integers(0, num_ops - 1)), max_size=4))
    edges = [(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]]
    reusable = possible_reuses(buffers)
    if draw(st.booleans()):
        reusable = [draw(st.permutations(row))[: draw(st.integers(0, 3))] for row in reusable]
    return make_problem(stage, edges, buffers, workspace, reusable)


def possible_reuses(buffers: list[tuple[int, int, list[int], bool]]) -> list[list[int]]:
    """For each buffer all whose bytes it could take over: as large, read by its producer, not kept."""
    return [
        [
            reused
            for reused, (other_size, source, readers, kept) in enumerate(buffers)
            if other_size == size and producer in readers and source != producer and not kept
        ]
        for size, producer, _, _ in buffers
    ]


def training_problem(layers: int, seed: int = 0, reuse: bool = False) -> OrderProblem:
    """Forward with saved activations, backward with weight gradients, and at the end the updates that free them.

    Seven operators a layer: three forward, two backward, two of the update. Any operator may write over its
    input if `reuse`.
    """
    dice = random.Random(seed)
    stage: list[int] = []
    buffers: list[tuple[int, int, list[int], bool]] = []

    def run(at: int, reads: list[int], size: int) -> int:
        """Append an operator of stage `at` and the buffer that it produces; the number of that buffer."""
        stage.append(at)
        for buffer in reads:
            buffers[buffer][2].append(len(stage) - 1)
        buffers.append((size, len(stage) - 1, [], False))
        return len(buffers) - 1

    activation = run(0, [], 100)
    saved = []
    for _ in range(layers):
        for _ in range(3):
            saved.append(activation)
            activation = run(0, [activation], dice.choice([50, 100, 200]))
    gradient = run(1, [activation], 100)
    weights = []
    for layer in reversed(range(layers)):
        inner = run(1, [gradient, saved[3 * layer + 2], saved[3 * layer + 1]], 100)
        weight = run(1, [inner, saved[3 * layer]], dice.choice([400, 900]))
        weights.append(weight)
        gradient = inner
    for weight in weights:
        step = run(1, [weight], buffers[weight][0])
        run(1, [weight, step], 0)
    return make_problem(stage, [], buffers, reusable=possible_reuses(buffers) if reuse else None)


def simulated_reuses(problem: OrderProblem, order: list[int]) -> dict[int, int]:
    """Reused buffer to result, straight from the definition: walk the operators in order, then their results."""
    position = {op: step for step, op in enumerate(order)}
    result_of: dict[int, int] = {}
    readers = consumers(problem).lists()
    for op in order:
        for result in [k for k in range(problem.num_buffers) if problem.producer[k] == op]:
            for reused in reusables(problem).lists()[result]:
                others_done = all(position[reader] <= position[op] for reader in readers[reused])
                if others_done and reused not in result_of and result not in result_of.values():
                    result_of[reused] = result
    return result_of


def simulated_live(problem: OrderProblem, order: list[int]) -> list[int]:
    """Live bytes at each step, straight from the definition: for every step, for every buffer, is it live?"""
    position = {op: step for step, op in enumerate(order)}
    result_of = simulated_reuses(problem, order) if sorted(order) == list(range(problem.num_ops)) else {}
    live = []
    for step, op in enumerate(order):
        total = int(problem.workspace[op])
        for buffer, readers in enumerate(consumers(problem).lists()):
            born = position[int(problem.producer[buffer])]
            dead = max([position[reader] for reader in readers], default=born) + 1
            if problem.kept[buffer]:
                dead = len(order)
            if buffer in result_of:
                dead = position[int(problem.producer[result_of[buffer]])]
            total += int(problem.size[buffer]) if born <= step < dead else 0
        live.append(total)
    return live


def is_legal(problem: OrderProblem, order: list[int]) -> bool:
    """Whether an order respects everything that a legal order must."""
    position = {op: step for step, op in enumerate(order)}
    pairs = [tuple(pair) for pair in problem.edges.tolist()]
    for buffer, readers in enumerate(consumers(problem).lists()):
        pairs += [(int(problem.producer[buffer]), reader) for reader in readers]
    stages = [int(problem.stage[op]) for op in order]
    return (
        sorted(order) == list(range(problem.num_ops))
        and all(position[before] < position[after] for before, after in pairs)
        and stages == sorted(stages)
    )


def best_peak(problem: OrderProblem) -> int:
    """The lowest peak of any legal order: dynamic programming over the sets of operators that have run."""
    num_ops = problem.num_ops
    before = [0] * num_ops
    for first, second in problem.edges.tolist():
        before[second] |= 1 << first
    for op in range(num_ops):
        before[op] |= sum(1 << other for other in range(num_ops) if problem.stage[other] < problem.stage[op])
    rows = []
    for buffer, readers in enumerate(consumers(problem).lists()):
        producer = int(problem.producer[buffer])
        for reader in readers:
            before[reader] |= 1 << producer
        mask = sum(1 << reader for reader in readers)
        rows.append((int(problem.size[buffer]), 1 << producer, mask, bool(problem.kept[buffer])))
    reusable = reusables(problem).lists()

    def taken_over(done: int, op: int) -> int:
        gone: list[int] = []
        for result in range(problem.num_buffers):
            if rows[result][1] == 1 << op:
                free = [reused for reused in reusable[result] if not rows[reused][2] & ~(done | 1 << op)]
                gone += [reused for reused in free if reused not in gone][:1]
        return sum(rows[reused][0] for reused in gone)

    def live(done: int, op: int) -> int:
        born = done | 1 << op
        occupied = sum(
            size
            for size, producer, readers, kept in rows
            if producer & born and (kept or producer == 1 << op or readers & ~done)
        )
        return int(problem.workspace[op]) + occupied - taken_over(done, op)

    @cache
    def rest(done: int) -> int:
        ready = [op for op in range(num_ops) if not done >> op & 1 and not before[op] & ~done]
        return min((max(live(done, op), rest(done | 1 << op)) for op in ready), default=0)

    return rest(0)


def random_layers(num_ops: int, width: int, seed: int = 0) -> OrderProblem:
    """Operators that each read up to three of the `width` results before them: wide, and hard to order."""
    dice = random.Random(seed)
    buffers: list[tuple[int, int, list[int], bool]] = [(dice.randint(1, 100), op, [], False) for op in range(num_ops)]
    for op in range(1, num_ops):
        for _ in range(dice.randint(1, 3)):
            buffers[dice.randrange(max(0, op - width), op)][2].append(op)
    return make_problem([0] * num_ops, [], buffers)

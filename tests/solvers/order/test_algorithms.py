"""Every algorithm gives a legal order; the greedy and torch's orders are what they claim to be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers.order.evaluate import live_bytes, peak_bytes
from roamc.solvers.order.list_schedule import (
    allocate_last,
    lescea,
    list_schedule,
    list_schedule_backward,
    lpmf,
    polish,
    release_first,
)
from roamc.solvers.order.portfolio import ALGORITHMS
from roamc.solvers.order.problem import OrderProblem, consumers, make_problem, predecessors, reusables
from roamc.solvers.order.stages import one_stage
from roamc.solvers.order.torch_orders import breadth_first, depth_first
from tests.solvers.order.cases import PROPERTY, is_legal, problems, simulated_live


@pytest.mark.parametrize("name", ALGORITHMS)
@PROPERTY
@given(problem=problems())
def test_order_is_legal_and_its_live_bytes_are_the_simulated_ones(name: str, problem: OrderProblem) -> None:
    staged = one_stage(problem)
    order = staged.order_of(ALGORITHMS[name](staged.problem, 0))
    assert order.dtype == np.int32
    assert is_legal(problem, order.tolist())
    assert live_bytes(problem, order).tolist() == simulated_live(problem, order.tolist())


@PROPERTY
@given(problems(stages=1))
def test_polish_is_legal(problem: OrderProblem) -> None:
    assert is_legal(problem, polish(problem, list_schedule(problem)).tolist())


@PROPERTY
@given(problems(stages=1), st.sampled_from([0, 7, 50, 1000]))
def test_list_schedule_is_the_greedy_of_its_definition(problem: OrderProblem, floor_bytes: int) -> None:
    assert list_schedule(problem, floor_bytes).tolist() == slow_list_schedule(problem, floor_bytes)


@PROPERTY
@given(problems(stages=1), st.sampled_from([0, 7, 50, 1000]))
def test_backward_schedule_is_the_greedy_of_its_definition(problem: OrderProblem, floor_bytes: int) -> None:
    assert list_schedule_backward(problem, floor_bytes).tolist() == slow_backward(problem, floor_bytes)


@PROPERTY
@given(problems(stages=1))
def test_members_are_list_schedules_with_other_floors(problem: OrderProblem) -> None:
    kept = sum(size for size, _, _, kept in buffer_rows(problem) if kept)
    assert lpmf(problem).tolist() == slow_list_schedule(problem, kept)
    assert lescea(problem).tolist() == slow_list_schedule(problem, 10**9)


def buffer_rows(problem: OrderProblem) -> list[tuple[int, int, list[int], bool]]:
    """(size, producer, readers, kept) of every buffer."""
    readers = consumers(problem).lists()
    columns = (problem.size.tolist(), problem.producer.tolist(), readers, problem.kept.tolist())
    return list(zip(*columns, strict=True))


def slow_reused(problem: OrderProblem, op: int, done: set[int]) -> int:
    """Bytes that the results of `op` take over if the operators of `done` have run before."""
    rows = buffer_rows(problem)
    gone: list[int] = []
    for result, row in enumerate(reusables(problem).lists()):
        if rows[result][1] == op:
            free = [reused for reused in row if set(rows[reused][2]) <= {*done, op} and reused not in gone]
            gone += free[:1]
    return sum(rows[reused][0] for reused in gone)


def slow_list_schedule(problem: OrderProblem, peak: int) -> list[int]:
    """The greedy with everything looked up again at every step."""
    order: list[int] = []
    live = 0

    def costs(op: int) -> tuple[int, int]:
        done = {*order, op}
        born = freed = 0
        for size, producer, readers, kept in buffer_rows(problem):
            born += size if producer == op else 0
            dies = not kept and op in (readers or [producer]) and set(readers) <= done
            freed += size if dies else 0
        return born + int(problem.workspace[op]) - slow_reused(problem, op, set(order)), born - freed

    while len(order) < problem.num_ops:
        waiting = [op for op in range(problem.num_ops) if op not in order]
        ready = [op for op in waiting if is_ready(problem, op, order)]
        op = min(ready, key=lambda op: (too_much(costs(op)[0], peak - live), costs(op)[1], op))
        need, net = costs(op)
        peak = max(peak, live + need)
        live += net
        order.append(op)
    return order


def too_much(need: int, slack: int) -> int:
    """What does not fit counts by its bytes, what fits not at all."""
    return need if need > slack else -(10**12)


def slow_backward(problem: OrderProblem, peak: int) -> list[int]:
    """The same from the end: an operator gives birth to what it is the last to read, and buries what it makes."""
    later: list[int] = []
    live = sum(size for size, _, _, kept in buffer_rows(problem) if kept)

    def costs(op: int) -> tuple[int, int]:
        born = buried = 0
        for size, producer, readers, kept in buffer_rows(problem):
            read_later = any(reader in later for reader in readers)
            born += size if not kept and not read_later and op in (readers or [producer]) else 0
            buried += size if producer == op else 0
        earlier = set(range(problem.num_ops)) - {*later, op}
        return born + int(problem.workspace[op]) - slow_reused(problem, op, earlier), born - buried

    while len(later) < problem.num_ops:
        waiting = [op for op in range(problem.num_ops) if op not in later]
        ready = [op for op in waiting if not any(is_before(problem, op, other) for other in waiting)]
        op = min(ready, key=lambda op: (too_much(costs(op)[0], peak - live), costs(op)[1], -op))
        need, net = costs(op)
        peak = max(peak, live + need)
        live += net
        later.append(op)
    return later[::-1]


def is_before(problem: OrderProblem, one: int, other: int) -> bool:
    """Whether an edge or a buffer says that `one` runs before `other`."""
    return [one, other] in problem.edges.tolist() or any(
        producer == one and other in readers for _, producer, readers, _ in buffer_rows(problem)
    )


def is_ready(problem: OrderProblem, op: int, done: list[int]) -> bool:
    """Whether everything that must run before `op` has run."""
    return all(other in done or not is_before(problem, other, op) for other in range(problem.num_ops))


def test_release_first_runs_each_update_as_soon_as_it_can() -> None:
    # ops 0, 1, 2: gradients, one after the other; ops 3, 4, 5: the updates that free them
    gradients = [(10, 0, [3], False), (10, 1, [4], False), (10, 2, [5], False)]
    problem = make_problem([0] * 6, [(0, 1), (1, 2)], gradients)
    assert release_first(problem).tolist() == [0, 3, 1, 4, 2, 5]


def test_allocate_last_puts_each_allocation_off_until_it_is_read() -> None:
    # ops 0, 1, 2 allocate; 3, 4, 5 read one each, one after the other
    buffers = [(10, 0, [3], False), (10, 1, [4], False), (10, 2, [5], False)]
    problem = make_problem([0] * 6, [(3, 4), (4, 5)], buffers)
    assert allocate_last(problem).tolist() == [0, 3, 1, 4, 2, 5]


def test_backward_greedy_finds_what_the_forward_greedy_misses() -> None:
    # Two chains: wide (0 → 2 → 4) shrinks only at its end, narrow (1 → 3) grows; then 5 joins both.
    buffers = [
        (4, 0, [2], False),
        (3, 1, [3], False),
        (6, 2, [4], False),
        (5, 3, [5], False),
        (1, 4, [5], False),
        (1, 5, [], True),
    ]
    problem = make_problem([0] * 6, [], buffers)
    peaks = {name: peak_bytes(problem, run(problem, 0)) for name, run in ALGORITHMS.items()}
    assert peaks["list_backward"] < peaks["lpmf"]


@PROPERTY
@given(problems(stages=1))
def test_breadth_first_runs_next_whose_predecessors_ran_earliest(problem: OrderProblem) -> None:
    before = predecessors(problem).lists()
    order: list[int] = []
    while len(order) < problem.num_ops:
        waiting = [op for op in range(problem.num_ops) if op not in order]
        ready = [op for op in waiting if set(before[op]) <= set(order)]
        order.append(min(ready, key=lambda op: (sorted(order.index(other) for other in before[op]), op)))
    assert breadth_first(problem).tolist() == order


@PROPERTY
@given(problems(stages=1))
def test_depth_first_goes_from_the_least_bytes_down(problem: OrderProblem) -> None:
    before = predecessors(problem).lists()
    touched = [0] * problem.num_ops
    for size, producer, readers, _ in buffer_rows(problem):
        for op in [producer, *readers]:
            touched[op] += size
    order: list[int] = []

    def visit(op: int) -> None:
        if op not in order:
            for other in sorted(before[op], key=lambda op: (touched[op], op)):
                visit(other)
            order.append(op)

    for root in sorted(range(problem.num_ops), key=lambda op: (touched[op], op)):
        visit(root)
    assert depth_first(problem).tolist() == order

"""Every algorithm gives a legal order; the greedy is the greedy it claims to be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers.order.evaluate import live_bytes, peak_bytes
from roamc.solvers.order.list_schedule import list_schedule, list_schedule_backward
from roamc.solvers.order.portfolio import ALGORITHMS
from roamc.solvers.order.problem import OrderProblem, consumers, make_problem
from roamc.solvers.order.ready_tree import ReadyTree
from roamc.solvers.order.release_first import polish, release_first
from tests.solvers.order.cases import PROPERTY, is_legal, problems, simulated_live


@pytest.mark.parametrize("name", ALGORITHMS)
@PROPERTY
@given(problem=problems())
def test_order_is_legal_and_its_live_bytes_are_the_simulated_ones(name: str, problem: OrderProblem) -> None:
    order = ALGORITHMS[name](problem, 0)
    assert order.dtype == np.int32
    assert is_legal(problem, order.tolist())
    assert live_bytes(problem, order).tolist() == simulated_live(problem, order.tolist())


@PROPERTY
@given(problems())
def test_polish_is_legal(problem: OrderProblem) -> None:
    order = polish(problem, list_schedule(problem))
    assert is_legal(problem, order.tolist())


@PROPERTY
@given(problems(), st.sampled_from([0, 7, 50, 1000]))
def test_list_schedule_is_the_greedy_of_its_definition(problem: OrderProblem, floor_bytes: int) -> None:
    assert list_schedule(problem, floor_bytes).tolist() == slow_list_schedule(problem, floor_bytes)


@PROPERTY
@given(problems(), st.sampled_from([0, 7, 50, 1000]))
def test_backward_schedule_is_the_greedy_of_its_definition(problem: OrderProblem, floor_bytes: int) -> None:
    assert list_schedule_backward(problem, floor_bytes).tolist() == slow_backward(problem, floor_bytes)


def buffer_rows(problem: OrderProblem) -> list[tuple[int, int, list[int], bool]]:
    """(size, producer, readers, kept) of every buffer."""
    readers = consumers(problem).lists()
    columns = (problem.size.tolist(), problem.producer.tolist(), readers, problem.kept.tolist())
    return list(zip(*columns, strict=True))


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
        return born + int(problem.scratch[op]), born - freed

    while len(order) < problem.num_ops:
        waiting = [op for op in range(problem.num_ops) if op not in order]
        ready = [op for op in waiting if is_ready(problem, op, order)]
        fitting = [op for op in ready if costs(op)[0] <= peak - live]
        op = min(fitting or ready, key=lambda op: (costs(op)[1] if fitting else costs(op)[0], op))
        need, net = costs(op)
        peak = max(peak, live + need)
        live += net
        order.append(op)
    return order


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
        return born + int(problem.scratch[op]), born - buried

    while len(later) < problem.num_ops:
        waiting = [op for op in range(problem.num_ops) if op not in later]
        ready = [op for op in waiting if not any(is_before(problem, op, other) for other in waiting)]
        fitting = [op for op in ready if costs(op)[0] <= peak - live]
        op = min(fitting or ready, key=lambda op: (costs(op)[1] if fitting else costs(op)[0], -op))
        need, net = costs(op)
        peak = max(peak, live + need)
        live += net
        later.append(op)
    return later[::-1]


def is_before(problem: OrderProblem, one: int, other: int) -> bool:
    """Whether an edge, a buffer or the stages say that `one` runs before `other`."""
    return (
        [one, other] in problem.edges.tolist()
        or bool(problem.stage[one] < problem.stage[other])
        or any(producer == one and other in readers for _, producer, readers, _ in buffer_rows(problem))
    )


def is_ready(problem: OrderProblem, op: int, done: list[int]) -> bool:
    """Whether everything that must run before `op` has run."""
    return all(other in done or not is_before(problem, other, op) for other in range(problem.num_ops))


@PROPERTY
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9), st.integers(-9, 9), st.integers(-1, 10))),
)
def test_ready_tree_finds_what_a_scan_finds(first_needs: list[int], steps: list[tuple[int, int, int, int]]) -> None:
    tree = ReadyTree(first_needs)
    ready: dict[int, tuple[int, int]] = {}
    for number, need, net, slack in steps:
        op = number % len(first_needs)
        if ready.get(op) == (need, net):
            tree.remove(op)
            del ready[op]
        else:
            tree.put(op, need, net)
            ready[op] = (need, net)
        if ready:
            fitting = [(net, op) for op, (need, net) in ready.items() if need <= slack]
            expected = min(fitting or [(need, op) for op, (need, _) in ready.items()])[1]
            assert tree.best(slack) == expected


def test_release_first_runs_each_update_as_soon_as_it_can() -> None:
    # ops 0, 1, 2: gradients, one after the other; ops 3, 4, 5: the updates that free them
    gradients = [(10, 0, [3], False), (10, 1, [4], False), (10, 2, [5], False)]
    problem = make_problem([0] * 6, [(0, 1), (1, 2)], gradients)
    assert release_first(problem).tolist() == [0, 3, 1, 4, 2, 5]


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
    assert peaks["list_backward"] < peaks["list"]

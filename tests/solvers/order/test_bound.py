"""No bound lies above the best order, and each sees what it should."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers.order import min_cut
from roamc.solvers.order.bound import hottest_ops, lower_bound, operator_bound, reachability_bound
from roamc.solvers.order.effort import EFFORT
from roamc.solvers.order.evaluate import peak_bytes
from roamc.solvers.order.min_cut import make_network, min_cut_bound
from roamc.solvers.order.problem import OrderProblem, make_problem
from tests.solvers.order.cases import PROPERTY, best_peak, problems, simulated_live, training_problem


@PROPERTY
@given(problems(most_ops=8, stages=1))
def test_bounds_and_best_peak_come_in_this_order(problem: OrderProblem) -> None:
    program = np.arange(problem.num_ops, dtype=np.int32)
    cheap = lower_bound(problem, program)
    cut, _ = min_cut_bound(problem, program, cheap, 10**6)
    assert cheap <= cut <= best_peak(problem) <= peak_bytes(problem, program)


@PROPERTY
@given(problems(most_ops=8, stages=1), st.data())
def test_min_cut_is_the_least_over_all_sets_that_may_run_before(problem: OrderProblem, data: st.DataObject) -> None:
    op = data.draw(st.integers(0, problem.num_ops - 1))
    assert min_cut.operator_bound(make_network(problem), op)[0] == least_at(problem, op)


def least_at(problem: OrderProblem, op: int) -> int:
    """The least live bytes while `op` runs, over all legal orders up to it: every closed set, by brute force."""
    pairs = [tuple(pair) for pair in problem.edges.tolist()]
    start = problem.consumer_start.tolist()
    for buffer, producer in enumerate(problem.producer.tolist()):
        pairs += [(producer, reader) for reader in problem.consumer[start[buffer] : start[buffer + 1]].tolist()]
    least = 2**62
    for chosen in range(1 << problem.num_ops):
        before = [other for other in range(problem.num_ops) if chosen >> other & 1]
        done = {*before, op}
        if op not in before and all(first in before or second not in done for first, second in pairs):
            after = [other for other in range(problem.num_ops) if other not in done]
            least = min(least, simulated_live(problem, [*before, op, *after])[len(before)])
    return least


@PROPERTY
@given(problems(stages=1))
def test_min_cut_is_at_least_reachability_and_that_at_least_the_operator_alone(problem: OrderProblem) -> None:
    everything = np.arange(problem.num_ops, dtype=np.int32)
    reachable = reachability_bound(problem, everything)
    assert (reachable >= operator_bound(problem)).all()
    network = make_network(problem)
    assert all(min_cut.operator_bound(network, op)[0] >= reachable[op] for op in everything.tolist())


def test_min_cut_sees_what_reachability_does_not() -> None:
    # 0 → 1 → 4 and 2 → 3 → 4: whichever of 1, 3 runs first, something of the other chain may wait or be done
    buffers = [(5, 0, [1], False), (3, 1, [4], False), (5, 2, [3], False), (3, 3, [4], False), (1, 0, [3], False)]
    problem = make_problem([0] * 5, [(0, 2)], buffers)
    assert reachability_bound(problem, np.array([3], dtype=np.int32)).tolist() == [9]
    assert min_cut.operator_bound(make_network(problem), 3)[0] == 12


def test_min_cut_reuses_the_input_that_costs_least() -> None:
    # 2 writes over 0 or 1; 3 reads 0 and may run before or after it
    buffers = [(8, 0, [2, 3], False), (8, 1, [2], False), (8, 2, [], False)]
    apart = make_problem([0] * 4, [], buffers)
    problem = make_problem([0] * 4, [], buffers, reusable=[[], [], [0, 1]])
    assert [min_cut.operator_bound(make_network(each), 2)[0] for each in (apart, problem)] == [24, 16]


def test_min_cut_stops_at_its_limit() -> None:
    problem = training_problem(20)
    program = np.arange(problem.num_ops, dtype=np.int32)
    bound, work = min_cut_bound(problem, program, 0, 1)
    whole, whole_work = min_cut_bound(problem, program, 0, 10**9)
    assert 0 < bound <= whole
    assert 0 < work < whole_work


@PROPERTY
@given(problems(stages=1))
def test_reachability_does_not_depend_on_what_else_is_chosen(problem: OrderProblem) -> None:
    everything = np.arange(problem.num_ops, dtype=np.int32)
    together = reachability_bound(problem, everything).tolist()
    assert [int(reachability_bound(problem, everything[op : op + 1])[0]) for op in everything] == together


def test_operator_bound_counts_reads_results_and_scratch_less_what_can_be_taken_over() -> None:
    buffers = [(1, 0, [2], False), (10, 1, [2], True), (100, 2, [], False), (1, 2, [], True)]
    assert operator_bound(make_problem([0] * 3, [], buffers, [0, 0, 5])).tolist() == [1, 10, 1 + 10 + 100 + 1 + 5]
    reusing = make_problem([0] * 3, [], buffers, [0, 0, 5], [[], [], [], [0]])
    assert operator_bound(reusing).tolist() == [1, 10, 1 + 10 + 100 + 5]


def test_what_is_kept_is_live_at_the_end_together() -> None:
    problem = make_problem([0] * 3, [], [(5, 0, [], True), (6, 1, [], True), (3, 2, [], False)])
    assert lower_bound(problem, np.arange(3, dtype=np.int32)) == 11


def test_hottest_operators_come_first() -> None:
    problem = make_problem([0] * 4, [], [(3, 0, [], False), (9, 1, [], False), (5, 2, [], False), (9, 3, [], False)])
    program = np.arange(4, dtype=np.int32)
    assert hottest_ops(problem, program, 3).tolist() == [1, 3, 2]


def test_reachability_sees_through_a_chain() -> None:
    # 0 → 1 → 2 → 3, and 3 also reads what 0 made: it is live while 1 and 2 run
    buffers = [(7, 0, [3], False), (1, 0, [1], False), (1, 1, [2], False), (1, 2, [3], False)]
    problem = make_problem([0] * 4, [], buffers)
    assert reachability_bound(problem, np.arange(4, dtype=np.int32)).tolist() == [8, 9, 9, 8]


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_batches_do_not_change_the_bound(batch: int) -> None:
    problem = training_problem(5)
    chosen = np.arange(problem.num_ops, dtype=np.int32)
    whole = reachability_bound(problem, chosen).tolist()
    effort = replace(EFFORT, reachability_batch_ops=batch, reachability_batch_buffers=batch)
    assert reachability_bound(problem, chosen, effort).tolist() == whole


def test_a_bound_of_few_operators_is_a_bound() -> None:
    problem = training_problem(20)
    program = np.arange(problem.num_ops, dtype=np.int32)
    whole = lower_bound(problem, program)
    assert 0 < lower_bound(problem, program, replace(EFFORT, bounded_ops=5)) <= whole

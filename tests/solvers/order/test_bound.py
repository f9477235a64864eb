"""The bound never lies above the best order, and each of its parts sees what it should."""

import numpy as np
import pytest
from hypothesis import given

from roamc.solvers.order import bound as bound_module
from roamc.solvers.order.bound import boundary_bound, lower_bound, operator_bound, reachability_bound
from roamc.solvers.order.portfolio import solve
from roamc.solvers.order.problem import OrderProblem, make_problem
from tests.solvers.order.cases import PROPERTY, best_peak, problems, training_problem


@PROPERTY
@given(problems(most_ops=7))
def test_bound_best_peak_and_portfolio_come_in_this_order(problem: OrderProblem) -> None:
    best = best_peak(problem)
    program = np.arange(problem.num_ops, dtype=np.int32)
    solution = solve(problem)
    assert lower_bound(problem, program) <= best <= solution.peak_bytes
    assert solution.bound_bytes <= best


@PROPERTY
@given(problems())
def test_reachability_is_at_least_the_bound_of_the_operator_alone(problem: OrderProblem) -> None:
    everything = np.arange(problem.num_ops, dtype=np.int32)
    assert (reachability_bound(problem, everything) >= operator_bound(problem)).all()


@PROPERTY
@given(problems())
def test_reachability_does_not_depend_on_what_else_is_chosen(problem: OrderProblem) -> None:
    everything = np.arange(problem.num_ops, dtype=np.int32)
    together = reachability_bound(problem, everything).tolist()
    assert [int(reachability_bound(problem, everything[op : op + 1])[0]) for op in everything] == together


def test_operator_bound_counts_own_buffers_scratch_and_kept_ones_of_earlier_stages() -> None:
    buffers = [(1, 0, [2], False), (10, 1, [2], True), (100, 2, [], False), (1000, 1, [], True)]
    problem = make_problem([0, 0, 1], [], buffers, [0, 0, 5])
    assert operator_bound(problem).tolist() == [1, 1010, 1 + 10 + 100 + 1000 + 5]


def test_boundary_bound_counts_what_crosses() -> None:
    buffers = [(1, 0, [2], False), (10, 0, [1], False), (100, 1, [], True), (1000, 2, [3], False)]
    assert boundary_bound(make_problem([0, 0, 1, 1], [], buffers)) == 101
    assert boundary_bound(make_problem([0, 0, 0, 0], [], buffers)) == 100


def test_reachability_sees_through_a_chain() -> None:
    # 0 → 1 → 2 → 3, and 3 also reads what 0 made: it is live while 1 and 2 run
    buffers = [(7, 0, [3], False), (1, 0, [1], False), (1, 1, [2], False), (1, 2, [3], False)]
    problem = make_problem([0] * 4, [], buffers)
    assert reachability_bound(problem, np.arange(4, dtype=np.int32)).tolist() == [8, 9, 9, 8]


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_batches_do_not_change_the_bound(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    problem = training_problem(5)
    chosen = np.arange(problem.num_ops, dtype=np.int32)
    whole = reachability_bound(problem, chosen).tolist()
    monkeypatch.setattr(bound_module, "_BATCH", batch)
    assert reachability_bound(problem, chosen).tolist() == whole


def test_a_large_problem_is_bounded_by_a_choice_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = training_problem(20)
    program = np.arange(problem.num_ops, dtype=np.int32)
    whole = lower_bound(problem, program)
    monkeypatch.setattr(bound_module, "EXAMINE_ALL_UP_TO", 10)
    monkeypatch.setattr(bound_module, "EXAMINED_BEYOND_THAT", 5)
    assert 0 < lower_bound(problem, program) <= whole

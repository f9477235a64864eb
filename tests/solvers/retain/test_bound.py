"""The bound on seconds holds for every order, and is met where the answer is plain."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers.order import peak_bytes
from roamc.solvers.retain import RetainProblem, make_problem, solve
from roamc.solvers.retain.bound import Bounds
from roamc.solvers.status import Status
from tests.solvers.order.cases import PROPERTY
from tests.solvers.retain.cases import chain, layered, legal_sequence, problems


def bound(problem: RetainProblem, budget: int, operators: int = 100) -> float:
    """The best bound over (nearly) all operators."""
    bounds = Bounds(problem)
    bounds.look_at(operators)
    return bounds.seconds(budget)


@PROPERTY
@given(problems(10), st.floats(0.3, 1), st.integers(0, 1000))
def test_no_order_is_below_the_bound(problem: RetainProblem, share: float, seed: int) -> None:
    budget = int(peak_bytes(problem.order, problem.sequence) * share)
    least = bound(problem, budget)
    sequence = legal_sequence(problem.order, random.Random(seed))
    never = [problem.num_ops] * problem.num_ops
    other = make_problem(problem.order, sequence, problem.seconds, problem.repeatable, problem.droppable, never)
    solution = solve(other, budget, work_limit=100_000)
    if solution.status is not Status.INFEASIBLE:
        assert solution.seconds >= least


@pytest.mark.parametrize("seed", range(8))
def test_bound_is_near_for_training_graphs(seed: int) -> None:
    problem = layered(6, seed)
    for percent in (90, 80, 70):
        budget = peak_bytes(problem.order, problem.sequence) * percent // 100
        solution = solve(problem, budget, work_limit=1_000_000)
        assert bound(problem, budget) <= solution.seconds


def test_bound_rises_as_the_budget_falls() -> None:
    problem = chain(8)
    full = peak_bytes(problem.order, problem.sequence)
    found = [bound(problem, full * percent // 100) for percent in range(100, 4, -5)]
    assert found == sorted(found)
    assert found[0] == 0
    assert found[5] > 0
    assert found[-1] == math.inf


def test_bound_is_met_where_one_large_buffer_is_to_go() -> None:
    problem = chain(6, inner=1, large=100, small=1)
    full = peak_bytes(problem.order, problem.sequence)
    solution = solve(problem, full - 50)
    assert solution.status is Status.OPTIMAL or solution.bound_seconds >= 0.3 * solution.seconds

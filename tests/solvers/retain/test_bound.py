"""The bound on seconds holds for every order, and is met where the answer is plain."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers.arrays import FloatArray, LongArray
from roamc.solvers.order import peak_bytes
from roamc.solvers.retain import RetainProblem, make_problem, solve
from roamc.solvers.retain.bound import Bounds, Codes
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


def with_codes(problem: RetainProblem, code: LongArray, extra: FloatArray, budget: int) -> tuple[float, float]:
    """The bound and the price of a byte where buffers can be kept in fewer bytes."""
    bounds = Bounds(problem, Codes(code, extra, problem.order.size))
    bounds.look_at(100)
    return bounds.seconds(budget), bounds.price(budget)


@PROPERTY
@given(problems(10), st.floats(0.3, 1), st.floats(0, 1))
def test_smaller_forms_never_raise_the_bound_and_useless_ones_leave_it(
    problem: RetainProblem, share: float, smaller: float
) -> None:
    size = problem.order.size
    budget = int(peak_bytes(problem.order, problem.sequence) * share)
    least = bound(problem, budget)
    nothing = np.zeros(len(size))
    assert with_codes(problem, size, nothing, budget)[0] == pytest.approx(least)
    dear = np.full(len(size), 1e6)
    if least < math.inf:  # else no reruns help, and smaller forms at any price may
        assert with_codes(problem, np.zeros_like(size), dear, budget)[0] == pytest.approx(least)
    free = with_codes(problem, (size * smaller).astype(np.int64), nothing, budget)[0]
    assert free <= least * (1 + 1e-9)


def test_bound_is_the_price_of_the_form_where_that_is_cheaper() -> None:
    """A large buffer waits while others come and go: to keep it in a tenth of its bytes costs less than a rerun."""
    problem = chain(6, inner=1, large=100, small=1)
    order = problem.order
    budget = peak_bytes(order, problem.sequence) - 50
    code, extra = order.size // 10, np.full(order.num_buffers, 1e-3 * problem.seconds.max())
    seconds, price = with_codes(problem, code, extra, budget)
    assert 0 < seconds < bound(problem, budget)
    assert 0 < price <= 1e-3 * problem.seconds.max() / 90 * (1 + 1e-6)

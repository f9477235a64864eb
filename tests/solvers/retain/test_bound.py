"""The bound on seconds holds for every order, and is met where the answer is plain."""

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers.arrays import BoolArray, FloatArray, LongArray
from roamc.solvers.order import peak_bytes
from roamc.solvers.retain import Bounds, RetainProblem, encoded, make_problem, solve
from roamc.solvers.retain.offers import clash
from roamc.solvers.status import Status
from tests.solvers.order.cases import PROPERTY
from tests.solvers.retain.cases import chain, layered, legal_sequence, made_early, of_several, offers_of, problems


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
    bounds = [bound(problem, full * percent // 100) for percent in range(100, 4, -5)]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0
    assert bounds[5] > 0
    assert bounds[-1] == math.inf


def test_bound_is_met_where_one_large_buffer_is_to_go() -> None:
    problem = chain(6, inner=1, large=100, small=1)
    full = peak_bytes(problem.order, problem.sequence)
    solution = solve(problem, full - 50)
    assert solution.status is Status.OPTIMAL or solution.bound_seconds >= 0.3 * solution.seconds


def offered(problem: RetainProblem, code: LongArray, extra: FloatArray, late: BoolArray | None = None) -> RetainProblem:
    """The problem with a smaller form of each buffer, for all readers or those that are `late`, by operator."""
    everyone = np.ones(problem.num_ops, dtype=np.bool_)
    offers = offers_of(problem, code.tolist(), extra.tolist(), (everyone if late is None else late).tolist())
    return dataclasses.replace(problem, offers=tuple(offers))


def with_codes(
    problem: RetainProblem, code: LongArray, extra: FloatArray, budget: int, late: BoolArray | None = None
) -> tuple[float, float]:
    """The bound and the price of a byte where buffers can be kept in fewer bytes, for all operators or those `late`."""
    bounds = Bounds(offered(problem, code, extra, late))
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
    code = (size * smaller).astype(np.int64)
    free = with_codes(problem, code, nothing, budget)[0]
    nobody = np.zeros(problem.num_ops, dtype=np.bool_)
    assert free <= with_codes(problem, code, nothing, budget, nobody)[0] * (1 + 1e-9) <= least * (1 + 1e-9) ** 2


@PROPERTY
@given(problems(7), st.floats(0.2, 1), st.integers(0, 2**32))
def test_no_choice_of_smaller_forms_is_below_the_bound(problem: RetainProblem, share: float, seed: int) -> None:
    check_with_codes(problem, share, random.Random(seed))


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_of_smaller_forms_is_below_the_bound_in_training(seed: int) -> None:
    for share in (0.8, 0.6, 0.45):
        check_with_codes(layered(4, seed, reuse=False), share, random.Random(seed))


def check_with_codes(problem: RetainProblem, share: float, dice: random.Random) -> None:
    """Any set of the offers, with the reruns that the solver finds for it."""
    size = problem.order.size
    late = np.zeros(problem.num_ops, dtype=np.bool_)
    late[problem.sequence[problem.num_ops // 2 :]] = True
    code = np.array([dice.choice([0, int(nbytes) // 8, int(nbytes)]) for nbytes in size], dtype=np.int64)
    extra = np.array([dice.choice([0.0, 0.0, 0.1]) for _ in size])
    budget = int(peak_bytes(problem.order, problem.sequence) * share)
    whole = offered(problem, code, extra, late)
    several = of_several(problem, whole.offers, late.tolist(), dice)
    idle = np.array([dice.random() < 0.5 for _ in range(problem.num_ops)])
    early, moved = made_early(problem, late.tolist(), dice)
    idle[[*moved]] = True
    whole = dataclasses.replace(whole, offers=(*early, *several, *whole.offers), idle=idle)
    least = bound(whole, budget)
    for some in (0.3, 1.0):
        taken: list[int] = []
        for place in range(len(whole.offers)):
            if dice.random() < some and not clash(whole.offers[each] for each in (*taken, place)):
                taken.append(place)
        solution = solve(encoded(whole, taken).problem, budget, work_limit=100_000)
        if solution.status is not Status.INFEASIBLE:
            assert solution.seconds + math.fsum(whole.offers[place].seconds for place in taken) >= least * (1 - 1e-9)


def test_bound_is_the_price_of_the_form_where_that_is_cheaper() -> None:
    """A large buffer waits while others come and go: to keep it in a tenth of its bytes costs less than a rerun."""
    problem = chain(6, inner=1, large=100, small=1)
    order = problem.order
    budget = peak_bytes(order, problem.sequence) - 50
    code, extra = order.size // 10, np.full(order.num_buffers, 1e-3 * problem.seconds.max())
    seconds, price = with_codes(problem, code, extra, budget)
    assert 0 < seconds < bound(problem, budget)
    assert 0 < price <= 1e-3 * problem.seconds.max() / 90 * (1 + 1e-6)

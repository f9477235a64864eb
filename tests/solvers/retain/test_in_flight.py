"""Micro-batches that wait at the boundary of a pipeline: what each has saved counts at every step."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roamc.solvers.retain import EFFORT, Choice, RetainProblem, RetainSolution, make_problem, solve, validate
from roamc.solvers.retain.bound import Bounds
from roamc.solvers.retain.validate import RetainVerdict, schedule
from roamc.solvers.status import Status
from tests.solvers.order.cases import PROPERTY
from tests.solvers.retain.cases import chain, in_flight, legal_sequence, of_several, offers_of, problems


def alone(problem: RetainProblem) -> RetainProblem:
    """The same schedule with nobody waiting."""
    return replace(problem, waiting=0, boundary=-1)


def counted(problem: RetainProblem, solution: RetainSolution) -> tuple[int, int]:
    """The peak of one micro-batch, and the bytes that it holds at the boundary, kept ones left out."""
    runs = schedule(alone(problem), solution)
    at = next(live for op, live in runs if op == problem.boundary)
    order = problem.order
    kept = sum(
        int(size)
        for size, held, op in zip(order.size, order.kept, order.producer, strict=True)
        if held and op < problem.boundary
    )
    return max(live for _, live in runs), at - kept


@settings(PROPERTY, max_examples=40)
@given(problems(), st.floats(0, 1), st.integers(1, 5), st.integers(0, 14))
def test_the_peak_is_that_of_one_and_what_the_others_have_saved(
    problem: RetainProblem, share: float, waiting: int, at: int
) -> None:
    staged = in_flight(problem, min(at, problem.num_ops), waiting)
    whole = solve(staged, 2**40)
    solution = solve(staged, int(whole.peak_bytes * share), work_limit=50_000)
    for each, budget in ((whole, 2**40), (solution, int(whole.peak_bytes * share))):
        assert validate(staged, budget, each).good, validate(staged, budget, each)
        peak, saved = counted(staged, each)
        assert each.peak_bytes == peak + waiting * saved


@settings(PROPERTY, max_examples=40)
@given(problems(10), st.floats(0.3, 1), st.integers(1, 3), st.integers(0, 10), st.integers(0, 1000))
def test_no_order_is_below_the_bound(problem: RetainProblem, share: float, waiting: int, at: int, seed: int) -> None:
    staged = in_flight(problem, min(at, problem.num_ops), waiting)
    budget = int(solve(staged, 2**40).peak_bytes * share)
    bounds = Bounds(staged)
    bounds.look_at(100)
    stage = staged.order.stage.tolist()
    sequence = sorted(legal_sequence(staged.order, random.Random(seed)), key=stage.__getitem__)
    parts = staged.seconds, staged.repeatable, staged.droppable, [staged.num_ops] * staged.num_ops
    other = make_problem(staged.order, sequence, *parts, waiting=waiting, boundary=staged.boundary)
    solution = solve(other, budget, work_limit=50_000)
    if solution.status is not Status.INFEASIBLE:
        assert solution.seconds >= bounds.seconds(budget)


def test_fewer_bytes_are_saved_where_others_wait() -> None:
    plain = chain(8)
    staged = in_flight(plain, plain.num_ops // 2, 7)
    workspace = [*[0] * plain.num_ops, 5_000]  # of the last operator: the peak of one, where nothing saved is left
    staged = replace(staged, order=replace(staged.order, workspace=np.array(workspace)))
    whole = solve(staged, 2**40)
    budget = whole.peak_bytes * 7 // 10
    solution = solve(staged, budget)
    assert solution.peak_bytes <= budget
    assert 0 < solution.bound_seconds <= solution.seconds
    peak, saved = counted(staged, solution)
    assert counted(staged, solve(alone(staged), peak))[1] > saved, "alone, nothing would have to be dropped"


def test_codes_that_the_others_need_are_kept() -> None:
    plain = in_flight(chain(4), 17, 3)
    sizes = plain.order.size.tolist()
    late = [op > 17 for op in range(plain.num_ops)]
    offers = offers_of(plain, [size // 2 for size in sizes], [0.2] * len(sizes), late)
    several = of_several(plain, offers, late, random.Random(0))
    assert several
    problem = replace(plain, offers=(*several, *offers))
    choice = Choice(problem, EFFORT)
    whole = choice.solve(2**40)
    for percent in (80, 50):
        budget = whole.peak_bytes * percent // 100
        solution = choice.solve(budget)
        form = choice.encoded(solution.taken)
        seconds = sum(problem.offers[place].seconds for place in solution.taken)
        assert validate(form.problem, budget, solution, seconds).good
        assert form.problem.waiting == 3
        assert form.problem.order.stage[form.problem.boundary] == 1


def test_judge_names_a_peak_without_those_that_wait() -> None:
    problem = in_flight(chain(3), 7, 2)
    solution = solve(problem, 2**40)
    wrong = replace(solution, peak_bytes=counted(problem, solution)[0])
    assert validate(problem, 2**40, wrong).verdict is RetainVerdict.WRONG_PEAK


@pytest.mark.parametrize(("waiting", "boundary"), [(1, -1), (-1, 0), (0, 2), (1, 99), (1, 1)])
def test_a_boundary_that_is_none_is_refused(waiting: int, boundary: int) -> None:
    plain = chain(2)
    parts = plain.seconds, plain.repeatable, plain.droppable
    with pytest.raises(ValueError, match="wait"):
        make_problem(plain.order, plain.sequence, *parts, waiting=waiting, boundary=boundary)

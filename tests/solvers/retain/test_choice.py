"""Reruns and offers chosen together: legal, within the budget, never dearer than reruns alone or below the bound."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers.order import peak_bytes
from roamc.solvers.order.problem import make_problem as make_order
from roamc.solvers.retain import (
    EFFORT,
    Bounds,
    Choice,
    Extra,
    Made,
    Offer,
    Part,
    RetainProblem,
    RetainSolution,
    RetainVerdict,
    encoded,
    make_problem,
    solve,
    validate,
)
from roamc.solvers.retain.offers import cheapest
from roamc.solvers.status import Status
from tests.solvers.order.cases import PROPERTY
from tests.solvers.retain.cases import chain, layered, offers_of, problems


def offered(problem: RetainProblem, dice: random.Random) -> RetainProblem:
    """The problem with up to two offers for each buffer that the second half of the schedule reads."""
    late = np.zeros(problem.num_ops, dtype=np.bool_)
    late[problem.sequence[problem.num_ops // 2 :]] = True
    size = problem.order.size.tolist()
    offers: list[Offer] = []
    for share, seconds in ((8, 1.0), (2, 0.1)):
        extra = [dice.choice([0.0, seconds]) for _ in size]
        offers += offers_of(problem, [nbytes // share for nbytes in size], extra, late.tolist())
    return dataclasses.replace(problem, offers=tuple(one for one in offers if dice.random() < 0.7))


def check(problem: RetainProblem, budget: int, found: RetainSolution) -> None:
    added = sum(problem.offers[place].seconds for place in found.taken)
    report = validate(encoded(problem, found.taken).problem, budget, found, added)
    assert report.good, report.detail
    if found.status is Status.INFEASIBLE:
        return
    assert found.peak_bytes <= budget
    alone = solve(dataclasses.replace(problem, offers=()), budget)
    assert alone.status is Status.INFEASIBLE or found.seconds <= alone.seconds * (1 + 1e-9) + 1e-12


@PROPERTY
@given(problems(10), st.floats(0.3, 1), st.integers(0, 2**32))
def test_answers_are_legal_and_never_dearer_than_reruns_alone(problem: RetainProblem, share: float, seed: int) -> None:
    whole = offered(problem, random.Random(seed))
    budget = int(peak_bytes(problem.order, problem.sequence) * share)
    choice = Choice(whole)
    check(whole, budget, choice.solve(budget))
    for one in choice.lowest():
        check(whole, one.peak_bytes, one)


@PROPERTY
@given(problems(7), st.floats(0.3, 1), st.integers(0, 2**32))
def test_no_set_of_offers_is_below_the_bound(problem: RetainProblem, share: float, seed: int) -> None:
    whole = offered(problem, random.Random(seed))
    budget = int(peak_bytes(problem.order, problem.sequence) * share)
    bounds = Bounds(whole)
    bounds.look_at(100)
    least = bounds.seconds(budget)
    for count in range(min(len(whole.offers), 3) + 1):
        for taken in itertools.combinations(range(len(whole.offers)), count):
            if len({whole.offers[place].buffer for place in taken}) == count:
                found = solve(encoded(whole, taken).problem, budget, work_limit=50_000)
                seconds = found.seconds + sum(whole.offers[place].seconds for place in taken)
                assert found.status is Status.INFEASIBLE or seconds >= least * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_offers_pay_in_training(seed: int) -> None:
    """Smaller forms that take a tenth of a rerun's time: with them, budgets cost less, and the lowest peak is lower."""
    problem = layered(8, seed)
    late = [step >= problem.num_ops // 2 for step in range(problem.num_ops)]
    size = problem.order.size.tolist()
    offers = offers_of(
        problem, [nbytes // 8 for nbytes in size], [0.1 * float(problem.seconds.mean())] * len(size), late
    )
    whole = dataclasses.replace(problem, offers=tuple(offers))
    choice, better = Choice(whole), 0
    for percent in (90, 75, 60):
        budget = peak_bytes(problem.order, problem.sequence) * percent // 100
        found, alone = choice.solve(budget), solve(problem, budget)
        check(whole, budget, found)
        better += found.seconds < alone.seconds or alone.status is Status.INFEASIBLE
        again = Choice(whole).solve(budget)
        assert (again.taken, again.reruns) == (found.taken, found.reruns), "earlier budgets changed the answer"
        choice.forget()
    assert better
    assert choice.lowest()[-1].peak_bytes <= solve(problem, 0).peak_bytes


def test_the_lowest_peak_is_asked_for_as_often_as_the_effort_says(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layered(4, 0)
    choice, asked = Choice(problem, dataclasses.replace(EFFORT, descents=0)), list[int]()
    solve_one = choice._solve

    def noted(budget: int, *args: object, **sets: object) -> RetainSolution:
        asked.append(budget)
        return solve_one(budget, *args, **sets)  # type: ignore[arg-type]

    monkeypatch.setattr(choice, "_solve", noted)
    choice.lowest()
    assert len(asked) == 2, "the first question and the one for fewer seconds"


def test_of_several_offers_the_price_decides() -> None:
    problem = chain(2)
    rows = [
        Offer(3, nbytes, (Extra(Part.DECODE, 5, 0, seconds, 0, True, (3,), (Made(100, True),)),), ((5, 0),))
        for nbytes, seconds in ((50, 1.0), (10, 3.0), (200, 0.0))
    ]
    sizes = [100] * problem.num_buffers
    assert cheapest(rows, sizes, 0.01) == (), "a byte is worth less than any of them costs"
    assert cheapest(rows, sizes, 0.03) == (0,)
    assert cheapest(rows, sizes, 0.06) == (1,)
    assert cheapest(rows, sizes, float("inf")) == (1,)


def half_read() -> RetainProblem:
    """Operators 0 to 5: 1 makes what 4 reads late, and 0 makes what 1 reads; nothing else reads either of them."""
    buffers = [(100, 0, [1], False), (100, 1, [4], False), (50, 2, [5], False), (1, 4, [5], False), (1, 5, [], True)]
    order = make_order([0] * 6, [], buffers)
    stand_in = Extra(Part.STAND_IN, 4, 0, 0.0, 0, True, (), (Made(2, True),))
    made_of_other = Extra(Part.DECODE, 4, 0, 1.0, 0, True, (2,), (Made(100, True),))
    offers = [Offer(1, 0, (stand_in,), ((4, 0),)), Offer(1, 0, (made_of_other,), ((4, 0),))]
    idle = [True, True, True, False, True, True]
    return make_problem(order, range(6), [1.0] * 6, [True] * 6, [True, True, True, True, False], None, idle, offers)


def test_operators_whose_results_nobody_reads_any_more_are_left_out() -> None:
    """The reader needs a stand-in only: the operator goes, and so does the one that it read from."""
    form = encoded(half_read(), (0,)).problem
    assert form.num_ops == 5, "two operators less, one more"
    assert form.order.size.tolist() == [50, 2, 1, 1]
    assert Choice(half_read()).solve(120).peak_bytes == 53


def test_form_may_be_made_of_what_is_there_anyway() -> None:
    problem = dataclasses.replace(half_read(), idle=np.zeros(6, dtype=np.bool_))
    form = encoded(problem, (1,))
    assert form.encodes == ((),)
    assert form.decodes == ((4,),), "in front of its reader"
    order = form.problem.order
    assert order.consumer[order.consumer_start[2] : order.consumer_start[3]].tolist() == [4, 6]


def test_two_offers_of_one_buffer_are_refused() -> None:
    with pytest.raises(ValueError, match="two taken offers are of buffer 1"):
        encoded(half_read(), (0, 1))


def test_seconds_of_offers_count() -> None:
    form = encoded(half_read(), (1,)).problem
    found = solve(form, 10**6)
    assert validate(form, 10**6, found, 1.0).verdict is RetainVerdict.WRONG_SECONDS
    assert validate(form, 10**6, dataclasses.replace(found, seconds=1.0), 1.0).good


@pytest.mark.parametrize(
    ("offer", "fault"),
    [
        (Offer(9, 0, (), ()), "names a buffer"),
        (Offer(1, 0, (Extra(Part.DECODE, 6, 0, 0.0, 0, True, (), ()),), ()), "names an op"),
        (Offer(1, 0, (Extra(Part.DECODE, 4, 0, 0.0, 0, True, (~0,), ()),), ()), "names a buffer"),
        (Offer(1, 0, (), ((4, 0),)), "lets a reader read buffer 0 of 0"),
    ],
)
def test_offers_of_what_does_not_exist_are_refused(offer: Offer, fault: str) -> None:
    problem = half_read()
    with pytest.raises(ValueError, match=fault):
        make_problem(
            problem.order, problem.sequence, problem.seconds, problem.repeatable, problem.droppable, offers=[offer]
        )

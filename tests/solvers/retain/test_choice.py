"""Reruns and offers chosen together: legal, within the budget, never dearer than reruns alone or below the bound."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roamc.solvers.order import peak_bytes
from roamc.solvers.order.problem import make_problem as make_order
from roamc.solvers.retain import (
    EFFORT,
    Bounds,
    Choice,
    Extra,
    Offer,
    Part,
    Result,
    RetainProblem,
    RetainSolution,
    RetainVerdict,
    encoded,
    make_problem,
    solve,
    validate,
)
from roamc.solvers.retain.offers import cheapest, clash
from roamc.solvers.status import Status
from tests.solvers.order.cases import PROPERTY
from tests.solvers.retain.cases import chain, layered, made_early, of_several, offers_of, problems


def offered(problem: RetainProblem, dice: random.Random) -> RetainProblem:
    """The problem with up to two offers for each buffer that the second half reads, and some of several buffers."""
    late = np.zeros(problem.num_ops, dtype=np.bool_)
    late[problem.sequence[problem.num_ops // 2 :]] = True
    size = problem.order.size.tolist()
    offers: list[Offer] = []
    for share, seconds in ((8, 1.0), (2, 0.1)):
        extra = [dice.choice([0.0, seconds]) for _ in size]
        offers += offers_of(problem, [nbytes // share for nbytes in size], extra, late.tolist())
    several = of_several(problem, offers, late.tolist(), dice)
    offers += [with_stand_ins(one, dice) for one in offers if dice.random() < 0.4]
    idle = np.array([dice.random() < 0.5 for _ in range(problem.num_ops)])
    early, moved = made_early(problem, late.tolist(), dice)
    idle[[*moved]] = True
    kept = tuple(one for one in (*early, *several, *offers) if dice.random() < 0.7)
    return dataclasses.replace(problem, offers=kept, idle=idle)


def with_stand_ins(offer: Offer, dice: random.Random) -> Offer:
    """The offer with a stand-in of no bytes for some of its readers, or for all; nothing else is then made."""
    shapes = tuple(reader for reader, *_ in offer.instead if dice.random() < 0.6)
    late = tuple(reader for reader, *_ in offer.instead if reader not in shapes)
    if not shapes:
        return offer
    stand_in = Extra(Part.STAND_IN, min(shapes), offer.buffer, 0.0, 0, True, (), (Result(0, False),))
    k = offer.buffer
    instead = tuple((reader, k, 2) for reader in shapes) + tuple((reader, k, 1) for reader in late)
    if late:
        encode, decode = offer.operators
        anchored = dataclasses.replace(decode, anchor=min(late))
        return dataclasses.replace(offer, operators=(encode, anchored, stand_in), instead=instead)
    return Offer(k, 0, (stand_in,), tuple((reader, k, 0) for reader in shapes))


def check(problem: RetainProblem, budget: int, solution: RetainSolution) -> None:
    added = sum(problem.offers[place].seconds for place in solution.taken)
    report = validate(encoded(problem, solution.taken).problem, budget, solution, added)
    assert report.good, report.detail
    if solution.status is Status.INFEASIBLE:
        return
    assert solution.peak_bytes <= budget
    alone = solve(dataclasses.replace(problem, offers=()), budget)
    assert alone.status is Status.INFEASIBLE or solution.seconds <= alone.seconds * (1 + 1e-9) + 1e-12


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
@given(problems(10), st.floats(0.3, 1), st.integers(0, 2**32))
def test_offers_behind_the_first_cost_no_seconds(problem: RetainProblem, share: float, seed: int) -> None:
    dice = random.Random(seed)
    whole = offered(problem, dice)
    first = dice.randint(0, len(whole.offers))
    alone = Choice(dataclasses.replace(whole, offers=whole.offers[:first]))
    both = Choice(whole, first=first)
    budget = int(share * peak_bytes(whole.order, whole.sequence))
    for together in (False, True):
        before, after = (choice.solve(budget, together=together) for choice in (alone, both))
        check(whole, budget, after)
        assert after.rank(budget) <= before.rank(budget)
    before, after = (choice.lowest()[-1] for choice in (alone, both))
    check(whole, after.peak_bytes, after)
    assert after.rank(0) <= before.rank(0)
    assert after.bound_seconds <= before.bound_seconds or after.peak_bytes < before.peak_bytes


@PROPERTY
@given(problems(10), st.lists(st.floats(0.3, 1), min_size=1, max_size=3), st.integers(0, 2**32))
def test_answers_to_other_budgets_help_until_they_are_forgotten(
    problem: RetainProblem, shares: list[float], seed: int
) -> None:
    whole = offered(problem, random.Random(seed))
    peak, choice = peak_bytes(whole.order, whole.sequence), Choice(whole)
    answers = [choice.solve(int(share * peak), together=True) for share in shares]
    lowest = min(answers, key=lambda answer: answer.peak_bytes)
    repeated = choice.solve(lowest.peak_bytes, together=True)
    assert repeated.rank(lowest.peak_bytes) <= lowest.rank(lowest.peak_bytes)
    choice.forget(solutions=True)
    again, anew = (one.solve(int(shares[0] * peak), together=True) for one in (choice, Choice(whole)))
    assert (again.reruns, again.taken) == (anew.reruns, anew.taken)


@PROPERTY
@given(problems(10), st.floats(0.3, 1), st.floats(0.5, 3), st.integers(0, 2**32))
def test_a_search_ends_with_what_is_enough(problem: RetainProblem, share: float, times: float, seed: int) -> None:
    whole = offered(problem, random.Random(seed))
    budget = int(peak_bytes(problem.order, problem.sequence) * share)
    best = Choice(whole).solve(budget)
    enough = best.seconds * times
    answer = Choice(whole).solve(budget, enough=enough)
    assert (answer.status is Status.INFEASIBLE) == (best.status is Status.INFEASIBLE)
    report = validate(
        encoded(whole, answer.taken).problem, budget, answer, sum(whole.offers[place].seconds for place in answer.taken)
    )
    assert report.good, report.detail
    if best.status is not Status.INFEASIBLE:
        assert answer.seconds <= max(best.seconds, enough) * (1 + 1e-9) + 1e-12
    if not enough:
        assert answer.seconds == best.seconds


@PROPERTY
@given(problems(10), st.floats(0.3, 1), st.integers(0, 2**32))
def test_sets_that_surely_add_more_are_left_out_for_the_same_answer(
    problem: RetainProblem, share: float, seed: int
) -> None:
    whole = offered(problem, random.Random(seed))
    budget = int(peak_bytes(problem.order, problem.sequence) * share)
    every = Choice(whole)
    every._surely_more = lambda *_: False  # type: ignore[method-assign]
    answer, of_all = Choice(whole).solve(budget), every.solve(budget)
    assert (answer.taken, answer.reruns) == (of_all.taken, of_all.reruns)


@pytest.mark.parametrize("enough", [0.0, 3.5])
def test_a_set_that_adds_more_is_tried_if_a_part_of_it_adds_less(enough: float) -> None:
    """A rerun adds 5 s, both offers 3 + 4 s, and the first of them is needed: 3 s."""
    buffers = [(100, 0, [5], False), (100, 1, [6], False), (100, 2, [7], False), (10_000, 3, [8], False)]
    arcs = [(i, 4) for i in range(4)] + [(4, j) for j in range(5, 9)]
    order = make_order([0] * 9, arcs, buffers, [0, 0, 0, 0, 20_000, 0, 0, 0, 0])
    offers = [
        Offer(
            k,
            1,
            (
                Extra(Part.ENCODE, k, 0, seconds / 2, 0, False, (k,), (Result(1, False),)),
                Extra(Part.DECODE, late, 0, seconds / 2, 0, False, (~0,), (Result(100, False),)),
            ),
            ((late, k, 1),),
        )
        for k, late, seconds in ((1, 6, 3.0), (2, 7, 4.0))
    ]
    seconds, again = [5.0, 1, 1, 20, 1, 1, 1, 1, 1], [True, False, False, True] + [False] * 5
    problem = make_problem(order, range(9), seconds, again, again[:4], offers=offers)
    answer = Choice(problem).solve(peak_bytes(order, problem.sequence) - 99, enough=enough)
    assert (answer.seconds, answer.taken) == (3.0, (0,))


def test_of_offers_alike_one_is_tried_beside_those_needed() -> None:
    problem = chain(6)
    buffers, ops = problem.order.num_buffers, problem.num_ops
    alike = offers_of(problem, [1] * buffers, [0.5] * buffers, [True] * ops)
    choice = Choice(dataclasses.replace(problem, offers=alike))
    sizes = [int(problem.order.size[offer.buffer]) for offer in alike]
    tried = choice._unlike(range(len(alike)))
    assert len(tried) == len(set(sizes)) < len(alike)
    assert tried[0] == 0


@settings(PROPERTY, max_examples=25)  # each solves up to 64 problems
@given(problems(7), st.floats(0.3, 1), st.integers(0, 2**32))
def test_no_set_of_offers_is_below_the_bound(problem: RetainProblem, share: float, seed: int) -> None:
    whole = offered(problem, random.Random(seed))
    budget = int(peak_bytes(problem.order, problem.sequence) * share)
    bounds = Bounds(whole)
    bounds.look_at(100)
    least = bounds.seconds(budget)
    for count in range(min(len(whole.offers), 3) + 1):
        for taken in itertools.combinations(range(len(whole.offers)), count):
            if not clash([whole.offers[place] for place in taken]):
                solution = solve(encoded(whole, taken).problem, budget, work_limit=50_000)
                seconds = solution.seconds + sum(whole.offers[place].seconds for place in taken)
                assert solution.status is Status.INFEASIBLE or seconds >= least * (1 - 1e-9)


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
        solution, alone = choice.solve(budget), solve(problem, budget)
        check(whole, budget, solution)
        better += solution.seconds < alone.seconds or alone.status is Status.INFEASIBLE
        again = Choice(whole).solve(budget)
        assert (again.taken, again.reruns) == (solution.taken, solution.reruns), "earlier budgets changed the answer"
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


def test_what_the_search_for_the_lowest_peak_has_refused_is_refused_again() -> None:
    choice = Choice(layered(6, 0))
    assert choice.refused == 0
    low = choice.lowest()[-1]
    assert 0 < choice.refused < low.peak_bytes
    assert choice.solve(choice.refused).status is Status.INFEASIBLE


def test_of_several_offers_the_price_decides() -> None:
    problem = chain(2)
    rows = [
        Offer(3, nbytes, (Extra(Part.DECODE, 5, 0, seconds, 0, True, (3,), (Result(100, True),)),), ((5, 3, 0),))
        for nbytes, seconds in ((50, 1.0), (10, 3.0), (200, 0.0))
    ]
    sizes = [100] * problem.num_buffers
    assert cheapest(rows, sizes, 0.01) == (), "a byte is worth less than any of them costs"
    assert cheapest(rows, sizes, 0.03) == (0,)
    assert cheapest(rows, sizes, 0.06) == (1,)
    assert cheapest(rows, sizes, float("inf")) == (1,)


@pytest.mark.parametrize(("budget", "seconds"), [(400, 0.0), (310, 1.0), (220, 2.0)])
def test_of_equal_offers_those_that_the_budget_needs_are_taken(budget: int, seconds: float) -> None:
    """Two buffers of 100 bytes wait while an operator makes 200; each has a form of 10 bytes for a second."""

    def smaller(buffer: int, late: int) -> Offer:
        encode = Extra(Part.ENCODE, buffer, 0, 0.5, 0, False, (buffer,), (Result(10, False),))
        decode = Extra(Part.DECODE, late, 0, 0.5, 0, False, (~0,), (Result(100, False),))
        return Offer(buffer, 10, (encode, decode), ((late, buffer, 1),))

    buffers = [(100, 0, [3], False), (100, 1, [4], False)]
    order = make_order([0] * 5, [(0, 2), (1, 2), (2, 3), (2, 4)], buffers, [0, 0, 200, 0, 0])
    offers = [smaller(0, 3), smaller(1, 4)]
    problem = make_problem(order, range(5), [1.0] * 5, [False] * 5, [False] * 2, offers=offers)
    solution = Choice(problem).solve(budget)
    assert (solution.peak_bytes, solution.seconds, solution.status) == (budget, seconds, Status.OPTIMAL)


def test_budget_that_nothing_can_keep_has_an_infinite_bound() -> None:
    problem = half_read()
    solution = Choice(problem).solve(1)
    assert (solution.status, solution.bound_seconds) == (Status.INFEASIBLE, float("inf"))


def half_read() -> RetainProblem:
    """Operators 0 to 5: 1 makes what 4 reads late, and 0 makes what 1 reads; nothing else reads either of them."""
    buffers = [(100, 0, [1], False), (100, 1, [4], False), (50, 2, [5], False), (1, 4, [5], False), (1, 5, [], True)]
    order = make_order([0] * 6, [], buffers)
    stand_in = Extra(Part.STAND_IN, 4, 0, 0.0, 0, True, (), (Result(2, True),))
    made_of_other = Extra(Part.DECODE, 4, 0, 1.0, 0, True, (2,), (Result(100, True),))
    offers = [Offer(1, 0, (stand_in,), ((4, 1, 0),)), Offer(1, 0, (made_of_other,), ((4, 1, 0),))]
    idle = [True, True, True, False, True, True]
    return make_problem(order, range(6), [1.0] * 6, [True] * 6, [True, True, True, True, False], None, idle, offers)


def test_operators_whose_results_nobody_reads_any_more_are_left_out() -> None:
    """The reader needs a stand-in only: the operator goes, and so does the one that it read from."""
    form = encoded(half_read(), (0,)).problem
    assert form.num_ops == 5, "two operators less, one more"
    assert form.order.size.tolist() == [50, 2, 1, 1]
    assert Choice(half_read()).solve(120).peak_bytes == 53


def test_bounds_leave_out_what_offers_may_leave_out() -> None:
    bounds = Bounds(half_read())
    bounds.look_at(100)
    assert bounds.alone <= 53
    assert bounds.seconds(53) == 0


def test_no_form_waits_behind_the_last_reader_of_what_is_decoded() -> None:
    """Buffer 0 is coded for operator 2; operator 5 needs only its shape, and nothing waits while 3 and 4 run."""
    buffers = [(100, 0, [1, 2, 5], False), (1, 1, [2], False), (1, 2, [3], False), (200, 3, [4], False)]
    order = make_order([0] * 6, [], [*buffers, (1, 4, [5], False), (1, 5, [], True)])
    coded = (
        Extra(Part.ENCODE, 1, 0, 1.0, 0, True, (0,), (Result(90, True),)),
        Extra(Part.DECODE, 2, 0, 0.0, 0, True, (~0,), (Result(100, True),)),
        Extra(Part.STAND_IN, 5, 1, 0.0, 0, True, (), (Result(1, True),)),
    )
    offer = Offer(0, 90, coded, ((2, 0, 1), (5, 0, 2)))
    problem = make_problem(order, range(6), [5.0] * 6, [False] * 6, [False] * 6, offers=[offer])
    solution = Choice(problem).solve(203)
    assert (solution.peak_bytes, solution.seconds, solution.taken) == (201, 1.0, (0,))
    assert solution.bound_seconds <= 1.0


def test_what_is_left_out_is_no_reader_of_another_offer() -> None:
    """Operator 1 reads buffer 0 decoded, and goes because its own reader takes a stand-in."""
    order = make_order(
        [0] * 4, [], [(100, 0, [1, 3], False), (100, 1, [2], False), (1, 2, [3], False), (1, 3, [], True)]
    )
    coded = (
        Extra(Part.ENCODE, 0, 0, 1.0, 0, True, (0,), (Result(10, True),)),
        Extra(Part.DECODE, 1, 0, 1.0, 0, True, (~0,), (Result(100, True),)),
    )
    stand_in = Extra(Part.STAND_IN, 2, 0, 0.0, 0, True, (), (Result(1, True),))
    offers = [Offer(0, 10, coded, ((1, 0, 1), (3, 0, 1))), Offer(1, 0, (stand_in,), ((2, 1, 0),))]
    idle = [False, True, False, False]
    problem = make_problem(order, range(4), [1.0] * 4, [True] * 4, [True] * 3 + [False], None, idle, offers)
    assert encoded(problem, (0, 1)).problem.num_ops == 6


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


def projected(*, idle: bool = True) -> RetainProblem:
    """Operator 4 makes a product of buffer 0 that 5 reads; offers let the product, or half of buffer 0, wait for 5.

    The third offer lets 5 read what is made of another buffer, and 3 makes a large buffer in between.
    """
    buffers = [(100, 0, [1, 4], False), (10, 1, [2, 3], False), (1, 2, [5], False), (200, 3, [4], False)]
    order = make_order([0] * 6, [], [*buffers, (20, 4, [5], False), (1, 5, [], True)])
    early = Extra(Part.ENCODE, 1, 0, 0.5, 0, True, (0,), (Result(20, True),))
    halved = (
        Extra(Part.ENCODE, 1, 0, 0.1, 0, True, (0,), (Result(50, True),)),
        Extra(Part.DECODE, 4, 0, 0.2, 0, True, (~0,), (Result(100, True),)),
        Extra(Part.DECODE, 4, 0, 0.4, 0, True, (~1,), (Result(20, True),)),
    )
    other = Extra(Part.DECODE, 5, 0, 1.0, 0, True, (1,), (Result(20, True),))
    offers = [
        Offer(0, 20, (early,), ((5, 4, 0),)),
        Offer(0, 50, halved, ((4, 0, 1), (5, 4, 2))),
        Offer(1, 10, (other,), ((5, 4, 0),)),
    ]
    can_go = [False] * 4 + [idle, False]
    return make_problem(order, range(6), [1.0] * 6, [False] * 6, [False] * 6, None, can_go, offers)


def test_what_is_made_early_waits_in_the_place_of_what_it_is_made_of() -> None:
    """Operator 4 is left out, and buffer 0 is free where 3 makes the large one."""
    form = encoded(projected(), (0,))
    order = form.problem.order
    assert (form.encodes, form.decodes) == (((2,),), ((),)), "behind operator 1, the last that reads buffer 0"
    assert form.problem.num_ops == 6
    assert order.size.tolist() == [100, 10, 20, 1, 200, 1], "none of the product that 4 would make"
    assert order.consumer[order.consumer_start[2] : order.consumer_start[3]].tolist() == [5]
    problem = projected()
    solution = Choice(dataclasses.replace(problem, offers=problem.offers[:1])).solve(231)
    assert (solution.taken, solution.peak_bytes, solution.seconds) == ((0,), 231, 0.5)
    assert 0.49 < solution.bound_seconds <= 0.5, "20 bytes of the form wait, where buffer 0 would"


def test_an_offer_costs_no_more_than_what_it_adds_to_what_is_left_out() -> None:
    problem = projected()
    offer = dataclasses.replace(problem.offers[0], saves=(0.4,))
    assert offer.seconds == pytest.approx(0.1)
    assert offer.shares == pytest.approx({0: 0.1, 4: 0.0})
    solution = Choice(dataclasses.replace(problem, offers=(offer,))).solve(231)
    assert solution.taken == (0,)
    assert solution.seconds == pytest.approx(0.1)
    assert 0.09 < solution.bound_seconds <= 0.1 + 1e-9


def test_readers_of_several_buffers_read_what_one_form_gives() -> None:
    """Operator 4 stays if it must, and reads buffer 0 decoded."""
    order = encoded(projected(idle=False), (1,)).problem.order
    assert order.size.tolist() == [100, 10, 50, 1, 200, 100, 20, 20, 1]
    readers = [order.consumer[a:b].tolist() for a, b in itertools.pairwise(order.consumer_start.tolist())]
    assert readers == [[1, 2], [3, 4], [5], [8], [7], [6, 7], [8], [], []]
    assert encoded(projected(), (1,)).problem.num_ops == 8, "three more, and none of operator 4"


def test_two_offers_that_serve_one_reader_in_the_place_of_one_buffer_are_refused() -> None:
    with pytest.raises(ValueError, match="two taken offers serve op 5 as a reader of buffer 4"):
        encoded(projected(), (0, 2))
    offers, sizes = projected().offers, projected().order.size.tolist()
    assert cheapest(offers, sizes, float("inf")) == (0,)
    assert cheapest(offers, sizes, 0.01) == (0,)
    assert cheapest(offers[1:], sizes, 0.1) == (0,), "of the two that clash the one that saves more"


def test_an_offer_shares_its_seconds_among_the_buffers_that_it_serves() -> None:
    assert projected().offers[1].shares == pytest.approx({0: 0.3, 4: 0.4})
    assert projected().offers[0].shares == {0: 0.5, 4: 0.0}, "what makes the form is for its buffer"


def test_seconds_of_offers_count() -> None:
    form = encoded(half_read(), (1,)).problem
    solution = solve(form, 10**6)
    assert validate(form, 10**6, solution, 1.0).verdict is RetainVerdict.WRONG_SECONDS
    assert validate(form, 10**6, dataclasses.replace(solution, seconds=1.0), 1.0).good


@pytest.mark.parametrize(
    ("offer", "fault"),
    [
        (Offer(9, 0, (), ()), "names a buffer"),
        (Offer(1, 0, (Extra(Part.DECODE, 6, 0, 0.0, 0, True, (), ()),), ()), "names an op"),
        (Offer(1, 0, (Extra(Part.DECODE, 4, 0, 0.0, 0, True, (~0,), ()),), ()), "names a buffer"),
        (Offer(1, 0, (), ((4, 9, 0),)), "names a buffer"),
        (Offer(1, 0, (), ((4, 1, 0),)), "lets a reader read buffer 0 of 0"),
    ],
)
def test_offers_of_what_does_not_exist_are_refused(offer: Offer, fault: str) -> None:
    problem = half_read()
    with pytest.raises(ValueError, match=fault):
        make_problem(
            problem.order, problem.sequence, problem.seconds, problem.repeatable, problem.droppable, offers=[offer]
        )

"""What minimum cuts say beyond a bound for each operator: either-or, and a list schedule that goes from cut to cut."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers.order.cut_guided import cut_guided
from roamc.solvers.order.disjunction import disjunctive_bound
from roamc.solvers.order.evaluate import live_bytes, peak_bytes
from roamc.solvers.order.list_schedule import lescea, lpmf
from roamc.solvers.order.min_cut import least_before, make_network, min_cut_bound, operator_bound
from roamc.solvers.order.problem import OrderProblem, dependencies, make_problem
from tests.solvers.order.cases import PROPERTY, best_peak, is_legal, problems, random_layers, training_problem

PLENTY = 10**7


@PROPERTY
@given(problems(stages=1), st.data())
def test_the_set_before_an_operator_reaches_its_bound(problem: OrderProblem, data: st.DataObject) -> None:
    op = data.draw(st.integers(0, problem.num_ops - 1))
    least, before, _ = least_before(make_network(problem), op)
    pairs = dependencies(problem)
    assert not before[op]
    assert before[pairs[before[pairs[:, 1]], 0]].all(), "closed under what must run before"
    program = np.arange(problem.num_ops)
    after = ~before
    after[op] = False
    order = np.concatenate([program[before], [op], program[after]])
    assert is_legal(problem, order.tolist())
    assert live_bytes(problem, order)[int(before.sum())] == least == operator_bound(make_network(problem), op)[0]


@PROPERTY
@given(problems(most_ops=8, stages=1), st.booleans())
def test_no_order_is_below_either_or(problem: OrderProblem, greedy: bool) -> None:
    order = lpmf(problem) if greedy else np.arange(problem.num_ops, dtype=np.int32)
    cut, _ = min_cut_bound(problem, order, 0, PLENTY)
    bound, _ = disjunctive_bound(problem, order, cut, PLENTY)
    assert cut <= bound <= best_peak(problem)


def either_or() -> OrderProblem:
    """Operator 1 works on what 0 left, at 150 bytes; 2 and 3 make gradients of 100 bytes, which 4 sums up."""
    buffers = [(60, 0, [1], False), (10, 0, [2], False), (10, 0, [3], False), (150, 1, [], False)]
    return make_problem([0] * 5, [], [*buffers, (100, 2, [4], False), (100, 3, [4], False)])


def test_either_or_closes_the_gap_of_the_cut_bound() -> None:
    problem = either_or()
    for order in ([0, 1, 2, 3, 4], [0, 2, 3, 4, 1]):  # the peak is at the one operator or at the other
        cut, _ = min_cut_bound(problem, np.array(order, dtype=np.int32), 0, PLENTY)
        assert (cut, best_peak(problem)) == (210, 230)
        assert disjunctive_bound(problem, np.array(order, dtype=np.int32), cut, PLENTY)[0] == 230


def test_either_or_keeps_its_limit() -> None:
    problem = random_layers(60, 30)
    order = lpmf(problem)
    _, work = disjunctive_bound(problem, order, 0, 2_000)
    assert work < 4_000
    assert disjunctive_bound(problem, order, peak_bytes(problem, order), PLENTY) == (peak_bytes(problem, order), 0)


@PROPERTY
@given(problems(stages=1))
def test_from_cut_to_cut_the_order_is_legal_and_the_peak_no_higher(problem: OrderProblem) -> None:
    start = lescea(problem)
    order, work = cut_guided(problem, start, 0, PLENTY)
    again, again_work = cut_guided(problem, start, 0, PLENTY)
    assert is_legal(problem, order.tolist())
    assert peak_bytes(problem, order) <= peak_bytes(problem, start)
    assert (order.tolist(), work) == (again.tolist(), again_work)


def test_cuts_lead_where_greedy_orders_do_not() -> None:
    lowered = 0
    for seed in range(20):
        problem = random_layers(40, 12, seed)
        greedy = min((lpmf(problem), lescea(problem)), key=lambda order: peak_bytes(problem, order))
        order, _ = cut_guided(problem, greedy, 0, PLENTY)
        lowered += peak_bytes(problem, order) < peak_bytes(problem, greedy)
    assert lowered >= 10


def test_cuts_keep_their_limit_and_end_at_the_bound() -> None:
    problem = training_problem(30)
    start = np.arange(problem.num_ops, dtype=np.int32)
    assert cut_guided(problem, start, peak_bytes(problem, start), PLENTY)[1] == 0
    _, work = cut_guided(problem, start, 0, 1)
    assert work <= 8 * problem.num_ops + 10 * len(dependencies(problem))

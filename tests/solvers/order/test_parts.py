"""Stages, groups, windows, segments, subgraphs: a part of a problem, or the problem in another form, is faithful."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers.order.contract import contract
from roamc.solvers.order.effort import EFFORT
from roamc.solvers.order.evaluate import live_bytes, peak_bytes
from roamc.solvers.order.exact import Bracket
from roamc.solvers.order.list_schedule import lescea, lpmf
from roamc.solvers.order.problem import OrderProblem, make_problem
from roamc.solvers.order.segments import narrow_by_segment, narrow_points
from roamc.solvers.order.stages import one_stage
from roamc.solvers.order.subgraphs import improve_by_subgraphs
from roamc.solvers.order.window import window
from tests.solvers.order.cases import PROPERTY, best_peak, is_legal, problems, random_layers


def program_of(problem: OrderProblem) -> np.ndarray:
    """Program order."""
    return np.arange(problem.num_ops, dtype=np.int32)


@PROPERTY
@given(problems(most_ops=8))
def test_barriers_say_what_stages_say(problem: OrderProblem) -> None:
    staged = one_stage(problem)
    assert best_peak(staged.problem) == best_peak(problem)
    assert is_legal(problem, staged.order_of(lescea(staged.problem)).tolist())
    assert staged.problem.num_ops == problem.num_ops + len(set(problem.stage.tolist())) - 1


@PROPERTY
@given(problems(most_ops=8, stages=1))
def test_groups_lose_nothing(problem: OrderProblem) -> None:
    grouped = contract(problem)
    assert best_peak(grouped.problem) == best_peak(problem)
    order = lpmf(grouped.problem)
    expanded = grouped.order_of(order)
    assert is_legal(problem, expanded.tolist())
    assert peak_bytes(problem, expanded) == peak_bytes(grouped.problem, order)


@PROPERTY
@given(problems(stages=1))
def test_groups_of_an_order_have_no_higher_peak(problem: OrderProblem) -> None:
    grouped = contract(problem)
    order = lescea(problem)
    groups = grouped.groups_in(order)
    assert is_legal(grouped.problem, groups.tolist())
    assert peak_bytes(grouped.problem, groups) <= peak_bytes(problem, order)


def test_updates_in_place_and_constants_join_their_neighbour() -> None:
    # 0: a constant for 1; 2 reads from 1, then 3 and 4 update in place; 5 waits for both groups, 6 has a result
    buffers = [(4, 0, [1], False), (8, 1, [2], False), (2, 2, [3, 5], False), (1, 1, [5], False), (1, 6, [], True)]
    problem = make_problem([0] * 7, [(3, 4), (2, 6)], buffers)
    assert contract(problem).members == ((0, 1), (2, 3, 4), (5,), (6,))


def test_an_operator_that_reads_what_the_group_may_take_over_stays_apart() -> None:
    # 2 only reads buffer 0, which 1 could take over if 2 ran before it
    buffers = [(8, 0, [1, 2], False), (8, 1, [], False)]
    edges = [(0, 2), (0, 1)]
    assert contract(make_problem([0] * 3, edges, buffers)).members == ((0, 2), (1,))
    reusing = make_problem([0] * 3, [*edges, (1, 2)], buffers, reusable=[[], [0]])
    assert contract(reusing).members == ((0,), (1,), (2,))


@PROPERTY
@given(problems(stages=1), st.data())
def test_window_counts_every_byte(problem: OrderProblem, data: st.DataObject) -> None:
    order = lescea(problem)
    lo = data.draw(st.integers(0, problem.num_ops - 1))
    hi = data.draw(st.integers(lo + 1, problem.num_ops))
    part = window(problem, order, lo, hi)
    inner = live_bytes(part.problem, program_of(part.problem)) + part.offset_bytes
    live = live_bytes(problem, order)
    assert inner[1:-1].tolist() == live[lo:hi].tolist()
    assert inner.max() <= live.max()
    moved = part.order_of(lpmf(part.problem))
    whole = np.concatenate([order[:lo], moved, order[hi:]])
    assert is_legal(problem, whole.tolist())
    expected = live_bytes(part.problem, lpmf(part.problem))[1:-1] + part.offset_bytes
    assert live_bytes(problem, whole)[lo:hi].tolist() == expected.tolist()


@PROPERTY
@given(problems(most_ops=8, stages=1))
def test_every_order_has_the_narrow_points_at_their_places(problem: OrderProblem) -> None:
    points = narrow_points(problem).tolist()
    fixed = [op for op in range(problem.num_ops) if comparable_to_all(problem, op)]
    assert points == fixed


def comparable_to_all(problem: OrderProblem, op: int) -> bool:
    """Whether every other operator must run before or after `op`."""
    num_ops = problem.num_ops
    before = np.zeros((num_ops, num_ops), dtype=bool)
    for first, second in problem.edges.tolist():
        before[first, second] = True
    start = problem.consumer_start.tolist()
    for buffer, producer in enumerate(problem.producer.tolist()):
        before[producer, problem.consumer[start[buffer] : start[buffer + 1]]] = True
    for middle in range(num_ops):
        before |= np.outer(before[:, middle], before[middle])
    return all(before[op, other] or before[other, op] for other in range(num_ops) if other != op)


@PROPERTY
@given(problems(most_ops=9))
def test_segments_give_the_best_peak_of_the_whole(problem: OrderProblem) -> None:
    staged = one_stage(problem).problem
    program = program_of(staged)
    bracket = narrow_by_segment(staged, Bracket(program, peak_bytes(staged, program), 0), 10**6)
    assert is_legal(staged, bracket.order.tolist())
    assert bracket.peak_bytes == bracket.bound_bytes == peak_bytes(staged, bracket.order) == best_peak(problem)


@PROPERTY
@given(problems(stages=1), st.integers(1, 6))
def test_subgraphs_give_a_legal_order_with_no_higher_peak(problem: OrderProblem, leaf: int) -> None:
    order = lescea(problem)
    start = Bracket(order, peak_bytes(problem, order), 0)
    bracket = improve_by_subgraphs(problem, start, 10**4, replace(EFFORT, leaf_ops=leaf))
    assert is_legal(problem, bracket.order.tolist())
    assert bracket.peak_bytes == peak_bytes(problem, bracket.order) <= start.peak_bytes
    assert bracket.bound_bytes == 0


def test_subgraphs_lower_the_peak_where_the_whole_is_out_of_reach() -> None:
    problem = random_layers(300, 100)
    order = lescea(problem)
    start = Bracket(order, peak_bytes(problem, order), 0)
    bracket = improve_by_subgraphs(problem, start, 200_000)
    assert bracket.peak_bytes < 0.9 * start.peak_bytes
    assert bracket.work <= 400_000

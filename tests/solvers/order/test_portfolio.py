"""The portfolio keeps the best, stops at the bound, and copes with size."""

from dataclasses import fields, replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers import Status
from roamc.solvers.order import EFFORT, Effort, Pieces, make_problem, solve, validate
from roamc.solvers.order.equal_peak import equal_peaks
from roamc.solvers.order.portfolio import ALGORITHMS, NO_PIECES
from roamc.solvers.order.problem import OrderProblem, consumers, predecessors, renumber, reusables, without_reuse
from tests.solvers.order.cases import PROPERTY, best_peak, problems, random_layers, training_problem
from tests.solvers.recorded import recorded, unread


@PROPERTY
@given(problems())
def test_portfolio_is_no_worse_than_any_of_its_algorithms(problem: OrderProblem) -> None:
    peak = solve(problem).peak_bytes
    assert all(peak <= solve(problem, (name,)).peak_bytes for name in ALGORITHMS)


@PROPERTY
@given(problems(), st.integers(2, 1000))
def test_scaled_sizes_scale_the_peak_and_leave_the_order(problem: OrderProblem, factor: int) -> None:
    scaled = make_problem(
        problem.stage.tolist(),
        [(before, after) for before, after in problem.edges.tolist()],
        zip(
            (problem.size * factor).tolist(),
            problem.producer.tolist(),
            consumers(problem).lists(),
            problem.kept.tolist(),
            strict=True,
        ),
        (problem.workspace * factor).tolist(),
        reusables(problem).lists(),
    )
    before, after = solve(problem), solve(scaled)
    assert after.order.tolist() == before.order.tolist()
    assert after.peak_bytes == factor * before.peak_bytes
    assert after.bound_bytes == factor * before.bound_bytes


def test_tie_keeps_program_order() -> None:
    problem = make_problem([0] * 3, [], [(5, op, [], True) for op in range(3)])
    solution = solve(problem)
    assert solution.algorithm == "program"
    assert solution.order.tolist() == [0, 1, 2]


def test_portfolio_stops_when_the_peak_meets_the_bound() -> None:
    solution = solve(make_problem([0, 0], [], [(5, 0, [1], False)]))
    assert solution.status is Status.OPTIMAL
    assert solution.candidates == (("program", 5),)
    assert solution.work == 2


@PROPERTY
@given(problems(most_ops=8))
def test_small_problems_are_solved(problem: OrderProblem) -> None:
    solution = solve(problem)
    assert solution.peak_bytes == solution.bound_bytes == best_peak(problem)
    assert solution.status is Status.OPTIMAL


@PROPERTY
@given(problems(most_ops=8), st.randoms(use_true_random=False))
def test_another_numbering_has_the_same_best_peak(problem: OrderProblem, dice) -> None:
    order: list[int] = []
    before = predecessors(problem).lists()
    while len(order) < problem.num_ops:
        waiting = [op for op in range(problem.num_ops) if op not in order]
        first = min(int(problem.stage[op]) for op in waiting)
        ready = [op for op in waiting if problem.stage[op] == first and set(before[op]) <= set(order)]
        order.append(dice.choice(ready))
    again = renumber(problem, np.array(order, dtype=np.int32))
    assert solve(again).peak_bytes == solve(problem).peak_bytes


def test_every_algorithm_is_reported_while_the_gap_is_open() -> None:
    solution = solve(training_problem(5, seed=1), pieces=NO_PIECES)
    assert solution.status is Status.GAP
    assert [name for name, _ in solution.candidates] == list(ALGORITHMS)
    assert (solution.algorithm, solution.peak_bytes) in solution.candidates


def test_search_closes_the_gap_that_the_algorithms_leave() -> None:
    problem = training_problem(5, seed=1)
    alone = solve(problem, pieces=NO_PIECES)
    solution = solve(problem)
    assert solution.peak_bytes < alone.peak_bytes
    assert solution.status is Status.OPTIMAL
    assert ("search", solution.peak_bytes) in solution.candidates


SWITCHES = [field.name for field in fields(Pieces)]


@pytest.mark.parametrize(("one", "other"), list(combinations(SWITCHES, 2)))
def test_every_pair_of_switches(one: str, other: str) -> None:
    cases = [training_problem(4, seed=1), training_problem(4, seed=1, reuse=True), random_layers(40, 12)]
    for problem in cases:
        best = solve(problem).peak_bytes
        for on, also in product((False, True), repeat=2):
            solution = solve(problem, pieces=replace(Pieces(), **{one: on, other: also}), work_limit=100_000)
            assert validate(problem, solution).good
            assert solution.bound_bytes <= best <= solution.peak_bytes
            alone = solve(problem, pieces=replace(NO_PIECES, **{one: on, other: also}), work_limit=100_000)
            assert validate(problem, alone).good
            assert alone.bound_bytes <= best <= alone.peak_bytes


@pytest.mark.parametrize("name", ["polish", "branches", "min_cut", "cuts", "search", "subgraphs"])
def test_a_switch_does_something(name: str) -> None:
    problem = random_layers(60, 30)
    without = solve(problem, pieces=NO_PIECES)
    with_it = solve(problem, pieces=replace(NO_PIECES, **{name: True}))
    assert (with_it.candidates, with_it.bound_bytes) != (without.candidates, without.bound_bytes)


@pytest.mark.parametrize("limit", [2_000, 100_000, 400_000])
def test_work_limit_is_kept_and_reported(limit: int) -> None:
    problem = random_layers(150, 60)
    solution = solve(problem, work_limit=limit)
    assert validate(problem, solution).good
    assert solution.status is Status.LIMIT
    assert solution.work <= 2 * limit


def test_progress_tells_of_a_falling_peak_and_a_rising_bound() -> None:
    seen: list[tuple[int, int]] = []
    solution = solve(training_problem(5, seed=1), progress=lambda peak, bound: seen.append((peak, bound)))
    assert seen[-1] == (solution.peak_bytes, solution.bound_bytes)
    assert [peak for peak, _ in seen] == sorted((peak for peak, _ in seen), reverse=True)
    assert [bound for _, bound in seen] == sorted(bound for _, bound in seen)
    assert len(set(seen)) > 1


@pytest.mark.parametrize("names", [(), ("program", "no_such_order")])
def test_unknown_algorithm_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="there are program, lpmf"):
        solve(training_problem(1), names)


@pytest.mark.parametrize("reuse", [False, True])
def test_training_graph_is_solved(reuse: bool) -> None:
    solution = solve(training_problem(60, reuse=reuse))
    assert solution.peak_bytes < dict(solution.candidates)["program"]
    assert solution.status is Status.OPTIMAL


def test_in_place_reuse_lowers_the_peak() -> None:
    problem = training_problem(60, seed=1, reuse=True)
    reusing = solve(problem)
    assert reusing.reuses
    assert reusing.peak_bytes < solve(without_reuse(problem)).peak_bytes


@pytest.mark.parametrize("layers, operators", [(286, 2_000), pytest.param(2857, 20_000, marks=pytest.mark.thorough)])
def test_long_graphs_get_another_order(layers: int, operators: int) -> None:
    problem = training_problem(layers)
    assert problem.num_ops >= operators
    solution = solve(problem)
    assert validate(problem, solution).good
    assert not np.array_equal(solution.order, np.arange(problem.num_ops))


@pytest.mark.parametrize("name", [field.name for field in fields(Effort)])
def test_any_effort_gives_a_legal_order(name: str) -> None:
    problem = random_layers(40, 40)
    effort = replace(EFFORT, work_limit=100_000)
    solution = solve(problem, effort=replace(effort, **{name: 1}))
    assert validate(problem, solution).good
    assert solution.peak_bytes <= solve(problem, pieces=NO_PIECES).peak_bytes


def test_effort_limits_the_work_unless_a_limit_is_given() -> None:
    problem = random_layers(40, 40)
    little = replace(EFFORT, work_limit=20_000)
    assert solve(problem, effort=little).work == solve(problem, work_limit=20_000).work
    assert solve(problem, effort=little).work < solve(problem, work_limit=100_000, effort=little).work


def test_a_gap_of_few_bytes_is_worth_little_work() -> None:
    problem = random_layers(60, 30)
    full = solve(problem)
    little, wide = (solve(problem, effort=replace(EFFORT, full_work_gap_bytes=gap)) for gap in (1 << 20, 1))
    assert little.bound_bytes <= full.peak_bytes <= little.peak_bytes
    assert little.work < full.work // 2
    assert wide.work == full.work


def test_a_trick_can_be_switched_off() -> None:
    problem = random_layers(120, 30)
    cuts = replace(NO_PIECES, cuts=True)
    with_rounds, without = (solve(problem, pieces=cuts, effort=replace(EFFORT, cut_rounds=count)) for count in (256, 0))
    assert with_rounds.peak_bytes < without.peak_bytes == solve(problem, pieces=NO_PIECES).peak_bytes
    assert with_rounds.work > without.work


def test_every_field_of_effort_is_read() -> None:
    effort, read = recorded(replace(EFFORT, work_limit=1_000_000))
    solve(random_layers(60, 30), effort=effort)
    problem = training_problem(20, reuse=True)
    list(equal_peaks(problem, solve(problem, effort=effort).order, effort))
    assert unread(EFFORT, read) == []

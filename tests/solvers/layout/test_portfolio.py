"""The portfolio keeps the best, stops at the bound, and copes with size."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roamc.solvers import Status
from roamc.solvers.layout import EFFORT, Effort, Gap, lower_bound, make_problem, solve, validate
from roamc.solvers.layout.portfolio import ALGORITHMS
from roamc.solvers.layout.problem import LayoutProblem, arena_bytes
from tests.solvers.layout.cases import (
    PROPERTY,
    hard_problem,
    lowest_arena,
    lowest_by_trial,
    problems,
    special_problems,
    tiny_problems,
    training_problem,
)
from tests.solvers.layout.test_tree_search import ABOVE_BOUND, from_rows
from tests.solvers.recorded import recorded, unread


@PROPERTY
@given(problems())
def test_portfolio_is_no_worse_than_any_heuristic(problem: LayoutProblem) -> None:
    arena = solve(problem, node_limit=100).arena_bytes
    assert all(arena <= arena_bytes(problem, algorithm(problem)) for algorithm in ALGORITHMS.values())


@PROPERTY
@given(problems(), st.sampled_from([2, 16, 1024]))
def test_scaled_sizes_scale_the_layout(problem: LayoutProblem, factor: int) -> None:
    scaled = make_problem(
        (problem.size * factor).tolist(),
        problem.born.tolist(),
        problem.dead.tolist(),
        problem.alignment * factor,
    )
    before, after = solve(problem, node_limit=200), solve(scaled, node_limit=200)
    assert after.offset.tolist() == (before.offset * factor).tolist()
    assert after.arena_bytes == factor * before.arena_bytes
    assert after.status is before.status


def test_search_stops_when_the_arena_meets_the_bound() -> None:
    solution = solve(make_problem([64, 64], [0, 0], [1, 1]))
    assert solution.status is Status.OPTIMAL
    assert solution.candidates == (("greedy_by_size", 128),)
    assert solution.work == 2


@pytest.mark.parametrize(("node_limit", "status"), [(0, Status.GAP), (40, Status.LIMIT), (10_000, Status.OPTIMAL)])
def test_status_says_how_the_search_ended(node_limit: int, status: Status) -> None:
    rows, bound, lowest = ABOVE_BOUND[1]
    problem = from_rows(rows, 64)
    solution = solve(problem, node_limit=node_limit)
    assert solution.status is status
    assert (solution.bound_bytes, solution.arena_bytes) == (64 * bound, 64 * lowest)
    assert validate(problem, solution).good


@PROPERTY
@given(problems(most_storages=6, most_steps=6))
def test_small_problems_are_solved_as_by_brute_force(problem: LayoutProblem) -> None:
    solution = solve(problem)
    assert solution.status is Status.OPTIMAL
    assert solution.arena_bytes == lowest_arena(problem)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(tiny_problems())
def test_small_special_problems_are_solved_as_by_brute_force(problem: LayoutProblem) -> None:
    solution = solve(problem)
    assert validate(problem, solution).good
    assert solution.status is Status.OPTIMAL
    assert solution.arena_bytes == lowest_by_trial(problem)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(special_problems(), st.sampled_from([0, 10, 1000]))
def test_special_problems_have_good_solutions(problem: LayoutProblem, node_limit: int) -> None:
    report = validate(problem, solve(problem, node_limit=node_limit))
    assert report.good, report


@PROPERTY
@given(problems(most_storages=8), st.randoms(use_true_random=False))
def test_the_sequence_of_the_storages_does_not_matter(problem: LayoutProblem, dice) -> None:
    places = list(range(problem.num_storages))
    dice.shuffle(places)
    shuffled = make_problem(problem.size[places], problem.born[places], problem.dead[places], problem.alignment)
    before, after = solve(problem), solve(shuffled)
    assert (after.arena_bytes, after.bound_bytes, after.status) == (
        before.arena_bytes,
        before.bound_bytes,
        before.status,
    )


@PROPERTY
@given(problems(), st.sampled_from([1, 7, 1000, 2**30]))
def test_later_steps_give_the_same_layout(problem: LayoutProblem, steps: int) -> None:
    later = make_problem(
        problem.size,
        problem.born.astype(np.int64) + steps,
        problem.dead.astype(np.int64) + steps,
        problem.alignment,
    )
    before, after = solve(problem, node_limit=200), solve(later, node_limit=200)
    assert after.offset.tolist() == before.offset.tolist()
    assert after.status is before.status


@PROPERTY
@given(problems(most_storages=6, most_steps=6), st.integers(0, 40))
def test_a_capacity_is_met_or_proved_out_of_reach(problem: LayoutProblem, more: int) -> None:
    capacity = lower_bound(problem) - 8 + more
    solution = solve(problem, capacity=capacity)
    assert validate(problem, solution).good
    assert (solution.arena_bytes <= capacity) == (lowest_arena(problem) <= capacity)
    assert (solution.status is Status.INFEASIBLE) == (solution.arena_bytes > capacity)


def test_search_ends_at_the_capacity() -> None:
    rows, bound, lowest = ABOVE_BOUND[1]
    problem = from_rows(rows, 64)
    assert solve(problem, capacity=64 * bound).status is Status.INFEASIBLE
    assert solve(problem, capacity=64 * bound, node_limit=40).status is Status.LIMIT
    assert solve(problem, capacity=64 * bound, node_limit=0).status is Status.GAP
    assert solve(problem, capacity=64 * bound - 1, node_limit=0).status is Status.INFEASIBLE
    assert solve(problem, capacity=64 * lowest).status is Status.GAP
    assert solve(problem, capacity=64 * lowest).arena_bytes == 64 * lowest


def test_time_that_is_up_leaves_a_layout_and_says_so() -> None:
    problem = from_rows(ABOVE_BOUND[1][0], 64)
    solution = solve(problem, seconds=0.0)
    assert validate(problem, solution).good
    assert solution.status is Status.LIMIT
    assert len(solution.candidates) == 1


def test_a_clock_with_time_enough_changes_nothing_that_is_proved() -> None:
    problem = from_rows(ABOVE_BOUND[1][0], 64)
    solution = solve(problem, node_limit=1 << 60, seconds=250.0)
    assert (solution.arena_bytes, solution.status) == (64 * ABOVE_BOUND[1][2], Status.OPTIMAL)


def test_fixed_storages_stay_and_others_go_around_them() -> None:
    problem = make_problem([16, 16, 16], [0, 0, 0], [2, 2, 1], 8, fixed=[16, -1, -1])
    solution = solve(problem)
    assert solution.offset[0] == 16
    assert (solution.arena_bytes, solution.status) == (48, Status.OPTIMAL)


def test_end_of_a_fixed_storage_is_a_bound() -> None:
    solution = solve(make_problem([16, 16], [0, 0], [1, 1], 8, fixed=[64, -1]))
    assert (solution.bound_bytes, solution.arena_bytes, solution.status) == (80, 80, Status.OPTIMAL)


def test_large_problems_with_gaps_are_not_searched() -> None:
    rows = ABOVE_BOUND[0][0] * 10
    columns = [list(column) for column in zip(*rows, strict=True)]
    problem = make_problem(*columns, 1, gaps=[Gap(0, 2, 3)])
    solution = solve(problem)
    assert validate(problem, solution).good
    assert "cp_sat" not in dict(solution.candidates)


@pytest.mark.parametrize("seed", range(8))
def test_hidden_layout_without_loss_is_found_again(seed: int) -> None:
    problem = hard_problem(30, seed)
    solution = solve(problem, node_limit=200_000)
    assert validate(problem, solution).good
    assert (solution.arena_bytes, solution.status) == (1000, Status.OPTIMAL)


@pytest.mark.parametrize("seed", range(12))
def test_training_graph_loses_at_most_one_percent(seed: int) -> None:
    problem = training_problem(12 + 4 * seed, seed)
    solution = solve(problem)
    assert validate(problem, solution).good
    assert solution.arena_bytes <= 1.01 * solution.bound_bytes


def test_twenty_thousand_storages() -> None:
    problem = training_problem(1500, seed=1)
    assert problem.num_storages >= 20_000
    solution = solve(problem)
    assert validate(problem, solution).good
    assert np.unique(solution.offset).size > 100


@pytest.mark.parametrize("name", [field.name for field in fields(Effort)])
def test_any_effort_gives_a_legal_layout(name: str) -> None:
    effort = replace(EFFORT, node_limit=2_000)
    for problem in (hard_problem(30), training_problem(5)):
        assert validate(problem, solve(problem, effort=replace(effort, **{name: 1}))).good


def test_a_trick_can_be_switched_off() -> None:
    problem = hard_problem(80, 7)
    assert any(name.endswith("+improve") for name, _ in solve(problem, node_limit=0).candidates)
    without = solve(problem, node_limit=0, effort=replace(EFFORT, improve_rounds=0))
    assert not any(name.endswith("+improve") for name, _ in without.candidates)
    searched = solve(problem, effort=replace(EFFORT, node_limit=0))
    assert "tree_search" not in dict(searched.candidates)


def test_every_field_of_effort_is_read() -> None:
    effort, read = recorded(replace(EFFORT, first_search_nodes=100))
    columns = [list(column) for column in zip(*ABOVE_BOUND[0][0], strict=True)]
    solve(make_problem(*columns, 1, gaps=[Gap(0, 1, 2)]), effort=effort)  # for CP-SAT
    solve(hard_problem(80, 1), node_limit=20_000, seconds=60, effort=effort)  # against the clock
    assert unread(EFFORT, read) == []

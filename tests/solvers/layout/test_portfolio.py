"""The portfolio keeps the best, stops at the bound, and copes with size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers import Status
from roamc.solvers.layout import make_problem, solve, validate
from roamc.solvers.layout.portfolio import ALGORITHMS
from roamc.solvers.layout.problem import LayoutProblem, arena_bytes
from tests.solvers.layout.cases import PROPERTY, problems, training_problem
from tests.solvers.layout.test_tree_search import ABOVE_BOUND, from_rows


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

"""The portfolio keeps the best, stops at the bound, and copes with size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers import Status
from roamc.solvers.order import make_problem, solve, validate
from roamc.solvers.order.portfolio import ALGORITHMS
from roamc.solvers.order.problem import OrderProblem, consumers, donors
from tests.solvers.order.cases import PROPERTY, problems, training_problem


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
        (problem.scratch * factor).tolist(),
        donors(problem).lists(),
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


def test_search_stops_when_the_peak_meets_the_bound() -> None:
    solution = solve(make_problem([0, 0], [], [(5, 0, [1], False)]))
    assert solution.status is Status.OPTIMAL
    assert solution.candidates == (("program", 5),)
    assert solution.work == 2


def test_every_algorithm_is_reported_when_there_is_a_gap() -> None:
    solution = solve(training_problem(5, seed=1))
    assert solution.status is Status.GAP
    assert [name for name, _ in solution.candidates][: len(ALGORITHMS)] == list(ALGORITHMS)
    assert (solution.algorithm, solution.peak_bytes) in solution.candidates


@pytest.mark.parametrize("names", [(), ("program", "no_such_order")])
def test_unknown_algorithm_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="there are program, list"):
        solve(training_problem(1), names)


def test_training_graph_ends_near_the_bound() -> None:
    problem = training_problem(60)
    solution = solve(problem)
    assert solution.peak_bytes < dict(solution.candidates)["program"]
    assert solution.peak_bytes <= 1.02 * solution.bound_bytes


def test_twenty_thousand_operators() -> None:
    problem = training_problem(2857)
    assert problem.num_ops >= 20_000
    solution = solve(problem)
    assert validate(problem, solution).good
    assert not np.array_equal(solution.order, np.arange(problem.num_ops))

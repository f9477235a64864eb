"""The exact search finds the least peak, proves it, and keeps to its limit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers.order.capacity_search import search_within
from roamc.solvers.order.evaluate import peak_bytes
from roamc.solvers.order.exact import Bracket, narrow
from roamc.solvers.order.flow import backward_flow, forward_flow
from roamc.solvers.order.problem import OrderProblem, make_problem
from tests.solvers.order.cases import PROPERTY, best_peak, is_legal, problems, random_layers, training_problem

DIRECTIONS = {"forward": forward_flow, "backward": backward_flow}


@pytest.mark.parametrize("direction", DIRECTIONS)
@PROPERTY
@given(problem=problems(most_ops=9, stages=1))
def test_search_decides_every_capacity(direction: str, problem: OrderProblem) -> None:
    best = best_peak(problem)
    flow = DIRECTIONS[direction](problem)
    answer = search_within(flow, best, 10**6)
    assert answer.order is not None
    assert is_legal(problem, answer.order.tolist())
    assert peak_bytes(problem, answer.order) == best
    below = search_within(flow, best - 1, 10**6)
    assert below.order is None
    assert below.proved_bytes == best


@pytest.mark.parametrize("direction", DIRECTIONS)
@PROPERTY
@given(problem=problems(most_ops=9, stages=1), capacity=st.integers(-1, 120))
def test_a_proof_holds_up_to_what_it_says(direction: str, problem: OrderProblem, capacity: int) -> None:
    answer = search_within(DIRECTIONS[direction](problem), capacity, 10**6)
    assert (answer.order is None) == (best_peak(problem) > capacity)
    if answer.proved_bytes is not None:
        assert capacity < answer.proved_bytes <= best_peak(problem)


@pytest.mark.parametrize("limit", [0, 1000, 30_000])
def test_search_keeps_to_its_limit(limit: int) -> None:
    problem = random_layers(100, 40)
    for direction in DIRECTIONS.values():
        answer = search_within(direction(problem), 600, limit)
        assert answer.order is None
        assert answer.proved_bytes is None
        assert limit < answer.work <= 2 * limit + 2 * problem.num_ops


@PROPERTY
@given(problems(most_ops=9, stages=1))
def test_narrow_closes_every_small_gap(problem: OrderProblem) -> None:
    program = np.arange(problem.num_ops, dtype=np.int32)
    bracket = narrow(problem, Bracket(program, peak_bytes(problem, program), 0), 10**6)
    assert bracket.peak_bytes == bracket.bound_bytes == best_peak(problem) == peak_bytes(problem, bracket.order)


@pytest.mark.parametrize("limit", [1, 20_000, 200_000])
def test_narrow_keeps_to_its_limit_and_what_it_returns_is_true(limit: int) -> None:
    problem = random_layers(100, 40)
    program = np.arange(problem.num_ops, dtype=np.int32)
    bracket = narrow(problem, Bracket(program, peak_bytes(problem, program), 0), limit)
    assert is_legal(problem, bracket.order.tolist())
    assert bracket.bound_bytes <= bracket.peak_bytes == peak_bytes(problem, bracket.order)
    assert bracket.work <= 2 * limit + 8 * problem.num_ops


def test_a_closed_bracket_costs_nothing() -> None:
    problem = training_problem(3)
    program = np.arange(problem.num_ops, dtype=np.int32)
    peak = peak_bytes(problem, program)
    start = Bracket(program, peak, peak)
    assert narrow(problem, start, 10**6) is start


def test_search_goes_up_where_that_leads_down() -> None:
    # 0 frees nothing by itself, but 1 behind it frees what 2 would have to live with; 2 → 3 frees later
    buffers = [(10, 0, [2, 4], False), (4, 1, [2], False), (1, 2, [5], False), (12, 3, [5], False)]
    problem = make_problem([0] * 6, [(0, 1), (0, 3), (2, 4)], buffers)
    answer = search_within(forward_flow(problem), best_peak(problem), 10**4)
    assert answer.order is not None
    assert answer.order.tolist().index(4) < answer.order.tolist().index(3)

"""What holds for every answer of the retention solver."""

import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roamc.solvers.order import make_problem as make_order
from roamc.solvers.order import peak_bytes
from roamc.solvers.retain import (
    EFFORT,
    Choice,
    Frontier,
    Ground,
    RetainProblem,
    RetainSolution,
    make_problem,
    solve,
    validate,
)
from roamc.solvers.retain.drops import list_drops, make_drop
from roamc.solvers.retain.reference import reference_order
from roamc.solvers.retain.search import Search
from roamc.solvers.retain.ways import ALONE
from roamc.solvers.status import Status
from tests.solvers.order.cases import PROPERTY
from tests.solvers.recorded import recorded, unread
from tests.solvers.retain.cases import chain, layered, offers_of, problems


def full_peak(problem: RetainProblem) -> int:
    return peak_bytes(problem.order, problem.sequence)


def check(problem: RetainProblem, budget: int, solution: RetainSolution) -> None:
    report = validate(problem, budget, solution)
    assert report.good, report


@PROPERTY
@given(problems(), st.floats(0, 1))
def test_judge_accepts_every_answer(problem: RetainProblem, share: float) -> None:
    budget = int(full_peak(problem) * share)
    solution = solve(problem, budget, work_limit=200_000)
    check(problem, budget, solution)
    assert solution.status is Status.INFEASIBLE or solution.peak_bytes <= budget


@pytest.mark.parametrize(
    "without",
    [
        {"anneal_rounds": 0},
        {"bound_cuts": 0, "bound_operators": 1, "cut_starts": 0},
        {"descent_steps": ()},
        {"exact_gaps": 0, "keep_rounds": 0, "vain_changes": 0},
        {"room_runs": 1, "room_spare": 0, "start_repairs": 0},
        {"simulations": 0},
        {"stuck_targets": 0},
    ],
    ids=",".join,
)
def test_judge_accepts_answers_of_less_effort(without: dict[str, Any]) -> None:
    problem = layered(6, 1)
    for percent in (80, 50, 0):
        budget = full_peak(problem) * percent // 100
        check(problem, budget, solve(problem, budget, work_limit=None, effort=replace(EFFORT, **without)))


SWITCHES: dict[str, dict[str, Any]] = {
    "annealing": {"anneal_rounds": 0},
    "all combinations": {"exact_gaps": 0},
    "cuts": {"cut_starts": 0},
    "neighbourhoods": {"vain_changes": 0},
    "way to the lowest peak": {"descent_steps": ()},
}
"""Each search of a call, and what leaves it out."""


def check_switches(problem: RetainProblem, budget: int, work_limit: int | None) -> None:
    """No search makes an answer worse than without it, whatever others there are."""
    ranks: dict[frozenset[str], tuple[bool, float, float]] = {}
    for off in (set(some) for count in range(len(SWITCHES) + 1) for some in combinations(SWITCHES, count)):
        less = {name: value for switch in off for name, value in SWITCHES[switch].items()}
        solution = solve(problem, budget, work_limit=work_limit, effort=replace(EFFORT, **less))
        ranks[frozenset(off)] = solution.rank(budget)
    for off, (missed, cost, _) in ranks.items():
        for switch in off:
            more_missed, more_cost, _ = ranks[off - {switch}]
            assert (more_missed, more_cost) <= (missed, cost * (1 + 1e-9)), (
                f"{switch} makes worse what has no {set(off)}"
            )


@pytest.mark.parametrize(("layers", "seed", "percent"), [(6, 1, 70), (12, 0, 50), (12, 1, 50), (20, 0, 30)])
def test_no_search_makes_an_answer_worse(layers: int, seed: int, percent: int) -> None:
    problem = layered(layers, seed)
    check_switches(problem, full_peak(problem) * percent // 100, 400_000)


@settings(PROPERTY, max_examples=20)
@given(problems(), st.floats(0, 1))
def test_no_search_makes_an_answer_of_a_small_problem_worse(problem: RetainProblem, share: float) -> None:
    check_switches(problem, int(full_peak(problem) * share), 50_000)


@pytest.mark.parametrize(("layers", "seed"), [(20, 1), (50, 0), (60, 1)])
def test_no_search_makes_an_answer_of_a_large_problem_worse(layers: int, seed: int) -> None:
    problem = layered(layers, seed)
    check_switches(problem, full_peak(problem) // 2, None)


@pytest.mark.parametrize("seed", range(12))
def test_judge_accepts_answers_for_training_graphs(seed: int) -> None:
    problem = layered(6, seed, reuse=seed % 2 == 0)
    for percent in (90, 70, 50, 40, 30):
        budget = full_peak(problem) * percent // 100
        check(problem, budget, solve(problem, budget, work_limit=2_000_000))


@PROPERTY
@given(problems())
def test_a_budget_of_the_peak_needs_nothing(problem: RetainProblem) -> None:
    solution = solve(problem, full_peak(problem))
    assert (solution.reruns, solution.seconds, solution.status) == ((), 0.0, Status.OPTIMAL)
    assert solution.peak_bytes == full_peak(problem)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_found_for_one_budget_serves_the_others(seed: int) -> None:
    problem = layered(5, seed)
    front = Frontier(Ground(problem))
    budgets = [full_peak(problem) * percent // 100 for percent in (70, 40, 55, 1)]
    for budget in budgets:
        solution = front.solve(budget, work_limit=300_000)
        check(problem, budget, solution)
        for other in front.answers:
            assert other.peak_bytes > budget or other.seconds >= solution.seconds
        assert solution.status is Status.INFEASIBLE or front.bound(budget) <= solution.seconds
    rising = [front.bound(budget) for budget in sorted(budgets, reverse=True)]
    assert rising == sorted(rising)


@pytest.mark.parametrize("seed", range(4))
def test_little_work_is_done_for_what_another_answer_beats(seed: int) -> None:
    problem = layered(5, seed)
    budget = full_peak(problem) * 6 // 10
    ground = Ground(problem, replace(EFFORT, rival_work=0))
    alone = Frontier(ground).solve(budget)
    assert Frontier(ground).solve(budget, rival=alone.seconds * 2) == alone
    beaten = Frontier(ground).solve(budget, rival=alone.seconds / 2)
    check(problem, budget, beaten)
    assert beaten.seconds >= alone.seconds
    assert beaten.work < alone.work / 2


@pytest.mark.parametrize("seed", range(3))
def test_a_start_is_never_made_worse(seed: int) -> None:
    problem = layered(5, seed)
    budget = full_peak(problem) * 6 // 10
    front = Frontier(Ground(problem))
    for limit in (3_000_000, 1):
        front.solve(budget, work_limit=limit)
    good, again = front.answers
    assert good.status is not Status.INFEASIBLE
    assert again.seconds <= good.seconds


def scaled(problem: RetainProblem, factor: int) -> RetainProblem:
    order = replace(problem.order, size=problem.order.size * factor, workspace=problem.order.workspace * factor)
    parts = problem.sequence, problem.seconds, problem.repeatable, problem.droppable, problem.expires
    return make_problem(order, *parts)


@settings(PROPERTY, max_examples=30)
@given(problems(6), st.floats(0.3, 1), st.integers(2, 1000))
def test_scaling_sizes_and_budget_changes_no_decision(problem: RetainProblem, share: float, factor: int) -> None:
    budget = int(full_peak(problem) * share)
    small = solve(problem, budget, work_limit=10**12)
    large = solve(scaled(problem, factor), budget * factor, work_limit=10**12)
    assert (small.reruns, small.status) == (large.reruns, large.status)
    assert large.peak_bytes == factor * small.peak_bytes


def test_blocks_are_rebuilt_whole_and_the_last_one_stays() -> None:
    blocks, inner = 6, 3
    problem = chain(blocks, inner)
    solution = solve(problem, full_peak(problem) // 2)
    check(problem, full_peak(problem) // 2, solution)
    again = sorted({rerun.operator for rerun in solution.reruns})
    block_of = [(op - 1) // (inner + 1) for op in again]
    assert max(block_of) < blocks - 1
    assert max(np.bincount([rerun.operator for rerun in solution.reruns])) == 1
    whole = [block for block in set(block_of) if block_of.count(block) == inner]
    assert len(set(block_of)) - len(whole) <= 1
    assert whole


def test_one_drop_that_suffices_is_not_passed_by() -> None:
    """Buffers 1 and 2 free more bytes per second than buffer 0, but only both free as many: 4 seconds, not 3."""
    sizes = [(10, 0, [5], False), (8, 1, [5], False), (8, 2, [5], False), (100, 3, [4], False), (1, 4, [5], False)]
    order = make_order([0] * 6, [], sizes)
    problem = make_problem(order, range(6), [3.0, 2, 2, 9, 9, 9], [True] * 6, [True] * 5)
    drops_alone = {name: value for less in SWITCHES.values() for name, value in less.items()}
    budget = full_peak(problem) - 10
    solution = solve(problem, budget, effort=replace(EFFORT, **drops_alone))
    check(problem, budget, solution)
    assert (solution.seconds, len(solution.reruns)) == (3.0, 1)


def test_deep_chains_get_by_with_little() -> None:
    problem = chain(40, inner=1, large=20, small=20)
    solution = solve(problem, full_peak(problem) // 4)
    check(problem, full_peak(problem) // 4, solution)
    assert solution.status is not Status.INFEASIBLE


def test_an_impossible_budget_is_said_to_be_so() -> None:
    problem = layered(4, random.Random(1).randrange(100))
    solution = solve(problem, 1)
    check(problem, 1, solution)
    assert solution.status is Status.INFEASIBLE
    assert solution.peak_bytes == solution.least_peak_bytes


@pytest.mark.parametrize("seed", range(6))
def test_the_least_peak_is_a_budget_that_is_met(seed: int) -> None:
    problem = layered(8, seed)
    least = solve(problem, 0, work_limit=1_000_000)
    again = solve(problem, least.least_peak_bytes, work_limit=1_000_000)
    check(problem, least.least_peak_bytes, again)
    assert least.status is Status.INFEASIBLE
    assert least.peak_bytes == least.least_peak_bytes
    assert again.peak_bytes <= least.least_peak_bytes


def test_what_must_not_run_again_is_kept_for_a_rerun() -> None:
    """Buffer 1 is cheap to make again from buffer 0, which only a step that must not run again makes."""
    sizes = [(60, 0, [1], False), (60, 1, [5], False), (10, 2, [3], False), (100, 3, [4], False), (10, 4, [5], False)]
    order = make_order([0] * 6, [], sizes)
    once = [True, False, False, False, False, False]
    droppable = [not once[producer] for producer in order.producer.tolist()]
    problem = make_problem(order, range(6), [9.0, 1, 1, 1, 1, 1], [not one for one in once], droppable)
    state = Search(problem).keep_everything()
    assert state.score.peak == 170
    drop = Search(problem)
    drops = list_drops(drop, drop.keep_everything(), 160)
    assert len(drops.gap)
    for number in range(len(drops.gap)):
        dropped = state.copy()
        make_drop(drop, dropped, drops, number, ALONE)
        assert drop.state(dropped.release, dropped.hold, 160).score.seconds < np.inf


def test_every_field_of_effort_is_read() -> None:
    effort, read = recorded(EFFORT)
    few, many = chain(1), layered(20, 0)
    solve(few, int(0.8 * full_peak(few)), effort=effort)  # few enough gaps for all combinations
    for budget in (0, full_peak(many) // 2, int(1.02 * solve(many, 0, work_limit=10**6).peak_bytes)):
        solve(many, budget, effort=effort)
    reference_order(many.order, many.sequence, effort)
    half, size = [step >= many.num_ops // 2 for step in range(many.num_ops)], many.order.size.tolist()
    offers = tuple(offers_of(many, [nbytes // 4 for nbytes in size], [0.0] * len(size), half))
    choice = Choice(replace(many, offers=offers), effort)
    choice.lowest()
    for _ in range(2):
        assert choice.solve(int(0.8 * full_peak(many))).taken
    assert unread(EFFORT, read) == []

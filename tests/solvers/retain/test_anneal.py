"""Reruns ahead of their reads: found where they save seconds, and never in the way."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.retain_graphs import layers
from roamc.solvers.order import make_problem as make_order
from roamc.solvers.order import peak_bytes
from roamc.solvers.retain import EFFORT, Rerun, RetainProblem, RetainSolution, make_problem, solve, validate
from roamc.solvers.retain.anneal import anneal, settle
from roamc.solvers.retain.greedy import keep, lower
from roamc.solvers.retain.reruns import decisions, list_reruns
from roamc.solvers.retain.search import Search, State, keep_more
from roamc.solvers.retain.simulate import bring_at
from roamc.solvers.status import Status
from tests.solvers.order.cases import PROPERTY
from tests.solvers.retain.cases import chain, in_flight, layered, problems, random_retain


def example() -> RetainProblem:
    """0 makes x, 1 makes y of x, 4 reads x again and 6 reads y; y is in the way at step 3, and x at step 5.

    So y is made again in front of step 4 or 5, which do not read it.
    """
    buffers = [(20, 0, [1, 4], False), (10, 1, [2, 6], False)]
    buffers += [(1, op, [op + 1], False) for op in (2, 3, 4, 5)]
    order = make_order([0] * 7, [], buffers, workspace=[0, 0, 0, 25, 0, 30, 0])
    return make_problem(order, range(7), [5.0, *[1.0] * 6], [True] * 7, [True, True, *[False] * 4])


BUDGET = 48
AHEAD = {(Rerun(step, 1, (1,)),) for step in (4, 5)}


def start(search: Search, budget: int) -> State:
    """What the other searches find."""
    return keep(search, lower(search, search.keep_everything(), budget, search.work + 100_000), budget)


NEVER_ANNEALED = replace(EFFORT, anneal_rounds=0)


def test_a_buffer_is_brought_back_while_its_input_is_there() -> None:
    solution = solve(example(), BUDGET)
    assert validate(example(), BUDGET, solution).good
    assert solution.reruns in AHEAD
    assert (solution.seconds, solution.status) == (1.0, Status.OPTIMAL)


def test_annealing_finds_it_too() -> None:
    search = Search(example())
    before = start(search, BUDGET)
    assert (before.score.seconds, before.score.peak <= BUDGET) == (6.0, True)
    after = anneal(search, before, BUDGET, search.work + 100_000, 0)
    assert list_reruns(search.problem, after.score.runs, search.room) in AHEAD


def test_what_is_brought_back_in_vain_is_settled() -> None:
    search = Search(example())
    state = search.keep_everything()
    gap = int(search.tables.gap_start[1]) + 1
    state.release[gap], state.hold[gap] = 0, bring_at(5, search.steps)
    full = peak_bytes(search.problem.order, search.problem.sequence)
    settled = settle(search, state, full)
    assert settled.hold[gap] == 0
    assert settled.score.seconds <= search.state(state.release, state.hold, full).score.seconds


@PROPERTY
@given(problems(), st.floats(0, 1))
def test_annealing_only_saves_seconds(problem: RetainProblem, share: float) -> None:
    budget = int(peak_bytes(problem.order, problem.sequence) * share)
    annealed = solve(problem, budget, work_limit=100_000)
    assert validate(problem, budget, annealed).good
    assert annealed == solve(problem, budget, work_limit=100_000)
    plain = solve(problem, budget, work_limit=100_000, effort=NEVER_ANNEALED)
    assert (annealed.status is Status.INFEASIBLE) == (plain.status is Status.INFEASIBLE)
    assert annealed.status is Status.INFEASIBLE or annealed.seconds <= plain.seconds


@pytest.mark.parametrize("seed", range(3))
def test_answers_for_random_layers_are_legal_and_no_worse(seed: int) -> None:
    problem = layers(25, seed)
    least = solve(problem, 0).least_peak_bytes
    budget = least + (peak_bytes(problem.order, problem.sequence) - least) * 3 // 10
    annealed = solve(problem, budget)
    assert validate(problem, budget, annealed).good
    assert annealed.seconds < solve(problem, budget, effort=NEVER_ANNEALED).seconds


def test_a_chain_is_as_it_was() -> None:
    problem = chain(12)
    budget = peak_bytes(problem.order, problem.sequence) // 2
    plain = solve(problem, budget, effort=NEVER_ANNEALED)
    assert solve(problem, budget).reruns == plain.reruns


@pytest.mark.parametrize("problem", [example(), layers(25), layers(50, 1), layered(5, 1), chain(8)])
def test_reruns_become_decisions_that_make_the_same_reruns(problem: RetainProblem) -> None:
    full, search = peak_bytes(problem.order, problem.sequence), Search(problem)
    for percent in (90, 80, 70, 60):
        solution = solve(problem, full * percent // 100)
        state = search.state(*decisions(problem, solution.reruns, search.gaps, search.tables), 0)
        assert list_reruns(problem, state.score.runs, search.room) == solution.reruns
        assert state.score.peak == solution.peak_bytes


@PROPERTY
@given(problems(), st.integers(0, 2**32))
def test_every_walk_with_brings_is_counted_as_the_judge_counts(problem: RetainProblem, seed: int) -> None:
    """Any decisions at all: the simulation's peak and seconds are those of its list of reruns."""
    search, dice = Search(problem), np.random.default_rng(seed)
    state = search.keep_everything()
    steps = search.steps
    for gap in np.flatnonzero(search.gaps.free).tolist():
        begin, end = int(search.gaps.begin[gap]), int(search.gaps.end[gap])
        choices = [(steps, 0), (0, 0), (0, steps), (0, bring_at(int(dice.integers(begin + 1, end)), steps))]
        state.release[gap], state.hold[gap] = choices[dice.integers(4)]
    simulated = search.state(state.release, state.hold, 0)
    if simulated.score.seconds < np.inf:
        reruns = list_reruns(problem, simulated.score.runs, search.room)
        status = Status.GAP if simulated.score.seconds else Status.OPTIMAL
        claimed = RetainSolution(reruns, simulated.score.peak, simulated.score.seconds, 0.0, 0, status, 0)
        report = validate(problem, simulated.score.peak, claimed)
        assert report.good, report


def check_undone_as_if_simulated(problem: RetainProblem, share: float, dice: random.Random, brings: bool) -> None:
    """`keep_more` makes the moves that simulations allow, from a state within this share of the peak or near it."""
    search = Search(problem)
    budget = int(search.lowest.score.peak * share)
    state = lower(search, search.keep_everything(), budget, search.work + 10**6)
    for gap in np.flatnonzero(state.release < search.steps).tolist() if brings else []:
        begin, end = int(search.gaps.begin[gap]), int(search.gaps.end[gap])
        if end > begin + 1 and dice.random() < 0.3:
            state.hold[gap] = bring_at(dice.randrange(begin + 1, end), search.steps)
    budget = max(budget, search.state(state.release, state.hold, budget).score.peak)
    state = search.state(state.release, state.hold, budget)
    if state.score.seconds == np.inf:
        return
    gaps = range(len(search.gaps.begin))
    moves = np.array(dice.sample(gaps, len(gaps)), dtype=np.int64)
    release, hold = np.full(len(moves), search.steps), state.hold[moves]
    wanted = state.copy()
    for move, gap in enumerate(moves.tolist()):
        tried = wanted.copy()
        tried.release[gap], tried.hold[gap] = release[move], hold[move]
        tried = search.state(tried.release, tried.hold, budget)
        if tried.score.peak <= budget and tried.score.seconds < wanted.score.seconds:
            wanted = tried
    search.state(state.release, state.hold, budget)
    places = moves, search.gaps.begin[moves], search.gaps.end[moves], release, hold
    hopeful = np.empty(len(moves), dtype=np.bool_)
    seconds, _ = keep_more(
        search.tables, state.release, state.hold, places, hopeful, budget, search.room, state.score.seconds
    )
    assert (seconds, state.release.tolist()) == (wanted.score.seconds, wanted.release.tolist())


@PROPERTY
@given(problem=problems(), share=st.floats(0.2, 0.9), dice=st.randoms(use_true_random=False), brings=st.booleans())
def test_needless_drops_are_undone_as_if_each_were_simulated(
    problem: RetainProblem, share: float, dice: random.Random, brings: bool
) -> None:
    check_undone_as_if_simulated(problem, share, dice, brings)


def test_bytes_that_were_taken_over_may_come_from_elsewhere() -> None:
    """Where a buffer is kept whose bytes the next result takes over, that one takes those of another."""
    problem = random_retain(layered(5, 106330).order, random.Random(106330))
    check_undone_as_if_simulated(problem, 0.52, random.Random(0), False)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100))
def test_needless_drops_of_many_layers_are_undone_as_if_each_were_simulated(seed: int) -> None:
    dice = random.Random(seed)
    problem = layered(dice.randrange(4, 12), seed)
    several = random_retain(problem.order, dice), in_flight(problem, problem.num_ops // 2, 2), problem
    for each in several:
        for share in (0.3, 0.5, 0.8):
            check_undone_as_if_simulated(each, share, dice, dice.random() < 0.3)

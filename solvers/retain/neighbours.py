"""Large neighbourhood search: change some decisions of the best state at random, repair it greedily, take it if better.

There are three kinds of change: keep the buffers that are rebuilt in a window of the schedule; drop a few buffers that
are kept (also both); and keep or drop all or some buffers of a family, the like gaps of repeated blocks, at once.
"""

import random
from collections.abc import Iterator

import numpy as np

from roamc.solvers.arrays import LongArray, group_by
from roamc.solvers.retain.effort import INSTANT
from roamc.solvers.retain.greedy import keep, lower
from roamc.solvers.retain.problem import rank_of
from roamc.solvers.retain.search import Search, State
from roamc.solvers.retain.starts import possible


def improve(search: Search, best: State, budget: int, work_limit: int, enough: float) -> State:
    """Return the best state found by random changes of `best`, compared by `rank`; `best` itself if none is better.

    budget: bytes.
    work_limit: a value of `search.work`, not an amount on top of it.
    enough: the search ends where the best state takes no more seconds than these; meant for a `best` within the budget.

    The changes are seeded: the same search and arguments give the same answer.
    """
    state = best
    for state in improvements(search, best, budget, work_limit):
        if state.score.seconds <= enough:
            break
    return state


def improvements(search: Search, best: State, budget: int, work_limit: int) -> Iterator[State]:
    """Change the best state at random again and again; yield the best so far in front of every change, and at the end.

    The search ends where `search.work` reaches `work_limit`, or after `effort.vain_changes` changes in a row that find
    no fewer seconds within the budget, or no lower peak above it. States yielded are not changed later. The changes are
    seeded: the same search and arguments give the same states.

    budget: bytes.
    work_limit: a value of `search.work`, not an amount on top of it.
    """
    effort, dice = search.effort, random.Random(0)
    family = _families(search)
    worth = np.full(len(search.gaps.begin), np.inf)
    in_vain = 0
    while search.work < work_limit and in_vain < effort.vain_changes:
        yield best
        target = max(budget, int(best.score.peak * effort.change_target)) if above(best, budget) else budget
        state = _changed(search, best, target, dice, family)
        if state.score.peak > target:
            share = (work_limit - search.work) // effort.change_divisor
            state = lower(search, state, target, search.work + share, worth)
        if state.score.peak <= target and state.score.seconds < best.score.seconds * effort.promising + INSTANT:
            state = keep(search, state, target)
        in_vain += 1
        if rank(state, budget) < rank(best, budget):
            in_vain = 0 if rank(state, budget)[:2] < rank(best, budget)[:2] else in_vain
            best = state.copy()
    yield best


def above(state: State, budget: int) -> bool:
    """Return whether the peak of `state` is above `budget`, in bytes."""
    return state.score.peak > budget


def rank(state: State, budget: int) -> tuple[bool, float, float]:
    """Return the state's key for comparison with other states under `budget`: the smaller tuple is the better state.

    The tuple is (False, seconds, peak) if the peak is at most `budget` bytes, else (True, peak, seconds).
    """
    return rank_of(state.score.peak, state.score.seconds, budget)


def _families(search: Search) -> list[LongArray]:
    """Return the free gaps, one array for each family of like gaps."""
    gap = np.flatnonzero(search.gaps.free)
    rows = group_by(search.gaps.family[gap], gap.astype(np.int32), int(search.gaps.family.max(initial=-1)) + 1)
    return [np.array(row, dtype=np.int64) for row in rows.lists() if row]


def _changed(search: Search, best: State, budget: int, dice: random.Random, family: list[LongArray]) -> State:
    state = search.state(best.release.copy(), best.hold.copy(), budget)
    rebuilt = np.flatnonzero(search.room.rebuilt > 0)
    kept = np.flatnonzero(search.gaps.free & (state.release >= search.steps) & ~search.gaps.last)
    change = dice.randrange(4)
    if change in (0, 3) and len(rebuilt):
        width = 1 + dice.randrange(max(1, len(rebuilt) // 3))
        first = dice.randrange(len(rebuilt) - width + 1)
        by_time = rebuilt[np.argsort(search.gaps.end[rebuilt], kind="stable")]
        _set(state, by_time[first : first + width], search.steps)
    if change in (1, 3) and len(kept):
        _set(state, np.array(dice.sample(kept.tolist(), min(len(kept), 1 + dice.randrange(4)))), 0)
    if change == 2 and family:
        row = dice.choice(family)
        some = row[: 1 + dice.randrange(len(row))] if dice.random() < 0.5 else row
        mostly_kept = int((state.release[some] >= search.steps).sum()) * 2 > len(some)
        _set(state, some, 0 if mostly_kept else search.steps)
    return possible(search, search.state(state.release, state.hold, budget), budget)


def _set(state: State, gap: LongArray, release: int) -> None:
    state.release[gap] = release
    state.hold[gap] = 0

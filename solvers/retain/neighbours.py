"""Large neighbourhoods: undo or make some decisions of the best state at random, lower and keep again, take the better.

Three kinds of change, each on gaps in which something can be decided: keep what is rebuilt in a window of the schedule;
drop a few buffers at the peak; and turn round a whole family, the like gaps of repeated blocks, at once.
"""

import random

import numpy as np

from roamc.solvers.arrays import LongArray
from roamc.solvers.retain.greedy import keep, lower
from roamc.solvers.retain.search import Search, State
from roamc.solvers.retain.starts import possible

_PATIENCE = 100
_SHARE = 8


def improve(search: Search, best: State, budget: int, work_limit: int, enough: float) -> State:
    """The best state found from `best`, a state within the budget, until nothing better turns up for long.

    enough: seconds that need not be improved on. Seeded: the same search gives the same answer.
    """
    dice = random.Random(0)
    family = _families(search)
    worth = np.full(len(search.gaps.begin), np.inf)
    in_vain = 0
    while search.work < work_limit and in_vain < _PATIENCE and best.score.seconds > enough:
        state = _changed(search, best, budget, dice, family)
        if state.score.peak > budget:
            share = (work_limit - search.work) // _SHARE
            state = lower(search, state, budget, search.work + share, worth)
        in_vain += 1
        if state.score.peak <= budget and state.score.seconds < best.score.seconds * 1.5 + 1e-12:
            state = keep(search, state, budget)
            if (state.score.seconds, state.score.peak) < (best.score.seconds, best.score.peak):
                in_vain = 0 if state.score.seconds < best.score.seconds else in_vain
                best = state
    return best


def _families(search: Search) -> list[LongArray]:
    """Gaps that can be decided, those alike together: same bytes, seconds, reads, place among the reads."""
    gaps, tables = search.gaps, search.tables
    alike: dict[tuple[int, float, int, int], list[int]] = {}
    for gap in np.flatnonzero(gaps.free).tolist():
        buffer = int(gaps.buffer[gap])
        first, last = int(tables.gap_start[buffer]), int(tables.gap_start[buffer + 1])
        key = int(tables.size[buffer]), float(tables.seconds[tables.producer[buffer]]), last - first, gap - first
        alike.setdefault(key, []).append(gap)
    return [np.array(row, dtype=np.int64) for row in alike.values()]


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

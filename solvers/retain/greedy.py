"""Drop what frees the most bytes above the budget per second, until the peak is within it; then keep what can stay.

At the peak, look at the buffers that are live there, are not read there and will be read later. Dropping one frees its
bytes until that read (or, if a rerun brought it back too early, until then), at the price of its chain. Measured is
the area above the budget, not the peak: where several steps tie, a single drop does not lower the peak.
"""

from collections.abc import Iterator

import numpy as np

from roamc.solvers.arrays import FloatArray, IntArray, LongArray
from roamc.solvers.retain.drops import Drops, list_drops, make_drop, try_drops
from roamc.solvers.retain.effort import INSTANT
from roamc.solvers.retain.search import Search, State, keep_more
from roamc.solvers.retain.simulate import Score
from roamc.solvers.retain.ways import ALONE, WAYS


def lower(search: Search, state: State, budget: int, work_limit: int, worth: FloatArray | None = None) -> State:
    """Drop until the peak is within the budget, nothing helps, or the search's work reaches `work_limit`.

    First against the budget itself; where that gets stuck, against targets that fall slowly from the peak, so that
    only the highest steps count. worth: for each gap what a drop in it was worth before, by a guess; see `_best_drop`.
    A state that no simulation gets through is returned as it is.
    """
    if state.score.seconds == np.inf:
        return state
    state = _drop_until(search, state, budget, work_limit, worth)
    in_vain = 0
    while state.score.peak > budget and search.work < work_limit and in_vain < search.effort.stuck_targets:
        peak = state.score.peak
        state = _drop_until(search, state, max(budget, int(peak * search.effort.stuck_target)), work_limit, None)
        in_vain = 0 if state.score.peak < peak else in_vain + 1
    return search.note(search.state(state.release, state.hold, budget))


def _drop_until(search: Search, state: State, budget: int, work_limit: int, worth: FloatArray | None) -> State:
    state = search.note(search.state(state.release.copy(), state.hold.copy(), budget))
    worth = np.full(len(search.gaps.begin), np.inf) if worth is None else worth
    effort, made = search.effort, 0
    while state.score.peak > budget and search.work < work_limit:
        drops = list_drops(search, state, budget)
        best, way = _best_drop(search, state, drops, budget, worth)
        if best < 0:
            break
        search.work += make_drop(search, state, drops, best, way)
        state = search.note(search.state(state.release, state.hold, budget))
        made += 1
        if made % max(effort.refresh_drops, len(drops.gap) // effort.refresh_divisor) == 0:
            worth[:] = np.where(worth > 0, worth * effort.hope, np.inf)
    return state


def _best_drop(search: Search, state: State, drops: Drops, budget: int, worth: FloatArray) -> tuple[int, int]:
    """The drop that frees most per second, -1 if none frees anything, and the best way of making it.

    worth: of each gap, what a drop in it freed when it was last measured, as a share of its reach, per second; infinite
    if it never was. So measured, what was worth less than the best is worth less now too, nearly always, and is not
    measured again (lazy evaluation: Minoux 1978); nor is what seemed hardly better, or every move would measure a whole
    family of like gaps. Of a family that is not measured yet the first is, for all.
    """
    gap, reach = drops.gap, np.maximum(drops.reach, 1.0)
    fresh, way = np.zeros(len(gap), dtype=np.bool_), np.zeros(len(gap), dtype=np.int64)
    while len(gap):
        guess = worth[gap] * reach
        best = int(np.argmax(guess))
        looked_at = np.where(fresh, guess, -1.0)
        near = int(np.argmax(looked_at))
        if looked_at[near] > 0 and looked_at[near] >= guess[best] * search.effort.near_best:
            return near, int(way[near])
        rows = np.array([best]) if guess[best] > 0 else np.flatnonzero(~fresh)
        if len(rows) == 0:
            break
        if guess[best] == np.inf:
            unknown = np.flatnonzero(np.isinf(guess))
            rows = unknown[np.unique(search.gaps.family[gap[unknown]], return_index=True)[1]]
        result = try_drops(search, state, drops, rows, budget)
        by_way = np.stack([_worth(state.score, result[:, each]) for each in range(WAYS)])
        value = by_way.max(axis=0) / reach[rows]
        if guess[best] == np.inf:
            _assume(worth, gap, search.gaps.family[gap], search.gaps.family[gap[rows]], search.effort.hope * value)
        worth[gap[rows]] = value
        way[rows] = by_way.argmax(axis=0)
        fresh[rows] = True
    return -1, ALONE


def _assume(worth: FloatArray, gap: LongArray, family: IntArray, measured: IntArray, guess: FloatArray) -> None:
    """What is unknown is worth what is guessed from the first of its family, until it is looked at."""
    good = guess > 0
    by_family = dict(zip(measured[good].tolist(), guess[good].tolist(), strict=True))
    unknown = np.flatnonzero(np.isinf(worth[gap]))
    worth[gap[unknown]] = [by_family.get(number, np.inf) for number in family[unknown].tolist()]


def _worth(score: Score, result: FloatArray) -> FloatArray:
    """Area freed per second added, of rows of seconds, peak and area; -1 for what frees nothing."""
    freed, added = score.area - result[:, 2], result[:, 0] - score.seconds
    worth = np.full(len(result), -1.0)
    good = freed > 0
    worth[good] = freed[good] / (np.maximum(added[good], 0.0) + INSTANT)
    return worth


def descend(search: Search, work_limit: int, step: float) -> Iterator[State]:
    """Go down from the lowest state seen, each time to `step` of the peak, and keep there what can stay.

    What is dropped for the first targets need not have been dropped for the last. Yields the lowest state seen, in
    front of every stage.
    """
    state = search.lowest.copy()
    while search.work < work_limit:
        yield search.lowest
        target = int(state.score.peak * step)
        found = lower(search, state, target, work_limit)
        if found.score.peak <= target:
            found = search.note(keep(search, found, target))
        elif found.score.peak >= state.score.peak:
            break
        state = found


def keep(search: Search, state: State, budget: int) -> State:
    """Undo drops for as long as the peak stays within the budget and seconds are saved, the dearest per byte first."""
    state = search.state(state.release.copy(), state.hold.copy(), budget)
    for _ in range(search.effort.keep_rounds):
        before = state.score.seconds
        for whole in (True, False):
            rebuilt = search.room.rebuilt
            gap = np.flatnonzero(rebuilt > (0 if whole else 1))
            producer = search.tables.producer[search.gaps.buffer[gap]]
            value = search.tables.seconds[producer] * rebuilt[gap] / search.tables.size[search.gaps.buffer[gap]]
            gap = gap[np.argsort(-value, kind="stable")]
            release = np.full(len(gap), search.steps) if whole else state.release[gap]
            hold = state.hold[gap] if whole else np.zeros(len(gap), dtype=np.int64)
            _, work = keep_more(
                search.tables, state.release, state.hold, gap, release, hold, budget, search.room, state.score.seconds
            )
            search.work += work
            state = search.state(state.release, state.hold, budget)
        if state.score.seconds >= before:
            break
    return state

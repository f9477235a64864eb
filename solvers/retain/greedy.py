"""Drop what frees the most bytes above the budget per second, until the peak is within it; then keep what can stay.

At the peak, look at the buffers that are live there, are not read there and will be read later. Dropping one frees its
bytes until that read (or, if a rerun brought it back too early, until then), at the price of its chain. Measured is
the area above the budget, not the peak: where several steps tie, a single drop does not lower the peak.
"""

import numpy as np

from roamc.solvers.arrays import FloatArray, LongArray
from roamc.solvers.compiled import compiled
from roamc.solvers.retain.search import Search, State, keep_more
from roamc.solvers.retain.tables import Tables
from roamc.solvers.retain.walk import Room, Score

_REFRESH = 8
_STAGE = 0.98
_PATIENCE = 3
_INSTANT = 1e-12


def lower(search: Search, state: State, budget: int, work_limit: int) -> State:
    """Drop until the peak is within the budget, nothing helps, or the search's work reaches `work_limit`.

    First against the budget itself; where that gets stuck, against targets that fall slowly from the peak, so that
    only the highest steps count.
    """
    state = _drop_until(search, state, budget, work_limit)
    in_vain = 0
    while state.score.peak > budget and search.work < work_limit and in_vain < _PATIENCE:
        peak = state.score.peak
        state = _drop_until(search, state, max(budget, int(peak * _STAGE)), work_limit)
        in_vain = 0 if state.score.peak < peak else in_vain + 1
    return search.note(search.state(state.release, state.hold, budget))


def _drop_until(search: Search, state: State, budget: int, work_limit: int) -> State:
    state = search.note(search.state(state.release.copy(), state.hold.copy(), budget))
    worth = np.full(len(search.gaps.begin), np.inf)
    made = 0
    while state.score.peak > budget and search.work < work_limit:
        gap, release, hold = _drops(search, state)
        best = _best_drop(search, state, gap, release, hold, budget, worth)
        if best < 0:
            break
        state.release[gap[best]], state.hold[gap[best]] = release[best], hold[best]
        worth[gap[best]] = np.inf
        state = search.note(search.state(state.release, state.hold, budget))
        made += 1
        if made % max(_REFRESH, len(gap) // _REFRESH) == 0:
            worth[:] = np.inf
    return state


def _best_drop(
    search: Search, state: State, gap: LongArray, release: LongArray, hold: LongArray, budget: int, worth: FloatArray
) -> int:
    """The move that frees most per second, -1 if none frees anything.

    worth: of each gap, when it was last measured, infinite if never. What was worth less than the best is worth less
    now too, nearly always, and is not measured again (lazy evaluation: Minoux 1978).
    """
    fresh = np.zeros(len(gap), dtype=np.bool_)
    while len(gap):
        best = int(np.argmax(worth[gap]))
        if fresh[best]:
            return best if worth[gap[best]] > 0 else -1
        unknown = np.flatnonzero(np.isinf(worth[gap]) & ~fresh)
        rows = unknown if len(unknown) else np.array([best])
        result = search.try_moves(state, gap[rows], release[rows], hold[rows], budget)
        worth[gap[rows]] = _worth(state.score, result)
        fresh[rows] = True
    return -1


def _worth(score: Score, result: FloatArray) -> FloatArray:
    """Area freed per second added, of rows of seconds, peak and area; -1 for what frees nothing."""
    freed, added = score.area - result[:, 2], result[:, 0] - score.seconds
    worth = np.full(len(result), -1.0)
    good = freed > 0
    worth[good] = freed[good] / (np.maximum(added[good], 0.0) + _INSTANT)
    return worth


def _drops(search: Search, state: State) -> tuple[LongArray, LongArray, LongArray]:
    """Gap, release and hold of the drops at the peak of the schedule in the room."""
    at = np.empty((3, len(search.tables.size)), dtype=np.int64)
    count = _list_drops(search.tables, state.score.runs, search.gaps.end, state.release, state.hold, search.room, at)
    return at[0, :count], at[1, :count], at[2, :count]


@compiled
def _list_drops(
    tables: Tables, runs: int, end: LongArray, release: LongArray, hold: LongArray, room: Room, at: LongArray
) -> int:
    peak = np.argmax(room.live[:runs])
    step = room.step[peak]
    count = 0
    for version in range(room.first_made[peak]):
        buffer = room.buffer[version]
        later = room.last[version] > peak and room.step[room.last[version]] > step
        if not (later and tables.droppable[buffer] and tables.size[buffer] > 0):
            continue
        gap = tables.gap_start[buffer]
        while end[gap] < step:
            gap += 1
        if end[gap] == step:
            continue
        at[0, count], at[1, count], at[2, count] = gap, min(release[gap], step + 1), step + 1
        count += 1
    return count


def keep(search: Search, state: State, budget: int) -> State:
    """Undo drops for as long as the peak stays within the budget and seconds are saved, the dearest per byte first."""
    state = search.state(state.release.copy(), state.hold.copy(), budget)
    for _ in range(_PATIENCE):
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

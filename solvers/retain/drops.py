"""The drops that are possible at the peak, and what each of them leads to.

A drop frees a buffer's bytes from the peak to its next read, in front of which it is rebuilt. What the rerun reads may
be gone by then, and what is rebuilt for it may lie there long before its own next read:

    block 1's results      ....rebuilt for block 2 =================== read by the backward of block 1
    transient chain        ....rebuilt for block 2|        rebuilt again =====

    input of the drop      =====| last read                 rebuilt |
    kept for the rerun     =========================================|

so each drop is tried in three ways: alone; with a transient chain, where what is newly rebuilt with it is not held from
there, which is how a checkpoint in the middle of a longer segment is given up (recursive checkpointing: Griewank 1992);
and with its inputs kept behind their last reads. In each way, what must not run again when a rerun needs it (a weight
that it reads may be updated by then) is kept too.
"""

from dataclasses import dataclass

import numpy as np

from roamc.solvers.arrays import FloatArray, IntArray, LongArray
from roamc.solvers.compiled import compiled_uncounted
from roamc.solvers.retain.search import Search, State
from roamc.solvers.retain.simulate import Room, boundary_run
from roamc.solvers.retain.tables import Tables
from roamc.solvers.retain.ways import ALONE, TRANSIENT, WAYS, WITH_INPUTS, Trail, drop_in_way, go_back, make_trail


@dataclass(frozen=True, eq=False)
class Drops:
    """The drops that are possible at the peak of a schedule.

    gap: int64[drops], the gap in which each drops a buffer.
    release, hold: int64[drops], the new decisions of that gap, as in `State`.
    reach: float64[drops], an upper estimate of the area that each can free: over the runs in the gap, the sum of the
        bytes above the budget, each no more than the buffer's size.
    since: int32[gaps], by gap the step of the last rerun in it that a later run reads, -1 for none, before any drop.
    """

    gap: LongArray
    release: LongArray
    hold: LongArray
    reach: FloatArray
    since: IntArray


def list_drops(search: Search, state: State, budget: int) -> Drops:
    """Return the drops at the first run with the peak: of droppable buffers that are live and not read at its step.

    Where other micro-batches wait at the boundary, drops of buffers that are live there are listed as well.

    `search.room` must hold the schedule of `state`, because that was simulated last. A run is one operator run of the
    schedule, original or rerun.

    budget: bytes, for `Drops.reach`.
    """
    gaps, room, runs = search.gaps, search.room, state.score.runs
    at = np.empty((3, 2 * len(search.tables.size)), dtype=np.int64)
    since = np.full(len(gaps.begin), -1, dtype=np.int32)
    count = _list_drops(search.tables, runs, gaps.end, state.release, room, at, since)
    gap = at[0, :count]
    first, behind = np.searchsorted(room.step[:runs], (gaps.begin[gap], gaps.end[gap]), side="right")
    reach = _reach(room.live[:runs], budget, first, behind, search.tables.size[gaps.buffer[gap]])
    return Drops(gap, at[1, :count], at[2, :count], reach, since)


def try_drops(search: Search, state: State, drops: Drops, rows: LongArray, budget: int) -> FloatArray:
    """Simulate some of the drops from `state`, each in every way, and return what the whole schedule then costs.

    state: its arrays are changed and set back. `search.work` grows, and `search.room` ends with another schedule.
    rows: int64[rows], the places of the drops in `drops`.
    budget: bytes; the area counts what is above.

    Returns float64[rows, WAYS, 3], indexed by row of `rows`, by way (ALONE, TRANSIENT, WITH_INPUTS) and by (seconds,
    peak bytes, area). Seconds are infinite where a drop is impossible in that way, or the way does not differ from
    ALONE.
    """
    result = np.empty((len(rows), WAYS, 3))
    gap = drops.gap[rows]
    search.work += _try_drops(
        search.tables,
        state.release,
        state.hold,
        (gap, search.gaps.end[gap], drops.release[rows], drops.hold[rows]),
        drops.since,
        budget,
        search.room,
        make_trail(len(search.gaps.begin)),
        result,
    )
    return result


def make_drop(search: Search, state: State, drops: Drops, number: int, way: int) -> int:
    """Make a drop: change the decisions of `state` in place, but not its score.

    number: the place of the drop in `drops`.
    way: ALONE, TRANSIENT or WITH_INPUTS; one that `try_drops` gave finite seconds.

    Returns the runs that were simulated for it; they are not added to `search.work`.
    """
    gap = int(drops.gap[number])
    drop = gap, int(search.gaps.end[gap]), int(drops.release[number]), int(drops.hold[number])
    trail, count, total = make_trail(len(search.gaps.begin)), 0, 0
    for each in (ALONE, TRANSIENT) if way == TRANSIENT else (way,):
        *_, work, count = drop_in_way(
            search.tables, state.release, state.hold, drop, each, drops.since, 0, search.room, trail, count
        )
        total += work
    return total


@compiled_uncounted
def _list_drops(
    tables: Tables, runs: int, end: LongArray, release: LongArray, room: Room, at: LongArray, since: IntArray
) -> int:
    count = _list_at(tables, int(np.argmax(room.live[:runs])), 0, end, release, room, at)
    if tables.waiting > 0:
        count = _list_at(tables, boundary_run(tables, runs, room), count, end, release, room, at)
    for version in range(room.first_made[runs]):
        if room.again[version] and room.last[version] > room.born[version]:
            since[room.at_gap[version]] = room.step[room.born[version]]
    return count


@compiled_uncounted
def _list_at(
    tables: Tables, run: int, listed: int, end: LongArray, release: LongArray, room: Room, at: LongArray
) -> int:
    """Add the drops at one run to the first `listed` of `at`, without those in gaps that are there already."""
    step, count = room.step[run], listed
    for version in range(room.first_made[run]):
        buffer = room.buffer[version]
        later = room.last[version] > run and room.step[room.last[version]] > step
        if not (later and tables.droppable[buffer] and tables.size[buffer] > 0):
            continue
        gap = tables.gap_start[buffer]
        while end[gap] < step:
            gap += 1
        is_listed = end[gap] <= step
        for number in range(listed):
            is_listed = is_listed or at[0, number] == gap
        if not is_listed:
            at[0, count], at[1, count], at[2, count] = gap, min(release[gap], step + 1), step + 1
            count += 1
    return count


def _reach(live: LongArray, budget: int, first: LongArray, behind: LongArray, size: LongArray) -> FloatArray:
    """Return for each drop the sum of min(size, live - budget) over its runs above the budget: float64[drops].

    live: int64[runs] bytes.  first, behind: int64[drops], the runs [first, behind) of each.  size: int64[drops] bytes.
    """
    above = np.flatnonzero(live > budget)
    begin, end = np.searchsorted(above, first), np.searchsorted(above, behind)
    reach, total = np.empty(len(size)), np.zeros(len(above) + 1)
    _sum_up(live[above] - budget, np.argsort(size, kind="stable"), begin, end, size, total, reach)
    return reach


@compiled_uncounted
def _sum_up(
    excess: LongArray,
    by_size: LongArray,
    begin: LongArray,
    end: LongArray,
    size: LongArray,
    total: FloatArray,
    reach: FloatArray,
) -> None:
    """Fill `reach`, see `_reach`. The caller sorts and searches, because both take longer to compile than to run."""
    summed_size = -1
    for number in by_size:
        if size[number] != summed_size:
            summed_size = size[number]
            for row in range(len(excess)):
                total[row + 1] = total[row] + min(summed_size, excess[row])
        reach[number] = total[end[number]] - total[begin[number]]


@compiled_uncounted
def _try_drops(
    tables: Tables,
    release: LongArray,
    hold: LongArray,
    drops: tuple[LongArray, LongArray, LongArray, LongArray],
    since: IntArray,
    budget: int,
    room: Room,
    trail: Trail,
    result: FloatArray,
) -> int:
    """Fill `result`, see `try_drops`, and return the runs simulated; `release` and `hold` end as they were.

    drops: int64[drops] each: the gaps, the steps at which they end, their new releases and holds.
    """
    total = 0
    for move in range(len(drops[0])):
        drop = drops[0][move], drops[1][move], drops[2][move], drops[3][move]
        count = 0
        for way in (ALONE, TRANSIENT, WITH_INPUTS):
            if way == TRANSIENT and result[move, ALONE, 0] == np.inf:
                result[move, way] = np.inf
                continue
            if way == WITH_INPUTS:
                go_back(release, hold, trail, count)
                count = 0
            seconds, peak, area, work, count = drop_in_way(
                tables, release, hold, drop, way, since, budget, room, trail, count
            )
            result[move, way, 0], result[move, way, 1], result[move, way, 2] = seconds, peak, area
            total += work
        go_back(release, hold, trail, count)
    return total

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
from typing import NamedTuple

import numpy as np

from roamc.solvers.arrays import BoolArray, FloatArray, IntArray, LongArray
from roamc.solvers.compiled import compiled_uncounted
from roamc.solvers.retain.effort import INSTANT
from roamc.solvers.retain.offers import Seconds
from roamc.solvers.retain.search import Search, State
from roamc.solvers.retain.simulate import Room, boundary_run
from roamc.solvers.retain.tables import Tables
from roamc.solvers.retain.ways import ALONE, TRANSIENT, WAYS, WITH_INPUTS, Trail, drop_in_way, go_back, make_trail


class Measured(NamedTuple):
    """What a search for the best drop has measured, and room for it.

    By drop: fresh, whether it was measured from this state; then value, its worth by reach, and way, its best.
    row: drops to measure next.  first: by family, the first drop whose worth is unknown.  result: of one drop.
    """

    fresh: BoolArray
    way: LongArray
    row: LongArray
    value: FloatArray
    first: LongArray
    result: FloatArray


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


def best_drop(
    search: Search, state: State, drops: Drops, budget: int, worth: FloatArray, least: Seconds
) -> tuple[int, int, list[tuple[int, int]]]:
    """Return (number, way, ends): the drop that frees most area per second, -1 if none frees any, and its best way.

    Each drop that is measured is simulated from `state` in every way. One that was worth less than the best is nearly
    always worth less now too, so it is not measured again (lazy evaluation: Minoux 1978). Nor is a drop that seems
    hardly better than the best measured one, or every move would measure a whole family of like gaps. Of a family not
    measured yet only the first drop is measured, for all of them.

    state: its arrays are changed and set back. `search.work` grows, and `search.room` ends with another schedule.
    budget: bytes; the area counts what is above.
    worth: float64[gaps], the area that a drop in each gap freed per second when it was last measured, divided by its
        reach; infinite if it never was. Changed in place.
    least: seconds. A measured drop that brings the peak within the budget enters `ends`, as (number, way), if its
        schedule adds fewer than these and than those of all earlier entries; -inf for no entries.
    """
    count, effort = len(drops.gap), search.effort
    ends = np.empty((2, count), dtype=np.int64)
    number, way, work, ended = _best_drop(
        search.tables,
        state.release,
        state.hold,
        (drops.gap, search.gaps.end[drops.gap], drops.release, drops.hold, np.maximum(drops.reach, 1.0)),
        drops.since,
        (search.gaps.family, worth, effort.near_best, effort.hope),
        (state.score.seconds, state.score.area, budget, least),
        search.room,
        make_trail(len(search.gaps.begin)),
        Measured(
            fresh=np.zeros(count, dtype=np.bool_),
            way=np.zeros(count, dtype=np.int64),
            row=np.empty(count, dtype=np.int64),
            value=np.empty(count),
            first=np.empty(len(search.gaps.begin), dtype=np.int64),
            result=np.empty((WAYS, 3)),
        ),
        ends,
    )
    search.work += work
    return number, way, [(number, way) for number, way in ends[:, :ended].T.tolist()]


def make_drop(search: Search, state: State, drops: Drops, number: int, way: int) -> int:
    """Make a drop: change the decisions of `state` in place, but not its score.

    number: the place of the drop in `drops`.
    way: ALONE, TRANSIENT or WITH_INPUTS; one in which `best_drop` found that the drop is possible.

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
def _best_drop(
    tables: Tables,
    release: LongArray,
    hold: LongArray,
    drops: tuple[LongArray, LongArray, LongArray, LongArray, FloatArray],
    since: IntArray,
    guesses: tuple[IntArray, FloatArray, float, float],
    aims: tuple[Seconds, float, int, Seconds],
    room: Room,
    trail: Trail,
    notes: Measured,
    ends: LongArray,
) -> tuple[int, int, int, int]:
    """Fill `ends`, see `best_drop`, and return (number, way, runs simulated, number of ends).

    drops: by drop its gap, the step at which that ends, the new release and hold, and the reach, at least 1.
    guesses: by gap its family and `worth`; then `effort.near_best` and `effort.hope`.
    aims: seconds and area of the state, the budget, and `least`.
    """
    gap, end, new_release, new_hold, reach = drops
    family, worth, near_best, hope = guesses
    seconds, area, budget, least = aims
    work, ended = 0, 0
    while True:
        best, most, near, measured = 0, -np.inf, -1, 0.0
        for row in range(len(gap)):
            guess = worth[gap[row]] * reach[row]
            if guess > most:
                best, most = row, guess
            if notes.fresh[row] and guess > measured:
                near, measured = row, guess
        if near >= 0 and measured >= most * near_best:
            return near, notes.way[near], work, ended
        count = _list_rows(gap, family, worth, best, most, notes)
        if count == 0:
            return -1, ALONE, work, ended
        fewest = least
        for number in range(count):
            row = notes.row[number]
            drop = gap[row], end[row], new_release[row], new_hold[row]
            work += _try_drop(tables, release, hold, drop, since, budget, room, trail, notes.result)
            notes.value[row] = -np.inf
            for way in range(WAYS):
                value = _worth(seconds, area, notes.result[way]) / reach[row]
                if value > notes.value[row]:
                    notes.value[row], notes.way[row] = value, way
                if notes.result[way, 1] <= budget and notes.result[way, 0] < fewest:
                    fewest, ends[0, ended], ends[1, ended] = notes.result[way, 0], row, way
        if fewest < least:
            least, ended = fewest, ended + 1
        if most == np.inf:  # guess the unknown by the first of their families
            for row in range(len(gap)):
                guess = hope * notes.value[notes.first[family[gap[row]]]] if worth[gap[row]] == np.inf else -1.0
                worth[gap[row]] = guess if guess > 0 else worth[gap[row]]
        for number in range(count):
            row = notes.row[number]
            worth[gap[row]], notes.fresh[row] = notes.value[row], True


@compiled_uncounted
def _list_rows(gap: LongArray, family: IntArray, worth: FloatArray, best: int, most: float, notes: Measured) -> int:
    """Put the drops to measure next into `notes.row`, and return their number.

    They are the `best`; or the first of each family of unknown worth, which goes into `notes.first`, if `most`, the
    guess for the best, is infinite; or all that are not measured yet if that guess is not positive.
    """
    if 0 < most < np.inf:
        notes.row[0] = best
        return 1
    count = 0
    if most == np.inf:
        notes.first[:] = -1
    for row in range(len(gap)):
        if most == np.inf and worth[gap[row]] == np.inf and notes.first[family[gap[row]]] < 0:
            notes.first[family[gap[row]]], notes.row[count] = row, row
            count += 1
        elif most <= 0 and not notes.fresh[row]:
            notes.row[count] = row
            count += 1
    return count


@compiled_uncounted
def _try_drop(
    tables: Tables,
    release: LongArray,
    hold: LongArray,
    drop: tuple[int, int, int, int],
    since: IntArray,
    budget: int,
    room: Room,
    trail: Trail,
    result: FloatArray,
) -> int:
    """Simulate one drop in every way, and return the runs simulated; `release` and `hold` end as they were.

    drop: as for `drop_in_way`.
    result: float64[WAYS, 3], filled: by way (ALONE, TRANSIENT, WITH_INPUTS) the seconds, peak bytes and area of the
        whole schedule. Seconds are infinite where the drop is impossible in that way, or it does not differ from ALONE.
    """
    total, count = 0, 0
    for way in (ALONE, TRANSIENT, WITH_INPUTS):
        if way == TRANSIENT and result[ALONE, 0] == np.inf:
            result[way] = np.inf
            continue
        if way == WITH_INPUTS:
            go_back(release, hold, trail, count)
            count = 0
        seconds, peak, area, work, count = drop_in_way(
            tables, release, hold, drop, way, since, budget, room, trail, count
        )
        result[way, 0], result[way, 1], result[way, 2] = seconds, peak, area
        total += work
    go_back(release, hold, trail, count)
    return total


@compiled_uncounted
def _worth(seconds: Seconds, area: float, result: FloatArray) -> float:
    """Return the area freed per second added, of a result (seconds, peak, area) from a state; -1 if none is freed."""
    freed = area - result[2]
    return freed / (max(result[0] - seconds, 0.0) + INSTANT) if freed > 0 else -1.0

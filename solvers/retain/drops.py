"""The drops that are possible at the peak, and what each of them leads to.

A drop frees a buffer from the peak to its next read. Its chain may bring back buffers long before their own next read,
which then lie there:

    block 1's results      ....rebuilt for block 2 =================== read by the backward of block 1
    transient chain        ....rebuilt for block 2|        rebuilt again =====

so each drop is tried alone, and with a transient chain: what is newly rebuilt with it is not held from there. The
second is how a checkpoint in the middle of a longer segment is given up (recursive checkpointing: Griewank 1992).
"""

from dataclasses import dataclass

import numpy as np

from roamc.solvers.arrays import FloatArray, IntArray, LongArray
from roamc.solvers.compiled import compiled
from roamc.solvers.retain.search import Search, State
from roamc.solvers.retain.tables import Tables
from roamc.solvers.retain.walk import Room, walk, walk_and_measure


@dataclass(frozen=True, eq=False)
class Drops:
    """Possible moves. gap, release, hold: int64[moves].

    since: int32[gaps], the step of the last rerun in each gap of the schedule that the moves start from, -1 for none.
    """

    gap: LongArray
    release: LongArray
    hold: LongArray
    since: IntArray


def list_drops(search: Search, state: State) -> Drops:
    """The drops at the first peak of the schedule in the room, which must be that of `state`."""
    at = np.empty((3, len(search.tables.size)), dtype=np.int64)
    since = np.full(len(search.gaps.begin), -1, dtype=np.int32)
    count = _list_drops(search.tables, state.score.runs, search.gaps.end, state.release, search.room, at, since)
    return Drops(at[0, :count], at[1, :count], at[2, :count], since)


def try_drops(search: Search, state: State, drops: Drops, rows: LongArray, budget: int) -> FloatArray:
    """Seconds, peak and area after each of the drops alone, and with a transient chain: float64[rows, 2, 3]."""
    result = np.empty((len(rows), 2, 3))
    search.work += _try_drops(
        search.tables,
        state.release,
        state.hold,
        (drops.gap[rows], drops.release[rows], drops.hold[rows]),
        drops.since,
        budget,
        search.room,
        result,
    )
    return result


def make_drop(search: Search, state: State, drops: Drops, number: int, alone: bool) -> int:
    """Change the state's decisions in place; the work done."""
    gap = drops.gap[number]
    state.release[gap], state.hold[gap] = drops.release[number], drops.hold[number]
    if alone:
        return 0
    runs, _ = walk(search.tables, state.release, state.hold, search.room)
    changed = np.empty(len(search.gaps.begin), dtype=np.int64)
    was = np.empty(len(search.gaps.begin), dtype=np.int64)
    _let_go(search.tables, runs, gap, state.hold, drops.since, search.room, changed, was)
    return runs


@compiled
def _list_drops(
    tables: Tables, runs: int, end: LongArray, release: LongArray, room: Room, at: LongArray, since: IntArray
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
        if end[gap] > step:
            at[0, count], at[1, count], at[2, count] = gap, min(release[gap], step + 1), step + 1
            count += 1
    for version in range(room.first_made[runs]):
        if room.again[version] and room.last[version] > room.born[version]:
            since[room.at_gap[version]] = room.step[room.born[version]]
    return count


@compiled
def _try_drops(
    tables: Tables,
    release: LongArray,
    hold: LongArray,
    drops: tuple[LongArray, LongArray, LongArray],
    since: IntArray,
    budget: int,
    room: Room,
    result: FloatArray,
) -> int:
    """Fill `result`; returns the runs walked. The state is as before."""
    work = 0
    gaps, new_release, new_hold = drops
    changed, was = np.empty(len(hold), dtype=np.int64), np.empty(len(hold), dtype=np.int64)
    for move in range(len(gaps)):
        gap = gaps[move]
        old_release, old_hold = release[gap], hold[gap]
        release[gap], hold[gap] = new_release[move], new_hold[move]
        seconds, peak, area, runs = walk_and_measure(tables, release, hold, budget, room)
        result[move, 0, 0], result[move, 0, 1], result[move, 0, 2] = seconds, peak, area
        work += runs
        count = 0
        if seconds < np.inf:
            count = _let_go(tables, runs, gap, hold, since, room, changed, was)
        if count > 0:
            seconds, peak, area, runs = walk_and_measure(tables, release, hold, budget, room)
            work += runs
        result[move, 1, 0], result[move, 1, 1], result[move, 1, 2] = seconds, peak, area
        for row in range(count - 1, -1, -1):
            hold[changed[row]] = was[row]
        release[gap], hold[gap] = old_release, old_hold
    return work


@compiled
def _let_go(
    tables: Tables,
    runs: int,
    dropped: int,
    hold: LongArray,
    since: IntArray,
    room: Room,
    changed: LongArray,
    was: LongArray,
) -> int:
    """Hold nothing from the step on at which `dropped` is rebuilt that was not rebuilt there before.

    The schedule in the room is the one after the drop. Returns how many gaps changed; `was` is what they held.
    """
    step = -1
    for version in range(room.first_made[runs]):
        if room.again[version] and room.at_gap[version] == dropped and room.last[version] > room.born[version]:
            step = room.step[room.born[version]]
            break
    count = 0
    for run in range(runs):
        if room.step[run] != step or room.op[run] == step:
            continue
        for version in range(room.first_made[run], room.first_made[run + 1]):
            gap = room.at_gap[version]
            held = room.last[version] > run and room.step[room.last[version]] > step and gap != dropped
            if held and since[gap] != step and hold[gap] <= step and tables.droppable[room.buffer[version]]:
                changed[count], was[count] = gap, hold[gap]
                hold[gap] = step + 1
                count += 1
    return count

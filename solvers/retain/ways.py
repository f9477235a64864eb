"""The ways of making one drop, compiled: each changes decisions in place and leaves a trail to go back on."""

from typing import NamedTuple

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.compiled import compiled_uncounted
from roamc.solvers.retain.simulate import Room, simulate_and_measure
from roamc.solvers.retain.tables import Tables

ALONE, TRANSIENT, WITH_INPUTS = 0, 1, 2
WAYS = 3
"""The number of ways, see `drops.py`."""

_MOST_REPAIRS = 3
"""Gaps that one drop keeps at most because a rerun needs what must not run again: each takes one more simulation.

A drop that needs more counts as impossible: more gaps make more drops possible, by more simulations for each.
"""


class Trail(NamedTuple):
    """What `release` and `hold` of a gap were before each change, int64[changes]."""

    gap: LongArray
    release: LongArray
    hold: LongArray


def make_trail(gaps: int) -> Trail:
    """Room for the changes of one drop, or for as many as that of so many gaps."""
    return Trail(*np.empty((3, gaps + _MOST_REPAIRS + 1), dtype=np.int64))


@compiled_uncounted
def drop_in_way(
    tables: Tables,
    release: LongArray,
    hold: LongArray,
    drop: tuple[int, int, int, int],
    way: int,
    since: IntArray,
    budget: int,
    room: Room,
    trail: Trail,
    count: int,
) -> tuple[float, int, float, int, int]:
    """Make the drop (gap, the gap's end, release, hold): seconds, peak, area, work, and the length of the trail.

    TRANSIENT continues where ALONE has ended, with its schedule in the room and its trail. A way that does not differ
    from ALONE takes infinite seconds.
    """
    gap, end, new_release, new_hold = drop
    before = count
    if way == TRANSIENT:
        count = _let_go(tables, room, gap, release, hold, since, trail, count)
    else:
        count = set_gap(release, hold, gap, new_release, new_hold, trail, count)
        before = count if way == WITH_INPUTS else before
        if way == WITH_INPUTS:
            count = _keep_inputs(tables, gap, end, release, hold, trail, count)
    if count == before:
        return np.inf, 2**62, np.inf, 0, count
    return _simulate_and_repair(tables, release, hold, budget, room, trail, count)


@compiled_uncounted
def go_back(release: LongArray, hold: LongArray, trail: Trail, count: int) -> None:
    """Undo `count` changes."""
    for row in range(count - 1, -1, -1):
        release[trail.gap[row]], hold[trail.gap[row]] = trail.release[row], trail.hold[row]


@compiled_uncounted
def set_gap(
    release: LongArray, hold: LongArray, gap: int, new_release: int, new_hold: int, trail: Trail, count: int
) -> int:
    """Decide a gap, and note on the trail what was decided before; the length of the trail."""
    trail.gap[count], trail.release[count], trail.hold[count] = gap, release[gap], hold[gap]
    release[gap], hold[gap] = new_release, new_hold
    return count + 1


@compiled_uncounted
def _simulate_and_repair(
    tables: Tables, release: LongArray, hold: LongArray, budget: int, room: Room, trail: Trail, count: int
) -> tuple[float, int, float, int, int]:
    """Simulate, and keep what must not run again when it is needed, until a simulation gets through."""
    work, repairs = 0, 0
    while True:
        seconds, peak, area, runs = simulate_and_measure(tables, release, hold, budget, room)
        work += runs
        if seconds < np.inf or room.stuck[0] < 0 or repairs == _MOST_REPAIRS or count == len(trail.gap):
            return seconds, peak, area, work, count
        gap = room.gap[room.stuck[0]]
        count = set_gap(release, hold, gap, len(tables.workspace), hold[gap], trail, count)
        repairs += 1


@compiled_uncounted
def _keep_inputs(
    tables: Tables, gap: int, end: int, release: LongArray, hold: LongArray, trail: Trail, count: int
) -> int:
    """Keep what the rerun at the end of `gap` reads and nothing else reads then or later."""
    steps = len(tables.workspace)
    op = tables.producer[tables.gap_buffer[gap]]
    for row in range(tables.read_start[op], tables.read_start[op + 1]):
        buffer = tables.read[row]
        final = tables.gap_start[buffer + 1] - 1
        if end < steps and tables.last_read[buffer] < end and release[final] < steps:
            count = set_gap(release, hold, final, steps, hold[final], trail, count)
    return count


@compiled_uncounted
def _let_go(
    tables: Tables,
    room: Room,
    dropped: int,
    release: LongArray,
    hold: LongArray,
    since: IntArray,
    trail: Trail,
    count: int,
) -> int:
    """Hold nothing from the step on at which `dropped` is rebuilt that was not rebuilt there before.

    The schedule in the room is the one after the drop.
    """
    step = -1
    runs = room.runs[0]
    for version in range(room.first_made[runs]):
        if room.again[version] and room.at_gap[version] == dropped and room.last[version] > room.born[version]:
            step = room.step[room.born[version]]
            break
    for run in range(runs):
        if room.step[run] != step or room.op[run] == step:
            continue
        for version in range(room.first_made[run], room.first_made[run + 1]):
            gap = room.at_gap[version]
            held = room.last[version] > run and room.step[room.last[version]] > step and gap != dropped
            if held and since[gap] != step and hold[gap] <= step and tables.droppable[room.buffer[version]]:
                count = set_gap(release, hold, gap, release[gap], step + 1, trail, count)
    return count

"""The ways of making one drop, compiled: each changes `release` and `hold` in place, and can be undone by its trail.

`drops.py` says what the ways ALONE, TRANSIENT and WITH_INPUTS are, `simulate.py` what `release` and `hold` mean.
"""

from typing import NamedTuple

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.compiled import compiled_uncounted
from roamc.solvers.retain.simulate import Room, simulate_and_measure
from roamc.solvers.retain.tables import Tables

ALONE, TRANSIENT, WITH_INPUTS = 0, 1, 2
WAYS = 3
"""The number of ways: ALONE, TRANSIENT and WITH_INPUTS count from 0 to WAYS - 1."""

_MOST_REPAIRS = 3
"""The most gaps that one drop keeps because a rerun reads a buffer that must not be made again.

Each takes one more simulation. A drop that needs more counts as impossible: a larger number makes more drops possible,
and takes more simulations for each.
"""


class Trail(NamedTuple):
    """The changes made to decisions, oldest first: the gap of each, and its `release` and `hold` before the change.

    All are int64, long enough for the changes of one drop. The caller keeps the number of entries in use as `count`.
    """

    gap: LongArray
    release: LongArray
    hold: LongArray


def make_trail(gaps: int) -> Trail:
    """Return an empty trail with room for the changes of one drop in a problem with this number of gaps."""
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
    """Make one drop in one way, changing `release` and `hold` in place, and simulate it.

    Gaps whose buffers a rerun needs and must not make again are kept as well, `_MOST_REPAIRS` of them at most.

    tables: the problem.
    release, hold: int64[gaps], the decisions; see `simulate.py`. `go_back` undoes what is changed in them.
    drop: (gap, the step at which it ends, its new release, its new hold), as in `Drops`.
    way: ALONE sets the gap only. WITH_INPUTS also keeps the inputs of its rerun that are read for the last time before
        the gap ends. TRANSIENT must follow a call with ALONE for the same drop that gave finite seconds, with the
        decisions, room, trail and count of that call: what is newly rebuilt with the drop is then not held for its own
        next read.
    since: int32[gaps], the step of the last rerun in each gap before the drop, -1 for none; see `Drops`.
    budget: bytes; the area counts what is above.
    room: ends with the schedule after the drop, if the seconds are finite.
    trail, count: the changes so far, to which these are added, and their number: 0 for ALONE and WITH_INPUTS.

    Returns (seconds, peak, area, work, count): cost of the whole schedule as in `Score`, runs simulated, and the number
    of changes now on the trail. Seconds are infinite where the drop is impossible, and, without a simulation, where the
    way does not differ from ALONE.
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
    """Undo the first `count` changes on the trail, the newest first: `release` and `hold` are changed in place."""
    for row in range(count - 1, -1, -1):
        release[trail.gap[row]], hold[trail.gap[row]] = trail.release[row], trail.hold[row]


@compiled_uncounted
def set_gap(
    release: LongArray, hold: LongArray, gap: int, new_release: int, new_hold: int, trail: Trail, count: int
) -> int:
    """Set entry `gap` of `release` and `hold` in place to the new values, and note the old ones on the trail.

    The old values become entry `count` of the trail; nothing checks that the trail has room. Returns the new number of
    entries.
    """
    trail.gap[count], trail.release[count], trail.hold[count] = gap, release[gap], hold[gap]
    release[gap], hold[gap] = new_release, new_hold
    return count + 1


@compiled_uncounted
def _simulate_and_repair(
    tables: Tables, release: LongArray, hold: LongArray, budget: int, room: Room, trail: Trail, count: int
) -> tuple[float, int, float, int, int]:
    """Simulate, and keep the gap of each buffer that is needed and must not be made again, until a simulation succeeds.

    Returns what `drop_in_way` returns.
    """
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
    """Keep, behind their last reads, the inputs of the rerun at the end of `gap` that are last read before it.

    Returns the number of entries on the trail.
    """
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
    """Let go of what was newly rebuilt together with the gap `dropped`: only a rerun at a later step is held.

    That is every other buffer rebuilt in front of the step at which `dropped` is rebuilt and read at a later step,
    unless `since` says that it was rebuilt there before the drop. The schedule in the room must be the one after the
    drop. Returns the number of entries on the trail.
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
            read_later = room.last[version] > run and room.step[room.last[version]] > step and gap != dropped
            if read_later and since[gap] != step and hold[gap] <= step and tables.droppable[room.buffer[version]]:
                count = set_gap(release, hold, gap, release[gap], step + 1, trail, count)
    return count

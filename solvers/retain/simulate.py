"""From decisions about gaps to a schedule with reruns, and its seconds and live bytes: the compiled simulation.

A gap (`tables.py`) is the time from a buffer's making or one of its reads to its next read. Two steps decide on it,
`release` and `hold`:

    made/read        release                  hold                    next read
        |================|  dropped             |  a rerun is kept =====|
    what is there is kept    each rerun is gone   from its step to the
    for reruns before        behind the step that   next read
    this step                asked for it

so release = n (the number of steps) keeps the buffer through the gap; a release and a hold of 0 drop it once, until its
first rerun; and a release of 0 with a hold of n drops it after every rerun. In the gap behind the last read a buffer
lives for as long as reruns read it, by the same rules.

A hold of n + 1 + s, see `bring_at`, is a hold of s that also brings the buffer back: in front of step s it is rebuilt,
if it is not there, whether or not it is read there. At an early step its inputs may still be there.

The simulation goes through the steps. In front of each it collects what the step reads and is not there, what is
brought back there, and what the operators that make it read in turn, and runs those operators in the reference order.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from roamc.solvers.arrays import BoolArray, IntArray, LongArray
from roamc.solvers.compiled import compiled_uncounted
from roamc.solvers.retain.tables import Tables


class Room(NamedTuple):
    """Arrays that a simulation writes: afterwards they hold the schedule that was simulated last.

    They are longer than the schedule. Only the first `runs[0]` runs are valid, with their reads and versions; what lies
    behind is left from other simulations. Operators are named by their steps, as in `Tables`.

    By run: op, the operator; step, the step of the reference order at which it runs (a rerun, with op != step, runs in
    front of it); live, bytes live during it, set by `count_live`; first_read and first_made, where its reads and the
    versions that it makes begin, with one entry more for the ends.
    By read: seen, the version that is read.
    By version: buffer; born, last, the first and the last run at which it is live; dead, the run from which on its
    bytes are free or another version's, set by `mark_reuse`; again, whether a rerun made it; at_gap, the gap in which
    it was made.
    By buffer, during the simulation: version, its newest; gap, the gap that the simulation is in; held, whether a rerun
    in that gap is kept until the next read; wanted, the step in front of which it was last to be rebuilt.
    By operator: called, the step in front of which it last ran again.
    By gap: rebuilt, the number of reruns that renewed its buffer in it; next_brought, the next gap that brings its
    buffer back at the same step, else -1.
    By step: brought, the first gap that brings its buffer back in front of the step, else -1.
    Two lists: batch, operators to run again in front of one step; stack, buffers to be rebuilt there.
    One entry each: stuck, valid only where seconds are infinite, the buffer that could not be rebuilt, -1 if the room
    was full; runs, the number of runs of the last simulation with finite seconds.
    """

    op: IntArray
    step: IntArray
    first_read: LongArray
    first_made: LongArray
    seen: IntArray
    buffer: IntArray
    born: IntArray
    last: IntArray
    dead: IntArray
    again: BoolArray
    at_gap: LongArray
    version: IntArray
    gap: LongArray
    held: BoolArray
    wanted: IntArray
    called: IntArray
    brought: IntArray
    next_brought: IntArray
    batch: LongArray
    stack: IntArray
    rebuilt: IntArray
    live: LongArray
    stuck: IntArray
    runs: IntArray


@dataclass(frozen=True)
class Score:
    """Cost of a schedule.

    seconds: seconds that its reruns add. Infinite where the decisions ask for a rerun that is not allowed, or for more
        reruns than the room takes; peak and area are then of no use, and larger than any other.
    peak: peak of live bytes.
    area: live bytes above the budget, summed over the runs.
    runs: runs of operators, originals included, that were simulated.
    """

    seconds: float
    peak: int
    area: float
    runs: int


def make_room(tables: Tables, most_runs: int) -> Room:
    """Return new arrays for simulations, with space for schedules of fewer than `most_runs` runs, originals included.

    Longer schedules, and schedules whose reruns read or make far more buffers than the original runs, count as
    impossible.

    tables: the problem, whose sizes the arrays have.
    """
    n, b, gaps = len(tables.workspace), len(tables.size), len(tables.gap_buffer)
    factor = 2 * (most_runs // max(n, 1) + 1)
    reads = factor * len(tables.read) + 2 * tables.widest_read + 1
    versions = factor * b + 2 * tables.widest_made + 1

    def ints(size: int) -> IntArray:
        return np.empty(size, dtype=np.int32)

    def longs(size: int) -> LongArray:
        return np.empty(size, dtype=np.int64)

    return Room(
        op=ints(most_runs + 1), step=ints(most_runs + 1),
        first_read=longs(most_runs + 2), first_made=longs(most_runs + 2),
        seen=ints(reads), buffer=ints(versions), born=ints(versions), last=ints(versions), dead=ints(versions),
        again=np.empty(versions, dtype=np.bool_), at_gap=longs(versions),
        version=ints(b), gap=longs(b), held=np.empty(b, dtype=np.bool_), wanted=ints(b),
        called=ints(n), batch=longs(n + 1), stack=ints(b + 1), rebuilt=ints(gaps),
        brought=ints(n), next_brought=ints(gaps),
        live=longs(most_runs + 2), stuck=ints(1), runs=ints(1),
    )  # fmt: skip


def evaluate(tables: Tables, release: LongArray, hold: LongArray, budget: int, room: Room) -> Score:
    """Simulate the schedule of decisions once, and return its cost; the room holds the schedule if the cost is finite.

    tables: the problem.
    release, hold: int64[gaps], the decisions, as in `State`.
    budget: bytes; the area counts what is above.
    room: arrays made for the same problem; overwritten.
    """
    seconds, peak, area, runs = simulate_and_measure(tables, release, hold, budget, room)
    return Score(seconds, int(peak), area, runs)


@compiled_uncounted
def simulate_and_measure(
    tables: Tables, release: LongArray, hold: LongArray, budget: int, room: Room
) -> tuple[float, int, float, int]:
    """Simulate the schedule of decisions once; return (seconds, peak, area, runs), as the fields of `Score`.

    tables: the problem.
    release, hold: int64[gaps], the decisions, as in `State`.
    budget: bytes; the area counts what is above.
    room: arrays made for the same problem; they end with the schedule if the seconds are finite.
    """
    runs, seconds = simulate(tables, release, hold, room)
    if seconds == np.inf:
        return np.inf, 2**62, np.inf, runs
    peak = measure(tables, runs, room)
    area = 0.0
    if peak > budget:
        for run in range(runs):
            area += max(room.live[run] - budget, 0)
    return seconds, peak, area, runs


@compiled_uncounted
def measure(tables: Tables, runs: int, room: Room) -> int:
    """Fill `room.dead` and `room.live` of a simulated schedule of this number of runs, and return its peak in bytes."""
    mark_reuse(tables, runs, room)
    return count_live(tables, runs, room)


@compiled_uncounted
def simulate(tables: Tables, release: LongArray, hold: LongArray, room: Room) -> tuple[int, float]:
    """Write the schedule of the decisions into the room; return (runs, seconds that the reruns add).

    Seconds are infinite where a rerun is not allowed or the room is full: `room.stuck` then says which, and runs counts
    the runs before. `room.dead` and `room.live` are not set, see `mark_reuse` and `count_live`. The loop passes tuples
    on only where something is rebuilt, because each call with one takes a microsecond.

    tables: the problem.
    release, hold: int64[gaps], the decisions, as in `State`.
    """
    read_start, read, gap, held, last = tables.read_start, tables.read, room.gap, room.held, room.last
    made_start, results, gap_start = tables.made_start, tables.made, tables.gap_start
    version, seen, born, maker, again, at_gap = room.version, room.seen, room.born, room.buffer, room.again, room.at_gap
    run_op, run_step, first_read, first_made = room.op, room.step, room.first_read, room.first_made
    run, at, fresh, seconds = 0, 0, 0, 0.0
    room.wanted[:] = -1
    room.called[:] = -1
    room.rebuilt[:] = 0
    _list_brings(hold, room)
    for step in range(len(tables.workspace)):
        missing = room.brought[step] >= 0
        for row in range(read_start[step], read_start[step + 1]):
            missing = missing or not (held[read[row]] or step < release[gap[read[row]]])
        if missing:
            run, at, fresh, more = _rebuild(tables, release, hold, step, (run, at, fresh), room)
            seconds += more
            if more == np.inf:
                return run, np.inf
        run_op[run], run_step[run], first_read[run], first_made[run] = step, step, at, fresh
        for row in range(read_start[step], read_start[step + 1]):
            buffer = read[row]
            last[version[buffer]] = run
            seen[at] = version[buffer]
            gap[buffer] += 1
            held[buffer] = False
            at += 1
        for row in range(made_start[step], made_start[step + 1]):
            buffer = results[row]
            gap[buffer] = gap_start[buffer]
            held[buffer] = False
            version[buffer] = fresh
            maker[fresh], born[fresh], last[fresh], again[fresh] = buffer, run, run, False
            at_gap[fresh] = gap[buffer]
            fresh += 1
        run += 1
    first_read[run], first_made[run], room.runs[0] = at, fresh, run
    for buffer in range(len(tables.size)):
        if tables.kept[buffer]:
            last[version[buffer]] = run - 1
    return run, seconds


@compiled_uncounted
def bring_at(step: int, steps: int) -> int:
    """Return the `hold` that brings a gap's buffer back in front of `step`, in an order of `steps` steps."""
    return steps + 1 + step


@compiled_uncounted
def held_from(hold: int, steps: int) -> int:
    """Return the step from which on a `hold` keeps reruns, whether or not it also brings the buffer back.

    steps: number of steps of the order.
    """
    return hold if hold <= steps else hold - bring_at(0, steps)


@compiled_uncounted
def _list_brings(hold: LongArray, room: Room) -> None:
    """Fill `room.brought` and `room.next_brought`: for each step, the gaps that bring their buffers back there."""
    steps = len(room.brought)
    room.brought[:] = -1
    most = 0
    for gap in range(len(hold)):  # nearly always the only loop, and without a branch
        most = max(most, hold[gap])
    if most <= steps:
        return
    for gap in range(len(hold)):
        if hold[gap] > steps:
            step = held_from(hold[gap], steps)
            room.next_brought[gap] = room.brought[step]
            room.brought[step] = gap


@compiled_uncounted
def _rebuild(
    tables: Tables, release: LongArray, hold: LongArray, step: int, cursor: tuple[int, int, int], room: Room
) -> tuple[int, int, int, float]:
    """Run again what must run in front of `step`; return the next run, read and version, and the seconds added.

    cursor: the next run, read and version.  Seconds are infinite where a rerun is not allowed or the room is full.
    """
    run, at, fresh = cursor
    called = _collect(tables, release, step, room)
    steps = len(tables.workspace) - step  # that are still to come, and need their room
    if called < 0:
        return run, at, fresh, np.inf
    room.stuck[0] = -1
    if run + called + steps >= len(room.op) - 1:
        return run, at, fresh, np.inf
    room_reads = len(room.seen) - len(tables.read) - tables.widest_read
    room_made = len(room.born) - len(tables.made) - tables.widest_made
    read, gap, held, wanted, last, version = tables.read, room.gap, room.held, room.wanted, room.last, room.version
    seconds = 0.0
    for number in range(called):
        op = room.batch[number]
        if at >= room_reads or fresh >= room_made:
            return run, at, fresh, np.inf
        room.op[run], room.step[run], room.first_read[run], room.first_made[run] = op, step, at, fresh
        for row in range(tables.read_start[op], tables.read_start[op + 1]):
            last[version[read[row]]] = run
            room.seen[at] = version[read[row]]
            at += 1
        for row in range(tables.made_start[op], tables.made_start[op + 1]):
            buffer = tables.made[row]
            holds = tables.droppable[buffer] and step >= held_from(hold[gap[buffer]], len(tables.workspace))
            room.buffer[fresh], room.born[fresh], last[fresh] = buffer, run, run
            room.again[fresh], room.at_gap[fresh] = True, gap[buffer]
            if not (held[buffer] or step < release[gap[buffer]]) and (holds or wanted[buffer] == step):
                version[buffer] = fresh
                room.rebuilt[gap[buffer]] += 1
                held[buffer] = holds
            fresh += 1
        seconds += tables.seconds[op]
        run += 1
    return run, at, fresh, seconds


@compiled_uncounted
def _collect(tables: Tables, release: LongArray, step: int, room: Room) -> int:
    """Put the operators to run again in front of `step` into `room.batch`, sorted by step; return their number.

    -1 if one must not run again; `room.stuck` is then the buffer that it would make.
    """
    read_start, read, gap, held = tables.read_start, tables.read, room.gap, room.held
    wanted, stack, called, producer = room.wanted, room.stack, room.called, tables.producer
    top, count, op = 0, 0, step
    bring = room.brought[step]
    while bring >= 0:
        buffer = tables.gap_buffer[bring]
        if producer[buffer] < step and gap[buffer] == bring and not (held[buffer] or step < release[bring]):
            wanted[buffer] = step
            stack[top] = buffer
            top += 1
        bring = room.next_brought[bring]
    while True:
        for row in range(read_start[op], read_start[op + 1]):
            buffer = read[row]
            if wanted[buffer] != step and not (held[buffer] or step < release[gap[buffer]]):
                wanted[buffer] = step
                stack[top] = buffer
                top += 1
        while top > 0 and called[producer[stack[top - 1]]] == step:
            top -= 1
        if top == 0:
            break
        top -= 1
        op = producer[stack[top]]
        if not (tables.droppable[stack[top]] and tables.repeatable[op] and step < tables.expires[op]):
            room.stuck[0] = stack[top]
            return -1
        called[op] = step
        room.batch[count] = op
        count += 1
    if count > 1:
        _sort(room.batch, count)
    return count


@compiled_uncounted
def _sort(row: LongArray, count: int) -> None:
    """Sort the first `count`, by Shell's method: what NumPy's sort compiles to makes arrays."""
    width = 1
    while width < count // 3:
        width = 3 * width + 1
    while width > 0:
        for place in range(width, count):
            item, to = row[place], place
            while to >= width and row[to - width] > item:
                row[to] = row[to - width]
                to -= width
            row[to] = item
        width //= 3


@compiled_uncounted
def mark_reuse(tables: Tables, runs: int, room: Room) -> None:
    """Fill `room.dead`: for each version the run from which on its bytes are free or belong to another version.

    That is `last` + 1, or `last` if a version made at run `last` takes over the bytes (in-place reuse). The room must
    hold a simulated schedule of this number of runs.
    """
    reusable_start, slot, maker, last, dead = tables.reusable_start, tables.slot, room.buffer, room.last, room.dead
    for version in range(room.first_made[runs]):
        dead[version] = last[version] + 1
    for version in range(room.first_made[runs]):
        buffer, run = maker[version], room.born[version]
        if reusable_start[buffer] == reusable_start[buffer + 1] or (room.again[version] and last[version] == run):
            continue
        for row in range(reusable_start[buffer], reusable_start[buffer + 1]):
            reused = room.seen[room.first_read[run] + slot[row]]
            if last[reused] == run and dead[reused] > run:
                dead[reused] = run
                break


@compiled_uncounted
def count_live(tables: Tables, runs: int, room: Room) -> int:
    """Fill `room.live` with the live bytes of each run, workspace and waiting bytes included, and return their peak.

    Call it after `mark_reuse`, with the same number of runs.
    """
    live, size, maker, born, dead = room.live, tables.size, room.buffer, room.born, room.dead
    live[: runs + 1] = 0
    for version in range(room.first_made[runs]):
        live[born[version]] += size[maker[version]]
        live[dead[version]] -= size[maker[version]]
    peak, current = 0, 0
    others = tables.waiting * waiting_bytes(tables, runs, room) if tables.waiting > 0 else 0
    for run in range(runs):
        current += live[run]
        live[run] = current + tables.workspace[room.op[run]] + others
        peak = max(peak, live[run])
    return peak


@compiled_uncounted
def boundary_run(tables: Tables, runs: int, room: Room) -> int:
    """Return the run at which micro-batches wait: that of the boundary itself, behind reruns in front of it."""
    for run in range(runs):
        if room.op[run] == tables.boundary and room.step[run] == tables.boundary:
            return run
    return runs


@compiled_uncounted
def waiting_bytes(tables: Tables, runs: int, room: Room) -> int:
    """Return the bytes that one micro-batch holds while it waits at the boundary, without buffers that are kept."""
    at, total = boundary_run(tables, runs, room), 0
    for version in range(room.first_made[at]):
        if room.last[version] > at and not tables.kept[room.buffer[version]]:
            total += tables.size[room.buffer[version]]
    return total

"""An order under construction: what has run, what may run next and what it would cost. Compiled, with undo.

While operator v runs, live bytes are `tally[LIVE] + need[v]` less what v takes over from dying inputs (`reused_bytes`);
when it has run they are `tally[LIVE] + net[v]`. Both `need` and `net` of an operator that has not run only ever fall as
others run. The searches over schedules rest on that.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.compiled import compiled_uncounted
from roamc.solvers.order.flow import Flow
from roamc.solvers.order.problem import Bytes, OpIndex

LIVE, DONE, READY, WORK, STAMP = range(5)
"""Indices into `Schedule.tally`."""


class Schedule(NamedTuple):
    """The state of an order under construction: n operators and b buffers of a `Flow`, run in its direction.

    `run` and `undo` change the arrays in place. The two directions and a buffer's starters and enders are those of
    `Flow`.

    tally: int64[5]. tally[LIVE] is the bytes live between the last operator that ran and the next, tally[DONE] how many
        operators have run, tally[READY] how many may run next, tally[WORK] how many costs were computed so far, and
        tally[STAMP] how many times `reused_bytes` matched results with inputs.
    order: int64[n]; order[:tally[DONE]] are the operators that have run, in sequence.
    ready: int64[n]; ready[:tally[READY]] are the operators that may run next, in no particular sequence.
    place: int64[n], the index in `ready` of each operator, -1 if it may not run next.
    waits: int64[n], how many of the operators that each one waits for have not run.
    born_by: int64[b], the operator with which each buffer became live; -1 if it is not born yet, -2 if it is live from
        the beginning.
    left, left_sum: int64[b], how many of each buffer's enders have not run, and the sum of their numbers: the number of
        the last one when one is left.
    need: int64[n] bytes that each operator adds to the live bytes while it runs, if it runs next: its workspace and the
        buffers that are born with it.
    net: int64[n] bytes by which the live bytes grow when it has run: buffers born with it less those that die with it.
    taken: int64[b], the value of tally[STAMP] when a result last took over the buffer's bytes.
    key: uint64[2], which stands for the set of operators that have run: each begins at 1, and every operator that runs
        changes it by exclusive or with its random word.
    word: uint64[n, 2], the random words of each operator.
    """

    tally: LongArray
    order: LongArray
    ready: LongArray
    place: LongArray
    waits: LongArray
    born_by: LongArray
    left: LongArray
    left_sum: LongArray
    need: LongArray
    net: LongArray
    taken: LongArray
    key: NDArray[np.uint64]
    word: NDArray[np.uint64]


def new_schedule(flow: Flow) -> Schedule:
    """Return a schedule of `flow` in which no operator has run. The random words come from a fixed seed."""
    num_ops, num_buffers = len(flow.waits), len(flow.size)
    schedule = Schedule(
        tally=np.zeros(5, dtype=np.int64),
        order=np.zeros(num_ops, dtype=np.int64),
        ready=np.zeros(num_ops, dtype=np.int64),
        place=np.full(num_ops, -1, dtype=np.int64),
        waits=flow.waits.copy(),
        born_by=np.full(num_buffers, -1, dtype=np.int64),
        left=np.diff(flow.ender_start).astype(np.int64),
        left_sum=np.zeros(num_buffers, dtype=np.int64),
        need=flow.workspace.copy(),
        net=np.zeros(num_ops, dtype=np.int64),
        taken=np.zeros(num_buffers, dtype=np.int64),
        key=np.ones(2, dtype=np.uint64),
        word=np.random.default_rng(0).integers(0, 2**64, size=(num_ops, 2), dtype=np.uint64),
    )
    _begin(flow, schedule)
    return schedule


def finished_order(flow: Flow, schedule: Schedule) -> IntArray:
    """Return the order of a schedule in which all operators have run: int32[n].

    The order begins with the operator that runs first in the problem, also if `flow` runs backward.

    flow: the tables that `schedule` was made from.
    """
    order = schedule.order[::-1] if flow.backward else schedule.order
    return order.astype(np.int32)


@compiled_uncounted
def _begin(flow: Flow, schedule: Schedule) -> None:
    for buffer in range(len(flow.size)):
        size = flow.size[buffer]
        for row in range(flow.starter_start[buffer], flow.starter_start[buffer + 1]):
            schedule.need[flow.starter[row]] += size
            schedule.net[flow.starter[row]] += size
        if flow.starter_start[buffer] == flow.starter_start[buffer + 1]:
            schedule.born_by[buffer] = -2
            schedule.tally[LIVE] += size
        for row in range(flow.ender_start[buffer], flow.ender_start[buffer + 1]):
            schedule.left_sum[buffer] += flow.ender[row]
        if schedule.left[buffer] == 1:
            schedule.net[schedule.left_sum[buffer]] -= size
    for op in range(len(flow.waits)):
        if flow.waits[op] == 0:
            enter(schedule, op)


@compiled_uncounted
def enter(schedule: Schedule, op: OpIndex) -> None:
    """Add `op` to the operators that may run next, in the arrays `ready`, `place` and `tally` of `schedule`."""
    schedule.place[op] = schedule.tally[READY]
    schedule.ready[schedule.tally[READY]] = op
    schedule.tally[READY] += 1


@compiled_uncounted
def leave(schedule: Schedule, op: OpIndex) -> None:
    """Remove `op` from the operators that may run next; the last entry of `ready` moves to its place."""
    schedule.tally[READY] -= 1
    last = schedule.ready[schedule.tally[READY]]
    schedule.ready[schedule.place[op]] = last
    schedule.place[last] = schedule.place[op]
    schedule.place[op] = -1


@compiled_uncounted
def run(flow: Flow, schedule: Schedule, op: OpIndex) -> None:
    """Run `op`, which must be ready, and bring the schedule up to date.

    Buffers are born or die with `op`, `need` and `net` of other operators fall, and operators that waited only for `op`
    become ready.

    flow: the tables that `schedule` was made from.
    """
    leave(schedule, op)
    schedule.order[schedule.tally[DONE]] = op
    schedule.tally[DONE] += 1
    schedule.tally[LIVE] += schedule.net[op]
    schedule.key[0] ^= schedule.word[op, 0]
    schedule.key[1] ^= schedule.word[op, 1]
    for row in range(flow.starts_start[op], flow.starts_start[op + 1]):
        buffer = flow.starts[row]
        if schedule.born_by[buffer] == -1:
            schedule.born_by[buffer] = op
            _charge_others(flow, schedule, buffer, op, -flow.size[buffer])
    for row in range(flow.ends_start[op], flow.ends_start[op + 1]):
        buffer = flow.ends[row]
        schedule.left[buffer] -= 1
        schedule.left_sum[buffer] -= op
        if schedule.left[buffer] == 1:
            schedule.net[schedule.left_sum[buffer]] -= flow.size[buffer]
    for row in range(flow.after_start[op], flow.after_start[op + 1]):
        schedule.waits[flow.after[row]] -= 1
        if schedule.waits[flow.after[row]] == 0:
            enter(schedule, flow.after[row])


@compiled_uncounted
def undo(flow: Flow, schedule: Schedule) -> OpIndex:
    """Take back the operator that ran last, which is ready again, and return it. At least one must have run."""
    schedule.tally[DONE] -= 1
    op: OpIndex = schedule.order[schedule.tally[DONE]]
    for row in range(flow.after_start[op], flow.after_start[op + 1]):
        if schedule.waits[flow.after[row]] == 0:
            leave(schedule, flow.after[row])
        schedule.waits[flow.after[row]] += 1
    for row in range(flow.ends_start[op], flow.ends_start[op + 1]):
        buffer = flow.ends[row]
        if schedule.left[buffer] == 1:
            schedule.net[schedule.left_sum[buffer]] += flow.size[buffer]
        schedule.left[buffer] += 1
        schedule.left_sum[buffer] += op
    for row in range(flow.starts_start[op], flow.starts_start[op + 1]):
        buffer = flow.starts[row]
        if schedule.born_by[buffer] == op:
            schedule.born_by[buffer] = -1
            _charge_others(flow, schedule, buffer, op, flow.size[buffer])
    schedule.tally[LIVE] -= schedule.net[op]
    schedule.key[0] ^= schedule.word[op, 0]
    schedule.key[1] ^= schedule.word[op, 1]
    enter(schedule, op)
    return op


@compiled_uncounted
def _charge_others(flow: Flow, schedule: Schedule, buffer: int, op: OpIndex, num_bytes: Bytes) -> None:
    """Add `num_bytes` to `need` and `net` of the buffer's starters other than `op`."""
    for row in range(flow.starter_start[buffer], flow.starter_start[buffer + 1]):
        other = flow.starter[row]
        if other != op:
            schedule.need[other] += num_bytes
            schedule.net[other] += num_bytes


@compiled_uncounted
def reused_bytes(flow: Flow, schedule: Schedule, op: OpIndex) -> Bytes:
    """Return the bytes that the results of `op`, which must be ready, take over from dying inputs if it runs next.

    Each result takes over the first of its reusable buffers whose last reader is `op` and which no earlier result of
    `op` took. In a backward flow, `op` is the last reader of exactly those of its inputs that are not yet live.
    """
    total = 0
    schedule.tally[STAMP] += 1
    for row in range(flow.written_start[op], flow.written_start[op + 1]):
        result = flow.written[row]
        for place in range(flow.reusable_start[result], flow.reusable_start[result + 1]):
            reused = flow.reusable[place]
            dies = schedule.born_by[reused] == -1 if flow.backward else schedule.left[reused] == 1
            if dies and schedule.taken[reused] != schedule.tally[STAMP]:
                schedule.taken[reused] = schedule.tally[STAMP]
                total += flow.size[reused]
                break
    return total


@compiled_uncounted
def cost(flow: Flow, schedule: Schedule, op: OpIndex) -> Bytes:
    """Return the live bytes while `op`, which must be ready, runs, if it runs next; counts one unit of work.

    The workspace of `op` is included; bytes that its results take over from inputs count once.

    flow: the tables that `schedule` was made from.
    """
    schedule.tally[WORK] += 1
    live: Bytes = schedule.tally[LIVE] + schedule.need[op] - reused_bytes(flow, schedule, op)
    return live

"""An order under construction: what has run, what may run next and what it would cost. Compiled, with undo.

While operator v runs, live bytes are `live + need[v]` less what v takes over from dying inputs (`reused_bytes`);
when it has run they are `live + net[v]`. Both numbers of an operator that has not run only ever fall as others
run. That is what the searches over schedules rest on.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.compiled import compiled
from roamc.solvers.order.flow import Flow
from roamc.solvers.order.problem import Bytes, OpIndex

LIVE, DONE, READY, WORK, STAMP = range(5)


class Schedule(NamedTuple):
    """The state; `tally[LIVE]` bytes, `tally[DONE]` operators that have run, `tally[READY]` that may run next,
    `tally[WORK]` operators looked at so far.

    order[:count[DONE]]: what has run.  ready[:count[READY]]: what may run next, place[v] where v stands in it.
    waits: what an operator still waits for.  born_by: who gave birth to a buffer, -1 nobody yet, -2 live from the
    beginning.  left, left_sum: how many of its enders have not run, and the sum of their numbers.  taken: the
    stamp of the last matching in which a result took over a buffer's bytes.  key: two sums (exclusive or) of random
    words of what has run, which stand for the set.  word: uint64[n, 2], the random words.
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
    """Nothing has run. The random words come from a fixed seed."""
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
    """The order that a complete schedule stands for, from the first operator to the last: int32[n]."""
    order = schedule.order[::-1] if flow.backward else schedule.order
    return order.astype(np.int32)


@compiled
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


@compiled
def enter(schedule: Schedule, op: OpIndex) -> None:
    """`op` may run next."""
    schedule.place[op] = schedule.tally[READY]
    schedule.ready[schedule.tally[READY]] = op
    schedule.tally[READY] += 1


@compiled
def leave(schedule: Schedule, op: OpIndex) -> None:
    """`op` may no longer run next; the last of the ready ones takes its place."""
    schedule.tally[READY] -= 1
    last = schedule.ready[schedule.tally[READY]]
    schedule.ready[schedule.place[op]] = last
    schedule.place[last] = schedule.place[op]
    schedule.place[op] = -1


@compiled
def run(flow: Flow, schedule: Schedule, op: OpIndex) -> None:
    """Run a ready operator: its buffers are born and buried, and those that waited for it may become ready."""
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


@compiled
def undo(flow: Flow, schedule: Schedule) -> OpIndex:
    """Take back the operator that ran last, and return it."""
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


@compiled
def _charge_others(flow: Flow, schedule: Schedule, buffer: int, op: OpIndex, num_bytes: Bytes) -> None:
    """Change what the other operators that could give birth to the buffer would have to allocate."""
    for row in range(flow.starter_start[buffer], flow.starter_start[buffer + 1]):
        other = flow.starter[row]
        if other != op:
            schedule.need[other] += num_bytes
            schedule.net[other] += num_bytes


@compiled
def reused_bytes(flow: Flow, schedule: Schedule, op: OpIndex) -> Bytes:
    """Bytes that the results of a ready operator take over if it runs now, by the rule in `problem.py`.

    Backwards, the operator is the last reader of exactly those of its inputs that are not yet live.
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


@compiled
def cost(flow: Flow, schedule: Schedule, op: OpIndex) -> Bytes:
    """Live bytes while a ready operator runs, if it runs now."""
    schedule.tally[WORK] += 1
    live: Bytes = schedule.tally[LIVE] + schedule.need[op] - reused_bytes(flow, schedule, op)
    return live

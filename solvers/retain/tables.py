"""The problem as arrays by step, for compiled loops: the operator at step t of the reference order is called t.

A gap of a buffer is the time from its making or one of its reads (original reads, not those of reruns) to its next
read, or to the end behind the last one. Gap `gap_start[k] + i` of buffer k lies behind its i-th read.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from roamc.solvers.arrays import BoolArray, Csr, FloatArray, IntArray, LongArray, read_only
from roamc.solvers.order.problem import OrderProblem, reads, renumber, reusables, writes
from roamc.solvers.retain.problem import RetainProblem


class Tables(NamedTuple):
    """A `RetainProblem` as arrays for the compiled loops; a tuple, because numba takes tuples as they are.

    Step t reads buffers `read[read_start[t]:read_start[t + 1]]` and makes `made[made_start[t]:made_start[t + 1]]`, both
    sorted.
    By step: workspace, bytes; seconds, repeatable, expires, as in `RetainProblem` for the operator that runs there.
    By buffer: size, bytes; producer, a step; droppable, kept; last_read, a step, that of the producer if it has no
    reader.
    slot: for each buffer whose bytes buffer k may take over, its place in the row of `read` of k's producer; those of k
    are `slot[reusable_start[k]:reusable_start[k + 1]]`, the best first.
    The gaps of buffer k are numbered from gap_start[k] to gap_start[k + 1] - 1; gap_buffer: the buffer of each gap.
    widest_read, widest_made: the most buffers that one step reads, and makes.
    waiting: how many other micro-batches wait; boundary: the step at which they do, the number of steps for none.
    """

    read_start: LongArray
    read: IntArray
    made_start: LongArray
    made: IntArray
    reusable_start: LongArray
    slot: IntArray
    workspace: LongArray
    seconds: FloatArray
    repeatable: BoolArray
    expires: LongArray
    size: LongArray
    producer: IntArray
    droppable: BoolArray
    kept: BoolArray
    gap_start: LongArray
    gap_buffer: IntArray
    last_read: IntArray
    widest_read: int
    widest_made: int
    waiting: int
    boundary: int


@dataclass(frozen=True, eq=False)
class Gaps:
    """All gaps of all buffers, by buffer and time: g of them, numbered as by `Tables.gap_start`.

    buffer: int32[g].
    begin, end: int64[g], the steps of the reads before and behind the gap; begin is the producer's step in front of the
        first read, and behind the last read end is the number of steps.
    last: bool[g], whether the gap lies behind the last read.
    free: bool[g], whether there is a choice: the buffer is droppable and has bytes, and a step lies inside the gap.
    family: int32[g], the same number for gaps that are alike: buffers of the same bytes, seconds of the producer and
        number of reads, and the same place among these reads. Repeated blocks make large families.
    """

    buffer: IntArray
    begin: LongArray
    end: LongArray
    last: BoolArray
    free: BoolArray
    family: IntArray


def make_tables(problem: RetainProblem) -> Tables:
    """Return the problem as arrays in which each operator is named by its step in the reference order."""
    order = renumber(problem.order, problem.sequence)
    read, written = reads(order), writes(order)
    return Tables(
        read_start=read.start,
        read=read.index,
        made_start=written.start,
        made=written.index,
        reusable_start=order.reusable_start,
        slot=_slots(read, reusables(order), order.producer),
        workspace=order.workspace,
        seconds=read_only(problem.seconds[problem.sequence]),
        repeatable=read_only(problem.repeatable[problem.sequence]),
        expires=read_only(problem.expires[problem.sequence]),
        size=order.size,
        producer=order.producer,
        droppable=problem.droppable,
        kept=order.kept,
        gap_start=read_only(order.consumer_start + np.arange(order.num_buffers + 1)),
        gap_buffer=read_only(_gap_buffers(order)),
        last_read=_last_reads(order),
        widest_read=int(np.diff(read.start).max(initial=0)),
        widest_made=int(np.diff(written.start).max(initial=0)),
        waiting=problem.waiting,
        boundary=int(np.append(problem.sequence, -1).tolist().index(problem.boundary)),
    )


def make_gaps(problem: RetainProblem) -> Gaps:
    """Return all gaps of the problem's buffers, numbered as by `Tables.gap_start`."""
    order = renumber(problem.order, problem.sequence)
    reads_of = np.diff(order.consumer_start)
    buffer = _gap_buffers(order)
    first = order.consumer_start[:-1] + np.arange(order.num_buffers)
    final = first + reads_of
    is_first, is_last = np.zeros(len(buffer), dtype=np.bool_), np.zeros(len(buffer), dtype=np.bool_)
    is_first[first], is_last[final] = True, True
    begin = np.empty(len(buffer), dtype=np.int64)
    begin[is_first], begin[~is_first] = order.producer, order.consumer
    end = np.full(len(buffer), order.num_ops, dtype=np.int64)
    end[~is_last] = order.consumer
    free = problem.droppable[buffer] & (order.size[buffer] > 0) & (end > begin + 1)
    seconds = problem.seconds[problem.sequence][order.producer[buffer]]
    looks = np.stack([order.size[buffer], seconds, reads_of[buffer], np.arange(len(buffer)) - first[buffer]], axis=1)
    family = np.unique(looks, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int32)
    return Gaps(buffer, begin, end, is_last, free, family)


def _gap_buffers(order: OrderProblem) -> IntArray:
    return np.repeat(np.arange(order.num_buffers, dtype=np.int32), np.diff(order.consumer_start) + 1)


def _last_reads(order: OrderProblem) -> IntArray:
    last = order.producer.copy()
    np.maximum.at(last, np.repeat(np.arange(order.num_buffers), np.diff(order.consumer_start)), order.consumer)
    return read_only(last)


def _slots(read: Csr, reusable: Csr, producer: IntArray) -> IntArray:
    rows = read.lists()
    slots = [rows[producer[result]].index(reused) for result, row in enumerate(reusable.lists()) for reused in row]
    return np.array(slots, dtype=np.int32)

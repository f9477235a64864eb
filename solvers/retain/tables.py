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
    """What the compiled loops read, a tuple because numba takes those as they are.

    Step t reads buffers `read[read_start[t]:read_start[t + 1]]` and makes `made[made_start[t]:made_start[t + 1]]`, both
    sorted.  slot: for each buffer that buffer k may take over, its place among the reads of the producer of k, in rows
    that begin at reusable_start.  By step: workspace bytes, seconds, repeatable, expires.  By buffer: size in bytes,
    producer (a step), droppable, kept, gap_start (b + 1), last_read (a step; the producer if nobody reads it).  By gap:
    gap_buffer.  widest_read, widest_made: the most buffers that a step reads, makes.
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


@dataclass(frozen=True, eq=False)
class Gaps:
    """All gaps of all buffers, by buffer and time.

    buffer: int32[g].  begin, end: int64[g], the steps of the reads on either side; end is n behind the last read.
    last: bool[g], whether it is that one.  free: bool[g], whether there is a choice: the buffer may be dropped, has
    bytes, and there is a step in the gap.
    family: int32[g], the same number for gaps that look alike: bytes, seconds of the producer, number of reads, place
    among them. Repeated blocks make large families.
    """

    buffer: IntArray
    begin: LongArray
    end: LongArray
    last: BoolArray
    free: BoolArray
    family: IntArray


def make_tables(problem: RetainProblem) -> Tables:
    """Renumber the operators by their steps and lay everything out in rows."""
    order = renumber(problem.order, problem.sequence)
    read, made = reads(order), writes(order)
    return Tables(
        read_start=read.start,
        read=read.index,
        made_start=made.start,
        made=made.index,
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
        widest_made=int(np.diff(made.start).max(initial=0)),
    )


def make_gaps(problem: RetainProblem) -> Gaps:
    """List the gaps in the numbering that `gap_start` gives them."""
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

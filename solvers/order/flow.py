"""A problem seen from one of its two ends, as tables for compiled loops.

Read from its end, an order gives birth to a buffer at its last reader and buries it at its producer:

    forward     producer |======= live =======| last reader
    backward    last reader |===== live ======| producer        (a kept buffer is live from the start)

With one form for both, every engine (greedy, search, improvement) runs in both directions. Live bytes are a
submodular function of the set of operators that have run, in both: a buffer counts from the first of its
starters to the last of its enders, and neither "one of these" nor "not yet all of those" grows faster in a
larger set.
"""

from typing import NamedTuple

import numpy as np

from roamc.solvers.arrays import Csr, LongArray, group_by
from roamc.solvers.order.problem import OrderProblem, consumers, predecessors, reusables, successors, writes


class Flow(NamedTuple):
    """A problem with one stage, n operators and b buffers, read from its first operator or from its last.

    Row r of a table `x` is `x[x_start[r]:x_start[r + 1]]`. All numbers are int64 and all arrays writable, so that every
    engine is compiled once for both directions.

    after: for each operator, those that wait for it directly.
    starter, ender: for each buffer, operators. A buffer becomes live with the first of its starters to run; without
        starters it is live from the beginning. A buffer dies with the last of its enders; without enders, never.
    starts, ends: for each operator, the buffers of which it is a starter, and of which it is an ender.
    written: for each operator, the buffers that it produces, whatever the direction.
    reusable: for each buffer, those whose bytes it may take over, the best first.
    waits: int64[n], how many operators each one waits for directly.
    size: int64[b] bytes.
    workspace: int64[n] bytes.
    backward: whether time runs from the last operator to the first.
    """

    after_start: LongArray
    after: LongArray
    starter_start: LongArray
    starter: LongArray
    ender_start: LongArray
    ender: LongArray
    starts_start: LongArray
    starts: LongArray
    ends_start: LongArray
    ends: LongArray
    written_start: LongArray
    written: LongArray
    reusable_start: LongArray
    reusable: LongArray
    waits: LongArray
    size: LongArray
    workspace: LongArray
    backward: bool


def forward_flow(problem: OrderProblem) -> Flow:
    """Return `problem`, which must have one stage, as a `Flow` that runs from its first operator to its last."""
    return _flow(problem, successors(problem), _producers(problem), _last_uses(problem), backward=False)


def backward_flow(problem: OrderProblem) -> Flow:
    """Return `problem`, which must have one stage, as a `Flow` that runs from its last operator to its first.

    An order of this flow is one of the problem read from the back: reverse it before use.
    """
    return _flow(problem, predecessors(problem), _last_uses(problem), _producers(problem), backward=True)


def _producers(problem: OrderProblem) -> Csr:
    return Csr(start=np.arange(problem.num_buffers + 1, dtype=np.int64), index=problem.producer)


def _last_uses(problem: OrderProblem) -> Csr:
    """Return the enders of each buffer: its readers; its producer if it has no readers; none if it is kept."""
    readers = consumers(problem)
    count = np.diff(readers.start)
    alone = np.flatnonzero((count == 0) & ~problem.kept)
    buffer_of = np.repeat(np.arange(problem.num_buffers, dtype=np.int32), count)
    dies = ~problem.kept[buffer_of]
    owner = np.concatenate([buffer_of[dies], alone]).astype(np.int32)
    return group_by(owner, np.concatenate([readers.index[dies], problem.producer[alone]]), problem.num_buffers)


def _invert(table: Csr, rows: int) -> Csr:
    owner = np.repeat(np.arange(len(table.start) - 1, dtype=np.int32), np.diff(table.start))
    return group_by(table.index, owner, rows)


def _flow(problem: OrderProblem, after: Csr, starter: Csr, ender: Csr, backward: bool) -> Flow:
    starts, ends = _invert(starter, problem.num_ops), _invert(ender, problem.num_ops)
    written = writes(problem)
    tables = (after, starter, ender, starts, ends, written, reusables(problem))
    long = [array.astype(np.int64) for table in tables for array in (table.start, table.index)]
    waits = np.bincount(after.index, minlength=problem.num_ops).astype(np.int64)
    return Flow._make((*long, waits, problem.size.copy(), problem.workspace.copy(), backward))

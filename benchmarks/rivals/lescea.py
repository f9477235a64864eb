"""The heuristics that ROAM names as its baseline: LESCEA for the order and LLFB for the layout.

ROAM describes neither in full and has no public code. LESCEA is taken to be the memory-aware list scheduler
of the embedded world without look-ahead: run the ready operator that leaves the fewest bytes alive. LLFB
("long-lived first, best fit") is Sekiyama and others 2018, arXiv 1804.10001, with gaps: the longest-lived
storage first, each into the tightest gap between storages that it meets.
"""

from __future__ import annotations

import heapq

import numpy as np

from benchmarks.rivals.precedence import ordering_pairs
from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.layout import LayoutProblem
from roamc.solvers.layout.problem import padded
from roamc.solvers.order import OrderProblem
from roamc.solvers.order.problem import consumers, reads, writes


def order(problem: OrderProblem) -> IntArray:
    """List scheduling: the ready operator with the lowest (allocated - freed), ties in program order: int32[n]."""
    schedule = _Schedule(problem)
    heap = [(schedule.left_behind(op), op) for op in range(problem.num_ops) if not schedule.waits[op]]
    heapq.heapify(heap)
    sequence: list[int] = []
    while heap:
        left, op = heapq.heappop(heap)
        if schedule.done[op] or left != schedule.left_behind(op):
            continue  # an older entry; one with the present number is in the heap too
        sequence.append(op)
        for changed in schedule.run(op):
            heapq.heappush(heap, (schedule.left_behind(changed), changed))
    return np.array(sequence, dtype=np.int32)


class _Schedule:
    """What has run, and what each operator would allocate and free now."""

    def __init__(self, problem: OrderProblem) -> None:
        self.size = problem.size.tolist()
        self.reads, self.writes, self.readers = (rows(problem).lists() for rows in (reads, writes, consumers))
        self.unread = [len(ops) + bool(kept) for ops, kept in zip(self.readers, problem.kept, strict=True)]
        self.after: list[list[int]] = [[] for _ in range(problem.num_ops)]
        pairs = set(ordering_pairs(problem))
        for number, ops in enumerate(self.readers):
            pairs.update((int(problem.producer[number]), op) for op in ops)
        self.waits = [0] * problem.num_ops
        for before, after in sorted(pairs):
            self.after[before].append(after)
            self.waits[after] += 1
        self.done = [False] * problem.num_ops

    def left_behind(self, op: int) -> int:
        """Bytes that running ``op`` now adds for good."""
        allocated = sum(self.size[buffer] for buffer in self.writes[op] if self.unread[buffer])
        return allocated - sum(self.size[buffer] for buffer in self.reads[op] if self.unread[buffer] == 1)

    def run(self, op: int) -> list[int]:
        """Run ``op``; the ready operators whose numbers may have changed."""
        self.done[op] = True
        changed = []
        for after in self.after[op]:
            self.waits[after] -= 1
            changed.append(after)
        for buffer in self.reads[op]:
            self.unread[buffer] -= 1
            if self.unread[buffer] == 1:
                changed += self.readers[buffer]
        return [op for op in dict.fromkeys(changed) if not self.waits[op] and not self.done[op]]


def layout(problem: LayoutProblem) -> LongArray:
    """Offsets in bytes, int64[n]: longest life first, larger first if equal, into the tightest gap that fits."""
    size = padded(problem)
    life = problem.dead.astype(np.int64) - problem.born
    offset = np.zeros(problem.num_storages, dtype=np.int64)
    placed = np.zeros(problem.num_storages, dtype=bool)
    for row in np.lexsort((problem.born, -size, -life)).tolist():
        if not size[row]:
            continue
        meets = placed & (problem.born < problem.dead[row]) & (problem.dead > problem.born[row])
        rows = np.flatnonzero(meets)
        offset[row] = _tightest(offset[rows], offset[rows] + size[rows], int(size[row]))
        placed[row] = True
    return offset


def _tightest(start: LongArray, end: LongArray, size: int) -> int:
    """The start of the smallest gap of at least ``size`` under the highest end; else that end."""
    if not len(start):
        return 0
    by_start = np.argsort(start, kind="stable")
    start, top = start[by_start], np.maximum.accumulate(end[by_start])
    floor = np.concatenate([[0], top[:-1]])
    gap = start - floor
    fits = np.flatnonzero(gap >= size)
    return int(floor[fits[np.argmin(gap[fits])]]) if len(fits) else int(top[-1])

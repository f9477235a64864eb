"""Consecutive operators of an order as a problem of their own, for pieces that solve a part at a time.

    order    ... | operators lo..hi-1 | ...        problem    source, operators, sink

The source produces what the operators read from before, the sink reads what is read behind them. Bytes that are
live throughout, whatever happens in between, are left out and counted in `offset_bytes`.
"""

from dataclasses import dataclass

import numpy as np

from roamc.solvers.arrays import BoolArray, Csr, IntArray, LongArray, group_by, read_only
from roamc.solvers.order.problem import Bytes, OrderProblem, Step
from roamc.solvers.order.reuse import positions


@dataclass(frozen=True, eq=False)
class Window:
    """Consecutive operators of an order as a problem of their own.

    problem: source 0, then the operators of `ops` as 1 to len(ops), then the sink; their given order is its program
        order.
    ops: int32, the operators' numbers in the whole problem, in the given order.
    offset_bytes: bytes that are live during the whole window and left out of `problem`. The live bytes of the whole
        order at a step of one of `ops` are the live bytes of `problem` at that step plus `offset_bytes`.
    """

    problem: OrderProblem
    ops: IntArray
    offset_bytes: Bytes

    def order_of(self, order: IntArray) -> IntArray:
        """Return an order of `problem` as an order of `ops`: int32, without source and sink."""
        return self.ops[order[1:-1] - 1]


def window(problem: OrderProblem, order: IntArray, lo: Step, hi: Step) -> Window:
    """Return the operators at steps [lo, hi) of a legal order as a problem of their own. O(n + b + reads).

    problem: has one stage.
    order: int32[n], a legal order of `problem`.
    """
    position = positions(order)
    number = np.clip(position - lo + 1, 0, hi - lo + 1).astype(np.int32)
    sink = hi - lo + 1
    born = number[problem.producer]
    buffer_of = np.repeat(np.arange(problem.num_buffers), np.diff(problem.consumer_start))
    last = born.copy()
    np.maximum.at(last, buffer_of, number[problem.consumer])
    last[problem.kept] = sink
    throughout = (born == 0) & (last == sink)
    chosen = (born < sink) & (last > 0) & ~throughout
    readers = _readers(problem, number, sink, buffer_of, chosen)
    reusable = _reusables(problem, chosen)
    inner = OrderProblem(
        stage=read_only(np.zeros(sink + 1, dtype=np.int32)),
        edges=read_only(_edges(problem, number, sink)),
        size=read_only(problem.size[chosen]),
        producer=read_only(born[chosen]),
        consumer_start=read_only(readers.start),
        consumer=read_only(readers.index),
        kept=read_only(np.zeros(int(chosen.sum()), dtype=np.bool_)),
        workspace=read_only(np.concatenate([[0], problem.workspace[order[lo:hi]], [0]]).astype(np.int64)),
        reusable_start=read_only(reusable.start),
        reusable=read_only(reusable.index),
    )
    return Window(inner, order[lo:hi], int(problem.size[throughout].sum()))


def _edges(problem: OrderProblem, number: IntArray, sink: int) -> IntArray:
    """Return the edges between operators of the window, with the source before and the sink after everything."""
    edges = number[problem.edges].reshape(-1, 2)
    inside = (edges[:, 0] > 0) & (edges[:, 1] < sink)
    ops = np.arange(1, sink)
    frame = np.concatenate(
        [np.stack([np.zeros_like(ops), ops], axis=1), np.stack([ops, np.full_like(ops, sink)], axis=1), [[0, sink]]]
    )
    return np.unique(np.concatenate([edges[inside], frame]), axis=0).astype(np.int32)


def _readers(problem: OrderProblem, number: IntArray, sink: int, buffer_of: LongArray, chosen: BoolArray) -> Csr:
    """Return the readers in the window; all those behind it become the sink, and so does the end for a kept buffer."""
    kept = np.flatnonzero(problem.kept)
    buffer = np.concatenate([buffer_of, kept])
    reader = np.concatenate([number[problem.consumer], np.full(len(kept), sink)])
    useful = chosen[buffer] & (reader > number[problem.producer[buffer]])
    renamed = np.cumsum(chosen) - 1
    pairs = np.unique(np.stack([renamed[buffer[useful]], reader[useful]], axis=1), axis=0)
    return group_by(pairs[:, 0].astype(np.int32), pairs[:, 1].astype(np.int32), int(chosen.sum()))


def _reusables(problem: OrderProblem, chosen: BoolArray) -> Csr:
    """Return the reusable buffers of the window's results; a buffer that is live throughout is not among them."""
    result = np.repeat(np.arange(problem.num_buffers), np.diff(problem.reusable_start))
    useful = chosen[result] & chosen[problem.reusable]
    renamed = (np.cumsum(chosen) - 1).astype(np.int32)
    return group_by(renamed[result[useful]], renamed[problem.reusable[useful]], int(chosen.sum()))

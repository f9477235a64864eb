"""Cheap lower bounds on the peak of every legal order, for problems with one stage. While operator v runs,

(a) alone: what v reads and writes, and its workspace, is live;
(b) reachability: a buffer is surely live if its producer is v or must run before v and it is kept, is produced
    by v, or has a reader that is v or must run after v;

each less the most bytes that v can take over from its inputs. (b) relaxes the bound of `min_cut.py`, where
operators unrelated to v may have run or not, whichever is cheaper: here the buffers between such operators
count as nothing. (a) is (b) seen from direct neighbours only, and costs O(n + reads). And at the end of every
order all kept buffers are live.
"""

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.order.effort import EFFORT, Effort
from roamc.solvers.order.evaluate import live_bytes
from roamc.solvers.order.problem import Bytes, OrderProblem, consumers, successors


def lower_bound(problem: OrderProblem, order: IntArray, effort: Effort = EFFORT) -> Bytes:
    """Return a lower bound, in bytes, on the peak of every legal order of a problem with one stage.

    order: int32[n], any legal order; its fullest steps choose the operators whose reachability bound is computed.
    effort: `effort.bounded_ops` is the largest number of such operators.
    """
    best = max(int(operator_bound(problem).max(initial=0)), int(problem.size[problem.kept].sum()))
    hottest = hottest_ops(problem, order, best)[: effort.bounded_ops]
    return max(best, int(reachability_bound(problem, hottest, effort).max(initial=0)))


def hottest_ops(problem: OrderProblem, order: IntArray, above: Bytes) -> IntArray:
    """Return the operators at whose step in `order` more than `above` bytes are live: int32, the fullest step first.

    order: int32[n], any legal order.
    """
    live = live_bytes(problem, order)
    steps = np.argsort(-live, kind="stable")
    return order[steps[live[steps] > above]]


def operator_bound(problem: OrderProblem) -> LongArray:
    """Return int64[n], for each operator the fewest bytes that are live while it runs, in any order.

    The bytes are those of the buffers that the operator reads and writes and of its workspace, less the most that its
    results can take over from its inputs.
    """
    bound = problem.workspace - most_reused(problem)
    np.add.at(bound, problem.producer, problem.size)
    per_reader = np.repeat(np.arange(problem.num_buffers), np.diff(problem.consumer_start))
    np.add.at(bound, problem.consumer, problem.size[per_reader])
    return bound


def most_reused(problem: OrderProblem) -> LongArray:
    """Return int64[n]: the most bytes of inputs that the results of each operator can take over in any order."""
    result_bytes = np.zeros(problem.num_ops, dtype=np.int64)
    results = np.flatnonzero(np.diff(problem.reusable_start))
    np.add.at(result_bytes, problem.producer[results], problem.size[results])
    result_of = np.repeat(np.arange(problem.num_buffers), np.diff(problem.reusable_start))
    pairs = np.unique(np.stack([problem.producer[result_of], problem.reusable]), axis=1)
    offered = np.zeros(problem.num_ops, dtype=np.int64)
    np.add.at(offered, pairs[0], problem.size[pairs[1]])
    return np.minimum(result_bytes, offered)


def reachability_bound(problem: OrderProblem, chosen: IntArray, effort: Effort = EFFORT) -> LongArray:
    """Return int64[len(chosen)], bytes that are surely live while each chosen operator runs, in any legal order.

    The operator's workspace is included, and the most bytes that its results can reuse are taken off. A buffer counts
    if its producer is the operator or must run before it, and if the buffer is kept, is produced by the operator, or
    has a reader that is the operator or must run after it.

    chosen: int32, operators of a problem with one stage, each at most once.
    effort: sizes of the batches in which operators and buffers are looked at; the result does not depend on them.

    Sets of chosen operators are Python integers (bit j is chosen[j]), for a batch of operators at a time: O((n +
    dependencies + reads) * len(chosen) / 64) word operations, and O(b * len(chosen)) to add up.
    """
    after = successors(problem).lists()
    readers = consumers(problem).lists()
    count, rows = effort.reachability_batch_ops, effort.reachability_batch_buffers
    batches = [chosen[lo : lo + count] for lo in range(0, len(chosen), count)]
    parts = [_reachability_batch(problem, batch, after, readers, rows) for batch in batches]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _reachability_batch(
    problem: OrderProblem, chosen: IntArray, after: list[list[int]], readers: list[list[int]], rows: int
) -> LongArray:
    self_bit = [0] * problem.num_ops
    for bit, op in enumerate(chosen.tolist()):
        self_bit[op] |= 1 << bit
    not_after = _runs_no_later(self_bit, after)
    not_before = _runs_no_earlier(self_bit, after)
    everything = (1 << len(chosen)) - 1
    width = (len(chosen) + 7) // 8
    masks = bytearray()
    for producer, kept, ops in zip(problem.producer.tolist(), problem.kept.tolist(), readers, strict=True):
        needed = everything if kept else self_bit[producer]
        for op in ops:
            needed |= not_before[op]
        masks += (not_after[producer] & needed).to_bytes(width, "little")
    packed = np.frombuffer(bytes(masks), dtype=np.uint8).reshape(problem.num_buffers, width)
    bound = problem.workspace[chosen] - most_reused(problem)[chosen]
    for lo in range(0, problem.num_buffers, rows):
        live = np.unpackbits(packed[lo : lo + rows], axis=1, count=len(chosen), bitorder="little")
        bound += problem.size[lo : lo + rows] @ live.astype(np.int64)
    return bound


def _runs_no_later(self_bit: list[int], after: list[list[int]]) -> list[int]:
    """Return, for each operator u, the bit set of the chosen v with u = v or u surely before v."""
    result = list(self_bit)
    for op in range(len(result) - 1, -1, -1):
        for successor in after[op]:
            result[op] |= result[successor]
    return result


def _runs_no_earlier(self_bit: list[int], after: list[list[int]]) -> list[int]:
    """Return, for each operator u, the bit set of the chosen v with u = v or u surely after v."""
    result = list(self_bit)
    for op, successors_of_op in enumerate(after):
        for successor in successors_of_op:
            result[successor] |= result[op]
    return result

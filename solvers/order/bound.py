"""A lower bound on the peak of every legal order. It is the largest of

(a) each operator alone: what it reads and writes, its scratch, and every kept buffer of an earlier stage; (b)
each stage boundary: what was produced up to it and is kept or still to be read (the same in every order); (c)
reachability, for chosen operators v: while v runs, a buffer is surely live if its producer is v or must run
before v
    and it is kept, is produced by v, or has a reader that is v or must run after v.

(a) and (c) are less by the most bytes that v can take over from its inputs.

(c) relaxes the min-cut bound, where operators unrelated to v may have run or not, whichever is cheaper: here
the buffers between such operators count as nothing. (a) is (c) seen from direct neighbours only, and costs
O(n + reads).
"""

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.order.evaluate import live_bytes
from roamc.solvers.order.problem import Bytes, OrderProblem, consumers, successors

EXAMINE_ALL_UP_TO = 3000
EXAMINED_BEYOND_THAT = 512
_BATCH = 1024


def lower_bound(problem: OrderProblem, order: IntArray) -> Bytes:
    """Bytes that no legal order can stay below.

    Any legal `order` will do; it only says where to look first: up to EXAMINE_ALL_UP_TO operators all are
    examined by (c), in larger problems the EXAMINED_BEYOND_THAT with most live bytes in `order` and as many
    of the largest by (a).
    """
    if problem.num_ops == 0:
        return 0
    alone = operator_bound(problem)
    best = max(int(alone.max()), boundary_bound(problem))
    if problem.num_ops <= EXAMINE_ALL_UP_TO:
        chosen = np.arange(problem.num_ops)
    else:
        hottest = order[np.argsort(-live_bytes(problem, order), kind="stable")[:EXAMINED_BEYOND_THAT]]
        largest = np.argsort(-alone, kind="stable")[:EXAMINED_BEYOND_THAT]
        chosen = np.union1d(hottest, largest)
    return max(best, int(reachability_bound(problem, chosen.astype(np.int32)).max()))


def operator_bound(problem: OrderProblem) -> LongArray:
    """Bound (a): int64[n], bytes that are live whenever each operator runs."""
    bound = problem.scratch - most_donated(problem)
    stage = problem.stage
    np.add.at(bound, problem.producer, problem.size)
    per_reader = np.repeat(np.arange(problem.num_buffers), np.diff(problem.consumer_start))
    crosses = problem.kept[per_reader] & (stage[problem.producer[per_reader]] < stage[problem.consumer])
    np.add.at(bound, problem.consumer, np.where(crosses, 0, problem.size[per_reader]))
    kept = np.flatnonzero(problem.kept)
    kept = kept[np.argsort(stage[problem.producer[kept]], kind="stable")]
    kept_so_far = np.concatenate([[0], np.cumsum(problem.size[kept])])
    bound += kept_so_far[np.searchsorted(stage[problem.producer[kept]], stage, side="left")]
    return bound


def most_donated(problem: OrderProblem) -> LongArray:
    """int64[n]: bytes of inputs that each operator's results can take over in any order, at most."""
    takes = np.zeros(problem.num_ops, dtype=np.int64)
    takers = np.flatnonzero(np.diff(problem.donor_start))
    np.add.at(takes, problem.producer[takers], problem.size[takers])
    taker_of = np.repeat(np.arange(problem.num_buffers), np.diff(problem.donor_start))
    pairs = np.unique(np.stack([problem.producer[taker_of], problem.donor]), axis=1)
    gives = np.zeros(problem.num_ops, dtype=np.int64)
    np.add.at(gives, pairs[0], problem.size[pairs[1]])
    return np.minimum(takes, gives)


def boundary_bound(problem: OrderProblem) -> Bytes:
    """Bound (b): the most bytes that are live at the last step of a stage, whatever the order."""
    stages, rank = np.unique(problem.stage, return_inverse=True)
    first = rank[problem.producer].astype(np.int64)
    past = first.copy()
    per_reader = np.repeat(np.arange(problem.num_buffers), np.diff(problem.consumer_start))
    np.maximum.at(past, per_reader, rank[problem.consumer])
    past[problem.kept] = len(stages)
    change = np.zeros(len(stages) + 1, dtype=np.int64)
    np.add.at(change, first, problem.size)
    np.subtract.at(change, past, problem.size)
    return int(np.cumsum(change).max(initial=0))


def reachability_bound(problem: OrderProblem, chosen: IntArray) -> LongArray:
    """Bound (c): bytes surely live while each of the `chosen` operators runs, int64[len(chosen)].

    Works on Python integers as sets of chosen operators (bit j is chosen[j]), _BATCH of them at a time:
    O((n + dependencies + reads) * len(chosen) / 64) word operations, and O(b * len(chosen)) to add up.
    """
    after = successors(problem).lists()
    readers = consumers(problem).lists()
    parts = [
        _reachability_batch(problem, chosen[lo : lo + _BATCH], after, readers) for lo in range(0, len(chosen), _BATCH)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _reachability_batch(
    problem: OrderProblem, chosen: IntArray, after: list[list[int]], readers: list[list[int]]
) -> LongArray:
    self_bit = [0] * problem.num_ops
    for bit, op in enumerate(chosen.tolist()):
        self_bit[op] |= 1 << bit
    not_after = _runs_no_later(problem, self_bit, after)
    not_before = _runs_no_earlier(problem, self_bit, after)
    everything = (1 << len(chosen)) - 1
    width = (len(chosen) + 7) // 8
    masks = bytearray()
    for producer, kept, ops in zip(problem.producer.tolist(), problem.kept.tolist(), readers, strict=True):
        needed = everything if kept else self_bit[producer]
        for op in ops:
            needed |= not_before[op]
        masks += (not_after[producer] & needed).to_bytes(width, "little")
    packed = np.frombuffer(bytes(masks), dtype=np.uint8).reshape(problem.num_buffers, width)
    bound = problem.scratch[chosen] - most_donated(problem)[chosen]
    for lo in range(0, problem.num_buffers, 4096):
        live = np.unpackbits(packed[lo : lo + 4096], axis=1, count=len(chosen), bitorder="little")
        bound += problem.size[lo : lo + 4096] @ live.astype(np.int64)
    return bound


def _runs_no_later(problem: OrderProblem, self_bit: list[int], after: list[list[int]]) -> list[int]:
    """For each operator u, the chosen v with u = v or u surely before v."""
    result = [0] * problem.num_ops
    stage = problem.stage.tolist()
    later_stages = 0
    this_stage = 0
    for op in range(problem.num_ops - 1, -1, -1):
        if op + 1 < problem.num_ops and stage[op + 1] != stage[op]:
            later_stages |= this_stage
            this_stage = 0
        this_stage |= self_bit[op]
        reached = self_bit[op] | later_stages
        for successor in after[op]:
            reached |= result[successor]
        result[op] = reached
    return result


def _runs_no_earlier(problem: OrderProblem, self_bit: list[int], after: list[list[int]]) -> list[int]:
    """For each operator u, the chosen v with u = v or u surely after v."""
    result = list(self_bit)
    stage = problem.stage.tolist()
    earlier_stages = 0
    this_stage = 0
    for op in range(problem.num_ops):
        if op > 0 and stage[op - 1] != stage[op]:
            earlier_stages |= this_stage
            this_stage = 0
        this_stage |= self_bit[op]
        result[op] |= earlier_stages
        for successor in after[op]:
            result[successor] |= result[op]
    return result

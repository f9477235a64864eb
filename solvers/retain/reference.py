"""A good reference order: the peak of a given order or lower, and fewer live bytes elsewhere.

An order made for the lowest peak may do anything far from that peak: it may put off all weight gradients to the end of
the backward pass. What they read then stays live for long. It stands in the way of every lower budget, and no rerun can
free it:

    put off      forward /^^^^\\ backward __________/^^^\\ weight gradients, updates
    in place     forward /^^^^\\ backward, each gradient and its update at once

The same goes for operators that read nothing, such as those that draw the masks of dropout: they may run long before
their results are needed.
"""

from dataclasses import replace

import numpy as np

from roamc.solvers.arrays import BoolArray, IntArray
from roamc.solvers.order import effort as order_effort
from roamc.solvers.order.branches import place_branches
from roamc.solvers.order.evaluate import live_bytes
from roamc.solvers.order.problem import OrderProblem, dependencies
from roamc.solvers.order.stages import one_stage
from roamc.solvers.retain.effort import EFFORT, Effort

_EFFORTS = (order_effort.EFFORT, replace(order_effort.EFFORT, largest_branch=2))
"""The efforts with which branches are placed, one after the other: large branches first, then small ones.

Near the end of the order, a large branch holds several gradients. The second time moves them apart, as small branches.
"""


def reference_order(order: OrderProblem, sequence: IntArray, effort: Effort = EFFORT) -> IntArray:
    """Return `sequence` with each update branch moved to where fewest bytes are live over time: int32[n].

    An update branch is a small group of operators on which nothing else waits (`order/branches.py`). Operators that
    read nothing move to right before the first operator that must follow them, where that saves enough
    (`effort.late_gain`). The peak does not rise, and the result is a legal order. A sequence in which stages are mixed
    is returned unchanged. 8,000 operators may take a second.

    Call it before `make_problem`, whose `expires` counts steps of the final sequence.

    sequence: int32[n], a legal order of the operators but for its stages.
    """
    stage = order.stage[sequence]
    if (np.diff(stage) < 0).any():
        return np.asarray(sequence, dtype=np.int32)
    staged = one_stage(order)
    barriers = np.setdiff1d(np.arange(staged.problem.num_ops), staged.number)
    places = np.flatnonzero(np.diff(stage)) + 1
    lifted = np.insert(staged.number[sequence], places, barriers).astype(np.int32)
    for each in _EFFORTS:
        lifted, _ = place_branches(staged.problem, lifted, effort=each)
    moved = staged.order_of(lifted)
    reads = np.zeros(order.num_ops, dtype=np.bool_)
    reads[order.consumer] = True
    late = _late(order, moved, reads)
    before, after = live_bytes(order, moved), live_bytes(order, late)
    lower = after.max(initial=0) <= before.max(initial=0)
    return late if lower and after[reads[late]].sum() <= before[reads[moved]].sum() * (1 - effort.late_gain) else moved


def _late(order: OrderProblem, sequence: IntArray, reads: BoolArray) -> IntArray:
    """Return the sequence with each operator that reads nothing right in front of the first that must follow it.

    It stays within its stage.  reads: bool[n], whether each operator reads a buffer.
    """
    position = np.empty(order.num_ops, dtype=np.int64)
    position[sequence] = np.arange(order.num_ops)
    stage_end = np.searchsorted(order.stage[sequence], order.stage, side="right")
    pairs = dependencies(order)
    followers: dict[int, list[int]] = {}
    for before, after in pairs[~reads[pairs[:, 0]]].tolist():
        followers.setdefault(before, []).append(after)
    place = 2 * position + 1
    for op in sorted(followers, key=lambda op: -position[op]):
        # An odd place is of an operator that stays, an even one right in front of it.
        place[op] = min(min(place[after] & ~1 for after in followers[op]), 2 * stage_end[op])
    return sequence[np.argsort(place[sequence], kind="stable")]

"""A good order to retain under: the same peak as another one, and fewer bytes live elsewhere.

An order that was made for the lowest peak is free wherever it is far from that peak, and may well put off all weight
gradients to the end of the backward pass. Drops take bytes off the peak only; what waits there then lies in the way of
every lower budget, and no rerun can free it:

    put off      forward /^^^^\\ backward __________/^^^\\ weight gradients, updates
    in place     forward /^^^^\\ backward, each gradient and its update at once

The same goes for what reads nothing, such as the masks of dropout: it may have been drawn long before it is needed.
"""

from dataclasses import replace

import numpy as np

from roamc.solvers.arrays import BoolArray, IntArray
from roamc.solvers.order.branches import place_branches
from roamc.solvers.order.effort import EFFORT
from roamc.solvers.order.evaluate import live_bytes
from roamc.solvers.order.problem import OrderProblem, dependencies
from roamc.solvers.order.stages import one_stage

_EFFORTS = (EFFORT, replace(EFFORT, largest_branch=2))
"""Near the end of the order, large branches hold several gradients; those then move apart as small branches."""

WORTH = 0.001
"""Nothing is put off for fewer live bytes, summed over the steps of operators that read something, than this share."""


def reference_order(order: OrderProblem, sequence: IntArray) -> IntArray:
    """The sequence with each update branch where fewest bytes are live over time, at no higher peak: int32[n].

    What reads nothing runs right before the first that must follow it, where that is worth it.

    Call it before `make_problem`: `expires` is in steps of the sequence. Takes as long as a second for 8,000 operators.
    A sequence that mixes stages comes back as it is.
    """
    stage = order.stage[sequence]
    if (np.diff(stage) < 0).any():
        return np.asarray(sequence, dtype=np.int32)
    staged = one_stage(order)
    barriers = np.setdiff1d(np.arange(staged.problem.num_ops), staged.number)
    places = np.flatnonzero(np.diff(stage)) + 1
    lifted = np.insert(staged.number[sequence], places, barriers).astype(np.int32)
    for effort in _EFFORTS:
        lifted, _ = place_branches(staged.problem, lifted, effort=effort)
    found = staged.order_of(lifted)
    reads = np.zeros(order.num_ops, dtype=np.bool_)
    reads[order.consumer] = True
    late = _late(order, found, reads)
    before, after = live_bytes(order, found), live_bytes(order, late)
    lower = after.max(initial=0) <= before.max(initial=0)
    return late if lower and after[reads[late]].sum() <= before[reads[found]].sum() * (1 - WORTH) else found


def _late(order: OrderProblem, sequence: IntArray, reads: BoolArray) -> IntArray:
    """The sequence with what reads nothing right in front of the first that must follow it, within its stage."""
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

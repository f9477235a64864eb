"""A good order to retain under: the same peak as another one, and fewer bytes live elsewhere.

An order that was made for the lowest peak is free wherever it is far from that peak, and may well put off all weight
gradients to the end of the backward pass. Drops take bytes off the peak only; what waits there then lies in the way of
every lower budget, and no rerun can free it:

    put off      forward /^^^^\\ backward __________/^^^\\ weight gradients, updates
    in place     forward /^^^^\\ backward, each gradient and its update at once
"""

import numpy as np

from roamc.solvers.arrays import IntArray
from roamc.solvers.order.branches import LARGEST, place_branches
from roamc.solvers.order.problem import OrderProblem
from roamc.solvers.order.stages import one_stage

_SIZES = (LARGEST, 2)
"""Near the end of the order, large branches hold several gradients; those then move apart as small branches."""


def reference_order(order: OrderProblem, sequence: IntArray) -> IntArray:
    """The sequence with each update branch where fewest bytes are live over time, at no higher peak: int32[n].

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
    for largest in _SIZES:
        lifted, _ = place_branches(staged.problem, lifted, largest=largest)
    return staged.order_of(lifted)

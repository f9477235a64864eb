"""Final local improvement: swap neighbours, for a lower peak first, then for fewer bytes over time.

Two neighbours u, v run on the same set D and leave the same set, so a swap changes the two steps and nothing
else. It is made if it lowers the greater of the two steps where that lies at the peak, or if it lowers their sum
and neither step comes to lie above the peak. One sweep moves an operator back as far as that pays; a sweep from
the end moves operators forward.
"""

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.compiled import compiled_uncounted
from roamc.solvers.order.effort import EFFORT, Effort
from roamc.solvers.order.evaluate import peak_bytes
from roamc.solvers.order.flow import Flow, backward_flow, forward_flow
from roamc.solvers.order.problem import Bytes, OpIndex, OrderProblem
from roamc.solvers.order.schedule import Schedule, cost, new_schedule, run, undo


def improve(problem: OrderProblem, order: IntArray, effort: Effort = EFFORT) -> IntArray:
    """Swap neighbours in a legal order to lower the peak, then the sum of live bytes over the steps: int32[n].

    Returns a new array, whose peak is never higher than that of `order`. The problem must have one stage. Stops after
    `effort.swap_sweeps` sweeps each way, or when a sweep each way swaps nothing.
    """
    flows = (forward_flow(problem), backward_flow(problem))
    improved = order.astype(np.int64)
    peak = peak_bytes(problem, order)
    for _ in range(effort.swap_sweeps):
        swaps = _sweep(flows[0], new_schedule(flows[0]), improved, peak)
        turned = improved[::-1].copy()
        swaps += _sweep(flows[1], new_schedule(flows[1]), turned, peak)
        improved = turned[::-1].copy()
        if swaps == 0:
            break
    return improved.astype(np.int32)


@compiled_uncounted
def _sweep(flow: Flow, schedule: Schedule, order: LongArray, peak: Bytes) -> int:
    """Run `order`, swap neighbours in it on the way, and return the number of swaps."""
    swaps = 0
    for step in range(len(order) - 1):
        if schedule.place[order[step + 1]] >= 0:
            most, total = _two_steps(flow, schedule, order[step], order[step + 1])
            other_most, other_total = _two_steps(flow, schedule, order[step + 1], order[step])
            lowers_peak = most >= peak and other_most < most
            lowers_sum = other_most <= max(most, peak - 1) and other_total < total
            if lowers_peak or lowers_sum:
                order[step], order[step + 1] = order[step + 1], order[step]
                swaps += 1
        run(flow, schedule, order[step])
    return swaps


@compiled_uncounted
def _two_steps(flow: Flow, schedule: Schedule, first: OpIndex, second: OpIndex) -> tuple[Bytes, Bytes]:
    """Return the greater and the sum of the live bytes of two ready operators that run one after the other."""
    one = cost(flow, schedule, first)
    run(flow, schedule, first)
    other = cost(flow, schedule, second)
    undo(flow, schedule)
    return max(one, other), one + other

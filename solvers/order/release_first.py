"""Program order, except that an operator that frees more than it allocates runs as soon as it can.

This is what a user does by hand who runs each weight update as soon as its gradient exists (LOMO, Lv et al.
2023). Backwards the same rule puts off an operator that allocates more than it frees until its result is
about to be read.
"""

from roamc.solvers.arrays import IntArray
from roamc.solvers.order.flow import backward_flow, forward_flow, from_backward, run_greedy
from roamc.solvers.order.problem import Bytes, OrderProblem, renumber


def release_first(problem: OrderProblem) -> IntArray:
    """The ready operator that frees most, or the first in program order if none frees: int32[n]."""
    return run_greedy(forward_flow(problem), 0, _only_what_is_freed)


def allocate_last(problem: OrderProblem) -> IntArray:
    """`release_first` from the last operator to the first: int32[n]."""
    return from_backward(run_greedy(backward_flow(problem), 0, _only_what_is_freed))


def polish(problem: OrderProblem, order: IntArray) -> IntArray:
    """Put the allocations of a legal order off, then bring its releases forward: int32[n]."""
    later = order[allocate_last(renumber(problem, order))]
    return later[release_first(renumber(problem, later))]


def _only_what_is_freed(need: Bytes, net: Bytes) -> tuple[Bytes, Bytes]:
    return 0, min(net, 0)

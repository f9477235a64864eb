"""Greedy list scheduling by memory, from the front and from the back.

Keep the highest peak M so far. Among the ready operators whose bytes fit into M - live, run the one that
leaves the least behind (allocated - freed); if none fits, run the one that allocates least. This is LPMF,
"least peak memory first", of PyTorch's inductor (torch/_inductor/memory.py, `topological_sort_lpmf`), after
the scheduler in "Buffer memory optimization for video codec application modeled in Simulink" (Han et al., DAC
2006). Two additions: M may start at a lower bound on the peak, since bytes that some step needs anyway cost
nothing at the others; and the same greedy runs backwards.
"""

from roamc.solvers.arrays import IntArray
from roamc.solvers.order.flow import backward_flow, forward_flow, from_backward, run_greedy
from roamc.solvers.order.problem import Bytes, OrderProblem


def list_schedule(problem: OrderProblem, floor_bytes: Bytes = 0) -> IntArray:
    """Order the operators greedily from the first to the last: int32[n].

    floor_bytes: a peak that is taken as given from the start (a lower bound, or 0). About O((n + reads) log
    n).
    """
    return run_greedy(forward_flow(problem), floor_bytes, _least_left_behind)


def list_schedule_backward(problem: OrderProblem, floor_bytes: Bytes = 0) -> IntArray:
    """Order the operators greedily from the last to the first: int32[n]. Otherwise as `list_schedule`."""
    return from_backward(run_greedy(backward_flow(problem), floor_bytes, _least_left_behind))


def _least_left_behind(need: Bytes, net: Bytes) -> tuple[Bytes, Bytes]:
    return need, net

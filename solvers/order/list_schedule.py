"""Greedy list scheduling by memory, from the front and from the back.

Keep the highest peak M so far. Among the ready operators whose bytes fit into M - live, run the one that
leaves the least behind (allocated - freed); if none fits, run the one that allocates least, and of several the
one that leaves least behind. The scheduler is that of "Buffer memory optimization for video codec application
modeled in Simulink" (Han et al., DAC 2006). Its members here differ in where M starts:

- `lpmf` (least peak memory first, torch/_inductor/memory.py): at the bytes that are kept to the end;
- from a lower bound on the peak: bytes that some step needs anyway cost nothing at the others;
- `lescea`, the list scheduling that ROAM (arXiv 2310.19295) compares with: without end, so that the operator
  that leaves least behind always runs.

`release_first` looks only at what an operator frees: program order, except that an operator that frees more
than it allocates runs as soon as it can. A user does this by hand who runs each weight update as soon as its
gradient exists (LOMO, Lv et al. 2023). Backwards the same rule puts off an operator that allocates more than
it frees until its result is about to be read.

All count in-place reuse: an operator needs fewer bytes once it is the last reader of a buffer that it may write over.
"""

from roamc.solvers.arrays import IntArray
from roamc.solvers.compiled import compiled
from roamc.solvers.order.flow import Flow, backward_flow, forward_flow
from roamc.solvers.order.problem import MOST_BYTES, Bytes, OpIndex, OrderProblem, renumber
from roamc.solvers.order.schedule import DONE, READY, Schedule, cost, finished_order, new_schedule, run


def list_schedule(problem: OrderProblem, floor_bytes: Bytes = 0) -> IntArray:
    """Order the operators of a problem with one stage greedily, from the first to the last: int32[n].

    With M the highest live bytes so far: of the ready operators that keep live bytes within M, the one that leaves the
    least behind runs; if none does, the one with the least live bytes while it runs. O(n * ready + reads).

    floor_bytes: the first M: a lower bound on the peak, or 0.
    """
    return _greedy(forward_flow(problem), floor_bytes, only_freed=False)


def list_schedule_backward(problem: OrderProblem, floor_bytes: Bytes = 0) -> IntArray:
    """Order the operators of a problem with one stage greedily, from the last to the first.

    With M the highest live bytes so far: of the operators on which no unplaced operator waits and that keep live bytes
    within M, the one that leaves the least behind is placed next; if none does, the one with the least live bytes.

    floor_bytes: the first M: a lower bound on the peak, or 0.

    Returns the order from its first operator to its last: int32[n].
    """
    return _greedy(backward_flow(problem), floor_bytes, only_freed=False)


def lpmf(problem: OrderProblem) -> IntArray:
    """Return the order of `topological_sort_lpmf` in torch/_inductor/memory.py: int32[n].

    It is `list_schedule` with the bytes that are kept to the end as `floor_bytes`. The problem must have one stage.
    """
    return list_schedule(problem, int(problem.size[problem.kept].sum()))


def lescea(problem: OrderProblem) -> IntArray:
    """Return the order in which the ready operator that leaves the fewest live bytes behind always runs: int32[n].

    The problem must have one stage. Ties go to the earlier operator in program order.
    """
    return list_schedule(problem, MOST_BYTES)


def release_first(problem: OrderProblem) -> IntArray:
    """Return program order, but with operators that free more than they allocate as early as they can run: int32[n].

    Of several ready operators that free more than they allocate, the one with the greatest difference runs first. The
    problem must have one stage.
    """
    return _greedy(forward_flow(problem), MOST_BYTES, only_freed=True)


def allocate_last(problem: OrderProblem) -> IntArray:
    """Return program order, but with operators that allocate more than they free as late as they can run: int32[n].

    Of several such operators that could run last, the one with the greatest difference does. The problem must have one
    stage.
    """
    return _greedy(backward_flow(problem), MOST_BYTES, only_freed=True)


def polish(problem: OrderProblem, order: IntArray) -> IntArray:
    """Put off the allocations of a legal order, then bring its releases forward, and return the new order: int32[n].

    The peak of the result is not compared with that of `order`: it may be higher. The problem must have one stage.
    """
    later = order[allocate_last(renumber(problem, order))]
    return later[release_first(renumber(problem, later))]


def _greedy(flow: Flow, floor_bytes: Bytes, only_freed: bool) -> IntArray:
    schedule = new_schedule(flow)
    _run_greedy(flow, schedule, floor_bytes, only_freed)
    return finished_order(flow, schedule)


@compiled
def _run_greedy(flow: Flow, schedule: Schedule, peak: Bytes, only_freed: bool) -> None:
    """Run ready operators one by one: the least by bytes that do not fit, then by bytes left behind, then by number.

    Bytes that do not fit are the live bytes while it runs, or 0 if these are no more than `peak`. Backwards the
    greatest number goes first. All is in one function: a call for each look would cost more than the look.
    """
    while schedule.tally[DONE] < len(flow.waits):
        best: OpIndex = schedule.ready[0]
        best_excess: Bytes = MOST_BYTES + 1
        best_net: Bytes = 0
        for place in range(schedule.tally[READY]):
            op: OpIndex = schedule.ready[place]
            excess: Bytes = 0
            net: Bytes = schedule.net[op]
            if only_freed:
                net = min(net, 0)
            else:
                live = cost(flow, schedule, op)
                excess = live if live > peak else 0
            better = excess < best_excess
            if not better and excess == best_excess:
                better = net < best_net or (net == best_net and (op > best) == flow.backward)
            if better:
                best, best_excess, best_net = op, excess, net
        peak = max(peak, cost(flow, schedule, best))
        run(flow, schedule, best)

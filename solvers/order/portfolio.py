"""Several simple orders, the best of them, and the bound beside it."""

from collections.abc import Callable
from dataclasses import dataclass

from roamc.solvers.arrays import IntArray, read_only
from roamc.solvers.order.bound import EXAMINE_ALL_UP_TO, lower_bound
from roamc.solvers.order.depth_first import last_ready_first, post_order
from roamc.solvers.order.donation import donations
from roamc.solvers.order.evaluate import peak_bytes
from roamc.solvers.order.list_schedule import list_schedule, list_schedule_backward
from roamc.solvers.order.problem import Bytes, OrderProblem, OrderSolution
from roamc.solvers.order.program_order import program_order
from roamc.solvers.order.release_first import allocate_last, polish, release_first
from roamc.solvers.status import Status

Algorithm = Callable[[OrderProblem, Bytes], IntArray]

ALGORITHMS: dict[str, Algorithm] = {
    "program": lambda problem, bound: program_order(problem),
    "list": lambda problem, bound: list_schedule(problem),
    "list_from_bound": list_schedule,
    "release_first": lambda problem, bound: release_first(problem),
    "allocate_last": lambda problem, bound: allocate_last(problem),
    "list_backward": lambda problem, bound: list_schedule_backward(problem),
    "list_backward_from_bound": list_schedule_backward,
    "post_order": lambda problem, bound: post_order(problem),
    "last_ready_first": lambda problem, bound: last_ready_first(problem),
}
"""Name of each algorithm, and the algorithm given the problem and a lower bound on its peak in bytes."""

DEFAULT_ALGORITHMS = tuple(ALGORITHMS)


def solve(problem: OrderProblem, algorithms: tuple[str, ...] = DEFAULT_ALGORITHMS) -> OrderSolution:
    """Run the named algorithms in turn, polish the best of several, and stop as soon as the peak meets the bound.

    Ties go to the earlier algorithm; program order comes first, so an order is changed only if that lowers
    the peak. The status is OPTIMAL if peak == bound, else GAP. Raises ValueError for an unknown name, or if
    there is none.
    """
    unknown = [name for name in algorithms if name not in ALGORITHMS]
    if unknown or not algorithms:
        raise ValueError(f"unknown order algorithms {unknown}; there are {', '.join(ALGORITHMS)}")
    bound = lower_bound(problem, program_order(problem))
    tried: list[_Candidate] = []
    for name in algorithms:
        order = ALGORITHMS[name](problem, bound)
        bound = _add_candidate(problem, name, order, tried, bound)
        if min(tried, key=_peak).peak_bytes == bound:
            break
    best = min(tried, key=_peak)
    if best.peak_bytes > bound and len(algorithms) > 1:
        bound = _add_candidate(problem, best.name + "+polish", polish(problem, best.order), tried, bound)
        best = min(tried, key=_peak)
    return OrderSolution(
        order=read_only(best.order),
        peak_bytes=best.peak_bytes,
        bound_bytes=bound,
        status=Status.OPTIMAL if best.peak_bytes == bound else Status.GAP,
        algorithm=best.name,
        work=problem.num_ops * len(tried),
        candidates=tuple((candidate.name, candidate.peak_bytes) for candidate in tried),
        donations=donations(problem, best.order),
    )


@dataclass(frozen=True, eq=False)
class _Candidate:
    name: str
    peak_bytes: Bytes
    order: IntArray


def _add_candidate(problem: OrderProblem, name: str, order: IntArray, tried: list[_Candidate], bound: Bytes) -> Bytes:
    """Add an order to those tried and return the bound, raised where the new best order shows where to look."""
    candidate = _Candidate(name, peak_bytes(problem, order), order)
    is_best = all(candidate.peak_bytes < other.peak_bytes for other in tried)
    tried.append(candidate)
    if is_best and len(tried) > 1 and problem.num_ops > EXAMINE_ALL_UP_TO:
        return max(bound, lower_bound(problem, order))
    return bound


def _peak(candidate: _Candidate) -> Bytes:
    return candidate.peak_bytes

"""A tree of subgraphs with a size limit: exact leaves, merged pairwise up to the whole.

Where the exact search of a whole graph is out of reach, that of a part is not. An order is cut into leaves of
`Effort.leaf_ops` consecutive operators; each leaf whose peak lies above the bound is searched exactly. A node of
the next level joins two neighbours and starts from their orders: its search moves operators across the seam.
This is ROAM's subgraph tree (arXiv 2310.19295) with a search in place of integer programs. What a node finds holds
for the whole, since its window counts every byte that is live around it.
"""

import numpy as np

from roamc.solvers.order.effort import EFFORT, Effort
from roamc.solvers.order.evaluate import live_bytes, peak_bytes
from roamc.solvers.order.exact import Bracket, narrow
from roamc.solvers.order.problem import OrderProblem, Step
from roamc.solvers.order.window import window


def improve_by_subgraphs(problem: OrderProblem, start: Bracket, work_limit: int, effort: Effort = EFFORT) -> Bracket:
    """Lower the peak of an order part by part, and return the new bracket; its bound stays that of `start`.

    Each round searches exactly those parts of `effort.leaf_ops` consecutive operators that reach the peak, then parts
    of twice as many, and so on up to the whole. After a round that lowers nothing the next has its seams elsewhere and,
    by `effort.subgraph_work_growth`, more work for each part. Ends when the peak meets the bound, after
    `effort.subgraph_patience` such rounds in a row, or at `work_limit`. The problem must have one stage.

    work_limit: operators to look at, not counting those that `start.work` counts.
    """
    best, in_vain = start, 0
    while in_vain < effort.subgraph_patience and not best.closed and best.work - start.work < work_limit:
        before = best.peak_bytes
        shift = effort.leaf_ops // 2 if in_vain % 2 else 0
        work_of_a_node = effort.subgraph_work * effort.subgraph_work_growth**in_vain
        best = _round(problem, best, start.work + work_limit, shift, work_of_a_node, effort)
        in_vain = 0 if best.peak_bytes < before else in_vain + 1
    return best


def _round(
    problem: OrderProblem, best: Bracket, work_limit: int, shift: Step, work_of_a_node: int, effort: Effort
) -> Bracket:
    """Search all levels once, from the leaves up, until the work of the bracket reaches `work_limit`."""
    size = effort.leaf_ops
    while size < 2 * problem.num_ops:
        for lo in range(-shift, problem.num_ops, size):
            if best.closed or best.work >= work_limit:
                return best
            limit = min(work_of_a_node, work_limit - best.work)
            best = _improve_node(problem, best, max(lo, 0), min(lo + size, problem.num_ops), limit, effort)
        size *= 2
    return best


def _improve_node(problem: OrderProblem, best: Bracket, lo: Step, hi: Step, work_limit: int, effort: Effort) -> Bracket:
    """Search the operators at steps [lo, hi) exactly if the peak is among them, and return the new bracket."""
    live = live_bytes(problem, best.order)
    peak = int(live[lo:hi].max())
    if peak < best.peak_bytes:
        return best
    part = window(problem, best.order, lo, hi)
    as_it_is = np.arange(part.problem.num_ops, dtype=np.int32)
    start = Bracket(as_it_is, peak - part.offset_bytes, best.bound_bytes - part.offset_bytes)
    bracket = narrow(part.problem, start, work_limit, effort)
    order = best.order.copy()
    order[lo:hi] = part.order_of(bracket.order)
    return Bracket(order, peak_bytes(problem, order), best.bound_bytes, best.work + bracket.work)

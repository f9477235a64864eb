"""Independent segments: a graph cut at its narrow points, each segment solved alone.

An operator is a narrow point if every other operator must run before or after it. Every order then passes
through the same sets there, so the peak of the whole is the greatest of the segments' peaks, and each segment can
be ordered without a look at the others. Stage boundaries are narrow points, and so is the loss of a training step.
"""

from itertools import pairwise

import numpy as np

from roamc.solvers.arrays import IntArray
from roamc.solvers.order.effort import EFFORT, Effort
from roamc.solvers.order.evaluate import live_bytes
from roamc.solvers.order.exact import Bracket, narrow
from roamc.solvers.order.problem import Bytes, OrderProblem, Step, dependencies
from roamc.solvers.order.window import window


def narrow_points(problem: OrderProblem) -> IntArray:
    """Return the operators that every other operator must run before or after: int32, in program order.

    The problem must have one stage. O(n + dependencies).
    """
    ops = np.arange(problem.num_ops)
    pairs = dependencies(problem)
    next_reader = np.full(problem.num_ops, problem.num_ops)
    np.minimum.at(next_reader, pairs[:, 0], pairs[:, 1])
    last_source = np.full(problem.num_ops, -1)
    np.maximum.at(last_source, pairs[:, 1], pairs[:, 0])
    ends_before = np.concatenate([[-1], np.maximum.accumulate(next_reader)[:-1]])[: problem.num_ops]
    starts_after = np.concatenate([np.minimum.accumulate(last_source[::-1])[::-1][1:], [problem.num_ops]])
    return np.flatnonzero((ends_before <= ops) & (starts_after[: problem.num_ops] >= ops)).astype(np.int32)


def narrow_by_segment(problem: OrderProblem, start: Bracket, work_limit: int, effort: Effort = EFFORT) -> Bracket:
    """Search exactly for a lower peak or a higher bound, segment by segment, and return the better bracket.

    A segment ends with a narrow point: an operator that every other operator must run before or after. The segment with
    the highest peak is searched first; segments whose peak is no higher than the bound are not searched. The problem
    must have one stage. O(segments * (n + reads)) in addition to the search.

    start: a legal order of `problem`, its peak, and a lower bound.
    work_limit: operators to look at in all, kept but for one step of a search. The `work` of the result continues that
        of `start`.
    effort: how the work is shared among the capacities that are tried.
    """
    cuts = [0, *(narrow_points(problem) + 1).tolist(), problem.num_ops]
    live = live_bytes(problem, start.order)
    spans = [(lo, hi) for lo, hi in pairwise(cuts) if lo < hi]
    spans.sort(key=lambda span: -int(live[span[0] : span[1]].max()))
    order, peak, bound, work = start.order.copy(), 0, start.bound_bytes, start.work
    for lo, hi in spans:
        bracket = _narrow_span(problem, order, (lo, hi), bound, max(0, work_limit - (work - start.work)), effort)
        order[lo:hi] = bracket.order
        peak, bound, work = max(peak, bracket.peak_bytes), max(bound, bracket.bound_bytes), work + bracket.work
    return Bracket(order, peak, min(bound, peak), work)


def _narrow_span(
    problem: OrderProblem,
    order: IntArray,
    span: tuple[Step, Step],
    bound: Bytes,
    work_limit: int,
    effort: Effort,
) -> Bracket:
    """Return the bracket of the operators at the steps [lo, hi) of `span`; its order keeps their numbers."""
    lo, hi = span
    peak = int(live_bytes(problem, order)[lo:hi].max())
    if peak <= bound or hi - lo == 1:
        return Bracket(order[lo:hi], peak, peak if hi - lo == 1 else bound)
    part = window(problem, order, lo, hi)
    as_it_is = np.arange(part.problem.num_ops, dtype=np.int32)
    start = Bracket(as_it_is, peak - part.offset_bytes, bound - part.offset_bytes)
    bracket = narrow(part.problem, start, work_limit, effort)
    return Bracket(
        part.order_of(bracket.order),
        bracket.peak_bytes + part.offset_bytes,
        bracket.bound_bytes + part.offset_bytes,
        bracket.work,
    )

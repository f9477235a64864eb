"""Other orders whose peak is no higher: what lives where changes, and with it how well it can be laid out.

A layout has most freedom where little is live. So the first of these orders lowers the live bytes wherever that
is possible, and leaves only the steps full that have to be:

    live    ___/\\_/\\___/\\__        the step of the peak stays, what is before and behind it is ordered anew
                ^                  as a problem of its own, and so on around the fullest step of each part

The others are what the algorithms make of the same capacity, and of other program orders, where ties fall
differently.
"""

import functools
import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from roamc.solvers.arrays import IntArray
from roamc.solvers.compiled import interpreted_first
from roamc.solvers.order.branches import place_branches
from roamc.solvers.order.effort import EFFORT, Effort
from roamc.solvers.order.evaluate import live_bytes, peak_bytes
from roamc.solvers.order.improve import improve
from roamc.solvers.order.list_schedule import lescea, list_schedule, list_schedule_backward, polish
from roamc.solvers.order.problem import Bytes, OrderProblem, Step, predecessors, renumber, successors
from roamc.solvers.order.stages import one_stage
from roamc.solvers.order.window import window

Attempt = Callable[[], IntArray]
"""A function without arguments that makes a legal order of the problem it was made for: int32[n]."""


@dataclass(frozen=True, eq=False)
class NamedOrder:
    """A legal order and how it was made.

    name: the attempt that made it, such as "relieved" or "drawn_0".
    order: int32[n], the operator at each step.
    peak_bytes: the most live bytes at one step of it.
    """

    name: str
    order: IntArray
    peak_bytes: Bytes


def equal_peaks(problem: OrderProblem, order: IntArray, effort: Effort = EFFORT) -> Iterator[NamedOrder]:
    """Yield other legal orders whose peak is no higher than that of `order`, the most promising first, each once.

    Each order is computed when the caller asks for it; there may be none.

    order: int32[n], a legal order of `problem`; not itself yielded.
    effort: limits of the algorithms that make the orders.
    """
    staged = one_stage(problem)
    start = _with_barriers(staged.number, order, problem.stage, staged.problem.num_ops)
    peak = interpreted_first(problem.num_ops, lambda: peak_bytes(staged.problem, start))
    seen = {order.tobytes()}
    for name, attempt in _attempts(staged.problem, start, peak, effort).items():
        other, height = interpreted_first(problem.num_ops, functools.partial(_measured, staged.problem, attempt))
        named = staged.order_of(other)
        if height <= peak and named.tobytes() not in seen:
            seen.add(named.tobytes())
            yield NamedOrder(name, named, height)


def _measured(problem: OrderProblem, attempt: Attempt) -> tuple[IntArray, Bytes]:
    """Return the order that the attempt makes, and its peak."""
    order = attempt()
    return order, peak_bytes(problem, order)


def _with_barriers(number: IntArray, order: IntArray, stage: IntArray, num_ops: int) -> IntArray:
    """An order of the staged problem as one of `one_stage(...).problem`: a barrier behind each stage but the last."""
    barriers = np.setdiff1d(np.arange(num_ops), number)
    cuts = np.flatnonzero(np.diff(stage[order])) + 1
    return np.insert(number[order], cuts, barriers).astype(np.int32)


def _attempts(problem: OrderProblem, order: IntArray, peak: Bytes, effort: Effort) -> dict[str, Attempt]:
    """Return the attempts by name, the most promising first."""
    attempts: dict[str, Attempt] = {
        "relieved": lambda: relieve(problem, order, effort),
        "from_peak": lambda: list_schedule(problem, peak),
        "from_peak+relieved": lambda: relieve(problem, list_schedule(problem, peak), effort),
        "lescea": lambda: lescea(problem),
        "swapped": lambda: improve(problem, order, effort),
        "branches": lambda: place_branches(problem, order, effort.equal_peak_branch_work, effort)[0],
        "polished": lambda: polish(problem, order),
        "backward": lambda: list_schedule_backward(problem, peak),
    }
    for number in range(effort.drawn_orders):
        attempts[f"drawn_{number}"] = functools.partial(_from_drawn, problem, peak, number, effort.drawn_distance)
    return attempts


def _from_drawn(problem: OrderProblem, peak: Bytes, seed: int, far: int) -> IntArray:
    drawn = _drawn(problem, random.Random(seed), far)
    return drawn[list_schedule(renumber(problem, drawn), peak)]


def relieve(problem: OrderProblem, order: IntArray, effort: Effort = EFFORT) -> IntArray:
    """Return an order with no higher peak and fewer live bytes around its full steps, as far as greedy rules find one.

    First the whole order, then the parts before and after its fullest step, then in the same way the parts of each
    part, are ordered anew by two greedy rules, up to `effort.relieved_parts` parts. A part keeps its sequence where
    neither rule lowers the part's peak. The problem must have one stage. The result is a new array, int32[n].

    order: int32[n], a legal order; left unchanged.
    """
    best = order.copy()
    spans = [(0, len(order))]
    for number in range(effort.relieved_parts):
        if number >= len(spans):
            break
        lo, hi = spans[number]
        best[lo:hi] = _lowered(problem, best, lo, hi)
        middle = lo + int(live_bytes(problem, best)[lo:hi].argmax())
        spans += [(first, end) for first, end in ((lo, middle), (middle + 1, hi)) if end - first > 1]
    return best


def _lowered(problem: OrderProblem, order: IntArray, lo: Step, hi: Step) -> IntArray:
    """Return the operators at steps [lo, hi), ordered by the better of two rules; as they were if neither is lower."""
    part = window(problem, order, lo, hi)
    as_it_is = np.arange(part.problem.num_ops, dtype=np.int32)
    candidates = (as_it_is, list_schedule(part.problem), lescea(part.problem))
    return part.order_of(min(candidates, key=lambda other: peak_bytes(part.problem, other)))


def _drawn(problem: OrderProblem, dice: random.Random, far: int) -> IntArray:
    """Return a legal order near program order: ready operators run by their number plus a random one below `far`."""
    after = successors(problem).lists()
    waits = np.diff(predecessors(problem).start).tolist()
    rank = [(op + dice.randrange(far), op) for op in range(problem.num_ops)]
    ready = [rank[op] for op in range(problem.num_ops) if waits[op] == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        op = heapq.heappop(ready)[1]
        order.append(op)
        for other in after[op]:
            waits[other] -= 1
            if waits[other] == 0:
                heapq.heappush(ready, rank[other])
    return np.array(order, dtype=np.int32)

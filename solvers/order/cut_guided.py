"""List scheduling guided by minimum cuts: each hottest operator in turn is put where the least is live.

A greedy looks ahead by one operator and does not see that it gets into a narrow place with the wrong things done
and undone. The min-cut bound of the operator there knows a set of operators that lets it run with the least bytes
(`min_cut.py`): that set runs before it and all others after it from now on, and the greedy starts again.

    live    __/\\__          the hottest operator v; its cut says who runs before it
              v
            before | v | after     from now on

So every round settles the live bytes at one operator, at its bound among the orders that agree with the rounds
before. Where even that is not below the best peak, these rounds lead no further.
"""

from dataclasses import dataclass, replace

import numpy as np

from roamc.solvers.arrays import BoolArray, IntArray, read_only
from roamc.solvers.order.effort import EFFORT, Effort
from roamc.solvers.order.evaluate import live_bytes, peak_bytes
from roamc.solvers.order.list_schedule import lescea, list_schedule
from roamc.solvers.order.min_cut import least_before, make_network
from roamc.solvers.order.problem import Bytes, OpIndex, OrderProblem, dependencies, renumber


@dataclass(frozen=True, eq=False)
class _Narrowed:
    """A problem with further edges. ops: int32[n], its operators' numbers in the problem that was given."""

    problem: OrderProblem
    ops: IntArray


def cut_guided(
    problem: OrderProblem, order: IntArray, bound: Bytes, work_limit: int, effort: Effort = EFFORT
) -> tuple[IntArray, int]:
    """Return the best order of all rounds, int32[n], or `order` if none has a lower peak, and the work done.

    In each round two greedy rules order the problem; at the fullest step of the better order, a minimum cut chooses the
    operators that run before that step's operator in all further rounds. The problem must have one stage.

    order: int32[n], a legal order, whose peak the rounds have to beat.
    bound: bytes; the rounds end when the peak is no higher.
    work_limit: number of operators and arcs looked at after which no further round begins.

    The rounds also end when an operator's minimum cut is not below the best peak, and after `effort.cut_rounds`.
    """
    best, best_peak, work = order, peak_bytes(problem, order), 0
    narrowed = _Narrowed(problem, np.arange(problem.num_ops, dtype=np.int32))
    for _ in range(effort.cut_rounds):
        if best_peak <= bound or work >= work_limit:
            break
        attempt = _schedule(narrowed.problem)
        live = live_bytes(narrowed.problem, attempt)
        step = int(live.argmax())
        if live[step] < best_peak:
            best, best_peak = narrowed.ops[attempt], int(live[step])
        least, before, arcs = least_before(make_network(narrowed.problem, effort), int(attempt[step]))
        work += effort.cut_round_price * problem.num_ops + arcs
        if least >= min(best_peak, int(live[step])):
            break
        narrowed = _settle(narrowed, attempt, int(attempt[step]), before)
    return best, work


def _schedule(problem: OrderProblem) -> IntArray:
    """Return the order with the lower peak of two greedy ones, the first if they are equal."""
    return min((list_schedule(problem), lescea(problem)), key=lambda order: peak_bytes(problem, order))


def _settle(narrowed: _Narrowed, order: IntArray, op: OpIndex, before: BoolArray) -> _Narrowed:
    """Return the problem with edges that put `before` before `op`, and all others after it; program order agrees."""
    problem = narrowed.problem
    after = ~before
    after[op] = False
    pairs = dependencies(problem)
    last, first = before.copy(), after.copy()
    last[pairs[before[pairs[:, 1]], 0]] = False
    first[pairs[after[pairs[:, 0]], 1]] = False
    into, out = np.flatnonzero(last), np.flatnonzero(first)
    edges = np.concatenate(
        [problem.edges, np.stack([into, np.full_like(into, op)], 1), np.stack([np.full_like(out, op), out], 1)]
    )
    legal = np.concatenate([order[before[order]], [op], order[after[order]]]).astype(np.int32)
    more = replace(problem, edges=read_only(edges.astype(np.int32)))
    return _Narrowed(renumber(more, legal), narrowed.ops[legal])

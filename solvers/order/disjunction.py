"""A bound from either-or: two operators that no dependency relates run in one of two sequences.

Let v be an operator and F operators that are related to v neither way. In every order

- either all of F run after v: then while v runs at least A(F) bytes are live, its min-cut bound with F behind it;
- or some u of F runs before v: then while u runs at least B(u) are, its min-cut bound with v behind it.

So no peak is below min(A(F), min B(u) over u in F). The min-cut bound of v alone is A of the empty set: it lets
operators run before v for nothing which could in truth not run there, such as the sum of many large gradients.
With F by falling B, A rises and the least B falls, so the best F is found by bisection.

(Immediate selection: Carlier and Pinson, "An algorithm for solving the job-shop problem", Management Science 1989.)
"""

import numpy as np

from roamc.solvers.arrays import IntArray
from roamc.solvers.order.bound import hottest_ops
from roamc.solvers.order.effort import EFFORT, Effort
from roamc.solvers.order.min_cut import Network, contracted, make_network, operator_bound
from roamc.solvers.order.problem import Bytes, OpIndex, OrderProblem


def disjunctive_bound(
    problem: OrderProblem, order: IntArray, bound: Bytes, work_limit: int, effort: Effort = EFFORT
) -> tuple[Bytes, int]:
    """Return a lower bound on every peak, in bytes and at least `bound`, and the work done in arcs.

    The bound uses that two operators which no dependency relates run in one of two sequences. It is computed for the
    operators at the `effort.disjunction_ops` fullest steps of `order`. The problem must have one stage.

    order: int32[n], any legal order.
    bound: bytes, a lower bound that is already known; operators whose step is no fuller are left out.
    work_limit: arcs to look at, kept but for a few cuts.
    """
    if work_limit <= 0:
        return bound, 0
    network, work = make_network(problem, effort), 0
    for op in hottest_ops(problem, order, bound)[: effort.disjunction_ops].tolist():
        value, arcs = _either_or(network, op, bound, work_limit - work)
        bound, work = max(bound, value), work + arcs
        if work >= work_limit:
            break
    return bound, work


def _either_or(network: Network, op: OpIndex, bound: Bytes, work_limit: int) -> tuple[Bytes, int]:
    """Return the best bound with `op` as v, at least `bound`, and the arcs that it took.

    F holds only operators with B above `bound`: others cannot raise it.
    """
    alone, work = operator_bound(network, op)
    bound = max(bound, alone)
    others: list[tuple[Bytes, OpIndex]] = []
    for other in np.flatnonzero(contracted(network, op) > 1).tolist():
        if work >= work_limit:
            break
        value, arcs = operator_bound(network, other, (op,))
        work += arcs
        if value > bound:
            others.append((value, other))
    others.sort(key=lambda item: (-item[0], item[1]))
    few, many = 0, len(others)
    while few < many:  # the shortest F whose A is no less than the least B that comes with it
        middle = (few + many) // 2
        value, arcs = operator_bound(network, op, [other for _, other in others[: middle + 1]])
        work += arcs
        bound = max(bound, min(value, others[middle][0]))
        few, many = (few, middle) if value >= others[middle][0] else (middle + 1, many)
    return bound, work

"""Precedence as every ordering rival needs it: what must run before what, stages included; and its judge."""

from __future__ import annotations

import itertools

import numpy as np

from roamc.solvers.arrays import IntArray
from roamc.solvers.order import OrderProblem
from roamc.solvers.order.problem import dependencies, predecessors, successors


def is_legal(problem: OrderProblem, order: IntArray) -> bool:
    """Whether every operator runs once, behind what it waits for and in its stage."""
    if sorted(order.tolist()) != list(range(problem.num_ops)):
        return False
    before, after = np.argsort(order)[dependencies(problem)].T
    return bool(np.all(before < after) and np.all(np.diff(problem.stage[order]) >= 0))


def ordering_pairs(problem: OrderProblem) -> list[tuple[int, int]]:
    """(before, after) pairs that no buffer implies: the problem's edges, and its stages.

    The last operators of a stage stand before the first of the next; nothing more is needed.
    """
    pairs = [(int(before), int(after)) for before, after in problem.edges]
    last, first = (_ends(problem, rows.lists()) for rows in (successors(problem), predecessors(problem)))
    stages = sorted(set(problem.stage.tolist()))
    for stage, following in itertools.pairwise(stages):
        pairs += [(before, after) for before in last[stage] for after in first[following]]
    return list(dict.fromkeys(pairs))


def _ends(problem: OrderProblem, neighbours: list[list[int]]) -> dict[int, list[int]]:
    """Per stage the operators that have no neighbour in it."""
    stage = problem.stage.tolist()
    ends: dict[int, list[int]] = {}
    for op, others in enumerate(neighbours):
        if all(stage[other] != stage[op] for other in others):
            ends.setdefault(stage[op], []).append(op)
    return ends

"""Memory-insensitive operators are taken out: each joins the one neighbour next to which it belongs.

Two rules, each of which loses nothing (first rule: it is the first lossless extension of `capacity_search.py`;
second rule: the same, read from the end):

    after    needs no bytes of its own, waits for one group only   → runs right after that group
    before   reads nothing, one group only waits for it            → runs right before that group

In a training step the updates of optimizer state in place are of the first kind, constants of the second.
"""

from dataclasses import dataclass

import numpy as np

from roamc.solvers.arrays import IntArray, group_by, read_only
from roamc.solvers.order.problem import OpIndex, OrderProblem, predecessors, reads, reusables, successors
from roamc.solvers.order.reuse import positions


@dataclass(frozen=True, eq=False)
class Contracted:
    """A problem whose operators are groups of the operators of another problem; buffers keep their numbers.

    problem: the problem of the groups, with one stage.
    members: members[g] are the operators of group g, in the sequence in which they run.
    anchor: int32[groups], the operator of each group that the others joined.
    """

    problem: OrderProblem
    members: tuple[tuple[OpIndex, ...], ...]
    anchor: IntArray

    def order_of(self, order: IntArray) -> IntArray:
        """Return the order of the n operators, int32[n], that runs the groups as `order` does, int32[groups]."""
        return np.array([op for group in order.tolist() for op in self.members[group]], dtype=np.int32)

    def groups_in(self, order: IntArray) -> IntArray:
        """Return the groups in the sequence in which a legal order of the operators runs their anchors: int32."""
        return np.argsort(positions(order)[self.anchor], kind="stable").astype(np.int32)


def contract(problem: OrderProblem) -> Contracted:
    """Join each memory-insensitive operator of a problem with one stage to the one group that it belongs next to.

    An operator is memory-insensitive if it needs no bytes of its own and waits for one group only, or if it reads
    nothing and one group only waits for it. Every other operator begins a group of its own. No order of the operators
    has a lower peak than the best order of the groups.
    """
    anchor = list(range(problem.num_ops))
    _join_before(problem, anchor)
    _join_after(problem, anchor)
    anchors = np.unique(np.array(anchor, dtype=np.int32))
    group = np.searchsorted(anchors, anchor).astype(np.int32)
    members: list[list[OpIndex]] = [[] for _ in anchors]
    for op, number in enumerate(group.tolist()):
        members[number].append(op)
    return Contracted(_grouped(problem, group, anchors), tuple(tuple(row) for row in members), anchors)


def _join_before(problem: OrderProblem, anchor: list[OpIndex]) -> None:
    """Second rule, from the last operator to the first. Producers of reusable buffers stay where they are."""
    after = successors(problem).lists()
    is_reusable = np.zeros(problem.num_buffers, dtype=np.bool_)
    is_reusable[problem.reusable] = True
    stays = problem.workspace > 0
    stays[problem.producer[is_reusable]] = True
    alone = np.flatnonzero((np.diff(problem.consumer_start) == 0) & ~problem.kept & (problem.size > 0))
    stays[problem.producer[alone]] = True
    reading = np.repeat(problem.size > 0, np.diff(problem.consumer_start))
    stays[problem.consumer[reading]] = True
    for op in np.flatnonzero(~stays)[::-1].tolist():
        groups = {anchor[other] for other in after[op]}
        if len(groups) == 1:
            anchor[op] = groups.pop()


def _join_after(problem: OrderProblem, anchor: list[OpIndex]) -> None:
    """First rule, from the first operator to the last. Who reads what the group may take over stays apart."""
    before, reads_of = predecessors(problem).lists(), reads(problem).lists()
    needs = problem.workspace.copy()
    np.add.at(needs, problem.producer, problem.size)
    reusable_by = _reusable_by(problem)
    for op in np.flatnonzero(needs == 0).tolist():
        groups = {anchor[other] for other in before[op]}
        if anchor[op] == op and len(groups) == 1:
            group = groups.pop()
            if not reusable_by.get(group, set()).intersection(reads_of[op]):
                anchor[op] = group


def _reusable_by(problem: OrderProblem) -> dict[OpIndex, set[int]]:
    """Buffers whose bytes the results of an operator may take over."""
    by_operator: dict[OpIndex, set[int]] = {}
    for result, row in enumerate(reusables(problem).lists()):
        if row:
            by_operator.setdefault(int(problem.producer[result]), set()).update(row)
    return by_operator


def _grouped(problem: OrderProblem, group: IntArray, anchors: IntArray) -> OrderProblem:
    workspace = np.zeros(len(anchors), dtype=np.int64)
    np.maximum.at(workspace, group, problem.workspace)
    edges = group[problem.edges].reshape(-1, 2)
    buffer_of = np.repeat(np.arange(problem.num_buffers), np.diff(problem.consumer_start))
    pairs = np.stack([buffer_of, group[problem.consumer]], axis=1)
    pairs = np.unique(pairs[pairs[:, 1] != group[problem.producer[buffer_of]]], axis=0)
    readers = group_by(pairs[:, 0].astype(np.int32), pairs[:, 1].astype(np.int32), problem.num_buffers)
    return OrderProblem(
        stage=read_only(np.zeros(len(anchors), dtype=np.int32)),
        edges=read_only(edges[edges[:, 0] != edges[:, 1]]),
        size=problem.size,
        producer=read_only(group[problem.producer]),
        consumer_start=read_only(readers.start),
        consumer=read_only(readers.index),
        kept=problem.kept,
        workspace=read_only(workspace),
        reusable_start=problem.reusable_start,
        reusable=problem.reusable,
    )

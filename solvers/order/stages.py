"""Stages as operators: the same problem with one stage, so that algorithms need to know nothing of stages.

Between two stages stands one operator more, the barrier: it runs after everything before it and before
everything behind it, and needs no bytes.

    stage   0 0 0   1 1        operator   0 1 2 (3) 4 5        with 3 the barrier
"""

from dataclasses import dataclass

import numpy as np

from roamc.solvers.arrays import IntArray, read_only
from roamc.solvers.order.problem import OrderProblem


@dataclass(frozen=True, eq=False)
class OneStage:
    """A problem with one stage that stands for one with several.

    problem: the problem with one stage; it has one operator more, a barrier, between each two stages.
    number: int32[n], for each operator of the problem with stages its number in `problem`.
    """

    problem: OrderProblem
    number: IntArray

    def order_of(self, order: IntArray) -> IntArray:
        """Return an order of `problem` as an order of the problem with stages, without barriers: int32."""
        name = np.full(self.problem.num_ops, -1, dtype=np.int32)
        name[self.number] = np.arange(len(self.number), dtype=np.int32)
        named = name[order]
        return named[named >= 0]


def one_stage(problem: OrderProblem) -> OneStage:
    """Return the same problem with one stage: a barrier, an operator without bytes, stands between each two stages.

    A problem that has one stage already is returned as it is.
    """
    cuts = np.flatnonzero(np.diff(problem.stage)) + 1
    number = np.arange(problem.num_ops) + np.searchsorted(cuts, np.arange(problem.num_ops), side="right")
    number = number.astype(np.int32)
    if len(cuts) == 0:
        return OneStage(problem, number)
    num_ops = problem.num_ops + len(cuts)
    workspace = np.zeros(num_ops, dtype=np.int64)
    workspace[number] = problem.workspace
    staged = OrderProblem(
        stage=read_only(np.zeros(num_ops, dtype=np.int32)),
        edges=read_only(np.concatenate([number[problem.edges], _barrier_edges(cuts + np.arange(len(cuts)), num_ops)])),
        size=problem.size,
        producer=read_only(number[problem.producer]),
        consumer_start=problem.consumer_start,
        consumer=read_only(number[problem.consumer]),
        kept=problem.kept,
        workspace=read_only(workspace),
        reusable_start=problem.reusable_start,
        reusable=problem.reusable,
    )
    return OneStage(staged, number)


def _barrier_edges(barriers: IntArray, num_ops: int) -> IntArray:
    """Return edges from every operator to the next barrier, and from each barrier to those up to the next."""
    ops = np.arange(num_ops)
    following = np.searchsorted(barriers, ops, side="right")
    into = following < len(barriers)
    behind = np.searchsorted(barriers, ops, side="left")
    out_of = behind > 0
    pairs = np.concatenate(
        [
            np.stack([ops[into], barriers[following[into]]], axis=1),
            np.stack([barriers[behind[out_of] - 1], ops[out_of]], axis=1),
        ]
    )
    return np.unique(pairs, axis=0).astype(np.int32)

"""PyTorch's breadth-first and depth-first orders, which inductor tries besides `lpmf`.

The functions give the same orders as `topological_sort_bfs` and `topological_sort_dfs` of torch/_inductor/memory.py.
Neither looks at live bytes.
"""

import heapq

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.order.problem import OpIndex, OrderProblem, predecessors, successors


def breadth_first(problem: OrderProblem) -> IntArray:
    """Return the order of torch's `topological_sort_bfs`: int32[n].

    Of the ready operators the one runs whose predecessors ran earliest, compared as sorted lists of steps. The problem
    must have one stage.
    """
    before, after = predecessors(problem).lists(), successors(problem).lists()
    waits_for = [len(ops) for ops in before]
    step = [0] * problem.num_ops
    ready: list[tuple[list[int], OpIndex]] = [([], op) for op, count in enumerate(waits_for) if count == 0]
    order: list[OpIndex] = []
    while ready:
        op = heapq.heappop(ready)[1]
        step[op] = len(order)
        order.append(op)
        for follower in after[op]:
            waits_for[follower] -= 1
            if waits_for[follower] == 0:
                heapq.heappush(ready, (sorted(step[other] for other in before[follower]), follower))
    return np.array(order, dtype=np.int32)


def depth_first(problem: OrderProblem) -> IntArray:
    """Return the order of torch's `topological_sort_dfs`: int32[n].

    Operators are taken by the bytes that they read and produce, the fewest first; before each, its predecessors run in
    the same way. The problem must have one stage.
    """
    rank = np.empty(problem.num_ops, dtype=np.int64)
    by_bytes = np.argsort(_touched(problem), kind="stable")
    rank[by_bytes] = np.arange(problem.num_ops)
    rank_of = rank.tolist()
    before = [sorted(ops, key=rank_of.__getitem__) for ops in predecessors(problem).lists()]
    done = [False] * problem.num_ops
    order: list[OpIndex] = []
    for root in by_bytes.tolist():
        if not done[root]:
            _finish(root, before, done, order)
    return np.array(order, dtype=np.int32)


def _touched(problem: OrderProblem) -> LongArray:
    touched = np.zeros(problem.num_ops, dtype=np.int64)
    np.add.at(touched, problem.producer, problem.size)
    buffer_of = np.repeat(np.arange(problem.num_buffers), np.diff(problem.consumer_start))
    np.add.at(touched, problem.consumer, problem.size[buffer_of])
    return touched


def _finish(root: OpIndex, before: list[list[OpIndex]], done: list[bool], order: list[OpIndex]) -> None:
    """Append `root` and everything below it that has not run, predecessors first."""
    path = [(root, iter(before[root]))]
    done[root] = True
    while path:
        op, untried = path[-1]
        below = next((other for other in untried if not done[other]), None)
        if below is None:
            order.append(op)
            path.pop()
        else:
            done[below] = True
            path.append((below, iter(before[below])))

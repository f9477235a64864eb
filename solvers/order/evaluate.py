"""Live bytes of an order, with in-place reuse, vectorised. The judge has its own count; a test compares the two."""

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.order.problem import Bytes, OrderProblem
from roamc.solvers.order.reuse import positions, reused_buffers


def live_bytes(problem: OrderProblem, order: IntArray) -> LongArray:
    """Return the live bytes at each step of `order`: int64[n], element t while operator order[t] runs.

    Live bytes include the workspace of the operator; a buffer and the result that takes over its bytes count once.
    `order` must be a permutation of the operators, int32[n]. O(n + b + reads + reusable).
    """
    num_ops = problem.num_ops
    position = positions(order)
    born = position[problem.producer]
    last = born.copy()
    buffer_of = np.repeat(np.arange(problem.num_buffers), np.diff(problem.consumer_start))
    np.maximum.at(last, buffer_of, position[problem.consumer])
    last[problem.kept] = num_ops - 1
    reused = reused_buffers(problem, position)
    last[reused[reused >= 0]] = born[reused >= 0] - 1
    change = np.zeros(num_ops + 1, dtype=np.int64)
    np.add.at(change, born, problem.size)
    np.subtract.at(change, last + 1, problem.size)
    live: LongArray = np.cumsum(change[:num_ops]) + problem.workspace[order]
    return live


def peak_bytes(problem: OrderProblem, order: IntArray) -> Bytes:
    """Return the most live bytes, workspace included, at one step of `order`; 0 for a problem without operators.

    order: int32[n], a permutation of the operators.
    """
    return int(live_bytes(problem, order).max(initial=0))

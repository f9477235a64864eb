"""The in-place reuses of an order, by the rule in `problem.py`."""

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.compiled import compiled
from roamc.solvers.order.problem import BufferIndex, OrderProblem


def reuses(problem: OrderProblem, order: IntArray) -> tuple[tuple[BufferIndex, BufferIndex], ...]:
    """Return (reused, result) for every buffer that takes over another's bytes in `order`, sorted by result.

    order: int32[n], a permutation of the operators.
    """
    reused = reused_buffers(problem, positions(order))
    results = np.flatnonzero(reused >= 0)
    return tuple(zip(reused[results].tolist(), results.tolist(), strict=True))


def reused_buffers(problem: OrderProblem, position: LongArray) -> IntArray:
    """Return for each buffer the buffer whose bytes it takes over, -1 for none: int32[b]. O(b + reads + reusable).

    position: int64[n], the step at which each operator runs, as `positions` gives it.
    """
    return _reused_buffers(
        position, problem.producer, problem.consumer_start, problem.consumer, problem.reusable_start, problem.reusable
    )


def positions(order: IntArray) -> LongArray:
    """Return the step at which each operator runs: int64[n], the inverse of `order`."""
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    return position


@compiled
def _reused_buffers(
    position: LongArray,
    producer: IntArray,
    consumer_start: LongArray,
    consumer: IntArray,
    reusable_start: LongArray,
    reusable: IntArray,
) -> IntArray:
    """Apply the rule result by result.

    A buffer can only be taken over at its last reader, so no two operators compete for it, and any sequence will do.
    """
    reused = np.full(len(producer), -1, dtype=np.int32)
    is_reused = np.zeros(len(producer), dtype=np.bool_)
    for result in range(len(producer)):
        step = position[producer[result]]
        for row in range(reusable_start[result], reusable_start[result + 1]):
            candidate = reusable[row]
            is_free = not is_reused[candidate]
            for reader in consumer[consumer_start[candidate] : consumer_start[candidate + 1]]:
                is_free = is_free and position[reader] <= step
            if is_free:
                is_reused[candidate] = True
                reused[result] = candidate
                break
    return reused

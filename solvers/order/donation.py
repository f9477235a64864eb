"""Who gives its bytes to whom in an order. What donation is stands in `problem.py`."""

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.compiled import compiled
from roamc.solvers.order.problem import BufferIndex, OrderProblem


def donations(problem: OrderProblem, order: IntArray) -> tuple[tuple[BufferIndex, BufferIndex], ...]:
    """(giver, taker) of every donation that happens in `order`, sorted by taker."""
    giver = givers(problem, positions(order))
    takers = np.flatnonzero(giver >= 0)
    return tuple(zip(giver[takers].tolist(), takers.tolist(), strict=True))


def givers(problem: OrderProblem, position: LongArray) -> IntArray:
    """For each buffer the buffer whose bytes it takes over, -1 for none: int32[b]. O(b + reads + donors)."""
    return _givers(
        position, problem.producer, problem.consumer_start, problem.consumer, problem.donor_start, problem.donor
    )


def positions(order: IntArray) -> LongArray:
    """The step at which each operator runs: int64[n], the inverse of `order`."""
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    return position


@compiled
def _givers(
    position: LongArray,
    producer: IntArray,
    consumer_start: LongArray,
    consumer: IntArray,
    donor_start: LongArray,
    donor: IntArray,
) -> IntArray:
    """A buffer can only be given at its last reader, so no two operators compete for it and any sequence of
    operators will do.
    """
    giver = np.full(len(producer), -1, dtype=np.int32)
    given = np.zeros(len(producer), dtype=np.bool_)
    for taker in range(len(producer)):
        step = position[producer[taker]]
        for row in range(donor_start[taker], donor_start[taker + 1]):
            candidate = donor[row]
            is_free = not given[candidate]
            for reader in consumer[consumer_start[candidate] : consumer_start[candidate + 1]]:
                is_free = is_free and position[reader] <= step
            if is_free:
                given[candidate] = True
                giver[taker] = candidate
                break
    return giver

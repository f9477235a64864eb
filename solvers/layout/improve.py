"""Repeat first fit, each time with the storages that did not fit under the bound moved to the front.

This is squeaky wheel optimization (Joslin and Clements 1999, JAIR 10): construct, find what went wrong, give
it priority, construct again. Deterministic, and bounded in rounds.
"""

import numpy as np

from roamc.solvers.arrays import LongArray
from roamc.solvers.layout.first_fit import first_fit
from roamc.solvers.layout.problem import Bytes, LayoutProblem, arena_bytes, padded


def improve(
    problem: LayoutProblem, offset: LongArray, target_bytes: Bytes, max_rounds: int, patience: int
) -> tuple[LongArray, int]:
    """Improve a layout, int64[n] bytes: the best one found (maybe the same), and the rounds it took.

    Stops when the arena is no higher than target_bytes, after max_rounds, after `patience` rounds without a
    lower arena, or when a round moves nothing.
    """
    size = padded(problem)
    best, best_arena, best_round = offset, arena_bytes(problem, offset), -1
    sequence = np.lexsort((problem.born, offset))
    for done in range(max_rounds):
        current = first_fit(problem, sequence)
        arena = arena_bytes(problem, current)
        if arena < best_arena:
            best, best_arena, best_round = current, arena, done
        if best_arena <= target_bytes or done - best_round >= patience:
            return best, done + 1
        too_high = (size > 0) & (current + size > target_bytes)
        moved = np.concatenate([sequence[too_high[sequence]], sequence[~too_high[sequence]]])
        if np.array_equal(moved, sequence):
            return best, done + 1
        sequence = moved
    return best, max_rounds

"""First fit in decreasing order of size, and the same with other keys: no one key is best everywhere.

Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference", arXiv 2001.03288.
"""

import numpy as np

from roamc.solvers.arrays import LongArray
from roamc.solvers.layout.first_fit import first_fit
from roamc.solvers.layout.problem import LayoutProblem, live_bytes, padded


def by_size(problem: LayoutProblem) -> LongArray:
    """The largest first; ties to the longer life, then the earlier birth: a sequence, int64[n]."""
    return np.lexsort((problem.born, -_lifetime(problem), -padded(problem)))


def by_lifetime(problem: LayoutProblem) -> LongArray:
    """The longest life first; ties to the larger: a sequence, int64[n]."""
    return np.lexsort((problem.born, -padded(problem), -_lifetime(problem)))


def by_area(problem: LayoutProblem) -> LongArray:
    """The largest size times lifetime first: a sequence, int64[n]."""
    area = padded(problem).astype(np.float64) * _lifetime(problem)
    return np.lexsort((problem.born, -padded(problem), -area))


def by_birth(problem: LayoutProblem) -> LongArray:
    """The earliest birth first; ties to the longer life: a sequence, int64[n]."""
    return np.lexsort((-padded(problem), -_lifetime(problem), problem.born))


def by_pressure(problem: LayoutProblem) -> LongArray:
    """Those live at a fuller step first, then the largest: a sequence, int64[n]."""
    live = live_bytes(problem)
    fullest = np.array(
        [live[lo:hi].max() for lo, hi in zip(problem.born.tolist(), problem.dead.tolist(), strict=True)],
        dtype=np.int64,
    )
    return np.lexsort((problem.born, -_lifetime(problem), -padded(problem), -fullest))


def greedy_by_size(problem: LayoutProblem) -> LongArray:
    """Offsets in bytes, int64[n], by first fit in decreasing order of size."""
    return first_fit(problem, by_size(problem))


def _lifetime(problem: LayoutProblem) -> LongArray:
    return problem.dead.astype(np.int64) - problem.born

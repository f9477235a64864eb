"""omnimalloc's supermalloc (PyPI ``omnimalloc``, Apache-2.0): a portfolio with branch and bound, in C++."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.rivals import Missing
from roamc.solvers.arrays import LongArray
from roamc.solvers.layout import LayoutProblem
from roamc.solvers.layout.problem import padded


def layout(problem: LayoutProblem, seconds: float = 3.0) -> LongArray:
    """Offsets in bytes, int64[n], on one thread. Its default time limit is 3 s.

    Raises:
        Missing: omnimalloc is not installed.
    """
    Allocation, Allocator = _omnimalloc()
    size = padded(problem)
    rows = np.flatnonzero(size)
    allocations = tuple(
        Allocation(id=int(row), size=int(size[row]), start=int(problem.born[row]), end=int(problem.dead[row]))
        for row in rows
    )
    offset = np.zeros(problem.num_storages, dtype=np.int64)
    for placed in Allocator(timeout=seconds, num_threads=1).solve(allocations).allocations:
        offset[placed.id] = placed.offset
    return offset


def _omnimalloc() -> tuple[Any, Any]:
    try:
        from omnimalloc import Allocation
        from omnimalloc.allocators import SupermallocAllocator
    except ImportError as error:
        raise Missing(f"omnimalloc is not here ({error}): pip install omnimalloc --no-deps") from None
    return Allocation, SupermallocAllocator

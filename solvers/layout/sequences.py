"""In which sequence first fit takes the storages: no one key is best everywhere.

By size is greedy by size of Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference",
arXiv 2001.03288. Width (lifetime), area and total (pressure) in three priorities are the static orders of
Moffitt, "MiniMalloc", ASPLOS 2023.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roamc.solvers.arrays import LongArray
from roamc.solvers.layout.problem import LayoutProblem, live_bytes, padded

Sequence = Callable[[LayoutProblem], LongArray]


def by_size(problem: LayoutProblem) -> LongArray:
    """Return int64[n], the indices of all storages, the largest first.

    Ties go to the longer life, then to the earlier birth.
    """
    return _sorted(-padded(problem), -_lifetime(problem), problem.born)


def by_size_and_birth(problem: LayoutProblem) -> LongArray:
    """Return int64[n], the indices of all storages, the largest first.

    Ties go to the earlier birth.

    First fit then gives storages of one size as many places as are live at once, no more: first fit by birth colours an
    interval graph with the fewest colours.
    """
    return _sorted(-padded(problem), problem.born)


def outward_by_size(problem: LayoutProblem) -> LongArray:
    """Return int64[n], the indices of all storages, the nearest in time to the fullest step first.

    Ties go to the larger size, then to the earlier birth. Storages that are live at the fullest step come first, so
    that first fit loses no byte there.
    """
    return _sorted(_steps_from_fullest(problem), -padded(problem), problem.born)


def outward_by_short_life(problem: LayoutProblem) -> LongArray:
    """Return int64[n], the indices of all storages, the nearest in time to the fullest step first.

    Ties go to the shorter life, then to the larger size, then to the earlier birth.
    """
    return _sorted(_steps_from_fullest(problem), _lifetime(problem), -padded(problem), problem.born)


def by_lifetime(problem: LayoutProblem) -> LongArray:
    """Return int64[n], the indices of all storages, the longest life first.

    Ties go to the larger size, then to the earlier birth.
    """
    return _sorted(-_lifetime(problem), -padded(problem), problem.born)


def by_area(problem: LayoutProblem) -> LongArray:
    """Return int64[n], the indices of all storages, the largest product of size and lifetime first.

    Ties go to the larger size, then to the earlier birth.
    """
    return _sorted(-_area(problem), -padded(problem), problem.born)


def by_birth(problem: LayoutProblem) -> LongArray:
    """Return int64[n], the indices of all storages, the earliest birth first.

    Ties go to the longer life, then to the larger size.
    """
    return _sorted(problem.born, -_lifetime(problem), -padded(problem))


def by_pressure(problem: LayoutProblem) -> LongArray:
    """Return int64[n], the indices of all storages, first those with the most live bytes at some step of their lives.

    Ties go to the larger size, then to the longer life, then to the earlier birth.
    """
    return _sorted(-fullest(problem), -padded(problem), -_lifetime(problem), problem.born)


def by_hint(problem: LayoutProblem) -> LongArray:
    """Return int64[n], the indices of all storages, those with a hint first, the lowest hint in front.

    Ties go to the larger size, then to the longer life, then to the earlier birth.
    """
    return _sorted(problem.hint < 0, problem.hint, -padded(problem), -_lifetime(problem), problem.born)


def long_lived_below(problem: LayoutProblem) -> LongArray:
    """Return int64[n], the indices of all storages, first those that live longer than a sixteenth of all steps.

    Long-lived storages come by falling lifetime, then the others by falling size. With the long-lived storages at the
    bottom, the others fall apart into segments of time that do not touch: each segment is laid out by itself, and all
    share the same bytes (Shu et al. 2023, "ROAM", arXiv 2310.19295, Fig. 5).
    """
    life = _lifetime(problem)
    steps = int(problem.dead.max(initial=0)) - int(problem.born.min(initial=0))
    long_lived = 16 * life > steps
    return _sorted(~long_lived, np.where(long_lived, -life, 0), -padded(problem), -life, problem.born)


def by_width_area_total(problem: LayoutProblem) -> LongArray:
    """Return int64[n], the indices of all storages by lifetime, then area, then pressure, each falling.

    Area is size times lifetime; pressure is the most live bytes at a step of the storage's life.
    """
    return _sorted(-_lifetime(problem), -_area(problem), -fullest(problem))


def by_total_area_width(problem: LayoutProblem) -> LongArray:
    """Return int64[n], the indices of all storages by pressure, then area, then lifetime, each falling.

    Area is size times lifetime; pressure is the most live bytes at a step of the storage's life.
    """
    return _sorted(-fullest(problem), -_area(problem), -_lifetime(problem))


def by_total_width_area(problem: LayoutProblem) -> LongArray:
    """Return int64[n], the indices of all storages by pressure, then lifetime, then area, each falling.

    Area is size times lifetime; pressure is the most live bytes at a step of the storage's life.
    """
    return _sorted(-fullest(problem), -_lifetime(problem), -_area(problem))


def fullest(problem: LayoutProblem) -> LongArray:
    """Return for each storage the most live padded bytes at a step of its life: int64[n]."""
    steps, live = live_bytes(problem)
    first = np.searchsorted(steps, problem.born).tolist()
    end = np.searchsorted(steps, problem.dead).tolist()
    return np.array([live[lo:hi].max(initial=0) for lo, hi in zip(first, end, strict=True)], dtype=np.int64)


def _steps_from_fullest(problem: LayoutProblem) -> LongArray:
    """Steps between each storage's life and the first of the fullest steps, 0 where it is live then: int64[n]."""
    steps, live = live_bytes(problem)
    fullest_step = int(steps[live.argmax()]) if len(live) else 0
    before = fullest_step + 1 - problem.dead.astype(np.int64)
    after = problem.born.astype(np.int64) - fullest_step
    distance: LongArray = np.maximum(np.maximum(before, after), 0)
    return distance


def _sorted(*keys: NDArray[Any]) -> LongArray:
    """Storages by the first key, ties by the next, at last by index."""
    return np.lexsort(keys[::-1])


def _lifetime(problem: LayoutProblem) -> LongArray:
    return problem.dead.astype(np.int64) - problem.born


def _area(problem: LayoutProblem) -> NDArray[np.float64]:
    return padded(problem).astype(np.float64) * _lifetime(problem)

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
    """The largest first; ties to the longer life, then the earlier birth: a sequence, int64[n]."""
    return _sorted(-padded(problem), -_lifetime(problem), problem.born)


def by_size_and_birth(problem: LayoutProblem) -> LongArray:
    """The largest first; ties to the earlier birth: a sequence, int64[n].

    Storages of one size then take as many places as are live at once, no more: first fit by birth colours an interval
    graph with the fewest colours.
    """
    return _sorted(-padded(problem), problem.born)


def outward_by_size(problem: LayoutProblem) -> LongArray:
    """Those nearest in time to the fullest step first; ties to the larger, then the earlier birth: int64[n].

    What is live at the fullest step comes first, so no byte is lost there.
    """
    return _sorted(_steps_from_fullest(problem), -padded(problem), problem.born)


def outward_by_short_life(problem: LayoutProblem) -> LongArray:
    """Those nearest in time to the fullest step first; ties to the shorter life, then the larger: int64[n]."""
    return _sorted(_steps_from_fullest(problem), _lifetime(problem), -padded(problem), problem.born)


def by_lifetime(problem: LayoutProblem) -> LongArray:
    """The longest life first; ties to the larger: a sequence, int64[n]."""
    return _sorted(-_lifetime(problem), -padded(problem), problem.born)


def by_area(problem: LayoutProblem) -> LongArray:
    """The largest size times lifetime first: a sequence, int64[n]."""
    return _sorted(-_area(problem), -padded(problem), problem.born)


def by_birth(problem: LayoutProblem) -> LongArray:
    """The earliest birth first; ties to the longer life: a sequence, int64[n]."""
    return _sorted(problem.born, -_lifetime(problem), -padded(problem))


def by_pressure(problem: LayoutProblem) -> LongArray:
    """Those live at a fuller step first, then the largest: a sequence, int64[n]."""
    return _sorted(-fullest(problem), -padded(problem), -_lifetime(problem), problem.born)


def by_hint(problem: LayoutProblem) -> LongArray:
    """Those with a hint first, by the hinted offset, then by size: a sequence, int64[n]."""
    return _sorted(problem.hint < 0, problem.hint, -padded(problem), -_lifetime(problem), problem.born)


def long_lived_below(problem: LayoutProblem) -> LongArray:
    """Those that live for more than a sixteenth of all steps, the longest life first; then the rest, the largest first.

    A sequence, int64[n]. With the long-lived at the bottom, what lies above them falls apart into segments of time that
    do not touch: each is laid out by itself and all share the same bytes (Shu et al. 2023, "ROAM", arXiv 2310.19295,
    Fig. 5).
    """
    life = _lifetime(problem)
    steps = int(problem.dead.max(initial=0)) - int(problem.born.min(initial=0))
    long_lived = 16 * life > steps
    return _sorted(~long_lived, np.where(long_lived, -life, 0), -padded(problem), -life, problem.born)


def by_width_area_total(problem: LayoutProblem) -> LongArray:
    """Lifetime, then area, then pressure, each falling: a sequence, int64[n]."""
    return _sorted(-_lifetime(problem), -_area(problem), -fullest(problem))


def by_total_area_width(problem: LayoutProblem) -> LongArray:
    """Pressure, then area, then lifetime, each falling: a sequence, int64[n]."""
    return _sorted(-fullest(problem), -_area(problem), -_lifetime(problem))


def by_total_width_area(problem: LayoutProblem) -> LongArray:
    """Pressure, then lifetime, then area, each falling: a sequence, int64[n]."""
    return _sorted(-fullest(problem), -_lifetime(problem), -_area(problem))


def fullest(problem: LayoutProblem) -> LongArray:
    """Live bytes at the fullest step of each storage's life: int64[n]."""
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

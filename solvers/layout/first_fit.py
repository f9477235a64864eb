"""Place storages one by one, each in the lowest gap that fits: what all heuristics by sequence share."""

import numpy as np

from roamc.solvers.arrays import LongArray
from roamc.solvers.layout.problem import LayoutProblem, padded


def first_fit(problem: LayoutProblem, sequence: LongArray) -> LongArray:
    """Place storages in the given sequence, each at the lowest offset free all its life: int64[n] bytes.

    sequence: int64[n], a permutation of the storages. Storages without bytes get offset 0. O(n^2) in vector
    operations.

    The placed storages are kept sorted by offset. For a new one, those that share a step with it are walked
    upwards with the highest end so far; the first gap between that and the next offset that is wide enough is
    taken:

        bytes   0 [ a ]......[ b    ]            gaps: between a and c, between the higher end of b, c and d
                        [ c ]        ....[ d ]
    """
    size = padded(problem)
    low, high = np.empty((2, problem.num_storages), dtype=np.int64)
    born, dead = np.empty((2, problem.num_storages), dtype=np.int32)
    offset = np.zeros(problem.num_storages, dtype=np.int64)
    wanted = sequence[size[sequence] > 0]
    columns = (size[wanted].tolist(), problem.born[wanted].tolist(), problem.dead[wanted].tolist())
    rows = zip(wanted.tolist(), *columns, strict=True)
    for count, (storage, room, first, end) in enumerate(rows):
        neighbours = np.flatnonzero((born[:count] < end) & (dead[:count] > first))
        place = _lowest_gap(low[neighbours], high[neighbours], room)
        offset[storage] = place
        at = int(np.searchsorted(low[:count], place))
        for column, value in ((low, place), (high, place + room), (born, first), (dead, end)):
            column[at + 1 : count + 1] = column[at:count]
            column[at] = value
    return offset


def _lowest_gap(low: LongArray, high: LongArray, room: int) -> int:
    """The lowest offset at which `room` bytes fit between intervals [low, high), sorted by low."""
    if len(low) == 0 or low[0] >= room:
        return 0
    tops = np.maximum.accumulate(high)
    fits = low[1:] - tops[:-1] >= room
    gap = int(fits.argmax()) if len(fits) else 0
    if len(fits) and fits[gap]:
        return int(tops[gap])
    return int(tops[-1])

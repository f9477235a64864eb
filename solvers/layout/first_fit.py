"""Place storages one by one, each in the lowest gap that fits: what all heuristics by sequence share."""

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.compiled import compiled
from roamc.solvers.layout.problem import LayoutProblem, padded, parts


def first_fit(problem: LayoutProblem, sequence: LongArray) -> LongArray:
    """Place storages in the given sequence, each at the lowest offset free all its life: int64[n] bytes.

    sequence: int64[n], a permutation of the storages. Fixed storages come before all others. Storages without
    bytes get offset 0. O(n^2) at worst, compiled.

    The placed parts are kept sorted by their lowest byte. For a new storage they are walked upwards, those that
    share a step with it push it up, and the walk ends at the first that begins above its end:

        bytes   0 [ a ]......[ b    ]            gaps: between a and c, between the higher end of b, c and d
                        [ c ]        ....[ d ]
    """
    rectangle = parts(problem)
    held = problem.fixed[sequence] >= 0
    ordered = np.concatenate([sequence[held], sequence[~held]]).astype(np.int64)
    ordered = ordered[(padded(problem) > 0)[ordered]]
    offset = np.maximum(problem.fixed, 0)
    _fill(
        ordered,
        problem.fixed,
        problem.own_alignment,
        rectangle.start,
        rectangle.born,
        rectangle.dead,
        rectangle.low,
        rectangle.high,
        offset,
    )
    return offset


@compiled
def _fill(
    ordered: LongArray,
    fixed: LongArray,
    alignment: LongArray,
    start: LongArray,
    born: LongArray,
    dead: LongArray,
    low: LongArray,
    high: LongArray,
    offset: LongArray,
) -> None:
    """Write the offset of every storage of `ordered`. `stack` holds the placed parts by their lowest byte."""
    bottom, top = np.empty_like(low), np.empty_like(high)
    stack = np.empty(len(born), dtype=np.int32)
    count = 0
    for storage in ordered:
        place = fixed[storage]
        moved = place < 0
        place = max(place, 0)
        while moved:  # a part that is pushed up takes the others along, and they may hit something in turn
            moved = False
            for part in range(start[storage], start[storage + 1]):
                room = high[part] - low[part]
                raised = _lowest(
                    stack[:count], bottom, top, born, dead, part, place + low[part], room, low[part], alignment[storage]
                )
                moved = moved or (raised > place and start[storage + 1] - start[storage] > 1)
                place = raised
        offset[storage] = place
        for part in range(start[storage], start[storage + 1]):
            bottom[part] = place + low[part]
            top[part] = place + high[part]
            at = count
            while at > 0 and bottom[stack[at - 1]] > bottom[part]:
                stack[at] = stack[at - 1]
                at -= 1
            stack[at] = part
            count += 1


@compiled
def _lowest(
    stack: IntArray,
    bottom: LongArray,
    top: LongArray,
    born: LongArray,
    dead: LongArray,
    part: int,
    at: int,
    room: int,
    low: int,
    alignment: int,
) -> int:
    """The lowest aligned offset from `at - low` on at which the part's `room` bytes are free."""
    first, end = born[part], dead[part]
    for other in stack:
        if bottom[other] >= at + room:
            break
        if top[other] > at and born[other] < end and first < dead[other]:
            at = -(-(top[other] - low) // alignment) * alignment + low
    return at - low

"""Place storages one by one, each in the lowest gap that fits: what all heuristics by sequence share."""

from typing import NamedTuple

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.compiled import compiled
from roamc.solvers.layout.effort import EFFORT, Effort
from roamc.solvers.layout.problem import LayoutProblem, Parts, padded, parts

_BORN, _DEAD, _BOTTOM, _TOP = range(4)
"""Columns of `_Stacks.life`."""


class _Stacks(NamedTuple):
    """The placed parts by their lowest byte: those that live in a slice of time for each slice, and all of them.

    life: int64[parts, 4], the steps in which each part lives and, once placed, its bytes: one row, one line of memory.
    from_slice, to_slice: int64[parts], the slices in which it lives.
    stacked: int32, stack by stack, that of all parts last.  begin, height: int64[slices + 1], where each begins and
    how many it has.  seen: int64[slices + 1], up to where a walk has come.
    """

    life: LongArray
    from_slice: LongArray
    to_slice: LongArray
    stacked: IntArray
    begin: LongArray
    height: LongArray
    seen: LongArray


def first_fit(problem: LayoutProblem, sequence: LongArray, effort: Effort = EFFORT) -> LongArray:
    """Place storages in the given sequence, each at the lowest offset free all its life: int64[n] bytes.

    sequence: int64[n], a permutation of the storages; those with fixed offsets are placed before all others anyway.
    effort: only `effort.slice_births` is read, which changes the time and not the result.

    Storages without bytes get offset 0, or the offset at which they are fixed. O(n^2) at worst, compiled.

    The placed parts are kept sorted by their lowest byte. For a new storage the parts are walked upwards: a part that
    shares a step with the storage pushes it up, and the walk ends at the first part that begins above its end:

        bytes   0 [ a ]......[ b    ]            gaps: between a and c, between the higher end of b, c and d
                        [ c ]        ....[ d ]

    With many parts, time is cut into slices, and a short-lived storage walks only over the parts in its slices.
    """
    rectangle = parts(problem)
    fixed = problem.fixed[sequence] >= 0
    ordered = np.concatenate([sequence[fixed], sequence[~fixed]]).astype(np.int64)
    ordered = ordered[(padded(problem) > 0)[ordered]]
    offset = np.maximum(problem.fixed, 0)
    _fill(
        ordered,
        problem.fixed,
        problem.own_alignment,
        rectangle.start,
        rectangle.low,
        rectangle.high,
        _no_stacks(rectangle, effort.slice_births),
        offset,
    )
    return offset


def _no_stacks(rectangle: Parts, births: int) -> _Stacks:
    """Empty stacks, with room for all parts that will be in them; about `births` are born in each slice."""
    born, dead = rectangle.born, rectangle.dead
    cuts = np.unique(np.sort(born)[births::births][:-1]) if len(born) else born
    slices = len(cuts) + 1 if len(cuts) else 0
    from_slice = np.searchsorted(cuts, born, side="right")
    to_slice = np.searchsorted(cuts, dead, side="left") + min(slices, 1)
    enter, leave = (np.bincount(edge, minlength=slices + 1) for edge in (from_slice, to_slice))
    room = np.append(np.cumsum(enter - leave)[:slices], len(born))
    return _Stacks(
        life=np.stack([born, dead, np.zeros_like(born), np.zeros_like(born)], axis=1),
        from_slice=from_slice,
        to_slice=to_slice,
        stacked=np.empty(room.sum(), dtype=np.int32),
        begin=np.cumsum(room) - room,
        height=np.zeros(slices + 1, dtype=np.int64),
        seen=np.zeros(slices + 1, dtype=np.int64),
    )


@compiled
def _fill(
    ordered: LongArray,
    fixed: LongArray,
    alignment: LongArray,
    start: LongArray,
    low: LongArray,
    high: LongArray,
    stacks: _Stacks,
    offset: LongArray,
) -> None:
    """Write the offset of every storage of `ordered`."""
    for storage in ordered:
        place = fixed[storage]
        moved = place < 0
        place = max(place, 0)
        while moved:  # a part that is pushed up takes the others along, and they may hit something in turn
            moved = False
            for part in range(start[storage], start[storage + 1]):
                room = high[part] - low[part]
                raised = _lowest(stacks, part, place + low[part], room, low[part], alignment[storage])
                moved = moved or (raised > place and start[storage + 1] - start[storage] > 1)
                place = raised
        offset[storage] = place
        for part in range(start[storage], start[storage + 1]):
            stacks.life[part, _BOTTOM], stacks.life[part, _TOP] = place + low[part], place + high[part]
            for number in range(stacks.from_slice[part], stacks.to_slice[part]):
                _insert(stacks, number, part)
            _insert(stacks, len(stacks.height) - 1, part)


@compiled
def _insert(stacks: _Stacks, number: int, part: int) -> None:
    """Put a part into a stack, behind all that begin no higher."""
    stacked, life, begin = stacks.stacked, stacks.life, stacks.begin[number]
    end = begin + stacks.height[number]
    lo, hi = begin, end
    while lo < hi:
        middle = (lo + hi) // 2
        if life[stacked[middle], _BOTTOM] <= life[part, _BOTTOM]:
            lo = middle + 1
        else:
            hi = middle
    for at in range(lo, end + 1):
        part, stacked[at] = stacked[at], part
    stacks.height[number] += 1


@compiled
def _lowest(stacks: _Stacks, part: int, at: int, room: int, low: int, alignment: int) -> int:
    """The lowest aligned offset from `at - low` on at which the part's `room` bytes are free.

    Walks the stacks of its slices in turn until none pushes it up; or the stack of all parts, if that is no longer
    than those together.
    """
    lo, hi, last = stacks.from_slice[part], stacks.to_slice[part], len(stacks.height) - 1
    length = 0
    for number in range(lo, hi):
        length += stacks.height[number]
        stacks.seen[number] = stacks.begin[number]
    if lo == hi or length >= stacks.height[last]:
        lo, hi = last, last + 1
        stacks.seen[last] = stacks.begin[last]
    quiet, number = 0, lo
    while quiet < hi - lo:
        pushed = _walk(stacks, number, part, at, room, low, alignment)
        quiet = quiet + 1 if pushed == at else 1
        at = pushed
        number = number + 1 if number + 1 < hi else lo
    return at - low


@compiled
def _walk(stacks: _Stacks, number: int, part: int, at: int, room: int, low: int, alignment: int) -> int:
    """Walk on in a stack, from where the last walk for the part ended: its lowest byte, pushed up by what is there."""
    stacked, life = stacks.stacked, stacks.life
    born, dead = life[part, _BORN], life[part, _DEAD]
    index, end = stacks.seen[number], stacks.begin[number] + stacks.height[number]
    while index < end:
        other = stacked[index]
        if life[other, _BOTTOM] >= at + room:
            break
        if life[other, _TOP] > at and life[other, _BORN] < dead and born < life[other, _DEAD]:
            at = -(-(life[other, _TOP] - low) // alignment) * alignment + low
        index += 1
    stacks.seen[number] = index
    return at

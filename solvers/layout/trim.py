"""Trims: ranges of the arena that are given back to the system while nothing lies there.

The arena has one size, that of its fullest step, and what cannot lie in it comes on top. Where the sum is above the
peak that we aim at, pages of the arena in which nothing lies at that time are trimmed, and come again when needed:

    address ^  aaaaaaaaaaaaaa
            |  bbbb  oo  ccccc        at the steps where the outside is large the range oo is trimmed
            |  ddddddddddddddd
            +-----------------> step, round and round: a trim may last from the end of a step into the next

The system clears a page that comes again, so every trim has its price. Arenas on a CPU alone are trimmed: only there
can parts of a block be given back. A storage may lie over a trim's edge, before and after it, for addresses stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from roamc.solvers.arrays import BoolArray, LongArray
from roamc.solvers.layout.effort import LARGE_PAGE, TrimEffort
from roamc.solvers.layout.problem import Bytes, Step


@dataclass(frozen=True)
class Room:
    """A laid out arena with the lives of its k storages, and the bytes outside of it.

    Attributes:
        arena_bytes: size of the arena.
        offset: int64[k], offsets of the storages, in bytes.
        size: int64[k] bytes of the storages, rounded up to the alignment.
        born: int64[k], first step of each storage.
        dead: int64[k], step behind the last of each storage.
        outsides: int64[n + 1] bytes outside the arena at each moment: the n steps (operators), and the time until
            the first of them runs again; one array for each way in which the caller may behave.
    """

    arena_bytes: Bytes
    offset: LongArray
    size: LongArray
    born: LongArray
    dead: LongArray
    outsides: tuple[LongArray, ...]


@dataclass(frozen=True)
class IdleRange:
    """A range of the arena, bytes ``[low, high)``, in which nothing lies for ``length`` moments from ``first`` on.

    The n + 1 moments are the n steps and the time between two runs, as in :class:`Room`; a range may go on from the
    last moment to the first.
    """

    low: Bytes
    high: Bytes
    first: Step
    length: int


@dataclass(frozen=True)
class Trimming:
    """One choice of trims.

    Attributes:
        ranges: the idle ranges that are trimmed.
        total: the peak of arena and outside with these trims, in bytes, summed over ``Room.outsides``.
    """

    ranges: tuple[IdleRange, ...]
    total: Bytes

    @property
    def trimmed_bytes(self) -> Bytes:
        """Sum of the bytes of `ranges`: what is given back and then used again in one run of the graph."""
        return sum(gap.high - gap.low for gap in self.ranges)

    @property
    def large(self) -> Bytes:
        """Bytes of ``trimmed_bytes`` that lie in whole large pages, those of 2 MiB."""
        pages = ((gap.high // LARGE_PAGE) - -(-gap.low // LARGE_PAGE) for gap in self.ranges)
        return LARGE_PAGE * sum(max(0, count) for count in pages)


def untrimmed(room: Room) -> Trimming:
    """Return the choice of no trims, whose ``total`` is the peak of the whole arena and the bytes outside."""
    return Trimming((), sum(room.arena_bytes + int(outside.max()) for outside in room.outsides))


def trimmings(room: Room, effort: TrimEffort) -> Iterator[Trimming]:
    """Yield choices of trims: first none, then, if the arena has ``effort.least_bytes``, one for each aim.

    For each size in ``effort.pieces`` the aims are falling peaks, one for each of ``effort.shares``; an aim that trims
    cannot reach is left out.
    """
    yield untrimmed(room)
    if room.arena_bytes >= effort.least_bytes:
        for piece in effort.pieces:
            yield from _trimmings(room, piece * -(-room.arena_bytes // (piece * effort.most_pieces)), effort.shares)


def _trimmings(room: Room, piece: Bytes, shares: Sequence[float]) -> Iterator[Trimming]:
    """The choices for an arena that is cut into pieces of ``piece`` bytes."""
    busy, size = _busy(room, piece)
    gaps = _IdleRanges(busy, size)
    totals = np.stack([room.arena_bytes + outside for outside in room.outsides])
    highest, lowest = totals.max(axis=1), (totals - size @ ~busy).max(axis=1)
    for share in shares:
        aims = lowest + (share * (highest - lowest)).astype(np.int64)
        over = totals - aims[:, None]
        if (chosen := gaps.cover(over)) is not None:
            yield Trimming(gaps.merged(chosen), int((over.max(axis=1) + aims).sum()))


def trimmed(gaps: Sequence[IdleRange], steps: int) -> LongArray:
    """Return the trimmed bytes at each moment, int64[n + 1], for n = ``steps``: the steps, then the time between runs.

    Args:
        gaps: the ranges that are trimmed, which do not overlap.
        steps: number n of steps.
    """
    trimmed_bytes = np.zeros(steps + 1, dtype=np.int64)
    for gap in gaps:
        _add(trimmed_bytes[None], gap.first, gap.length, gap.high - gap.low)
    return trimmed_bytes


def _busy(room: Room, piece: Bytes) -> tuple[BoolArray, LongArray]:
    """Whether something lies in a piece at a moment, bool[pieces, n + 1], and bytes of each piece."""
    count, moments = -(-room.arena_bytes // piece), len(room.outsides[0])
    change = np.zeros((count, moments + 1), dtype=np.int32)
    for offset, size, born, dead in zip(room.offset, room.size, room.born, room.dead, strict=True):
        low, high = offset // piece, -(-(offset + size) // piece)
        change[low:high, born] += 1
        change[low:high, dead] -= 1
    edges = np.minimum(np.arange(count + 1, dtype=np.int64) * piece, room.arena_bytes)
    return np.cumsum(change, axis=1)[:, :moments] > 0, np.diff(edges)


class _IdleRanges:
    """All gaps of all pages as arrays; moments go round."""

    def __init__(self, busy: BoolArray, size: LongArray) -> None:
        self.moments = busy.shape[1]
        self.page, self.first, self.length = _free_runs(busy)
        self.size = size[self.page]
        self.low = np.concatenate(([0], np.cumsum(size)))[self.page]

    def cover(self, over: LongArray) -> list[int] | None:
        """Choose gaps that together bring ``over`` to 0 or below, by number; None if the aim is out of reach.

        For the moment that is highest above the aim, gaps that include the moment are taken, first the ones that help
        at the most moments; then for the next moment. In the end, gaps that others have made needless are left out.

        Args:
            over: int64[ways, n + 1] bytes above the aim, one row for each array of ``Room.outsides``; changed in place.
        """
        chosen: list[int] = []
        unused = np.ones(len(self.first), dtype=bool)
        while (worst := int(over.max())) > 0:
            moment = int(over.max(axis=0).argmax())
            inside = np.flatnonzero(unused & ((moment - self.first) % self.moments < self.length))
            ranked = inside[np.lexsort((-self.low[inside], -self._helps(over, inside)))]
            count = int(np.searchsorted(np.cumsum(self.size[ranked]), worst)) + 1
            if count > len(ranked):
                return None
            for gap in ranked[:count].tolist():
                self._take(over, gap, -1)
            unused[ranked[:count]] = False
            chosen += ranked[:count].tolist()
        return [gap for gap in reversed(chosen) if not self._needless(over, gap)]

    def merged(self, chosen: Sequence[int]) -> tuple[IdleRange, ...]:
        """Return the gaps with the numbers in ``chosen``, those of neighbouring pages and equal time as one range."""
        ranges: list[IdleRange] = []
        columns = np.stack([self.first, self.length, self.low, self.size])[:, list(chosen)]
        for first, length, low, size in sorted(columns.T.tolist()):
            last = ranges[-1] if ranges else None
            if last is not None and (last.first, last.length, last.high) == (first, length, low):
                ranges[-1] = IdleRange(last.low, low + size, first, length)
            else:
                ranges.append(IdleRange(low, low + size, first, length))
        return tuple(ranges)

    def _helps(self, over: LongArray, gaps: LongArray) -> LongArray:
        """At how many moments above the aim each gap lies."""
        above = (over > 0).sum(axis=0)
        before = np.concatenate(([0], np.cumsum(np.concatenate((above, above)))))
        counted: LongArray = before[self.first[gaps] + self.length[gaps]] - before[self.first[gaps]]
        return counted

    def _take(self, over: LongArray, gap: int, sign: int) -> None:
        _add(over, int(self.first[gap]), int(self.length[gap]), sign * int(self.size[gap]))

    def _needless(self, over: LongArray, gap: int) -> bool:
        """Whether all stays within the aim without a chosen gap; its bytes are then added to ``over`` again."""
        self._take(over, gap, 1)
        if (over <= 0).all():
            return True
        self._take(over, gap, -1)
        return False


def _add(rows: LongArray, first: Step, length: int, nbytes: Bytes) -> None:
    """Add ``nbytes`` to ``length`` moments from ``first`` on, in place, going on with the first behind the last."""
    moments = rows.shape[1]
    rows[:, first : first + length] += nbytes
    rows[:, : max(0, first + length - moments)] += nbytes


def _free_runs(busy: BoolArray) -> tuple[LongArray, LongArray, LongArray]:
    """(pages, first moments, lengths) of all runs of moments in which a page is free; none of pages never used.

    Sorted by page; in a page, from the first moment on at which it is used, and round.
    """
    moments = busy.shape[1]
    before = np.roll(busy, 1, axis=1)
    used = np.argmax(busy, axis=1)
    page, first = np.nonzero(before & ~busy)
    begins = (first - used[page]) % moments
    pages, ends = np.nonzero(busy & ~before)
    ends = (ends - used[pages] - 1) % moments + 1
    order = np.lexsort((begins, page))
    return page, first[order], ends[np.lexsort((ends, pages))] - begins[order]

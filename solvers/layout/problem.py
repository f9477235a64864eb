"""The layout problem (dynamic storage allocation with known lifetimes) and its answer, as data.

A storage occupies [offset, offset + padded size) bytes of one arena during the half-open steps [born, dead).
Two storages conflict if both are live at some step and both have bytes; they must not overlap in the arena.
Offsets are multiples of the alignment, so placing padded sizes loses nothing: what follows a storage begins
at an aligned offset anyway.

A storage may have an alignment of its own, a fixed offset, a hint, and gaps: steps at which it needs none of
its bytes, or only a window of them. It is then several rectangles that move together, its parts:

    bytes   |xxxxxx|      |xxxxxx|      a storage with two gaps: in the first it needs nothing,
            |xxxxxx|      |xxxx  |      in the second a window of its bytes
            born  gap    gap  gap dead

The lower bound on the arena is the peak of live padded bytes; arena / bound - 1 is the fragmentation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray, read_only
from roamc.solvers.status import Status

Bytes = int
Step = int
StorageIndex = int

DEFAULT_ALIGNMENT = 64
"""Bytes to which PyTorch's allocator for CPUs aligns: a cache line of most processors."""

MOST_BYTES = 2**62
"""No arena of a problem has more bytes, so that the sum of two offsets fits into int64."""

_MOST_STEPS = 2**31 - 1
"""The last step that int32 holds."""


@dataclass(frozen=True)
class Gap:
    """Steps of a storage's life at which the storage needs none of its bytes, or only some.

    storage: index of the storage.
    born, dead: the half-open steps [born, dead) of the gap.
    low, high: bytes [low, high) of the storage, counted from its offset, that are needed during the gap; none if equal.
    """

    storage: StorageIndex
    born: Step
    dead: Step
    low: Bytes = 0
    high: Bytes = 0


@dataclass(frozen=True, eq=False)
class LayoutProblem:
    """n storages to be placed in one arena, as read-only arrays; build it with `make_problem`, which checks it.

    size: int64[n] bytes, not padded.
    born, dead: int32[n]; storage i lives in the half-open steps [born[i], dead[i]).
    alignment: bytes, a power of two; offsets are multiples of it, and sizes are padded to it.
    own_alignment: int64[n] bytes, a multiple of `alignment` that the storage's offset must be a multiple of.
    fixed: int64[n] bytes, the offset that a storage must have; -1 for a storage that may lie anywhere.
    hint: int64[n] bytes, an offset that one heuristic tries to come near; -1 for none.
    gaps: steps at which a storage needs none or only some of its bytes, sorted by storage and step.
    """

    size: LongArray
    born: IntArray
    dead: IntArray
    alignment: Bytes
    own_alignment: LongArray
    fixed: LongArray
    hint: LongArray
    gaps: tuple[Gap, ...]

    @property
    def num_storages(self) -> int:
        """Number of storages, n."""
        return len(self.size)

    @property
    def plain(self) -> bool:
        """Whether the problem has no gaps and no fixed offsets; alignments of storages' own and hints are allowed."""
        return not self.gaps and bool((self.fixed < 0).all())


@dataclass(frozen=True, eq=False)
class LayoutSolution:
    """An offset for every storage and what is known about the arena.

    offset: int64[n] bytes; 0 for storages without bytes that are not fixed.
    arena_bytes: the highest end of a padded storage.
    bound_bytes: lower bound on every arena: the peak of live padded bytes or a fixed storage's end, the larger.
    status: OPTIMAL if arena_bytes == bound_bytes or a completed search proved that no lower arena exists; LIMIT
        if a limit stopped the search; GAP if no search ran, or if the arena meets the capacity that was asked for;
        INFEASIBLE if it is proved that no arena meets the capacity.
    algorithm: the name of the algorithm that found the layout.
    work: number of storages placed, over all algorithms that ran.
    candidates: (name, arena bytes) of every algorithm that ran, in the order in which they ran.
    capacity: bytes of the arena that were asked for; None to minimize.
    """

    offset: LongArray
    arena_bytes: Bytes
    bound_bytes: Bytes
    status: Status
    algorithm: str
    work: int
    candidates: tuple[tuple[str, Bytes], ...]
    capacity: Bytes | None = None


@dataclass(frozen=True, eq=False)
class Parts:
    """The rectangles of all storages that have bytes, by storage and step.

    start: int64[n + 1]; storage i has the parts in [start[i], start[i + 1]).
    born, dead: int64[parts], the half-open steps of each part.
    low, high: int64[parts], the bytes [low, high) of each part, counted from the storage's offset.
    """

    start: LongArray
    born: LongArray
    dead: LongArray
    low: LongArray
    high: LongArray


def make_problem(
    size: Sequence[Bytes] | LongArray,
    born: Sequence[Step] | LongArray | IntArray,
    dead: Sequence[Step] | LongArray | IntArray,
    alignment: Bytes = DEFAULT_ALIGNMENT,
    *,
    own_alignment: Sequence[Bytes] | LongArray | None = None,
    fixed: Sequence[Bytes] | LongArray | None = None,
    hint: Sequence[Bytes] | LongArray | None = None,
    gaps: Sequence[Gap] = (),
) -> LayoutProblem:
    """Check the parts of a layout problem and pack them into a `LayoutProblem`.

    Storage i is entry i of every list; all lists have the same length n.

    size: bytes, not padded.
    born, dead: storage i lives in the half-open steps [born[i], dead[i]).
    alignment: bytes, a power of two; every offset is a multiple of it, and sizes are padded to it.
    own_alignment: bytes that the offset of a storage must be a multiple of in addition, not necessarily a power of two;
        1 for none, as for all storages if left out.
    fixed: the offset that a storage must have, in bytes; -1 for one that is free to choose, as for all if left out.
    hint: an offset, in bytes, that a heuristic tries to keep to by placing storages in the sequence of their hints;
        no layout has to. -1 for none, as for all if left out.
    gaps: steps within a storage's life at which it needs none of its bytes, or only a window of them; in any sequence,
        those of one storage must not overlap in time.

    Raises ValueError, naming the storage, for a negative size, a birth before step 0, a death that is not
    after the birth, lists of different lengths, an alignment that is not a power of two (or, of its own, below
    1), a fixed offset that is not aligned or over another, a gap outside of its storage or over another, or more
    than 2**62 bytes in all.
    """
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"alignment {alignment} is not a power of two")
    if not len(size) == len(born) == len(dead):
        raise ValueError(f"{len(size)} sizes, {len(born)} births and {len(dead)} deaths")
    for storage, (num_bytes, first, end) in enumerate(zip(size, born, dead, strict=True)):
        if num_bytes < 0:
            raise ValueError(f"storage {storage} has a negative size: {num_bytes}")
        if not 0 <= first < end <= _MOST_STEPS:
            raise ValueError(f"storage {storage} lives from step {first} to {end}")
    own = _column("own alignments", own_alignment, len(size), 1)
    place = _column("fixed offsets", fixed, len(size), -1)
    _check_places(own, place)
    aligned = np.lcm(own, alignment)
    wrong = np.flatnonzero((place >= 0) & (place % aligned != 0))
    if len(wrong):
        storage = int(wrong[0])
        raise ValueError(f"storage {storage} is fixed at {place[storage]}, alignment {aligned[storage]}")
    rooms = sum(int(num_bytes) + alignment for num_bytes in size) + int(aligned.astype(np.float64).sum())
    if rooms + int(place.max(initial=0)) > MOST_BYTES:
        raise ValueError("padded sizes add up to more than 2**62 bytes")
    problem = LayoutProblem(
        size=read_only(np.array(size, dtype=np.int64)),
        born=read_only(np.array(born, dtype=np.int32)),
        dead=read_only(np.array(dead, dtype=np.int32)),
        alignment=alignment,
        own_alignment=read_only(aligned),
        fixed=read_only(place),
        hint=read_only(_column("hints", hint, len(size), -1)),
        gaps=tuple(sorted(gaps, key=lambda gap: (gap.storage, gap.born))),
    )
    _check_gaps(problem)
    _check_fixed(problem)
    return problem


def _column(name: str, values: Sequence[int] | LongArray | None, length: int, default: int) -> LongArray:
    column = np.full(length, default, dtype=np.int64) if values is None else np.array(values, dtype=np.int64)
    if len(column) != length:
        raise ValueError(f"{len(column)} {name} for {length} storages")
    return column


def _check_places(own: LongArray, place: LongArray) -> None:
    for storage in np.flatnonzero((own < 1) | (own > MOST_BYTES)).tolist():
        raise ValueError(f"storage {storage} has an alignment of {own[storage]}")
    for storage in np.flatnonzero((place < -1) | (place > MOST_BYTES)).tolist():
        raise ValueError(f"storage {storage} is fixed at {place[storage]}")


def _check_gaps(problem: LayoutProblem) -> None:
    before = Gap(-1, 0, 0)
    for gap in problem.gaps:
        if not 0 <= gap.storage < problem.num_storages:
            raise ValueError(f"a gap names storage {gap.storage} of {problem.num_storages}")
        subject = f"storage {gap.storage} has a gap from step {gap.born} to {gap.dead}"
        if not problem.born[gap.storage] <= gap.born < gap.dead <= problem.dead[gap.storage]:
            raise ValueError(f"{subject} outside of its life")
        if not 0 <= gap.low <= gap.high <= problem.size[gap.storage]:
            raise ValueError(f"{subject} with a window {gap.low}:{gap.high} outside of its bytes")
        if gap.storage == before.storage and gap.born < before.dead:
            raise ValueError(f"{subject} over another")
        before = gap


def _check_fixed(problem: LayoutProblem) -> None:
    rectangle = parts(problem)
    owner = np.repeat(np.arange(problem.num_storages), np.diff(rectangle.start))
    rows = np.flatnonzero(problem.fixed[owner] >= 0)
    owner, born, dead = owner[rows], rectangle.born[rows], rectangle.dead[rows]
    low, high = (problem.fixed[owner] + edge[rows] for edge in (rectangle.low, rectangle.high))
    for i in range(len(rows)):
        clash = (born[:i] < dead[i]) & (born[i] < dead[:i]) & (low[:i] < high[i]) & (low[i] < high[:i])
        if clash.any():
            raise ValueError(f"storages {owner[:i][clash][0]} and {owner[i]} are fixed over each other")


def padded(problem: LayoutProblem) -> LongArray:
    """Return the sizes of all storages rounded up to `problem.alignment`: int64[n] bytes."""
    rounded: LongArray = (problem.size + (problem.alignment - 1)) & ~np.int64(problem.alignment - 1)
    return rounded


def parts(problem: LayoutProblem) -> Parts:
    """Return the rectangles of every storage: one, several if the storage has gaps, none if it has no bytes."""
    size = padded(problem)
    rows: dict[int, list[tuple[Step, Step, Bytes, Bytes]]] = {}
    for gap in problem.gaps:
        storage = gap.storage
        own_rows = rows.setdefault(
            storage, [(int(problem.born[storage]), int(problem.dead[storage]), 0, int(size[storage]))]
        )
        first, end, low, high = own_rows.pop()
        own_rows += [(first, gap.born, low, high), (gap.born, gap.dead, gap.low, gap.high), (gap.dead, end, low, high)]
    counts = (size > 0).astype(np.int64)
    for storage, own_rows in rows.items():
        rows[storage] = [row for row in own_rows if row[0] < row[1] and row[2] < row[3]]
        counts[storage] = len(rows[storage])
    start = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    owner = np.repeat(np.arange(problem.num_storages), counts)
    columns = np.stack([problem.born[owner], problem.dead[owner], np.zeros_like(owner), size[owner]]).astype(np.int64)
    for storage, own_rows in rows.items():
        columns[:, start[storage] : start[storage + 1]] = np.array(own_rows, dtype=np.int64).reshape(-1, 4).T
    born, dead, low, high = columns
    return Parts(start, born, dead, low, high)


def live_bytes(problem: LayoutProblem) -> tuple[LongArray, LongArray]:
    """Return the live padded bytes over time, gaps taken into account, as (steps, bytes).

    steps: int64[k], ascending: the steps at which some part of a storage is born or dies.
    bytes: int64[k], the live bytes from each of the steps up to the next.
    """
    piece = parts(problem)
    steps, event = np.unique(np.concatenate([piece.born, piece.dead]), return_inverse=True)
    room = piece.high - piece.low
    change = np.zeros(len(steps), dtype=np.int64)
    np.add.at(change, event[: len(room)], room)
    np.subtract.at(change, event[len(room) :], room)
    return steps.astype(np.int64), np.cumsum(change)


def live_pairs(problem: LayoutProblem) -> int:
    """Return the number of pairs of storages whose lives have a step in common; gaps are not looked at."""
    born, dead = np.sort(problem.born), np.sort(problem.dead)
    before = np.arange(len(born)) - np.searchsorted(dead, born, side="right")
    return int(before.sum())


def lower_bound(problem: LayoutProblem) -> Bytes:
    """Return a lower bound on every arena in bytes: the larger of the peak of live padded bytes and any fixed end.

    A fixed end is the fixed offset of a storage plus its padded size.
    """
    size = padded(problem)
    fixed = (problem.fixed >= 0) & (size > 0)
    return max(int(live_bytes(problem)[1].max(initial=0)), int((problem.fixed + size)[fixed].max(initial=0)))


def arena_bytes(problem: LayoutProblem, offset: LongArray) -> Bytes:
    """Return the bytes of the arena of a layout: the highest end of a padded storage; 0 if no storage has bytes.

    offset: int64[n] bytes.
    """
    size = padded(problem)
    return int((offset + size)[size > 0].max(initial=0))

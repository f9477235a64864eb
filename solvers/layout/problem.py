"""The layout problem (dynamic storage allocation with known lifetimes) and its answer, as data.

A storage occupies [offset, offset + padded size) bytes of one arena during the half-open steps [born, dead).
Two storages conflict if both are live at some step and both have bytes; they must not overlap in the arena.
Offsets are multiples of the alignment, so placing padded sizes loses nothing: what follows a storage begins
at an aligned offset anyway.

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
_MOST_BYTES = 2**62
_MOST_STEPS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class LayoutProblem:
    """n storages; build it with `make_problem`, which checks it.

    size: int64[n] bytes, not padded.  born, dead: int32[n], half-open steps.  alignment: bytes, a power of
    two. All arrays are read-only.
    """

    size: LongArray
    born: IntArray
    dead: IntArray
    alignment: Bytes

    @property
    def num_storages(self) -> int:
        """Number of storages, n."""
        return len(self.size)


@dataclass(frozen=True, eq=False)
class LayoutSolution:
    """An offset for every storage and what is known about the arena.

    offset: int64[n] bytes; 0 for storages without bytes.  arena_bytes: the highest end of a padded storage.
    bound_bytes: the peak of live padded bytes. status: OPTIMAL if arena_bytes == bound_bytes or a completed
    search proved that no lower arena exists; LIMIT if the
        node limit stopped the search; GAP if no search was asked for.
    algorithm: the name of the algorithm that found it.  work: storages placed, over all algorithms that ran.
    candidates: (name, arena bytes) of every algorithm that ran, in the order in which they ran.
    """

    offset: LongArray
    arena_bytes: Bytes
    bound_bytes: Bytes
    status: Status
    algorithm: str
    work: int
    candidates: tuple[tuple[str, Bytes], ...]


def make_problem(
    size: Sequence[Bytes] | LongArray,
    born: Sequence[Step] | LongArray,
    dead: Sequence[Step] | LongArray,
    alignment: Bytes = DEFAULT_ALIGNMENT,
) -> LayoutProblem:
    """Check the parts of a layout problem and pack them into arrays.

    Raises ValueError, naming the storage, for a negative size, a birth before step 0, a death that is not
    after the birth, lists of different lengths, an alignment that is not a power of two, or more than 2**62
    padded bytes in all.
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
    if sum(int(num_bytes) + alignment for num_bytes in size) > _MOST_BYTES:
        raise ValueError("padded sizes add up to more than 2**62 bytes")
    return LayoutProblem(
        size=read_only(np.array(size, dtype=np.int64)),
        born=read_only(np.array(born, dtype=np.int32)),
        dead=read_only(np.array(dead, dtype=np.int32)),
        alignment=alignment,
    )


def padded(problem: LayoutProblem) -> LongArray:
    """Sizes rounded up to the alignment: int64[n] bytes."""
    rounded: LongArray = (problem.size + (problem.alignment - 1)) & ~np.int64(problem.alignment - 1)
    return rounded


def live_bytes(problem: LayoutProblem) -> LongArray:
    """Live padded bytes at each step: int64[last death]; element t counts storages with born <= t < dead."""
    size = padded(problem)
    num_steps = int(problem.dead.max(initial=0))
    change = np.zeros(num_steps + 1, dtype=np.int64)
    np.add.at(change, problem.born, size)
    np.subtract.at(change, problem.dead, size)
    live: LongArray = np.cumsum(change[:num_steps])
    return live


def lower_bound(problem: LayoutProblem) -> Bytes:
    """The peak of live padded bytes: no arena can be smaller."""
    return int(live_bytes(problem).max(initial=0))


def arena_bytes(problem: LayoutProblem, offset: LongArray) -> Bytes:
    """The highest end of a padded storage that has bytes; 0 if there is none."""
    size = padded(problem)
    return int((offset + size)[size > 0].max(initial=0))

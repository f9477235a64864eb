"""Where every storage of a program lives: plain data, made by the layout pass, read by emission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roamc.units import Bytes


@dataclass(frozen=True)
class Trim:
    """Bytes ``[low, high)`` of the arena that are trimmed: given back to the system while nothing lies in them.

    Attributes:
        low: first byte, from the arena's start.
        high: behind the last.
        after: the operator behind which they are given back; empty where they are trimmed when the step starts.
        before: the operator in front of which they come back; empty where they stay trimmed when the step has ended.
    """

    low: Bytes
    high: Bytes
    after: str
    before: str

    @property
    def nbytes(self) -> Bytes:
        """How many."""
        return self.high - self.low


@dataclass(frozen=True)
class Layout:
    """Offsets of all temporaries of one graph.

    Attributes:
        arena_bytes: size of the arena.
        alignment: bytes; every offset is a multiple.
        offset: storage name to offset in the arena, in bytes.
        with_allocator: storages that stay with torch's allocator: results of operators without an ``out=`` form that
            are not worth a copy.
        peak_bytes: most bytes at one step, of the arena without what is trimmed and of all that lies outside it.
        needed_bytes: the same with what operators take for themselves, and tensors' own objects.
        trims: the ranges of the arena that are trimmed for a while.
    """

    arena_bytes: Bytes
    alignment: Bytes
    offset: Mapping[str, Bytes]
    with_allocator: frozenset[str]
    peak_bytes: Bytes
    needed_bytes: Bytes
    trims: tuple[Trim, ...] = ()

    @property
    def trimmed(self) -> tuple[tuple[Bytes, Bytes], ...]:
        """The ranges that are trimmed when a step starts."""
        return tuple((trim.low, trim.high) for trim in self.trims if not trim.after)

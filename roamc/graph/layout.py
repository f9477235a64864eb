"""Where every storage of a program lies: plain data, made by the layout pass and read by code generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roamc.units import Bytes


@dataclass(frozen=True)
class Trim:
    """Bytes ``[low, high)`` of the arena that are trimmed: given back to the system while nothing lies in them.

    Attributes:
        low: offset in the arena of the first byte.
        high: offset behind the last byte.
        after: name of the operator behind which they are given back; "" if they are trimmed already when the step
            starts.
        before: name of the operator in front of which they come back; "" if they stay trimmed when the step has ended.
    """

    low: Bytes
    high: Bytes
    after: str
    before: str

    @property
    def nbytes(self) -> Bytes:
        """Bytes that are trimmed."""
        return self.high - self.low


@dataclass(frozen=True)
class Layout:
    """Where each temporary of one graph lies: at an offset in the arena, or with torch's allocator.

    Attributes:
        arena_bytes: size of the arena.
        alignment: bytes; every offset is a multiple.
        offset: name of a storage in the arena to its offset, in bytes.
        with_allocator: names of storages that stay with torch's allocator: results of operators without an ``out=``
            form that are not worth a copy.
        peak_bytes: most bytes at one step, of the arena without what is trimmed and of all that lies outside it.
        needed_bytes: most bytes at one step, with each operator's workspace, the tensor objects and what other
            micro-batches in flight have saved.
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
        """The (low, high) of each range that is trimmed already when a step starts, in bytes of the arena."""
        return tuple((trim.low, trim.high) for trim in self.trims if not trim.after)

"""Where every storage of a program lives: plain data, made by the layout pass, read by emission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roamc.units import Bytes


@dataclass(frozen=True)
class Layout:
    """Offsets of all temporaries of one graph.

    Attributes:
        arena_bytes: size of the arena.
        alignment: bytes; every offset is a multiple.
        offset: storage name to offset in the arena, in bytes.
        held: storages that the allocator keeps: results of operators without an ``out=`` form that
            are not worth a copy.
    """

    arena_bytes: Bytes
    alignment: Bytes
    offset: Mapping[str, Bytes]
    held: frozenset[str]

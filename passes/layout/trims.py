"""Trims of an arena on a CPU: which there are for a layout, what they cost, and what a step takes because of them.

Where arenas cannot be trimmed, as on a GPU, there is one choice: none.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from roamc.graph.memory import Int64s
from roamc.passes.layout.eager import Bools
from roamc.passes.layout.effort import Effort
from roamc.passes.layout.placement import Placement, Table, arena_live, outsides, peak
from roamc.solvers.layout import LayoutSolution
from roamc.solvers.layout.effort import LARGE_PAGE
from roamc.solvers.layout.trim import Room, Trimming, trimmings, untrimmed
from roamc.units import Bytes


def choices(table: Table, placement: Placement, solution: LayoutSolution, *, shrinks: bool) -> Iterator[Trimming]:
    """Yield choices of trims, the first of which is none.

    Args:
        table: the graph's storages.
        placement: which of them lie with the allocator.
        solution: offsets of the others.
        shrinks: whether the arena can be trimmed during a step.
    """
    inside = ~table.foreign & ~placement.with_allocator
    room = Room(
        arena_bytes=int(solution.arena_bytes),
        offset=solution.offset,
        size=table.padded[inside],
        born=table.born[inside],
        dead=table.dead[inside],
        outsides=moments(table, placement),
    )
    yield from trimmings(room, table.effort.trim) if shrinks else (untrimmed(room),)


def moments(table: Table, placement: Placement) -> tuple[Int64s, ...]:
    """Return the bytes outside the arena at each of the n operators, and between this step and the next: int64[n + 1].

    The two arrays are for a caller that keeps the outputs of forward and for one that drops them, both with padded
    sizes and workspace. With ``torch.compile`` the optimizer runs between steps: the last entry is twice the bytes of
    the gradients, but at most the step's peak. The last entry is 0 for an arena too small to be trimmed.

    Args:
        table: the graph's storages, and the n steps.
        placement: which of them lie with the allocator.
    """
    arena = arena_live(table, placement.with_allocator)
    if peak(arena) < table.effort.trim.least_bytes:
        return tuple(np.append(outside + table.workspace, 0) for outside in outsides(table, placement.with_allocator))
    gradients = int(table.padded[table.foreign & (table.dropped == table.steps)].sum()) if table.saved.any() else 0
    by_caller = []
    for outside in outsides(table, placement.with_allocator):
        inside = outside + table.workspace
        by_caller.append(np.append(inside, min(2 * gradients, peak(arena + inside))))
    return tuple(by_caller)


def taken(table: Table, inside: Bools, arena_bytes: Bytes, outside: Int64s, *, keeps: bool) -> Bytes:
    """Return the bytes that are held when an arena with trims is allocated, before any part of it is trimmed.

    The arena counts with one large page more, to which it is aligned. An arena without saved storages is idle between
    forward and backward; if idle arenas are freed, it is allocated again at the boundary, and the bytes outside count.

    Args:
        table: the graph's k storages, and the n steps.
        inside: bool[k], which of them lie in the arena.
        arena_bytes: size of the arena.
        outside: int64[n], bytes outside the arena at every step.
        keeps: whether idle arenas are kept.
    """
    waits = bool((table.saved & inside).any())
    beside = int(outside[table.boundary]) if table.boundary and not waits and not keeps else 0
    return beside + arena_bytes + LARGE_PAGE


def price(trimming: Trimming, effort: Effort) -> Bytes:
    """Return the price of the trims in ``trimming``, in bytes of peak: 0 if there are none."""
    if not trimming.ranges:
        return 0
    small = trimming.trimmed_bytes - trimming.large
    pages = trimming.large // effort.trim_price + small // effort.small_trim_price
    return trimming.total // 2 // effort.trim_share + pages

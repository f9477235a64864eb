"""The numbers of a layout counted again from its places and trims, for plans that come from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roamc.cost import objects
from roamc.errors import PlanError
from roamc.graph import TrainGraph
from roamc.graph.layout import Layout, Trim
from roamc.graph.memory import Int64s, MemoryModel, build_memory
from roamc.passes.layout.eager import Bools
from roamc.passes.layout.placement import Table, apart_bytes, arena_live, make_table, outside_live, peak
from roamc.passes.layout.trims import taken
from roamc.units import Bytes


def recounted(graph: TrainGraph, layout: Layout) -> dict[str, Bytes]:
    """Return the numbers of :class:`roamc.passes.layout.Decision` that follow from ``layout``, by field name.

    ``needed_bytes`` is for the graph's number of threads and a caller whose idle arenas are freed, the case with the
    most bytes.

    Args:
        graph: its operators run in their present order; stays as it is.
        layout: a layout of ``graph``; its own ``peak_bytes`` and ``needed_bytes`` are not read.

    Raises:
        PlanError: a trim begins or ends at a name that is no operator of the graph.
    """
    memory = build_memory(graph)
    table = make_table(memory, graph, layout.alignment)
    apart = np.array([storage.name in layout.with_allocator for storage in memory.counted], dtype=bool)
    outside = outside_live(table, apart)
    tensors = layout.arena_bytes - _trimmed(layout.trims, memory) + outside
    return {
        "live_bytes": peak(arena_live(table, apart)),
        **apart_bytes(table, apart),
        "trimmed_bytes": sum(trim.nbytes for trim in layout.trims if trim.before),
        "peak_bytes": peak(tensors),
        "needed_bytes": _needed(table, outside, tensors, layout, ~table.foreign & ~apart),
        "waiting_bytes": table.waiting,
    }


def _trimmed(trims: Sequence[Trim], memory: MemoryModel) -> Int64s:
    """Bytes of the arena that are trimmed at every step."""
    step = {operator.node.name: number for number, operator in enumerate(memory.operators)}
    steps = len(memory.operators)
    trimmed = np.zeros(steps, dtype=np.int64)
    for trim in trims:
        unknown = [name for name in (trim.after, trim.before) if name and name not in step]
        if unknown:
            raise PlanError(f"{trim} names {unknown[0]!r}, which is no operator of this graph")
        trimmed[step[trim.after] + 1 if trim.after else 0 : step[trim.before] if trim.before else steps] += trim.nbytes
    return trimmed


def _needed(table: Table, outside: Int64s, tensors: Int64s, layout: Layout, inside: Bools) -> Bytes:
    """What ``tensors``, bytes at every step, need with what operators take for themselves, objects and what waits."""
    needed = peak(tensors + table.workspace)
    needed += objects(needed, table.objects.peak(inside))
    if layout.trims:
        needed = max(needed, taken(table, inside, layout.arena_bytes, outside, keeps=False))
    return needed + table.waiting

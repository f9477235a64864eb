"""layout: give every temporary of the step an offset in one arena, or leave it with torch's allocator.

    rewrite:  nothing in the graph; ``TrainGraph.layout`` holds arena size and offsets, which emission reads
    checks:   every temporary has one place; offsets are multiples of the alignment; no two storages that live at the
              same step overlap; the peak is what offsets and lives say (:mod:`roamc.graph.verify`)

:mod:`roamc.passes.layout.placement` says which storages may stay with the allocator; on a CPU
:mod:`roamc.passes.layout.trims` which pages of the arena are trimmed: given back to the system while nothing lies
there. :mod:`roamc.passes.layout.choose` lays several of these choices out with :mod:`roamc.solvers.layout` and takes
the one with the lowest peak.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from roamc.errors import PlanError
from roamc.graph import TrainGraph, main_device, tensors_of
from roamc.graph.layout import Layout, Trim
from roamc.graph.memory import MemoryModel, Place, build_memory
from roamc.options import LARGEST_ALIGNMENT, Options
from roamc.passes.layout.choose import best
from roamc.passes.layout.eager import Floor, eager_floor
from roamc.passes.layout.effort import EFFORT
from roamc.passes.layout.placement import Table, apart_bytes, excess, make_table
from roamc.passes.layout.recount import recounted
from roamc.solvers.layout.trim import IdleRange
from roamc.units import Bytes

__all__ = [
    "ALIGNMENT",
    "EFFORT",
    "NAME",
    "Decision",
    "Floor",
    "above_eager",
    "apply",
    "decide",
    "eager_floor",
    "lay_out",
    "least_alignment",
    "recounted",
]

NAME = "layout"

ALIGNMENT = {"cpu": 64, "cuda": 512}
"""Alignment of the arena by device type, in bytes: that of torch's own allocator, so that kernels take the paths that
they take in eager."""


@dataclass(frozen=True)
class Decision:
    """The chosen layout.

    Attributes:
        arena_bytes: size of the arena.
        alignment: every offset is a multiple of it, in bytes.
        offset: storage name to offset in the arena, in bytes.
        with_allocator: names of the temporaries left with torch's allocator.
        live_bytes: most live bytes of the arena's storages at one operator; the arena's lower bound.
        outside_bytes: most bytes outside the arena at one operator: outputs, tangents, results left with the
            allocator, results before their copy into the arena.
        copied_bytes: bytes that one run copies into the arena because an operator has no ``out=`` form.
        allocator_bytes: most bytes of results left with the allocator at one operator.
        peak_bytes: most bytes at one operator: of the arena without trimmed ranges, and of what lies outside it.
        needed_bytes: the same with the operators' estimated workspace and the estimated size of tensor objects; with
            trims at least what the arena takes before parts of it are trimmed. ``waiting_bytes`` are in it.
        trims: (low, high, after, before): bytes [low, high) of the arena are given back behind operator ``after`` and
            used again by operator ``before``; ``""`` stands for the start or the end of the step.
        trimmed_bytes: bytes of the arena that are trimmed and then used again in one run.
        status: ``"optimal"`` if the arena has the size of its lower bound, else ``"gap"`` or ``"limit"``.
        algorithm: name of the algorithm that found the offsets.
        waiting_bytes: bytes that the others in flight hold, micro-batches of a pipeline or calls; else 0.
    """

    arena_bytes: Bytes
    alignment: Bytes
    offset: Mapping[str, Bytes]
    with_allocator: tuple[str, ...]
    live_bytes: Bytes
    outside_bytes: Bytes
    copied_bytes: Bytes
    allocator_bytes: Bytes
    peak_bytes: Bytes
    needed_bytes: Bytes
    trims: tuple[tuple[Bytes, Bytes, str, str], ...]
    trimmed_bytes: Bytes
    status: str
    algorithm: str
    waiting_bytes: Bytes


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Choose which temporaries stay with the allocator, offsets for the others, and the arena's trims.

    ``graph`` stays as it is; its operators are laid out in their present order. ``options`` give the budget, the
    alignment and the limits of the search.

    Raises:
        VerifyError: the solver gave a layout that is not legal.
    """
    return lay_out(build_memory(graph), graph, options)


def lay_out(memory: MemoryModel, graph: TrainGraph, options: Options) -> Decision:
    """Choose a layout as :func:`decide` does, but for the storages and the order of ``memory``.

    Args:
        memory: memory model of ``graph`` in its present order, or in another one, with or without in-place reuse.
        graph: says the device, the number of threads, the largest element and what eager holds; stays as it is.
        options: budget, alignment and limits of the search.

    Raises:
        VerifyError: the solver gave a layout that is not legal.
    """
    device = main_device(graph).type
    alignment = least_alignment(graph, options)
    table = _table(memory, graph, options)
    chosen = best(table, graph.eager_bytes, alignment, options, shrinks=device == "cpu" and sys.platform == "linux")
    placement, solution = chosen.placement, chosen.solution
    names = [operator.node.name for operator in memory.operators]
    outside = placement.with_allocator
    placed = [s.name for s, inside in zip(memory.counted, ~table.foreign & ~outside, strict=True) if inside]
    return Decision(
        arena_bytes=int(solution.arena_bytes),
        alignment=alignment,
        offset=dict(zip(placed, solution.offset.tolist(), strict=True)),
        with_allocator=tuple(s.name for s, apart in zip(memory.counted, outside, strict=True) if apart),
        live_bytes=int(solution.bound_bytes),
        **apart_bytes(table, outside),
        peak_bytes=chosen.peak_bytes,
        needed_bytes=chosen.needed_bytes,
        trims=tuple(trim for gap in chosen.trimming.ranges for trim in _trims(gap, names)),
        trimmed_bytes=chosen.trimming.trimmed_bytes,
        status=str(solution.status.value),
        algorithm=solution.algorithm,
        waiting_bytes=table.waiting,
    )


def least_alignment(graph: TrainGraph, options: Options) -> Bytes:
    """Return the alignment of the arena: what the user set or the device's own, and at least the largest element.

    With less than the device's own, products may have other last bits; see :data:`ALIGNMENT`.
    """
    return max(options.alignment or ALIGNMENT[main_device(graph).type], _largest_element(graph))


def _largest_element(graph: TrainGraph) -> Bytes:
    """Bytes of the largest element of any tensor: a tensor begins at a multiple of it."""
    return max((tensor.dtype.itemsize for node in graph.graph.nodes for _, tensor in tensors_of(node)), default=1)


def above_eager(graph: TrainGraph, options: Options) -> Bytes:
    """Return an upper bound on the bytes by which ``graph`` may exceed eager's peak, workspace included.

    0 if the graph cannot exceed eager's peak, if it has no layout or no ``eager_floor`` (large graphs have none), or if
    ``options.limit_bytes`` sets a budget.
    """
    memory, layout = build_memory(graph), graph.layout
    if layout is None or not graph.eager_floor or options.limit_bytes is not None:
        return 0
    with_allocator = np.array([storage.name in layout.with_allocator for storage in memory.counted], dtype=bool)
    return excess(_table(memory, graph, options), with_allocator, layout.arena_bytes)


def _table(memory: MemoryModel, graph: TrainGraph, options: Options) -> Table:
    """The storages as arrays; with what eager holds as a limit if there is no other."""
    floor = graph.eager_floor if options.limit_bytes is None else None
    alignment = least_alignment(graph, options)
    price = EFFORT.allocator_price if options.limit_bytes is None else EFFORT.budget_price
    effort = replace(EFFORT, allocator_price=price)
    return make_table(memory, graph, alignment, floor=floor, idle=options.keeps_arena, effort=effort)


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Attach the decided layout to the graph, for emission to read; the FX graph stays as it is.

    Raises:
        PlanError: the decision's storages are not the graph's temporaries, or its alignment is no power of two or above
            ``LARGEST_ALIGNMENT``.
    """
    temporaries = {s.name for s in build_memory(graph).counted if s.place is Place.TEMPORARY}
    named = [*decision.offset, *decision.with_allocator]
    if set(named) != temporaries or len(named) != len(temporaries):
        raise PlanError("the plan's storages are not this graph's temporaries")
    if decision.alignment < 1 or decision.alignment & (decision.alignment - 1):
        raise PlanError(f"alignment must be a power of two, not {decision.alignment}")
    if decision.alignment > LARGEST_ALIGNMENT:
        raise PlanError(f"alignment must be at most {LARGEST_ALIGNMENT} bytes, not {decision.alignment}")
    return graph.replace(
        layout=Layout(
            arena_bytes=decision.arena_bytes,
            alignment=decision.alignment,
            offset=dict(decision.offset),
            with_allocator=frozenset(decision.with_allocator),
            peak_bytes=decision.peak_bytes,
            needed_bytes=decision.needed_bytes,
            trims=tuple(Trim(*trim) for trim in decision.trims),
        )
    )


def _trims(gap: IdleRange, names: Sequence[str]) -> Iterator[tuple[Bytes, Bytes, str, str]]:
    """The trim of ``gap``; two trims, one up to the end of the step and one from its start, if it lasts into the next.

    ``names`` are those of all operators, first to last; ``""`` stands for the start or the end of the step.
    """
    end = gap.first + gap.length
    after = names[gap.first - 1] if gap.first else ""
    if end <= len(names):
        yield gap.low, gap.high, after, names[end]
        return
    yield gap.low, gap.high, after, ""
    yield gap.low, gap.high, "", names[end - len(names) - 1]

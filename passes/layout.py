"""layout: an offset in one arena for every temporary of the step.

Results of operators without an ``out=`` form are either copied into the arena, or held by torch's
allocator. Both are tried and the lower total is kept; the fewer copies win a tie. Temporaries on another
device than the arena's are always held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from roamc.errors import PlanError
from roamc.forms import FormKind, form_of
from roamc.graph import TrainGraph, main_device
from roamc.layout import Layout
from roamc.memory import Int64s, MemoryModel, Place, Storage, build_memory, lifetimes, sizes, timeline
from roamc.options import Options
from roamc.solvers.layout import LayoutSolution, make_problem, solve
from roamc.units import Bytes

NAME = "layout"

ALIGNMENT = {"cpu": 64, "cuda": 512}
"""Bytes; what torch's own allocator aligns to, so that kernels take the paths that they take in eager."""

HOLD_LIMITS = (0, 1, 2, 4, 16, 1 << 60)
"""Results that live at most this many steps are held in one trial each."""


@dataclass(frozen=True)
class Decision:
    """The chosen layout.

    Attributes:
        arena_bytes: size of the arena.
        alignment: bytes.
        offset: storage name to offset, in bytes.
        held: storages left to the allocator.
        live_bytes: most live bytes of the arena's storages at one step; the arena's lower bound.
        outside_bytes: most bytes outside the arena at one step: outputs, held results, results before their copy.
        copied_bytes: bytes copied into the arena per step for want of an ``out=`` form.
        held_bytes: most bytes of held results at one step.
        status: ``"optimal"`` if the arena is its lower bound, else ``"gap"`` or ``"limit"``.
        algorithm: the member of the portfolio that found it.
    """

    arena_bytes: Bytes
    alignment: Bytes
    offset: Mapping[str, Bytes]
    held: tuple[str, ...]
    live_bytes: Bytes
    outside_bytes: Bytes
    copied_bytes: Bytes
    held_bytes: Bytes
    status: str
    algorithm: str


@dataclass(frozen=True)
class _Trial:
    """Lifetimes split into arena and outside for one choice of held storages."""

    total: Bytes
    copied: Bytes
    held: frozenset[int]


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Choose held results, then offsets for the rest."""
    memory = build_memory(graph)
    device = main_device(graph).type
    alignment = options.alignment or ALIGNMENT[device]
    born, dead = lifetimes(memory)
    elsewhere = frozenset(s.index for s in memory.counted if s.device != device)
    trials = [_trial(memory, born, dead, limit, elsewhere) for limit in HOLD_LIMITS]
    best = min(trials, key=lambda trial: (trial.total, trial.copied))
    rows = [row for row, s in enumerate(memory.counted) if s.place is Place.TEMPORARY and s.index not in best.held]
    solution = _solve(memory, rows, born, dead, alignment, options)
    outside, held = _outside(memory, born, dead, best.held)
    names = [memory.counted[row].name for row in rows]
    return Decision(
        arena_bytes=int(solution.arena_bytes),
        alignment=alignment,
        offset=dict(zip(names, solution.offset.tolist(), strict=True)),
        held=tuple(s.name for s in memory.counted if s.place is Place.TEMPORARY and s.index in best.held),
        live_bytes=int(solution.bound_bytes),
        outside_bytes=int(outside.max(initial=0)),
        copied_bytes=best.copied,
        held_bytes=int(held.max(initial=0)),
        status=str(solution.status.value),
        algorithm=solution.algorithm,
    )


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Attach the layout; emission reads it.

    Raises:
        PlanError: the decision names other storages than the graph has.
    """
    temporaries = {s.name for s in build_memory(graph).counted if s.place is Place.TEMPORARY}
    if set(decision.offset) | set(decision.held) != temporaries:
        raise PlanError("layout: the plan's storages are not this graph's temporaries")
    layout = Layout(decision.arena_bytes, decision.alignment, dict(decision.offset), frozenset(decision.held))
    return graph.replace(layout=layout)


def allocated(memory: MemoryModel) -> list[Storage]:
    """Temporaries made by operators without an ``out=`` form."""
    found = []
    for op in memory.operators:
        if form_of(op.node, len(op.births)).kind is FormKind.ALLOCATE:
            found += [memory.storages[i] for i in op.births if memory.storages[i].place is Place.TEMPORARY]
    return found


def _trial(memory: MemoryModel, born: Int64s, dead: Int64s, limit: int, elsewhere: frozenset[int]) -> _Trial:
    row_of = {s.index: row for row, s in enumerate(memory.counted)}
    candidates = allocated(memory)
    short = {s.index for s in candidates if dead[row_of[s.index]] - born[row_of[s.index]] <= limit}
    held = elsewhere.union(short)
    inside = np.array([s.place is Place.TEMPORARY and s.index not in held for s in memory.counted], dtype=bool)
    arena = timeline(sizes(memory.counted)[inside], born[inside], dead[inside], len(memory.operators))
    outside, _ = _outside(memory, born, dead, held)
    copied = sum(s.nbytes for s in candidates if s.index not in held)
    return _Trial(int(arena.max(initial=0) + outside.max(initial=0)), copied, held)


def _outside(memory: MemoryModel, born: Int64s, dead: Int64s, held: frozenset[int]) -> tuple[Int64s, Int64s]:
    """Bytes outside the arena at every step: all of them, and those of held results alone."""
    steps = len(memory.operators)
    size = sizes(memory.counted)
    is_held = np.array([s.index in held and s.place is Place.TEMPORARY for s in memory.counted], dtype=bool)
    is_output = np.array([s.place is Place.OUTPUT for s in memory.counted], dtype=bool)
    kept = timeline(size[is_held], born[is_held], dead[is_held], steps)
    total = kept + timeline(size[is_output], born[is_output], dead[is_output], steps)
    for storage in allocated(memory):
        if storage.index not in held:
            total[storage.producer] += storage.nbytes  # graph order is the order: operator = step
    return total, kept


def _solve(
    memory: MemoryModel, rows: list[int], born: Int64s, dead: Int64s, alignment: Bytes, options: Options
) -> LayoutSolution:
    chosen = np.array(rows, dtype=np.int64)
    problem = make_problem(sizes(memory.counted)[chosen], born[chosen], dead[chosen], alignment=alignment)
    return solve(problem, node_limit=options.layout_nodes)

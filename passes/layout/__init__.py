"""layout: an offset in one arena for every temporary of the step, but for those that the allocator holds.

Which those are is chosen in :mod:`roamc.passes.layout.held`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roamc.errors import PlanError, VerifyError
from roamc.graph import TrainGraph, main_device
from roamc.layout import Layout
from roamc.memory import MemoryModel, Place, build_memory, timeline
from roamc.options import Options
from roamc.passes.layout.held import Bools, Split, Table, cost, make_table, outside_live, peak, splits
from roamc.solvers.layout import LayoutSolution, make_problem, solve, validate
from roamc.units import Bytes

NAME = "layout"

ALIGNMENT = {"cpu": 64, "cuda": 512}
"""Bytes; what torch's own allocator aligns to, so that kernels take the paths that they take in eager."""

LAYOUTS = 3
"""How many splits are laid out, beside the lowest, while the arena is above its lower bound or the peak above
the budget."""


@dataclass(frozen=True)
class Decision:
    """The chosen layout.

    Attributes:
        arena_bytes: size of the arena.
        alignment: bytes.
        offset: storage name to offset, in bytes.
        held: storages left to the allocator.
        live_bytes: most live bytes of the arena's storages at one step; the arena's lower bound.
        outside_bytes: most bytes outside the arena at one step: outputs, tangents, held results, results
            before their copy.
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


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Choose held results, then offsets for the rest."""
    return lay_out(build_memory(graph), graph, options)


def lay_out(memory: MemoryModel, graph: TrainGraph, options: Options) -> Decision:
    """As :func:`decide`, for the storages of ``memory``, which may be those of ``graph`` in another order."""
    device = main_device(graph).type
    alignment = options.alignment or ALIGNMENT[device]
    table = make_table(memory, device, alignment, boundary=graph.boundary)
    split, solution = _lowest(table, splits(table, graph.eager_bytes), alignment, options)
    placed = [s.name for s, inside in zip(memory.counted, ~table.foreign & ~split.held, strict=True) if inside]
    return Decision(
        arena_bytes=int(solution.arena_bytes),
        alignment=alignment,
        offset=dict(zip(placed, solution.offset.tolist(), strict=True)),
        held=tuple(s.name for s, held in zip(memory.counted, split.held, strict=True) if held),
        live_bytes=int(solution.bound_bytes),
        outside_bytes=peak(outside_live(table, split.held)),
        copied_bytes=int(table.size[table.allocated & ~split.held].sum()),
        held_bytes=peak(timeline(table.size * split.held, table.born, table.dead, table.steps)),
        status=str(solution.status.value),
        algorithm=solution.algorithm,
    )


def _lowest(table: Table, ranked: Sequence[Split], alignment: Bytes, options: Options) -> tuple[Split, LayoutSolution]:
    """The first split, if its arena meets its lower bound and the budget; else the best of a few."""
    limit = options.limit_bytes
    found: list[tuple[bool, Bytes, Split, LayoutSolution]] = []
    for split in (*ranked[:LAYOUTS], min(ranked, key=lambda split: split.peak_bytes)):
        solution = _solve(table, split.held, alignment, options)
        total = int(solution.arena_bytes) + peak(outside_live(table, split.held))
        fits = limit is None or total <= limit
        found.append((not fits, cost(total, split) if fits else total, split, solution))
        if fits and solution.arena_bytes == solution.bound_bytes:
            break
    _, _, chosen, laid_out = min(found, key=lambda item: item[:2])
    return chosen, laid_out


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Attach the layout; emission reads it.

    Raises:
        PlanError: the decision names other storages than the graph has.
    """
    temporaries = {s.name for s in build_memory(graph).counted if s.place is Place.TEMPORARY}
    if set(decision.offset) | set(decision.held) != temporaries:
        raise PlanError("layout: the plan's storages are not this graph's temporaries")
    if decision.alignment < 1 or decision.alignment & (decision.alignment - 1):
        raise PlanError(f"layout: alignment must be a power of two, not {decision.alignment}")
    layout = Layout(decision.arena_bytes, decision.alignment, dict(decision.offset), frozenset(decision.held))
    return graph.replace(layout=layout)


def _solve(table: Table, held: Bools, alignment: Bytes, options: Options) -> LayoutSolution:
    inside = ~table.foreign & ~held
    problem = make_problem(table.size[inside], table.born[inside], table.dead[inside], alignment=alignment)
    solution = solve(problem, node_limit=options.layout_nodes)
    report = validate(problem, solution)
    if not report.good:
        raise VerifyError(f"pass 'layout': {solution.algorithm} gave a layout that is not legal: {report.detail}")
    return solution

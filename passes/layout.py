"""layout: an offset in one arena for every temporary of the step.

Results of operators without an ``out=`` form are either copied into the arena, or held by torch's
allocator. Both are tried and the lower total is kept; the fewer copies win a tie. Temporaries on another
device than the arena's are always held; so are saved tensors of a torch.compile graph with ``saved="allocator"``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roamc.errors import PlanError, VerifyError
from roamc.forms import FormKind, form_of
from roamc.graph import TrainGraph, main_device
from roamc.layout import Layout
from roamc.memory import Int64s, MemoryModel, Operator, Place, build_memory, lifetimes, sizes, timeline
from roamc.options import Options
from roamc.solvers.layout import LayoutSolution, make_problem, solve, validate
from roamc.units import Bytes

NAME = "layout"

Bools = npt.NDArray[np.bool_]

ALIGNMENT = {"cpu": 64, "cuda": 512}
"""Bytes; what torch's own allocator aligns to, so that kernels take the paths that they take in eager."""

HOLD_STEPS = (0, 1, 2, 4, 16, 64, 1 << 60)
"""In one trial each, results that live at most this many steps are held."""

HOLD_SHARES = (0.0, 1 / 64, 1 / 8, 1 / 2)
"""And of these, in one trial each, only results of at least this share of the largest one."""

RELIEVED, RELIEF_CANDIDATES = 32, 12
"""How many storages may be moved across, and of how many on each side the best is taken each time."""

NEARLY = 0.995
"""A step counts as crowded from this share of the fullest one on."""

LAYOUTS = 3
"""How many of the best trials are laid out, while the arena does not reach its lower bound."""


@dataclass(frozen=True)
class Decision:
    """The chosen layout.

    Attributes:
        arena_bytes: size of the arena.
        alignment: bytes.
        offset: storage name to offset, in bytes.
        held: storages left to the allocator: results without an ``out=`` form, and a few others where that
            lowers the peak (see :func:`_relieve`).
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
class _Table:
    """All storages that the step makes, as arrays in the order of ``memory.counted``; graph order is the order."""

    steps: int
    size: Int64s
    padded: Int64s
    born: Int64s
    dead: Int64s
    output: Bools
    allocated: Bools
    elsewhere: Bools
    """On another device than the arena, or saved for backward where the options leave those to the allocator."""


@dataclass(frozen=True)
class _Trial:
    """One choice of held results: peak of arena plus outside before layout, at how many steps either is nearly
    at its fullest, bytes copied, and the choice."""

    total: Bytes
    crowded: int
    copied: Bytes
    held: Bools


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Choose held results, then offsets for the rest."""
    memory = build_memory(graph)
    device = main_device(graph).type
    alignment = options.alignment or ALIGNMENT[device]
    freed = {s.index for s in memory.saved} if graph.boundary and options.saved == "allocator" else set()
    table = _table(memory, device, alignment, freed)
    found: list[tuple[_Trial, LayoutSolution]] = []
    for trial in _trials(table)[:LAYOUTS]:
        found.append((trial, _solve(table, trial.held, alignment, options)))
        if found[-1][1].arena_bytes == found[-1][1].bound_bytes:
            break
    trial, solution = min(found, key=lambda pair: pair[1].arena_bytes + _peak(_outside(table, pair[0].held)))
    placed = [s.name for s, inside in zip(memory.counted, ~table.output & ~trial.held, strict=True) if inside]
    return Decision(
        arena_bytes=int(solution.arena_bytes),
        alignment=alignment,
        offset=dict(zip(placed, solution.offset.tolist(), strict=True)),
        held=tuple(s.name for s, held in zip(memory.counted, trial.held, strict=True) if held),
        live_bytes=int(solution.bound_bytes),
        outside_bytes=_peak(_outside(table, trial.held)),
        copied_bytes=trial.copied,
        held_bytes=_peak(_live(table, trial.held)),
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
    if decision.alignment < 1 or decision.alignment & (decision.alignment - 1):
        raise PlanError(f"layout: alignment must be a power of two, not {decision.alignment}")
    layout = Layout(decision.arena_bytes, decision.alignment, dict(decision.offset), frozenset(decision.held))
    return graph.replace(layout=layout)


def _table(memory: MemoryModel, device: str, alignment: Bytes, freed: Container[int]) -> _Table:
    born, dead = lifetimes(memory)
    size = sizes(memory.counted)
    makers = {i for op in memory.operators if _allocates(op) for i in op.births}
    return _Table(
        steps=len(memory.operators),
        size=size,
        padded=-(-size // alignment) * alignment,
        born=born,
        dead=dead,
        output=_mask(s.place is Place.OUTPUT for s in memory.counted),
        allocated=_mask(s.index in makers and s.place is Place.TEMPORARY for s in memory.counted),
        elsewhere=_mask(
            s.place is Place.TEMPORARY and (s.device != device or s.index in freed) for s in memory.counted
        ),
    )


def _mask(flags: Iterable[bool]) -> Bools:
    return np.array(list(flags), dtype=bool)


def _allocates(operator: Operator) -> bool:
    return form_of(operator.node, len(operator.births)).kind is FormKind.ALLOCATE


def _trials(table: _Table) -> list[_Trial]:
    """Every different choice of held results, the lowest peak first, then the fewest copies."""
    life = table.dead - table.born
    largest = int(table.size[table.allocated].max(initial=0))
    trials: dict[bytes, _Trial] = {}
    for steps in HOLD_STEPS:
        for share in HOLD_SHARES:
            held = table.elsewhere | (table.allocated & (life <= steps) & (table.size >= share * largest))
            if held.tobytes() not in trials:
                trials[held.tobytes()] = _trial(table, held)
    best = sorted(trials.values(), key=_cost)
    return [_relieve(table, best[0]), *best]


def _trial(table: _Table, held: Bools) -> _Trial:
    arena, outside = _arena(table, held), _outside(table, held)
    crowded = sum(int((live > _peak(live) * NEARLY).sum()) for live in (arena, outside))
    copied = int(table.size[table.allocated & ~held].sum())
    return _Trial(_peak(arena) + _peak(outside), crowded, copied, held)


def _cost(trial: _Trial) -> tuple[Bytes, Bytes]:
    return trial.total, trial.copied


def _progress(trial: _Trial) -> tuple[Bytes, int]:
    """What a move across has to lower: the total, or else the number of steps that keep it up."""
    return trial.total, trial.crowded


def _relieve(table: _Table, trial: _Trial) -> _Trial:
    """Move a few storages across, one at a time, while that lowers the peak.

    The arena is as large at every step as at its fullest, and the allocator's share comes on top of it:

        arena    ########            the storage x lives at the arena's fullest step, the allocator's share is
        outside      oo  OOO         largest at another. Held, x takes room there that is free at its time.

    And the other way round: a held result of the allocator's fullest step may have room in the arena.
    """
    start = trial
    for _ in range(RELIEVED if table.steps else 0):
        fullest_arena = int(np.argmax(_arena(table, trial.held)))
        fullest_outside = int(np.argmax(_outside(table, trial.held)))
        inside = ~trial.held & ~table.output
        movable = trial.held & ~table.elsewhere
        rows = _largest(table, inside, fullest_arena, fullest_outside)
        rows += _largest(table, movable, fullest_outside, fullest_arena)
        tried = [_trial(table, trial.held ^ (np.arange(len(inside)) == row)) for row in rows]
        best = min(tried, key=_progress, default=trial)
        if _progress(best) >= _progress(trial):
            break
        trial = best
    return trial if trial.total < start.total else start


def _largest(table: _Table, chosen: Bools, step: int, other: int) -> list[int]:
    """Of the chosen storages that are alive at ``step`` and not at ``other``, the largest."""
    alive, elsewhere = ((table.born <= at) & (at < table.dead) for at in (step, other))
    rows = np.flatnonzero(chosen & alive & ~elsewhere)
    ordered = rows[np.argsort(-table.size[rows], kind="stable")][:RELIEF_CANDIDATES]
    return [int(row) for row in ordered]


def _arena(table: _Table, held: Bools) -> Int64s:
    return timeline(table.padded * ~(held | table.output), table.born, table.dead, table.steps)


def _outside(table: _Table, held: Bools) -> Int64s:
    """Bytes outside the arena at every step: outputs, held results, and results that are about to be copied."""
    copied = table.allocated & ~held
    total = _live(table, held | table.output)
    np.add.at(total, table.born[copied], table.size[copied])
    return total


def _live(table: _Table, chosen: Bools) -> Int64s:
    return timeline(table.size * chosen, table.born, table.dead, table.steps)


def _peak(live: Int64s) -> Bytes:
    return int(live.max(initial=0))


def _solve(table: _Table, held: Bools, alignment: Bytes, options: Options) -> LayoutSolution:
    inside = ~table.output & ~held
    problem = make_problem(table.size[inside], table.born[inside], table.dead[inside], alignment=alignment)
    solution = solve(problem, node_limit=options.layout_nodes)
    report = validate(problem, solution)
    if not report.good:
        raise VerifyError(f"pass 'layout': {solution.algorithm} gave a layout that is not legal: {report.detail}")
    return solution

"""A graph as a problem for :mod:`roamc.solvers.retain`: what may be dropped between two readers and made again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from roamc.cost import workspaces
from roamc.cost.kind import is_light
from roamc.graph import Phase, TrainGraph, tensors_of
from roamc.graph.keep import is_kept
from roamc.graph.memory import MemoryModel, Operator, Place, Storage, build_memory
from roamc.options import Options
from roamc.passes import reorder, reuse
from roamc.passes.retain.recompute import may_run_again
from roamc.passes.retain.recompute_variants import recompute_variant, results_of
from roamc.solvers.retain import Ground, RetainProblem, make_problem, reference_order
from roamc.units import Seconds


@dataclass(frozen=True)
class Question:
    """A graph as numbers, and the names behind them.

    Attributes:
        problem: for the solver.
        operators: per operator its name; empty for the moment at which the caller hands in the tangents.
        storages: per buffer its storage.
        allowed: what may run again, ``"all"`` or ``"light"``.
    """

    problem: RetainProblem
    operators: tuple[str, ...]
    storages: tuple[Storage, ...]
    allowed: str

    @functools.cached_property
    def ground(self) -> Ground:
        """What the solver keeps of the problem for further peaks."""
        return Ground(self.problem)


def question(
    graph: TrainGraph, options: Options, order: Sequence[str], prices: Mapping[str, Seconds], allowed: str = "all"
) -> Question:
    """The graph as a problem of reruns, for operators in ``order``; ``prices`` says how long each takes.

    With ``"light"`` for ``allowed`` only operators run again that are light on any device.
    """
    able = ALLOWED[allowed]
    memory = build_memory(graph)
    reuses = () if reuse.NAME in options.disable else reuse.all_reuses(memory)
    problem, names = reorder.order_problem(graph, memory, reuses, workspaces(memory.operators).tolist())
    nodes = {op.node.name: op.node for op in memory.operators}
    sequence = reference_order(problem, np.array(_sequence(names, order, memory.boundary), dtype=np.int32)).tolist()
    storages = reorder.buffers_of(memory)
    made = make_problem(
        problem,
        sequence,
        seconds=[prices[name] if name else 0.0 for name in names],
        repeatable=[bool(name) and able(nodes[name]) for name in names],
        droppable=droppable(memory, storages, able),
        expires=expiries(memory, nodes, names, sequence, boundary=graph.boundary),
    )
    return Question(made, tuple(names), storages, allowed)


def _may_run_lightly(node: fx.Node) -> bool:
    return may_run_again(node) and is_light(node)


Able = Callable[[fx.Node], bool]

ALLOWED: dict[str, Able] = {"all": may_run_again, "light": _may_run_lightly}
"""Which operators may run again, by what :attr:`roamc.passes.retain.decision.Decision.allowed` says."""


def _sequence(names: Sequence[str], order: Sequence[str], boundary: int) -> list[int]:
    """The order as numbers; the caller hands in the tangents right behind forward."""
    number = {name: index for index, name in enumerate(names)}
    sequence = [number[name] for name in order]
    if reorder.HANDOVER in number:
        sequence.insert(boundary, number[reorder.HANDOVER])
    return sequence


def droppable(memory: MemoryModel, storages: Sequence[Storage], able: Able = may_run_again) -> list[bool]:
    """Temporaries that another run of one ``able`` operator makes again, and that nothing writes after the first."""
    written = {storage for op in memory.operators for storage in op.writes}
    made = {storage for op in memory.operators for storage in _made_again(memory, op, able)}
    again = made - written
    return [s.place is Place.TEMPORARY and s.nbytes > 0 and s.index in again for s in storages]


def _made_again(memory: MemoryModel, operator: Operator, able: Able) -> set[int]:
    """The storages that another run of ``operator`` would make."""
    kept = operator.phase is Phase.FORWARD and is_kept(operator.node)
    if not operator.births or kept or not able(operator.node):
        return set()
    target, _, _ = recompute_variant(operator.node)
    count = results_of(target, operator.node)
    results = {memory.owner[operator.node.name, at] for at, _ in tensors_of(operator.node) if at < count}
    return results.intersection(operator.births)


def expiries(
    memory: MemoryModel, nodes: dict[str, fx.Node], names: Sequence[str], sequence: Sequence[int], *, boundary: bool
) -> list[int]:
    """Per operator the first step in front of which it must not run again: what it reads is written before that.

    Where forward and backward are run apart (``boundary``), a tensor of the caller's that the graph writes may be
    written between the two: by another forward.
    """
    steps = {names[index]: step for step, index in enumerate(sequence)}
    writes: dict[int, list[int]] = {}
    for op in memory.operators:
        for storage in op.writes:
            writes.setdefault(storage, []).append(steps[op.node.name])
    handed = {s.index for s in memory.storages if s.place is Place.INPUT and s.index in writes} if boundary else set()
    found = []
    for name in names:
        read = _read_again(memory, nodes[name]) if name and writes else ()
        later = [step for storage in read for step in writes.get(storage, ()) if step > steps[name]]
        last = min(later, default=len(names) - 1) + 1
        forward = bool(handed.intersection(read)) and steps[name] < memory.boundary
        found.append(min(last, memory.boundary) if forward else last)
    return found


def _read_again(memory: MemoryModel, node: fx.Node) -> set[int]:
    """The storages that another run of ``node`` reads."""
    _, args, kwargs = recompute_variant(node)
    read: set[int] = set()
    fx.map_arg((args, kwargs), lambda given: read.update(memory.owner[given.name, at] for at, _ in tensors_of(given)))
    return read

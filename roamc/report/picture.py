"""What a picture of a plan shows, as data: live bytes before and after, and where every storage lies.

    live bytes      one stack of kinds per step, in eager's order and in the planned one
    address ^       ####  bbbbbbb          one box per storage:
            |   aaaaaaaaaaaaaaa             x its steps [born, dead), y its bytes [low, low + nbytes)
            +------------------> step

:mod:`roamc.report.html` draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roamc.cost import DeviceProfile, seconds
from roamc.graph import TrainGraph
from roamc.graph.lifetimes import sizes, timeline
from roamc.graph.memory import Int64s, MemoryModel, Step, build_memory
from roamc.operators.schemas import name_of
from roamc.report.explain import KINDS, Explanation, Live, Lives, describe
from roamc.report.origin import Origins
from roamc.solvers.layout import make_problem, solve
from roamc.units import Bytes, Seconds


@dataclass(frozen=True)
class Work:
    """What one step does.

    Attributes:
        name: name of the node that runs.
        operator: name of its operator, such as ``aten.mm.default``.
        phase: name of its phase.
        source: where it comes from, see :class:`roamc.report.origin.Origin`.
        module: likewise.
        seconds: its predicted time.
    """

    name: str
    operator: str
    phase: str
    source: str
    module: str
    seconds: Seconds


@dataclass(frozen=True)
class Course:
    """Live bytes over the n steps of one order.

    Attributes:
        work: what each step does.
        storages: all storages that live and die with the step, in the order of ``MemoryModel.counted``.
        by_kind: maps every :attr:`Live.kind` to its live bytes, int64[n].
        live: their sum, int64[n].
    """

    work: tuple[Work, ...]
    storages: tuple[Live, ...]
    by_kind: Mapping[str, Int64s]
    live: Int64s

    @property
    def peak(self) -> Step:
        """The first step with the most live bytes."""
        return int(np.argmax(self.live))


@dataclass(frozen=True)
class Box:
    """One storage as a rectangle: steps ``[born, dead)`` and bytes ``[low, low + nbytes)``.

    Attributes:
        storage: the storage, with its steps and bytes.
        low: its offset in the arena; outside the arena an offset at which it can be drawn, over no other.
        tensors: names of the results that lie in it one after another, each written over the one before.
    """

    storage: Live
    low: Bytes
    tensors: tuple[str, ...]

    @property
    def high(self) -> Bytes:
        """The offset behind the last byte of the storage."""
        return self.low + self.storage.nbytes


@dataclass(frozen=True)
class Trimmed:
    """Bytes ``[low, high)`` of the arena that are trimmed in the steps ``[first, end)``."""

    low: Bytes
    high: Bytes
    first: Step
    end: Step


@dataclass(frozen=True)
class Picture:
    """Everything that is drawn of one plan.

    Attributes:
        report: the explanation, with the plan and the peaks of both orders.
        before: live bytes in program order, gradients kept to the end, as eager PyTorch runs it.
        after: live bytes in the planned order.
        arena: the storages of the arena, at their offsets.
        outside: storages with the allocator or the caller; their addresses are not known beforehand.
        trims: ranges of the arena that are trimmed.
    """

    report: Explanation
    before: Course
    after: Course
    arena: tuple[Box, ...]
    outside: tuple[Box, ...]
    trims: tuple[Trimmed, ...] = ()


def follow(graph: TrainGraph, lives: Lives, profile: DeviceProfile) -> Course:
    """Return live bytes and storages over the steps of ``graph`` in its present order.

    Args:
        graph: captured or planned, with at least one operator.
        lives: what :func:`roamc.report.explain.lives_of` returned for ``graph``.
        profile: of the device whose time is predicted.
    """
    memory, born, dead = lives.memory, lives.born, lives.dead
    origins = Origins(graph)
    storages = tuple(describe(graph, origins, memory, born, dead, range(len(memory.counted))))
    size, steps = sizes(memory.counted), len(memory.operators)
    kinds = np.array([KINDS.index(storage.kind) for storage in storages], dtype=np.int64)
    by_kind = {kind: timeline(size * (kinds == number), born, dead, steps) for number, kind in enumerate(KINDS)}
    return Course(_work(origins, memory, profile), storages, by_kind, lives.live)


def draw(report: Explanation, before: Course, graph: TrainGraph, lives: Lives, profile: DeviceProfile) -> Picture:
    """Return the picture of a plan.

    Args:
        report: the explanation of the planned graph.
        before: what :func:`follow` gave with eager's lives for the captured graph, before planning.
        graph: the planned graph; without a layout all storages are outside the arena.
        lives: what :func:`roamc.report.explain.lives_of` returned for ``graph``.
        profile: of the device whose time is predicted.
    """
    after = follow(graph, lives, profile)
    tensors = _tensors(graph)
    offset = graph.layout.offset if graph.layout is not None else {}
    outside = [storage for storage in after.storages if storage.name not in offset and storage.born < storage.dead]
    lows = _stacked(outside)
    return Picture(
        report=report,
        before=before,
        after=after,
        arena=tuple(Box(s, offset[s.name], tensors(s.name)) for s in after.storages if s.name in offset),
        outside=tuple(Box(s, low, tensors(s.name)) for s, low in zip(outside, lows, strict=True)),
        trims=_trims(graph, after),
    )


def _trims(graph: TrainGraph, course: Course) -> tuple[Trimmed, ...]:
    step = {work.name: number for number, work in enumerate(course.work)}
    voids = [
        Trimmed(trim.low, trim.high, step[trim.after] + 1 if trim.after else 0, step.get(trim.before, len(step)))
        for trim in (graph.layout.trims if graph.layout is not None else ())
    ]
    return tuple(void for void in voids if void.first < void.end)


def _work(origins: Origins, memory: MemoryModel, profile: DeviceProfile) -> tuple[Work, ...]:
    places = [origins.of(operator.node, operator.phase) for operator in memory.operators]
    return tuple(
        Work(
            op.node.name,
            name_of(op.node.target),
            op.phase.name,
            place.source,
            place.module,
            seconds(op.node, profile),
        )
        for op, place in zip(memory.operators, places, strict=True)
    )


def _tensors(graph: TrainGraph) -> Callable[[str], tuple[str, ...]]:
    """Return a function from a storage's name to the names of the results that lie in it one after another.

    There are several where an operator writes its result over its argument.
    """
    memory = build_memory(graph)
    results: dict[str, list[str]] = {}
    for operator in memory.operators:
        if operator.node.name in graph.reuse:
            results.setdefault(memory.storage_of(operator.node).name, []).append(operator.node.name)
    return lambda name: (name, *results.get(name, ()))


def _stacked(storages: Sequence[Live]) -> list[Bytes]:
    """Offsets at which storages without an address can be drawn, so that no two lie over each other."""
    size, born, dead = ([getattr(storage, name) for storage in storages] for name in ("nbytes", "born", "dead"))
    problem = make_problem(size, born, dead, alignment=1)
    lows: list[Bytes] = solve(problem, node_limit=0).offset.tolist()
    return lows

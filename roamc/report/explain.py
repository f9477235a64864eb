"""Why is the peak this big: what lives at the worst step, who made it, and where in the user's model.

Free functions over the planned graph and its :class:`~roamc.graph.memory.MemoryModel`; the results are plain data,
ready for JSON, and are rendered by :mod:`roamc.report.text`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roamc.graph import Phase, TrainGraph
from roamc.graph.layout import Layout
from roamc.graph.memory import (
    Int64s,
    MemoryModel,
    Place,
    Storage,
    build_memory,
    eager_lifetimes,
    lifetimes,
    sizes,
    timeline,
)
from roamc.operators.out_variants import FormKind, form_of
from roamc.operators.schemas import name_of
from roamc.planning.plan import Plan
from roamc.planning.planned import Planned
from roamc.report.curve import Curve
from roamc.report.origin import origin, parameter_names
from roamc.report.rerun import Dropped, Smaller, dropped, smaller
from roamc.units import Bytes

KINDS = ("saved", "gradient", "output", "tangent", "temporary")
"""Every :attr:`Live.kind`, those that live longest first."""


@dataclass(frozen=True)
class Live:
    """One storage that lives at a peak.

    Attributes:
        name: of the storage.
        nbytes: its bytes.
        kind: "saved" (made in forward, read in backward), "gradient", "output", "tangent" (the gradient of an
            output, handed in) or "temporary".
        place: "arena", "allocator" (also where no layout was made), or "caller" (handed out or in).
        operator: what makes it, such as ``aten.mm.default``; empty for a tangent.
        phase: of its operator.
        source: the line of the user's model, or the parameter that an update belongs to.
        born: step that makes it.
        dead: step behind its last use.
    """

    name: str
    nbytes: Bytes
    kind: str
    place: str
    operator: str
    phase: str
    source: str
    born: int
    dead: int


@dataclass(frozen=True)
class Group:
    """Storages of a peak that one line of the model makes with one operator, such as one per layer."""

    source: str
    operator: str
    kind: str
    count: int
    nbytes: Bytes


@dataclass(frozen=True)
class Peak:
    """The worst step of one order.

    Attributes:
        step: its number, from 0.
        steps: how many there are.
        name: node that runs there.
        operator: what it is.
        phase: of that node.
        source: as of :class:`Live`.
        live_bytes: sum of ``storages``.
        storages: all that live there, largest first.
        by_kind: bytes by :attr:`Live.kind`.
        by_phase: bytes by :attr:`Live.phase`.
        phase_peaks: phase to the most live bytes at any step of it.
    """

    step: int
    steps: int
    name: str
    operator: str
    phase: str
    source: str
    live_bytes: Bytes
    storages: tuple[Live, ...]
    by_kind: Mapping[str, Bytes]
    by_phase: Mapping[str, Bytes]
    phase_peaks: Mapping[str, Bytes]


@dataclass(frozen=True)
class Allocating:
    """An operator that has no ``out=`` form, all its calls together.

    Attributes:
        operator: what it is.
        calls: how many make a temporary.
        copied_bytes: of results copied into the arena, per step.
        allocator_bytes: of results left with the allocator, per step; not all at the same time.
    """

    operator: str
    calls: int
    copied_bytes: Bytes
    allocator_bytes: Bytes


@dataclass(frozen=True)
class Explanation:
    """Everything ``roamc explain`` shows.

    Attributes:
        plan: the plan itself, with its stage times.
        eager: the peak in program order, gradients kept to the end, as eager PyTorch runs it.
        planned: the peak in the chosen order.
        allocating: operators without an ``out=`` form, most bytes first.
        dropped: what is made again to keep the budget, most bytes first.
        smaller: what is kept in fewer bytes to keep the budget, those first that save most.
        candidates: every order that was tried and its peak, lowest first.
        order: the candidate that was taken.
        graph: the planned graph.
        source: the emitted program, if it was asked for.
        curve: what lower peaks cost, if it was asked for.
    """

    plan: Plan
    eager: Peak
    planned: Peak
    graph: TrainGraph = field(repr=False)
    allocating: tuple[Allocating, ...]
    dropped: tuple[Dropped, ...] = ()
    smaller: tuple[Smaller, ...] = ()
    candidates: tuple[tuple[str, Bytes], ...] = ()
    order: str = ""
    source: str = field(default="", repr=False)
    curve: Curve | None = None

    def to_dict(self, top: int | None = None) -> dict[str, Any]:
        """Plain data, ready for JSON; ``top`` cuts the lists of storages and groups."""
        data = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "graph"}
        data["plan"] = self.plan.to_dict(seconds=True)
        for key in ("eager", "planned"):
            data[key] = dataclasses.asdict(data[key])
            data[key]["groups"] = [dataclasses.asdict(group) for group in groups(getattr(self, key))][:top]
            data[key]["storages"] = data[key]["storages"][:top]
        for key in ("allocating", "dropped", "smaller"):
            data[key] = [dataclasses.asdict(item) for item in data[key]]
        data["curve"] = dataclasses.asdict(self.curve) if self.curve else None
        if not self.source:
            del data["source"]
        return data


def explain(
    eager: Peak, planned: Planned, source: str = "", lives: Lives | None = None, curve: Curve | None = None
) -> Explanation:
    """Put together what was found before planning (``eager``, from :func:`find_peak`) and after it (``lives``)."""
    order = planned.plan.decisions.get("reorder", {})
    candidates = tuple((str(name), int(peak)) for name, peak in order.get("candidates", ()))
    return Explanation(
        plan=planned.plan,
        eager=eager,
        planned=find_peak(planned.graph, lives),
        graph=planned.graph,
        allocating=allocating(planned.graph),
        dropped=dropped(planned.graph, planned.plan),
        smaller=smaller(planned.graph, planned.plan),
        candidates=tuple(sorted(candidates, key=lambda item: item[1])),
        order=str(order.get("algorithm", "")),
        source=source,
        curve=curve,
    )


@dataclass(frozen=True, eq=False)
class Lives:
    """A graph's memory in its present order: when every storage lives, and how much does at every step."""

    memory: MemoryModel
    born: Int64s
    dead: Int64s
    live: Int64s


def lives_of(graph: TrainGraph, *, eager: bool = False) -> Lives:
    """The lives of the storages of ``graph``.

    Args:
        graph: captured or planned, with at least one operator.
        eager: keep gradients to the end of the step, as eager PyTorch does.
    """
    memory = build_memory(graph)
    born, dead = eager_lifetimes(memory) if eager else lifetimes(memory)
    return Lives(memory, born, dead, timeline(sizes(memory.counted), born, dead, len(memory.operators)))


def find_peak(graph: TrainGraph, lives: Lives | None = None, *, eager: bool = False) -> Peak:
    """The worst step of ``graph`` in its present order; the first one where several are equal.

    ``lives`` is what :func:`lives_of` found with the same arguments, if that is known already.
    """
    lives = lives or lives_of(graph, eager=eager)
    memory, born, dead, live = lives.memory, lives.born, lives.dead, lives.live
    step = int(np.argmax(live))
    operator = memory.operators[step]
    alive = np.flatnonzero((born <= step) & (step < dead))
    storages = sorted(describe(graph, memory, born, dead, alive), key=lambda item: (-item.nbytes, item.born, item.name))
    return Peak(
        step=step,
        steps=len(memory.operators),
        name=operator.node.name,
        operator=name_of(operator.node.target),
        phase=operator.phase.name,
        source=origin(operator.node, operator.phase, parameter_names(graph)),
        live_bytes=int(live[step]),
        storages=tuple(storages),
        by_kind=_sums(storages, "kind"),
        by_phase=_sums(storages, "phase"),
        phase_peaks=_phase_peaks(memory, live),
    )


def groups(peak: Peak) -> tuple[Group, ...]:
    """The storages of ``peak`` by line, operator and kind, most bytes first."""
    found: dict[tuple[str, str, str], Group] = {}
    for storage in peak.storages:
        key = (storage.source, storage.operator, storage.kind)
        before = found.get(key, Group(*key, 0, 0))
        found[key] = Group(*key, before.count + 1, before.nbytes + storage.nbytes)
    return tuple(sorted(found.values(), key=lambda item: (-item.nbytes, item.source, item.operator, item.kind)))


def allocating(graph: TrainGraph) -> tuple[Allocating, ...]:
    """Operators whose temporaries are allocated outside the arena first; needs the layout."""
    memory = build_memory(graph)
    found: dict[str, Allocating] = {}
    apart = graph.layout.with_allocator if graph.layout is not None else frozenset()
    for operator in memory.operators:
        births = [memory.storages[index] for index in operator.births]
        made = [storage for storage in births if storage.place is Place.TEMPORARY]
        if not made or form_of(operator.node, len(births)).kind is not FormKind.ALLOCATE:
            continue
        name = name_of(operator.node.target)
        before = found.get(name, Allocating(name, 0, 0, 0))
        kept = sum(storage.nbytes for storage in made if storage.name in apart)
        copied = sum(storage.nbytes for storage in made) - kept
        found[name] = Allocating(name, before.calls + 1, before.copied_bytes + copied, before.allocator_bytes + kept)
    return tuple(sorted(found.values(), key=lambda item: (-item.copied_bytes - item.allocator_bytes, item.operator)))


def describe(graph: TrainGraph, memory: MemoryModel, born: Int64s, dead: Int64s, rows: Iterable[int]) -> Iterator[Live]:
    """The storages of ``memory.counted`` whose numbers are ``rows``, living as ``born`` and ``dead`` say."""
    saved = {storage.index for storage in memory.saved}
    names = parameter_names(graph)
    for row in rows:
        storage = memory.counted[row]
        maker = memory.operators[storage.producer] if storage.producer >= 0 else None
        yield Live(
            name=storage.name,
            nbytes=storage.nbytes,
            kind=_kind(storage, storage.index in saved),
            place=_place(storage, graph.layout),
            operator=name_of(maker.node.target) if maker else "",
            phase=maker.phase.name if maker else Phase.BACKWARD.name,
            source=origin(maker.node, maker.phase, names) if maker else "",
            born=int(born[row]),
            dead=int(dead[row]),
        )


def _kind(storage: Storage, saved: bool) -> str:
    if storage.place is not Place.TEMPORARY:
        return str(storage.place.value)
    if storage.gradient:
        return "gradient"
    return "saved" if saved else "temporary"


def _place(storage: Storage, layout: Layout | None) -> str:
    if storage.place is not Place.TEMPORARY:
        return "caller"
    return "allocator" if layout is None or storage.name in layout.with_allocator else "arena"


def _sums(storages: Iterable[Live], key: str) -> dict[str, Bytes]:
    """Bytes by one attribute, most first."""
    total: dict[str, Bytes] = {}
    for storage in storages:
        name = getattr(storage, key)
        total[name] = total.get(name, 0) + storage.nbytes
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def _phase_peaks(memory: MemoryModel, live: Int64s) -> dict[str, Bytes]:
    phases = np.array([int(operator.phase) for operator in memory.operators])
    return {phase.name: int(live[phases == phase].max()) for phase in Phase if (phases == phase).any()}

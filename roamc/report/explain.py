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
import torch

from roamc.graph import Phase, TrainGraph, placeholders
from roamc.graph.eager_memory import eager_lifetimes, of_eager
from roamc.graph.layout import Layout
from roamc.graph.lifetimes import lifetimes, sizes, timeline
from roamc.graph.memory import Int64s, MemoryModel, Place, Storage, build_memory, held_storages
from roamc.graph.origin import OUTPUT
from roamc.operators.out_variants import FormKind, form_of
from roamc.operators.schemas import name_of
from roamc.planning.plan import Plan
from roamc.planning.planned import Planned
from roamc.report.curve import Curve
from roamc.report.fused import Grouped, grouped
from roamc.report.origin import NOWHERE, Origins
from roamc.report.pieces import Piece
from roamc.report.projected import ProjectedWeight, projected
from roamc.report.rerun import Dropped, Smaller, dropped, smaller
from roamc.units import Bytes

KINDS = ("saved", "gradient", "output", "tangent", "temporary")
"""Every :attr:`Live.kind`, those that live longest first."""


@dataclass(frozen=True)
class Live:
    """One storage that lives at a peak.

    Attributes:
        name: name of the storage.
        nbytes: its bytes.
        kind: "saved" (made in forward, read in backward), "gradient", "output", "tangent" (the gradient of an
            output, handed in) or "temporary".
        place: "arena", "allocator" (also where no layout was made), or "caller" (handed out or in).
        operator: name of the operator that makes it, such as ``aten.mm.default``; empty for a tangent.
        phase: name of that operator's phase; ``"BACKWARD"`` for a tangent.
        source: the line of the user's model, or the parameter that an update belongs to; see
            :class:`roamc.report.origin.Origin`, for ``module`` and ``layers`` as well.
        module: path of the module of the model that makes it; for a tangent, of the one that made its output.
        layers: ``module`` with ``*`` for the numbers of layers.
        output: its place in what the model returns, as ``output['logits']``; empty if it is not returned.
        born: the step that makes it, from 0.
        dead: the step behind its last use.
    """

    name: str
    nbytes: Bytes
    kind: str
    place: str
    operator: str
    phase: str
    source: str
    module: str
    layers: str
    output: str
    born: int
    dead: int


@dataclass(frozen=True)
class Group:
    """All storages of a peak that :func:`groups` sums up.

    Attributes:
        module: as :attr:`Live.layers`; empty unless they are summed up by module.
        source: as :attr:`Live.source`; empty unless they are summed up by line.
        operator: as :attr:`Live.operator`; empty unless they are summed up by line.
        kind: as :attr:`Live.kind`.
        count: number of storages.
        nbytes: bytes of all of them.
        modules: number of modules that make them: of the layers that ``module`` stands for.
    """

    module: str
    source: str
    operator: str
    kind: str
    count: int
    nbytes: Bytes
    modules: int


@dataclass(frozen=True)
class Held:
    """What the caller holds of one module during the whole step, or of all layers that are alike.

    Attributes:
        module: path of the module that has the parameters, with ``*`` for the numbers of layers; empty for inputs.
        modules: number of modules: of the layers that ``module`` stands for.
        nbytes: bytes of all of it.
        roles: their parts, keys as in :attr:`roamc.planning.plan.Plan.fixed_bytes`.
    """

    module: str
    modules: int
    nbytes: Bytes
    roles: Mapping[str, Bytes]


@dataclass(frozen=True)
class Peak:
    """The step of one order at which the most bytes live.

    Attributes:
        step: its number, from 0.
        steps: number of steps (operators) of the order.
        name: name of the node that runs there.
        operator: name of its operator, such as ``aten.mm.default``.
        phase: name of its phase.
        source: where it comes from, as in :class:`Live`.
        module: its module, as in :class:`Live`.
        live_bytes: bytes of ``storages`` together.
        storages: all storages that live at that step, largest first.
        by_kind: bytes by :attr:`Live.kind`.
        by_phase: bytes by :attr:`Live.phase`.
        phase_peaks: maps each phase to the most live bytes at any step of it.
    """

    step: int
    steps: int
    name: str
    operator: str
    phase: str
    source: str
    module: str
    live_bytes: Bytes
    storages: tuple[Live, ...]
    by_kind: Mapping[str, Bytes]
    by_phase: Mapping[str, Bytes]
    phase_peaks: Mapping[str, Bytes]


@dataclass(frozen=True)
class Allocating:
    """An operator that has no ``out=`` form, all its calls together.

    Attributes:
        operator: name of the operator.
        calls: number of its calls that make a temporary.
        copied_bytes: bytes of results that one run copies into the arena.
        allocator_bytes: bytes of results that one run leaves with the allocator; not all live at the same time.
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
        held: what the caller holds by module, see :func:`held`; empty if the graph knows no modules.
        dropped: what is made again for a lower peak, most bytes first.
        smaller: what is kept in fewer bytes for a lower peak, those first that save most.
        projected: weights whose gradients are made in a subspace, in the sequence in which these are made.
        grouped: operators that run as one, those with most bytes inside first.
        candidates: (algorithm, peak in bytes) of every order that was tried, lowest first.
        order: name of the candidate that was taken; empty without pass ``reorder``.
        graph: the planned graph.
        source: the emitted program; empty if it was not asked for.
        curve: what lower peaks cost; None if it was not asked for.
        pieces: all graphs of the file that this one is of; empty where it is of none, or was asked for by name.
    """

    plan: Plan
    eager: Peak
    planned: Peak
    graph: TrainGraph = field(repr=False)
    allocating: tuple[Allocating, ...]
    held: tuple[Held, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    smaller: tuple[Smaller, ...] = ()
    projected: tuple[ProjectedWeight, ...] = ()
    grouped: tuple[Grouped, ...] = ()
    candidates: tuple[tuple[str, Bytes], ...] = ()
    order: str = ""
    source: str = field(default="", repr=False)
    curve: Curve | None = None
    pieces: tuple[Piece, ...] = ()

    def to_dict(self, top: int | None = None, by: str | None = None) -> dict[str, Any]:
        """Return all but the graph as plain data, ready for JSON.

        Args:
            top: number of storages and of groups of each peak to keep, from the largest on; None keeps all.
            by: as for :func:`groups`.
        """
        data = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "graph"}
        data["plan"] = self.plan.report()
        del data["pieces"]
        for key in ("eager", "planned"):
            data[key] = dataclasses.asdict(data[key])
            data[key]["groups"] = [dataclasses.asdict(group) for group in groups(getattr(self, key), by)][:top]
            data[key]["storages"] = data[key]["storages"][:top]
        for key in ("allocating", "held", "dropped", "smaller", "projected", "grouped"):
            data[key] = [dataclasses.asdict(item) for item in data[key]]
        data["curve"] = dataclasses.asdict(self.curve) if self.curve else None
        if not self.source:
            del data["source"]
        return data | self._pieces()

    def plan_dict(self) -> dict[str, Any]:
        """Return the plan alone as plain data, ready for JSON, with the graphs beside it."""
        return self.plan.report() | self._pieces()

    def _pieces(self) -> dict[str, Any]:
        return {"pieces": [each.to_dict() for each in self.pieces]} if self.pieces else {}


def explain(eager: Peak, planned: Planned, lives: Lives, source: str = "") -> Explanation:
    """Return what ``roamc explain`` shows of a planned graph.

    Args:
        eager: the peak of the captured graph, which :func:`find_peak` found with eager's lives before planning.
        planned: the planned graph and its plan.
        lives: what :func:`lives_of` returned for the planned graph.
        source: the emitted program; empty to leave it out.
    """
    order = planned.plan.decisions.get("reorder", {})
    candidates = tuple((str(name), int(peak)) for name, peak in order.get("candidates", ()))
    return Explanation(
        plan=planned.plan,
        eager=eager,
        planned=find_peak(planned.graph, lives),
        graph=planned.graph,
        allocating=allocating(planned.graph),
        held=held(planned.graph),
        dropped=dropped(planned.graph, planned.plan),
        smaller=smaller(planned.graph, planned.plan),
        projected=projected(planned.graph, planned.plan),
        grouped=grouped(planned.graph),
        candidates=tuple(sorted(candidates, key=lambda item: item[1])),
        order=str(order.get("algorithm", "")),
        source=source,
    )


@dataclass(frozen=True, eq=False)
class Lives:
    """When every storage of a graph lives in its present order, and how many bytes live at every step.

    Attributes:
        memory: the memory model of the graph, with k counted storages and n operators.
        born: int64[k], first step of each storage of ``memory.counted``.
        dead: int64[k], step behind the last.
        live: int64[n] live bytes at every step.
    """

    memory: MemoryModel
    born: Int64s
    dead: Int64s
    live: Int64s


def lives_of(graph: TrainGraph, *, eager: bool = False) -> Lives:
    """Return when the storages of ``graph`` live in its present order.

    Args:
        graph: captured or planned, with at least one operator.
        eager: whether lives are those of eager PyTorch, which keeps gradients to the end of the step and writes some
            results over their arguments; see :func:`roamc.graph.eager_memory.eager_lifetimes`.
    """
    memory = build_memory(graph)
    if eager:
        memory = of_eager(memory)
    born, dead = eager_lifetimes(memory) if eager else lifetimes(memory)
    return Lives(memory, born, dead, timeline(sizes(memory.counted), born, dead, len(memory.operators)))


def find_peak(graph: TrainGraph, lives: Lives) -> Peak:
    """Return the step of ``graph`` with the most live bytes in its present order, the first of equals.

    Args:
        graph: captured or planned, with at least one operator.
        lives: what :func:`lives_of` returned for ``graph``.
    """
    memory, born, dead, live = lives.memory, lives.born, lives.dead, lives.live
    step = int(np.argmax(live))
    operator = memory.operators[step]
    origins = Origins(graph)
    origin = origins.of(operator.node, operator.phase)
    alive = np.flatnonzero((born <= step) & (step < dead))
    described = describe(graph, origins, memory, born, dead, alive)
    storages = sorted(described, key=lambda item: (-item.nbytes, item.born, item.name))
    return Peak(
        step=step,
        steps=len(memory.operators),
        name=operator.node.name,
        operator=name_of(operator.node.target),
        phase=operator.phase.name,
        source=origin.source,
        module=origin.module,
        live_bytes=int(live[step]),
        storages=tuple(storages),
        by_kind=_sums(storages, "kind"),
        by_phase=_sums(storages, "phase"),
        phase_peaks=_phase_peaks(memory, live),
    )


def groups(peak: Peak, by: str | None = None) -> tuple[Group, ...]:
    """Return the storages of ``peak`` summed up, groups of most bytes first.

    Args:
        peak: the peak.
        by: one of :data:`BY`: by module and kind; by line, operator and kind; or by kind alone. None for by module
            where modules are known, else by line.
    """
    by = by or by_default(peak)
    members: dict[tuple[str, str, str, str], list[Live]] = {}
    for storage in peak.storages:
        line = (storage.source, storage.operator) if by == "line" else ("", "")
        members.setdefault((storage.layers if by == "module" else "", *line, storage.kind), []).append(storage)
    totals = [
        Group(*key, len(own), sum(each.nbytes for each in own), len({each.module for each in own}))
        for key, own in members.items()
    ]
    return tuple(sorted(totals, key=lambda item: (-item.nbytes, item.module, item.source, item.operator, item.kind)))


def by_default(peak: Peak) -> str:
    """Return which of :data:`BY` the storages of ``peak`` are summed up by where nobody says it."""
    return "module" if any(storage.module for storage in peak.storages) else "line"


def allocating(graph: TrainGraph) -> tuple[Allocating, ...]:
    """Return the operators without an ``out=`` form, whose temporaries torch's allocator gives; most bytes first.

    Args:
        graph: the planned graph; without a layout all bytes count as copied.
    """
    memory = build_memory(graph)
    totals: dict[str, Allocating] = {}
    apart = graph.layout.with_allocator if graph.layout is not None else frozenset()
    for operator in memory.operators:
        births = [memory.storages[index] for index in operator.births]
        temporaries = [storage for storage in births if storage.place is Place.TEMPORARY]
        if not temporaries or form_of(operator.node, len(births)).kind is not FormKind.ALLOCATE:
            continue
        name = name_of(operator.node.target)
        before = totals.get(name, Allocating(name, 0, 0, 0))
        left = sum(storage.nbytes for storage in temporaries if storage.name in apart)
        copied = sum(storage.nbytes for storage in temporaries) - left
        totals[name] = Allocating(name, before.calls + 1, before.copied_bytes + copied, before.allocator_bytes + left)
    return tuple(sorted(totals.values(), key=lambda item: (-item.copied_bytes - item.allocator_bytes, item.operator)))


def held(graph: TrainGraph) -> tuple[Held, ...]:
    """Return what the caller holds by module, most bytes first; their sum is that of ``Plan.fixed_bytes`` but for
    assumed optimizer state and sums of gradients.

    A state belongs to the module of its parameter, and memory that several modules share to the first of them. Nothing
    is returned if the graph knows no modules.

    Args:
        graph: captured or planned.
    """
    origins = Origins(graph)
    roles: dict[str, dict[str, Bytes]] = {}
    modules: dict[str, set[str]] = {}
    for node, port, storage in held_storages(graph):
        origin = origins.holder(node, port)
        own = roles.setdefault(origin.layers, {})
        own[port.role.value] = own.get(port.role.value, 0) + storage.nbytes
        modules.setdefault(origin.layers, set()).add(origin.module)
    rows = [Held(layers, len(modules[layers]), sum(own.values()), own) for layers, own in roles.items()]
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.module))) if any(roles) else ()


def describe(
    graph: TrainGraph, origins: Origins, memory: MemoryModel, born: Int64s, dead: Int64s, rows: Iterable[int]
) -> Iterator[Live]:
    """Yield a :class:`Live` for each storage of ``memory.counted`` whose index is in ``rows``, in their order.

    Args:
        graph: the graph.
        origins: of ``graph``.
        memory: the memory model of ``graph``, with k counted storages.
        born: int64[k], the step that makes each storage.
        dead: int64[k], the step behind the last use of each.
        rows: indices into ``memory.counted``.
    """
    saved = {storage.index for storage in memory.saved}
    outputs = _outputs(graph, memory)
    inputs = {node.name: node for node in placeholders(graph.graph)}
    for row in rows:
        storage = memory.counted[row]
        maker = memory.operators[storage.producer] if storage.producer >= 0 else None
        node = maker.node if maker else inputs.get(storage.name)
        phase = maker.phase if maker else Phase.BACKWARD
        origin = origins.of(node, phase) if node else NOWHERE
        yield Live(
            name=storage.name,
            nbytes=storage.nbytes,
            kind=_kind(storage, storage.index in saved),
            place=_place(storage, graph.layout),
            operator=name_of(maker.node.target) if maker else "",
            phase=phase.name,
            source=origin.source if maker else "",
            module=origin.module,
            layers=origin.layers,
            output=outputs.get(storage.index, ""),
            born=int(born[row]),
            dead=int(dead[row]),
        )


def _outputs(graph: TrainGraph, memory: MemoryModel) -> dict[int, str]:
    """Index of each storage that is as large as what the model returns in it to the place of that."""
    places: dict[int, str] = {}
    for node in graph.graph.nodes:
        if OUTPUT in node.meta and isinstance(node.meta.get("val"), torch.Tensor):
            storage, value = memory.storage_of(node), node.meta["val"]
            if storage.nbytes == value.numel() * value.itemsize:
                places.setdefault(storage.index, node.meta[OUTPUT])
    return places


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

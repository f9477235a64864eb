"""What a plan under a budget recomputes or encodes: by line of the model, with bytes and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from roamc.graph import Encoding, TrainGraph, operators, output_node
from roamc.graph.memory import build_memory
from roamc.passes.retain.compress import MARK, Mark
from roamc.planning.plan import Plan
from roamc.report.origin import Origins
from roamc.rewriting.rerun import encodings_of
from roamc.units import Bytes, Seconds


@dataclass(frozen=True)
class Dropped:
    """The storages of one line and module, made by one operator, that are made again, such as one per layer.

    Attributes:
        source: line of the model, as :class:`roamc.report.origin.Origin` has it.
        module: the module, with its numbers of layers as ``*``: likewise.
        operator: name of the operator, such as ``aten.gelu.default``.
        count: number of storages that are made again; one that is made twice counts twice.
        nbytes: bytes of all of them; not all are dropped at the same time.
        runs: how often such operators run again.
        seconds: predicted time of these runs.
    """

    source: str
    module: str
    operator: str
    count: int
    nbytes: Bytes
    runs: int
    seconds: Seconds


@dataclass(frozen=True)
class Smaller:
    """The storages of one line and module, made by one operator, that wait for backward in a smaller form.

    Attributes:
        source: line of the model, as :class:`roamc.report.origin.Origin` has it.
        module: the module, with its numbers of layers as ``*``: likewise.
        operator: name of the operator, such as ``aten.native_dropout.default``.
        codec: name of the codec.
        readers: the kinds of readers that the codec, which has an error, may decode for, such as ``"slope"``; empty
            for an exact codec.
        count: number of storages.
        before: bytes of all of them.
        after: bytes of their codes.
        seconds: predicted time of encoding and decoding them.
        bits: those of the codes for each element.
        error: the most by which what these readers make is off, see :class:`roamc.passes.retain.codecs.Codec`; 0 for an
            exact codec.
    """

    source: str
    module: str
    operator: str
    codec: str
    readers: str
    count: int
    before: Bytes
    after: Bytes
    seconds: Seconds
    bits: float
    error: float


def smaller(graph: TrainGraph, plan: Plan) -> tuple[Smaller, ...]:
    """Return what codecs keep smaller, by line, module, operator, codec and readers; first what saves the most bytes.

    Args:
        graph: the planned graph, with the codecs' operators.
        plan: its plan; without codecs in the decision of pass ``retain`` the result is empty.
    """
    origins = Origins(graph)
    marks: dict[str, tuple[str, str, str]] = {}
    widths: dict[str, int] = {}
    for node in operators(graph.graph):
        mark: Mark | None = node.meta.get(MARK)
        if mark is not None:
            origin = origins.of(node, graph.phase[node.name])
            marks.setdefault(mark.storage, (origin.source, origin.layers, mark.operator))
            if isinstance(node.meta["val"], torch.Tensor):
                widths.setdefault(mark.storage, node.meta["val"].itemsize)  # a projection is of the value's dtype
    encodings = encodings_of(graph)
    totals: dict[tuple[str, str, str, str, str], Smaller] = {}
    for storage, codec, before, after, seconds, _ in plan.decisions.get("retain", {}).get("codes", ()):
        encoding = encodings.get((storage, codec))  # there is none where nothing waits, or projections do
        error = encoding.error if encoding else 0.0
        kinds = sorted(kind.value for kind in encoding.serves) if encoding and error else []
        bits = 8 * (_width(encoding) if encoding else widths.get(storage, 0)) * after / before
        key = (*marks.get(storage, ("", "", "")), codec, ", ".join(kinds))
        old = totals.get(key, Smaller(*key, 0, 0, 0, 0.0, 0.0, 0.0))
        total = old.before + before, old.after + after, old.seconds + seconds
        bits = (old.bits * old.before + bits * before) / total[0]
        totals[key] = Smaller(*key, old.count + 1, *total, bits, max(old.error, error))
    order = sorted(totals.values(), key=lambda item: (item.source, item.module, item.operator))
    return tuple(sorted(order, key=lambda item: item.after - item.before))


def _width(encoding: Encoding) -> Bytes:
    """Bytes of an element of the value."""
    decoded: Any = output_node(encoding.decode).args[0]
    return int(decoded.meta["val"].itemsize)


def dropped(graph: TrainGraph, plan: Plan) -> tuple[Dropped, ...]:
    """Return what pass ``retain`` makes again, by line, module and operator; most bytes first.

    Args:
        graph: the planned graph, with the reruns.
        plan: its plan; without reruns in the decision of pass ``retain`` the result is empty.
    """
    reruns = plan.decisions.get("retain", {}).get("reruns", ())
    price = {str(name): float(seconds) for name, *_, seconds in reruns}
    origins = Origins(graph)
    memory = build_memory(graph)
    totals: dict[tuple[str, str, str], Dropped] = {}
    for again in memory.operators:
        if again.node.name not in price:
            continue
        indices = again.births or [memory.storage_of(again.node).index]  # written over an argument, it makes none
        used = [memory.storages[i] for i in indices if memory.uses[i]]
        origin = origins.of(again.node, again.phase)
        key = origin.source, origin.layers, str(again.node.meta["again_target"])
        old = totals.get(key, Dropped(*key, 0, 0, 0, 0.0))
        size = old.nbytes + sum(storage.nbytes for storage in used)
        totals[key] = Dropped(*key, old.count + len(used), size, old.runs + 1, old.seconds + price[again.node.name])
    return tuple(sorted(totals.values(), key=lambda item: (-item.nbytes, item.source, item.module, item.operator)))

"""What a plan under a budget recomputes or encodes: by line of the model, with bytes and time."""

from __future__ import annotations

from dataclasses import dataclass

from roamc.graph import TrainGraph, operators
from roamc.graph.memory import build_memory
from roamc.passes.retain.compress import MARK, Mark
from roamc.planning.plan import Plan
from roamc.report.origin import origin, parameter_names
from roamc.units import Bytes, Seconds


@dataclass(frozen=True)
class Dropped:
    """The storages that one line of the model makes with one operator and that are made again, such as one per layer.

    Attributes:
        source: line of the model, as :func:`roamc.report.origin.origin` gives it.
        operator: name of the operator, such as ``aten.gelu.default``.
        count: number of storages that are made again; one that is made twice counts twice.
        nbytes: bytes of all of them; not all are dropped at the same time.
        runs: how often such operators run again.
        seconds: predicted time of these runs.
    """

    source: str
    operator: str
    count: int
    nbytes: Bytes
    runs: int
    seconds: Seconds


@dataclass(frozen=True)
class Smaller:
    """The storages that one line of the model makes with one operator and that wait for backward in a smaller form.

    Attributes:
        source: line of the model, as :func:`roamc.report.origin.origin` gives it.
        operator: name of the operator, such as ``aten.native_dropout.default``.
        codec: name of the codec.
        count: number of storages.
        before: bytes of all of them.
        after: bytes of their codes.
        seconds: predicted time of encoding and decoding them.
    """

    source: str
    operator: str
    codec: str
    count: int
    before: Bytes
    after: Bytes
    seconds: Seconds


def smaller(graph: TrainGraph, plan: Plan) -> tuple[Smaller, ...]:
    """Return what codecs keep smaller, by line of the model, operator and codec; first what saves the most bytes.

    Args:
        graph: the planned graph, with the codecs' operators.
        plan: its plan; without codecs in the decision of pass ``retain`` the result is empty.
    """
    names = parameter_names(graph)
    marks: dict[str, tuple[str, str]] = {}
    for node in operators(graph.graph):
        mark: Mark | None = node.meta.get(MARK)
        if mark is not None:
            marks.setdefault(mark.storage, (origin(node, graph.phase[node.name], names), mark.operator))
    totals: dict[tuple[str, str, str], Smaller] = {}
    for storage, codec, before, after, seconds, _ in plan.decisions.get("retain", {}).get("codes", ()):
        key = (*marks.get(storage, ("", "")), codec)
        old = totals.get(key, Smaller(*key, 0, 0, 0, 0.0))
        total = old.before + before, old.after + after, old.seconds + seconds
        totals[key] = Smaller(*key, old.count + 1, *total)
    return tuple(sorted(totals.values(), key=lambda item: (item.after - item.before, item.source, item.operator)))


def dropped(graph: TrainGraph, plan: Plan) -> tuple[Dropped, ...]:
    """Return what pass ``retain`` makes again, by line of the model and operator; most bytes first.

    Args:
        graph: the planned graph, with the reruns.
        plan: its plan; without reruns in the decision of pass ``retain`` the result is empty.
    """
    reruns = plan.decisions.get("retain", {}).get("reruns", ())
    price = {str(name): float(seconds) for name, *_, seconds in reruns}
    names = parameter_names(graph)
    memory = build_memory(graph)
    totals: dict[tuple[str, str], Dropped] = {}
    for again in memory.operators:
        if again.node.name not in price:
            continue
        indices = again.births or [memory.storage_of(again.node).index]  # written over an argument, it makes none
        used = [memory.storages[i] for i in indices if memory.uses[i]]
        key = origin(again.node, again.phase, names), str(again.node.meta["again_target"])
        old = totals.get(key, Dropped(*key, 0, 0, 0, 0.0))
        size = old.nbytes + sum(storage.nbytes for storage in used)
        totals[key] = Dropped(*key, old.count + len(used), size, old.runs + 1, old.seconds + price[again.node.name])
    return tuple(sorted(totals.values(), key=lambda item: (-item.nbytes, item.source, item.operator)))

"""What a plan under a budget drops and makes again or keeps smaller: by line of the model, with bytes and time."""

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
        source: line of the model.
        operator: what makes them, such as ``aten.gelu.default``.
        count: how many storages.
        nbytes: bytes of all of them; not all are dropped at the same time.
        runs: how often the operator runs again.
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
        source: line of the model.
        operator: what makes them, such as ``aten.native_dropout.default``.
        codec: how they are kept.
        count: how many storages.
        before: bytes of all of them.
        after: bytes of the smaller forms.
        seconds: predicted time of writing and reading these.
    """

    source: str
    operator: str
    codec: str
    count: int
    before: Bytes
    after: Bytes
    seconds: Seconds


def smaller(graph: TrainGraph, plan: Plan) -> tuple[Smaller, ...]:
    """Of the planned graph, those first that save most bytes."""
    names = parameter_names(graph)
    marks: dict[str, tuple[str, str]] = {}
    for node in operators(graph.graph):
        mark: Mark | None = node.meta.get(MARK)
        if mark is not None:
            marks.setdefault(mark.storage, (origin(node, graph.phase[node.name], names), mark.operator))
    found: dict[tuple[str, str, str], Smaller] = {}
    for storage, codec, before, after, seconds in plan.decisions.get("retain", {}).get("codes", ()):
        key = (*marks.get(storage, ("", "")), codec)
        old = found.get(key, Smaller(*key, 0, 0, 0, 0.0))
        total = old.before + before, old.after + after, old.seconds + seconds
        found[key] = Smaller(*key, old.count + 1, *total)
    return tuple(sorted(found.values(), key=lambda item: (item.after - item.before, item.source, item.operator)))


def dropped(graph: TrainGraph, plan: Plan) -> tuple[Dropped, ...]:
    """Of the planned graph, most bytes first."""
    reruns = plan.decisions.get("retain", {}).get("reruns", ())
    price = {str(operator): float(seconds) for _, operator, _, seconds in reruns}
    names = parameter_names(graph)
    memory = build_memory(graph)
    found: dict[tuple[str, str], Dropped] = {}
    for again in memory.operators:
        first = again.node.meta.get("again")
        if first not in price:
            continue
        made = again.births or [memory.storage_of(again.node).index]  # written over an argument, it makes none
        kept = [memory.storages[i] for i in made if memory.uses[i]]
        key = origin(again.node, again.phase, names), str(again.node.meta["again_target"])
        old = found.get(key, Dropped(*key, 0, 0, 0, 0.0))
        size = old.nbytes + sum(storage.nbytes for storage in kept)
        found[key] = Dropped(*key, old.count + len(kept), size, old.runs + 1, old.seconds + price[first])
    return tuple(sorted(found.values(), key=lambda item: (-item.nbytes, item.source, item.operator)))

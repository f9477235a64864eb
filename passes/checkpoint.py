"""checkpoint: what the user marked with a selective ``torch.utils.checkpoint`` policy is made again in backward.

``torch.compile`` follows such policies where it splits the graph. A whole step is one graph that nobody splits: there
the marks of the trace, ``meta["recompute"]``, are followed here. Plain ``checkpoint`` regions need no marks, their
second run is in the trace.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from roamc.graph import Phase, TrainGraph
from roamc.memory import MemoryModel, build_memory
from roamc.options import Options
from roamc.passes.retain.decide import droppable
from roamc.passes.retain.recompute import Rerun, rerun

NAME = "checkpoint"

AGAIN = frozenset({CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE})


@dataclass(frozen=True)
class Decision:
    """What runs again.

    Attributes:
        reruns: (operator in front of which it runs, operator that runs again, storages that it renews).
    """

    reruns: tuple[tuple[str, str, tuple[str, ...]], ...]


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Every marked storage that backward reads is made again right before its first reader there."""
    if graph.boundary or not any("recompute" in node.meta for node in graph.graph.nodes):
        return Decision(())
    memory = build_memory(graph)
    finder = _Finder(memory, _marked(memory))
    for operator in memory.operators:
        if operator.phase is not Phase.FORWARD:
            for storage in operator.reads:
                finder.renew(storage, operator.node)
    return Decision(tuple(tuple(again) for again in finder.found))  # type: ignore[misc]


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Write the reruns into the graph.

    Raises:
        PlanError: the graph has no such operators or storages.
    """
    return rerun(graph, [Rerun(*again) for again in decision.reruns]) if decision.reruns else graph


def _marked(memory: MemoryModel) -> set[int]:
    """Storages of forward operators that are to run again, and can."""
    pairs = zip(memory.counted, droppable(memory, memory.counted), strict=True)
    able = {storage.index for storage, may in pairs if may}
    return {
        index
        for operator in memory.operators
        if operator.phase is Phase.FORWARD and operator.node.meta.get("recompute") in AGAIN
        for index in operator.births
        if index in able
    }


class _Finder:
    """Collects reruns: what a rerun reads of other marked storages is renewed before it."""

    def __init__(self, memory: MemoryModel, marked: set[int]) -> None:
        self.memory = memory
        self.missing = marked
        self.found: list[Rerun] = []

    def renew(self, storage: int, at: fx.Node) -> None:
        """Make ``storage`` again in front of ``at``, unless it is there or not marked."""
        pending = [storage]
        while pending:
            current = pending[-1]
            maker = self.memory.operators[self.memory.storages[current].producer]
            needed = [read for read in maker.reads if read in self.missing] if current in self.missing else []
            if needed:
                pending.extend(needed)
                continue
            pending.pop()
            if current in self.missing:
                made = [index for index in maker.births if index in self.missing]
                names = tuple(self.memory.storages[index].name for index in made)
                self.found.append(Rerun(at.name, maker.node.name, names))
                self.missing.difference_update(made)

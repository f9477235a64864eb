"""checkpoint: recompute in backward what a selective ``torch.utils.checkpoint`` policy says must be recomputed.

    rewrite:  y = op(x) marked, backward: g = f(y)   -->  y = op(x), backward: y' = op(x); g = f(y')
    checks:   the graph has every operator and storage that the decision names, and every reader reads it; a recomputed
              operator gives the same bits again, and none of its inputs has been written since

Only graphs of a whole step are rewritten: ``torch.compile`` follows these policies itself where it splits the graph. A
plain ``checkpoint`` without a policy needs no pass, because its second run is in the trace already.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.utils.checkpoint import CheckpointPolicy

from roamc.graph import Phase, TrainGraph
from roamc.graph.memory import MemoryModel, build_memory
from roamc.options import Options
from roamc.rewriting.expiry import droppable, expiries
from roamc.rewriting.rerun import rerun
from roamc.rewriting.rerun_readers import Run, with_readers
from roamc.rewriting.reruns import Rerun

NAME = "checkpoint"

AGAIN = frozenset({CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE})
"""Policies in ``node.meta["recompute"]`` under which an operator of forward runs again in backward."""


@dataclass(frozen=True)
class Decision:
    """A decision lists the operators that run again in backward.

    Attributes:
        reruns: the fields of a :class:`roamc.rewriting.reruns.Rerun` for each of them.
    """

    reruns: tuple[tuple[str, str, str, tuple[tuple[str, tuple[str, ...]], ...]], ...]


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Plan to make every storage again that a checkpoint policy marks, right before its first reader behind forward.

    The decision is empty for a graph with a boundary between forward and backward, or without marks
    (``node.meta["recompute"]``). ``options`` are not read, and ``graph`` stays as it is.
    """
    if graph.boundary or not any("recompute" in node.meta for node in graph.graph.nodes):
        return Decision(())
    memory = build_memory(graph)
    finder = _Finder(memory, _marked(memory))
    for step, operator in enumerate(memory.operators):
        if operator.phase is not Phase.FORWARD:
            for storage in operator.reads:
                finder.renew(storage, step)
    reruns, _ = with_readers(graph, [operator.node.name for operator in memory.operators], finder.reruns)
    return Decision(tuple(reruns))


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Write the reruns into the graph, whose FX graph is changed in place, and return the graph.

    Raises:
        PlanError: the reruns do not fit the graph, see :func:`roamc.rewriting.reruns.places`.
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
    """Collects reruns: marked storages that a rerun reads are renewed before it.

    An operator whose inputs have been written since, such as a buffer, does not run again: its first results stay.
    """

    def __init__(self, memory: MemoryModel, marked: set[int]) -> None:
        self.memory = memory
        self.missing = marked
        self.reruns: list[Run] = []
        names = [operator.node.name for operator in memory.operators]
        nodes = {operator.node.name: operator.node for operator in memory.operators}
        self.until = expiries(memory, nodes, names, range(len(names)), boundary=False)

    def renew(self, storage: int, step: int) -> None:
        """Make ``storage`` again in front of ``step``, unless it is there, not marked, or can no longer be made."""
        pending = [storage]
        while pending:
            current = pending[-1]
            to_renew = self._is_due(current, step)
            maker = self.memory.operators[self.memory.storages[current].producer]
            needed = [read for read in maker.reads if self._is_due(read, step)] if to_renew else []
            if needed:
                pending.extend(needed)
                continue
            pending.pop()
            if to_renew:
                storages = tuple(index for index in maker.births if index in self.missing)
                self.reruns.append(Run(step, maker.node.name, storages))
                self.missing.difference_update(storages)

    def _is_due(self, storage: int, step: int) -> bool:
        return storage in self.missing and step < self.until[self.memory.storages[storage].producer]

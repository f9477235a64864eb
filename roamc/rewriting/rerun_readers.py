"""From places in an order to names of readers: which version of a storage each reader reads.

order            sin   sum   sin again   mul   cos again   add          mul, cos again and add read the second sin
a Run            in front of a step: the newest version is read, whoever reads
a Rerun          the readers of each version by their names, wherever the operators go
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from roamc.graph import Phase, TrainGraph
from roamc.graph.memory import MemoryModel, Step, build_memory
from roamc.rewriting.names import Names
from roamc.rewriting.rerun_variants import reads_again, reads_of
from roamc.rewriting.reruns import Rerun


class Run(NamedTuple):
    """One more run of an operator at a place in an order.

    Attributes:
        before: step of the order in front of which the operator runs again.
        operator: name of the operator.
        renews: storages, by their indices in the memory model: all later readers read what this run makes.
    """

    before: Step
    operator: str
    renews: tuple[int, ...]


def with_readers(
    graph: TrainGraph, order: Sequence[str], runs: Sequence[Run], taken: Iterable[str] = ()
) -> tuple[list[Rerun], list[str]]:
    """Return ``runs`` with names and readers, and the order with them in it.

    Args:
        graph: the graph without the runs; stays as it is.
        order: names of all operators, in a legal order; "" stands for a step that is no operator of the graph, at the
            boundary.
        runs: sorted by step; those in front of one step in the sequence in which they run.
        taken: names that no run may get, besides those of the graph.

    Returns:
        (reruns, names): a rerun for each run of which something is read, and the names of all that runs in turn.
    """
    names = Names(graph.graph)
    for name in taken:
        names.take(name)
    naming = _Naming(build_memory(graph), order, runs, names)
    reruns = naming.reruns()
    merged: list[str] = []
    insertions = iter([(before, one.name) for before, one in reruns])
    upcoming = next(insertions, None)
    for step, name in enumerate(order):
        while upcoming is not None and upcoming[0] == step:
            merged.append(upcoming[1])
            upcoming = next(insertions, None)
        if name:
            merged.append(name)
    return [one for _, one in reruns], merged


class _Naming:
    """Finds the readers of each run.

    Attributes:
        memory: memory model of the graph.
        order, runs: as given to :func:`with_readers`.
        names: a new name for each run.
        number: name of an operator to its index in the memory model.
        versions: storage to the runs that make it again, first to last.
        readers: for each run, storage to the places and names of its readers.
    """

    def __init__(self, memory: MemoryModel, order: Sequence[str], runs: Sequence[Run], names: Names) -> None:
        self.memory, self.order, self.runs = memory, order, runs
        self.names = [names.fresh(run.operator) for run in runs]
        self.number = {op.node.name: index for index, op in enumerate(memory.operators)}
        self.versions: dict[int, list[int]] = {}
        for index, run in enumerate(runs):
            for storage in run.renews:
                self.versions.setdefault(storage, []).append(index)
        self.readers: list[dict[int, list[tuple[tuple[Step, int], str]]]] = [{} for _ in runs]

    def reruns(self) -> list[tuple[Step, Rerun]]:
        """Return (step in front of which it runs, rerun) for each run of which something is read."""
        self._note_operators()
        for index in reversed(range(len(self.runs))):
            if self.readers[index]:  # else it is left out, and reads nothing
                node = self.memory.operators[self.number[self.runs[index].operator]].node
                for storage in sorted(reads_again(self.memory, node) & self.versions.keys()):
                    self._note(storage, (self.runs[index].before, index), self.names[index])
        return [(run.before, self._rerun(index)) for index, run in enumerate(self.runs) if self.readers[index]]

    def _note_operators(self) -> None:
        step = {name: at for at, name in enumerate(self.order)}
        for storage in self.versions:
            for user in self.memory.uses[storage]:
                node = self.memory.operators[user].node
                if storage in reads_of(self.memory, node):
                    self._note(storage, (step[node.name], len(self.runs)), node.name)

    def _note(self, storage: int, place: tuple[Step, int], reader: str) -> None:
        """Note a reader of a storage at the run whose version is the newest at its place, if it is not the first."""
        runs = self.versions[storage]
        newest = bisect_left([(self.runs[index].before, index) for index in runs], place) - 1
        if newest >= 0:
            self.readers[runs[newest]].setdefault(storage, []).append((place, reader))

    def _rerun(self, index: int) -> Rerun:
        run, readers = self.runs[index], self.readers[index]
        storages = [
            (self.memory.storages[storage].name, readers[storage]) for storage in run.renews if storage in readers
        ]
        renews = tuple((storage, tuple(name for _, name in sorted(read))) for storage, read in storages)
        return Rerun(self.names[index], run.operator, self._phase(run).name.lower(), renews)

    def _phase(self, run: Run) -> Phase:
        """The phase of what stands behind a run; that in front of a step which is no operator is FORWARD."""
        behind = self.order[run.before]
        return self.memory.operators[self.number[behind]].phase if behind else Phase.FORWARD

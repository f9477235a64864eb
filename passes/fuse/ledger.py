"""Live bytes while groups change: which nodes read a storage, where their groups run, and which storages are inside."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import fx

from roamc.graph import tensors_of
from roamc.graph.lifetimes import lifetimes, sizes, timeline
from roamc.graph.memory import Int64s, MemoryModel, Place
from roamc.units import Bytes

Undo = Callable[[], object]
"""Takes one change back."""


class Ledger:
    """The storages of a graph whose groups are not written yet, with the lives that they have with these groups.

    ``Ledger(memory)`` knows no group; :meth:`group` and :meth:`reread` note what changes. A storage is named by its
    index in the memory model.

    Attributes:
        memory: memory model of the graph without groups.
        step: node of an operator to its step; a copy has that of the operator in front of which it stands.
        readers: for each storage the nodes that read or write it, copies included.
    """

    def __init__(self, memory: MemoryModel) -> None:
        self.memory = memory
        self.step = {operator.node: step for step, operator in enumerate(memory.operators)}
        nodes = [operator.node for operator in memory.operators]
        self.readers: list[dict[fx.Node, None]] = [dict.fromkeys(nodes[use] for use in uses) for uses in memory.uses]
        self._row = {storage.index: row for row, storage in enumerate(memory.counted)}
        self._nbytes = sizes(memory.counted)
        self._born, self._dead = lifetimes(memory)
        self._runs: dict[fx.Node, int] = {}

    def runs_at(self, node: fx.Node) -> int:
        """Return the step at which ``node`` runs: that of its group, if it is in one."""
        return self._runs.get(node, self.step[node])

    def live(self) -> Int64s:
        """Return the live bytes at each step, int64[operators]."""
        return timeline(self._nbytes, self._born, self._dead, len(self.memory.operators))

    def saved(self) -> Bytes:
        """Return the bytes of storages that are born in forward and die behind it."""
        crossing = (self._born < self.memory.boundary) & (self._dead > self.memory.boundary)
        return int(self._nbytes[crossing].sum())

    def crosses(self, storage: int) -> bool:
        """Whether ``storage`` lives from forward into backward, or is the caller's."""
        row = self._row.get(storage)
        return row is None or bool(self._born[row] < self.memory.boundary < self._dead[row])

    def group(self, members: Iterable[fx.Node], step: int, results: Collection[tuple[fx.Node, int]]) -> Undo:
        """Note that ``members`` run at ``step``, and that what they make has no storage but for ``results``.

        Args:
            members: operators of one group.
            step: step at which the group runs.
            results: (member, position of its result) for each result of the group.

        Returns:
            A function that takes this note back; later notes must have been taken back before.
        """
        members = list(members)
        before = {member: self._runs.get(member) for member in members}
        sized, touched = self._nbytes, set[int]()
        self._nbytes = sized.copy()
        for member in members:
            self._runs[member] = step
            at = self.step[member]
            if self.memory.operators[at].node is not member:  # a copy, which makes no storage of the model
                continue
            operator = self.memory.operators[at]
            touched.update((*operator.births, *operator.reads, *operator.writes))
            positions = (position for position, _ in tensors_of(member) if (member, position) not in results)
            hidden = {self.memory.owner[member.name, position] for position in positions}
            for birth in operator.births:  # what was hidden in a smaller group may be read by a copy now
                if birth in self._row:
                    self._nbytes[self._row[birth]] = 0 if birth in hidden else self.memory.storages[birth].nbytes
        undo = self._moved(sorted(touched))

        def back() -> None:
            self._nbytes = sized
            for member, at in before.items():
                if at is None:
                    del self._runs[member]
                else:
                    self._runs[member] = at
            undo()

        return back

    def reread(self, storage: int, gone: Sequence[fx.Node], new: Sequence[fx.Node]) -> Undo:
        """Note that the nodes ``gone`` no longer read ``storage``, and the nodes ``new`` do.

        Returns:
            A function that takes this note back; later notes must have been taken back before.
        """
        before = self.readers[storage]
        left = dict.fromkeys(node for node in before if node not in gone)
        self.readers[storage] = {**left, **dict.fromkeys(new)}
        undo = self._moved([storage])

        def back() -> None:
            self.readers[storage] = before
            undo()

        return back

    def _moved(self, storages: Iterable[int]) -> Undo:
        """Bring the lives of ``storages`` up to date."""
        old: list[tuple[int, int, int]] = []
        for index in storages:
            storage, row = self.memory.storages[index], self._row.get(index)
            if row is None:
                continue
            old.append((row, int(self._born[row]), int(self._dead[row])))
            if storage.producer >= 0:
                self._born[row] = self.runs_at(self.memory.operators[storage.producer].node)
            if storage.place is not Place.OUTPUT:
                last = max((self.runs_at(reader) for reader in self.readers[index]), default=-1)
                self._dead[row] = max(int(self._born[row]) + (storage.producer >= 0), last + 1)

        def back() -> None:
            for row, born, dead in old:
                self._born[row], self._dead[row] = born, dead

        return back

"""Reruns as data: which operators run again, for which readers, and where in a graph that follows from.

A rerun names its readers and not its place. Where it is written is in front of the first reader and of the first
operator that writes what the rerun reads. Written so into program order, it stands behind all that it reads:

    program order     a   b   w   f | g   h             w writes what b reads; a' is read by b', b' by h
    with reruns       a   b   a'  b'  w   f | g   h     b' in front of w, so a' in front of b'

:func:`places` checks that the reruns fit the graph, and finds these places.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import fx

from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph
from roamc.graph.memory import MemoryModel, build_memory
from roamc.rewriting.names import stem_of
from roamc.rewriting.rerun_variants import makes_again, may_run_again, must_stay, reads_again, reads_of

PHASES = {phase.name.lower(): phase for phase in Phase}
"""The phase of each word in :attr:`Rerun.phase`."""


class Rerun(NamedTuple):
    """One more run of an operator.

    Attributes:
        name: name of this run: that of the operator with another number.
        operator: name of the operator that runs again.
        phase: part of the step that the run belongs to, a word of :data:`PHASES`.
        renews: (storage, readers) for each storage of which this run makes a version that something reads: name of the
            storage, and names of the operators and reruns that read this version. Readers of the storage that no rerun
            names read what the operator's first run makes.
    """

    name: str
    operator: str
    phase: str
    renews: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Placed:
    """A rerun and its place.

    Attributes:
        rerun: the rerun.
        first: node of the operator that runs again.
        before: node of the operator in front of which the rerun is written.
    """

    rerun: Rerun
    first: fx.Node
    before: fx.Node


def places(graph: TrainGraph, reruns: Sequence[Rerun]) -> list[Placed]:
    """Return the places of ``reruns``, in the order in which they are to be written; ``graph`` stays as it is.

    The result does not depend on the sequence in which they are given.

    Args:
        graph: operators in any legal order, such as program order.
        reruns: in any sequence.

    Raises:
        PlanError: names a rerun whose operator, storage or reader is not in the graph or not what it should be; that
            has an odd or taken name, or no readers; or whose readers, or a write to what it reads, come in an earlier
            part of the step than the rerun itself.
    """
    placing = _Placing(graph, reruns)
    for one in reruns:
        placing.check(one)
    return placing.placed()


class _Placing:
    """Reruns and the graph that they are for.

    Attributes:
        graph, memory: the graph and its memory model.
        reruns: name to rerun.
        number: name of an operator to its index in the memory model, which is its place in the graph.
        storage: name of a storage to its index in the memory model.
        readers: (storage, name of a reader) of all that reruns name so far.
    """

    def __init__(self, graph: TrainGraph, reruns: Sequence[Rerun]) -> None:
        self.graph = graph
        self.memory: MemoryModel = build_memory(graph)
        self.reruns = {one.name: one for one in reruns}
        self.number = {op.node.name: index for index, op in enumerate(self.memory.operators)}
        self.storage = {storage.name: storage.index for storage in self.memory.storages}
        self.readers: set[tuple[str, str]] = set()
        self._names = {node.name for node in graph.graph.nodes}

    @cached_property
    def writers(self) -> dict[int, list[int]]:
        """Storage to the operators that write it, in the graph's order."""
        by_storage: dict[int, list[int]] = {}
        for index, op in enumerate(self.memory.operators):
            for storage in op.writes:
                by_storage.setdefault(storage, []).append(index)
        return by_storage

    # -- checks -----------------------------------------------------------------------------------

    def check(self, one: Rerun) -> None:
        """Check what a rerun says of itself and of its readers; raise PlanError as :func:`places` does."""
        if one.operator not in self.number or not may_run_again(self._node(one.operator), self.graph.same_plan):
            raise PlanError(f"this graph has no operator {one.operator!r} that could run again")
        if must_stay(self.memory.operators[self.number[one.operator]]):
            raise PlanError(f"{one.operator} is kept by roamc.keep, and would run again as {one.name}: plan again")
        if not re.fullmatch(re.escape(stem_of(one.operator)) + "_[1-9][0-9]{0,8}", one.name):
            raise PlanError(f"another run of {one.operator} cannot have the name {one.name!r}")
        if one.name in self._names:
            raise PlanError(f"two operators would have the name {one.name!r}")
        self._names.add(one.name)
        if one.phase not in PHASES:
            raise PlanError(f"{one.name}: the phase must be one of {', '.join(PHASES)}, not {one.phase!r}")
        if self.graph.boundary and PHASES[one.phase] is Phase.UPDATE:
            raise PlanError(f"{one.name} would run in {one.phase}, which this graph does not have: plan again")
        makes = makes_again(self.memory, self.memory.operators[self.number[one.operator]])
        for storage, readers in one.renews:
            if self.storage.get(storage) not in makes:
                raise PlanError(f"{one.operator} does not make the storage {storage!r}")
            for reader in readers:
                self._check_reader(one, storage, reader)
        if len(dict(one.renews)) < len(one.renews):
            raise PlanError(f"{one.name} names a storage twice")
        if not one.renews or not all(readers for _, readers in one.renews):
            raise PlanError(f"nothing reads what {one.name} makes: plan again")

    def _check_reader(self, one: Rerun, storage: str, reader: str) -> None:
        if reader not in self.reruns and reader not in self.number:
            raise PlanError(f"this graph has no operator {reader!r}, which is to read {one.name}")
        if self.storage[storage] not in self._reads(reader):
            raise PlanError(f"{reader} does not read {storage}, which {one.name} makes again")
        if (storage, reader) in self.readers:
            raise PlanError(f"{reader} would read two versions of {storage}, one of them that of {one.name}")
        self.readers.add((storage, reader))

    def _reads(self, reader: str) -> set[int]:
        """The storages that an operator or a rerun reads by its arguments."""
        if reader not in self.reruns:
            return reads_of(self.memory, self._node(reader))
        again = self.reruns[reader].operator
        return reads_again(self.memory, self._node(again)) if again in self.number else set()

    def _node(self, name: str) -> fx.Node:
        return self.memory.operators[self.number[name]].node

    # -- places -----------------------------------------------------------------------------------

    def placed(self) -> list[Placed]:
        """Find the place of each rerun, as :func:`places` does.

        Operators read what operators in front of them make, so in the order of these no rerun reads one behind it.
        """
        order = sorted(self.reruns.values(), key=lambda one: (self.number[one.operator], len(one.name), one.name))
        at: dict[str, int] = {}
        for one in reversed(order):
            at[one.name] = self._place(one, at)
        order.sort(key=lambda one: (at[one.name], self._is_late(one)))
        return [Placed(one, self._node(one.operator), self.memory.operators[at[one.name]].node) for one in order]

    def _place(self, one: Rerun, at: dict[str, int]) -> int:
        """The number of the operator in front of which a rerun is written; ``at`` has those of its readers."""
        readers = {reader: None for _, named in one.renews for reader in named}
        places = {reader: at[reader] if reader in at else self.number[reader] for reader in readers}
        write = self._first_write(one)
        place = min(*places.values(), write)
        boundary = self.memory.boundary
        if not self.graph.boundary:
            return place
        if not self._is_late(one):
            if self.number[one.operator] >= boundary:
                raise PlanError(f"{one.name} would run in {one.phase}, in front of {one.operator}: plan again")
            return min(place, boundary)
        for reader in readers:
            if not self._is_late(self.reruns[reader]) if reader in at else places[reader] < boundary:
                raise PlanError(f"{one.name} would run in {one.phase}, behind {reader}, which reads it: plan again")
        if place < boundary:
            writer = self.memory.operators[write].node.name
            raise PlanError(
                f"{one.name} would run in {one.phase}, behind {writer}, which writes what it reads: plan again"
            )
        return place

    def _is_late(self, one: Rerun) -> bool:
        """Whether a rerun stands behind the boundary, if the graph has one."""
        return self.graph.boundary and PHASES[one.phase] is not Phase.FORWARD

    def _first_write(self, one: Rerun) -> int:
        """The first operator behind the first run that writes what a rerun reads; the number of all if none does."""
        begun = self.number[one.operator]
        read = reads_again(self.memory, self._node(one.operator)) if self.writers else ()
        later = (at for storage in read for at in self.writers.get(storage, ()) if at > begun)
        return min(later, default=len(self.number))

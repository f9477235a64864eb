"""Storages and aliases of a graph, and which orders of its operators are legal. The only place that knows them.

A *storage* is what an allocator hands out: a base tensor and all views of it. Which tensors share one say their ids,
see :mod:`roamc.graph.storage_ids`, and ``TrainGraph.reuse``. An *operator* here is a node that does work: views and
picks of one result out of several belong to no step of their own. When a storage lives in an order, and how many bytes
live at each step, says :mod:`roamc.graph.lifetimes`.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import getitem, is_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from roamc.errors import VerifyError
from roamc.graph import Phase, Port, Role, TrainGraph, output_values, placeholders, storage_name, tensors_of
from roamc.graph.storage_ids import STORAGES, StorageId, all_ids, id_of, ids_of, placed
from roamc.operators import ops
from roamc.operators.table import Space
from roamc.units import Bytes

Step = int
Int64s = npt.NDArray[np.int64]


class Place(enum.Enum):
    """Who owns a storage: decides how long it lives, whether live bytes count it, and whether it may lie in the arena.

    Attributes:
        INPUT: the caller, or the graph for a constant. It exists before and after the step; live bytes leave it out.
        TANGENT: the caller, who hands it to backward and keeps no reference. It counts from the start of backward to
            its last use, and never lies in the arena.
        OUTPUT: the caller, who gets it from the step. It counts to the end of the step, and never lies in the arena.
        TEMPORARY: the step, which makes it and frees it after its last use. Only temporaries may lie in the arena.
    """

    INPUT = "input"
    TANGENT = "tangent"
    OUTPUT = "output"
    TEMPORARY = "temporary"


WROTE_OVER = "roamc_wrote_over"
"""Key in a node's ``meta``: eager runs this operator in place on its first argument; the graph makes a new value."""

FOREACH = "roamc_foreach"
"""Key in a node's ``meta``: (group, list, call) of the ``torch._foreach`` call in which eager runs this operator.

Operators with equal numbers are one call. Eager runs the calls in the order of their numbers, counted from 0: of the
optimizer's group, of the tensors of one device and dtype in that group, and of the call on these tensors."""


@dataclass(frozen=True)
class Storage:
    """One storage: the bytes behind a base tensor and all views of it.

    Attributes:
        index: position in ``MemoryModel.storages``.
        name: name of the node that makes it, with ``#k`` for result k of several.
        nbytes: bytes of the whole storage, not of any view.
        place: who owns it.
        producer: index in ``MemoryModel.operators`` of the operator that makes it; -1 for inputs, tangents, constants.
        device: the device that it is on, such as "cpu" or "cuda:0".
        gradient: whether it is the gradient of a parameter, which eager keeps until the optimizer has run.
        space: the memory that it lies in.
        overwritten: whether the caller may write to it when forward has run, see :class:`roamc.graph.Port`.
    """

    index: int
    name: str
    nbytes: Bytes
    place: Place
    producer: int
    device: str = "cpu"
    gradient: bool = False
    space: Space = Space.DEVICE
    overwritten: bool = False


@dataclass(frozen=True)
class Operator:
    """One node that does work, and the storages that it touches, as indices into ``MemoryModel.storages``.

    Attributes:
        node: the node.
        phase: the part of the step that it belongs to.
        births: storages that it makes.
        reads: storages made earlier that it reads. An operator that waits for the end of an asynchronous one also reads
            all that the asynchronous one reads, writes and makes.
        writes: storages made earlier that it writes, by in-place reuse as well.
    """

    node: fx.Node
    phase: Phase
    births: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class MemoryModel:
    """The storages and operators of one graph, and which orders of the operators are legal.

    Attributes:
        storages: every storage, inputs included.
        operators: every node that does work, in graph order.
        edges: (before, after) pairs of operator indices that every order must keep: data, writes against reads of
            the same storage, random, collective and checking operators in their order, writes to inputs behind checks,
            parts of an update behind its gradient.
        owner: (node name, result position) to storage index, for every tensor of the graph.
    """

    storages: tuple[Storage, ...]
    operators: tuple[Operator, ...]
    edges: tuple[tuple[int, int], ...]
    owner: dict[tuple[str, int], int]

    @cached_property
    def counted(self) -> tuple[Storage, ...]:
        """The storages that live bytes count: all in device memory that the step makes, outputs too, and tangents."""
        own = (storage for storage in self.storages if storage.place is not Place.INPUT)
        return tuple(storage for storage in own if storage.space is Space.DEVICE)

    @cached_property
    def boundary(self) -> Step:
        """The number of FORWARD operators: the step at which backward starts, if the graph has a boundary."""
        return sum(operator.phase is Phase.FORWARD for operator in self.operators)

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """For each of ``storages``, in order: indices of the operators that read or write it, without its producer."""
        by_storage: list[list[int]] = [[] for _ in self.storages]
        for index, operator in enumerate(self.operators):
            for storage in sorted({*operator.reads, *operator.writes}):
                by_storage[storage].append(index)
        return tuple(tuple(users) for users in by_storage)

    @cached_property
    def ends(self) -> dict[int, int]:
        """Index of each operator that ends later than it starts to the index of the operator that waits for its end."""
        index = {operator.node: at for at, operator in enumerate(self.operators)}
        starts = ((started_by(operator.node), at) for at, operator in enumerate(self.operators))
        return {index[start]: at for start, at in starts if start is not None}

    @cached_property
    def saved(self) -> tuple[Storage, ...]:
        """The counted storages, outputs included, that FORWARD makes and BACKWARD or UPDATE uses."""
        forward = {index for index, operator in enumerate(self.operators) if operator.phase is Phase.FORWARD}
        storages = (storage for storage in self.counted if storage.producer in forward)
        return tuple(storage for storage in storages if not forward.issuperset(self.uses[storage.index]))

    @cached_property
    def saved_bytes(self) -> Bytes:
        """The bytes of :attr:`saved`: of each micro-batch that waits for its backward."""
        return sum(storage.nbytes for storage in self.saved)

    def storage_of(self, node: fx.Node, position: int = 0) -> Storage:
        """Return the storage of result ``position`` of ``node``, as :func:`roamc.graph.tensors_of` numbers results.

        Raises:
            KeyError: that result is no tensor.
        """
        return self.storages[self.owner[node.name, position]]


def build_memory(graph: TrainGraph) -> MemoryModel:
    """Return the storages, operators and order constraints of ``graph``.

    The FX graph caches its last model. A call returns that model again, as long as no node was added, moved, renamed or
    given another target, argument or value, and ``inputs``, ``outputs``, ``phase``, ``gradients``, ``waits`` and
    ``reuse`` of ``graph`` are the same objects.

    Raises:
        VerifyError: an entry of ``graph.reuse`` does not join two single tensors, or a value has no storage id.
    """
    cached = kept_memory(graph)
    if cached is not None:
        return cached
    memory = _Builder(graph).build()
    setattr(graph.graph, _KEPT_AS, _Known(_state(graph), memory))
    return memory


def kept_memory(graph: TrainGraph) -> MemoryModel | None:
    """Return the cached result of the last call of :func:`build_memory` for the FX graph of ``graph``.

    None if there was no call, or if anything that :func:`build_memory` reads has changed since.
    """
    cached: _Known | None = getattr(graph.graph, _KEPT_AS, None)
    if cached is None:
        return None
    state = _state(graph)
    same = len(cached.state) == len(state) and all(map(is_, cached.state, state))
    return cached.memory if same else None


_KEPT_AS = "_roamc_memory"
"""Attribute of an FX graph that caches its :class:`_Known`, so that the model is freed with the graph it refers to."""


class _Known(NamedTuple):
    """A cached model, and the objects that it was read off."""

    state: list[object]
    memory: MemoryModel


def _state(graph: TrainGraph) -> list[object]:
    """Every object that :class:`_Builder` reads. To compare identities is enough: a change replaces the object."""
    state: list[object] = [graph.inputs, graph.outputs, graph.phase, graph.gradients, graph.waits, graph.reuse]
    for node in graph.graph.nodes:
        state += (node, node.name, node.target, node.args, node.kwargs, node.meta.get("val"), node.meta.get(STORAGES))
    return state


def rearranged(memory: MemoryModel, order: Sequence[int], reused: Mapping[int, int]) -> MemoryModel:
    """Return the model of the graph behind ``memory`` with its operators in ``order`` and with in-place reuse.

    Args:
        memory: of a graph without in-place reuse; n operators.
        order: a permutation of 0..n-1, legal.
        reused: index of the storage of a result to that of the argument whose bytes it takes over.

    Returns:
        The model that :func:`build_memory` would read off that graph, but for the edges that in-place reuse adds. The
        storages of the results in ``reused`` are gone; operators and storages have new indices.
    """
    position = {operator: step for step, operator in enumerate(order)}
    root = roots_of(reused)
    roots = [root.get(storage.index, storage.index) for storage in memory.storages]
    handed = {roots[s.index] for s in memory.storages if s.place is Place.OUTPUT}
    gradient = {roots[s.index] for s in memory.storages if s.gradient}
    left = [storage for storage in memory.storages if storage.index not in reused]
    left.sort(key=lambda storage: (position.get(storage.producer, -1), storage.index))
    new = {storage.index: index for index, storage in enumerate(left)}
    number = [new[root] for root in roots]
    storages = tuple(
        replace(
            storage,
            index=index,
            producer=position.get(storage.producer, -1),
            place=Place.OUTPUT if storage.index in handed else storage.place,
            gradient=storage.index in gradient,
        )
        for index, storage in enumerate(left)
    )
    operators = tuple(_renamed(memory.operators[at], number, reused) for at in order)
    edges = tuple(sorted((position[before], position[after]) for before, after in memory.edges))
    return MemoryModel(storages, operators, edges, {key: number[index] for key, index in memory.owner.items()})


def roots_of(reused: Mapping[int, int]) -> dict[int, int]:
    """Return, for each storage in ``reused``, the storage in whose bytes it lies after all in-place reuse.

    Args:
        reused: index of a storage to the index of the storage whose bytes it takes over; may form chains.
    """
    roots: dict[int, int] = {}
    for storage in reused:
        chain = []
        while storage in reused and storage not in roots:
            chain.append(storage)
            storage = reused[storage]
        roots.update(dict.fromkeys(chain, roots.get(storage, storage)))
    return roots


def _renamed(operator: Operator, number: Sequence[int], reused: Mapping[int, int]) -> Operator:
    """The operator with ``number`` for its storages; a result in ``reused`` becomes a write to what it reuses."""
    births = tuple(number[birth] for birth in operator.births if birth not in reused)
    overwritten = {number[birth] for birth in operator.births if birth in reused}
    reads = {number[storage] for storage in operator.reads}
    writes = {number[storage] for storage in operator.writes} | overwritten
    return replace(operator, births=births, reads=tuple(sorted(reads)), writes=tuple(sorted(writes)))


class _Builder:
    """Builds a :class:`MemoryModel` in one walk over the nodes; ``seen`` maps storage id to index."""

    def __init__(self, graph: TrainGraph) -> None:
        self.graph = graph
        self.shared = SharedStorages(graph)
        self.storages: list[Storage] = []
        self.operators: list[Operator] = []
        self.owner: dict[tuple[str, int], int] = {}
        self.seen: dict[StorageId, int] = {}
        self.maker: dict[fx.Node, int] = {}
        self.handed: set[StorageId] = set()
        self.gradients: set[StorageId] = set()
        self.overwritten: set[StorageId] = set()

    def build(self) -> MemoryModel:
        self.handed = self.shared.of_all(output_values(self.graph.graph))
        by_name = {node.name: node for node in self.graph.graph.nodes}
        self.gradients = self.shared.of_all(by_name.get(name) for name in self.graph.gradients)
        fed = list(zip(placeholders(self.graph.graph), self.graph.inputs, strict=True))
        tangents = {node for node, port in fed if port.role is Role.TANGENT}
        returned = zip(output_values(self.graph.graph), self.graph.outputs, strict=True)
        self.overwritten = self.shared.of_all(node for node, port in (*fed, *returned) if port.overwritten)
        for node in self.graph.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                for position, tensor, storage in placed(node):
                    key = self.shared.of(storage)
                    place = self._place(key, Place.TANGENT) if node in tangents else Place.INPUT
                    self._claim(node, position, tensor, key, place, -1)
            elif node.op == "call_function":
                self._visit(node)
        return MemoryModel(tuple(self.storages), tuple(self.operators), self._edges(), self.owner)

    def _claim(
        self, node: fx.Node, position: int, tensor: torch.Tensor, key: StorageId, place: Place, producer: int
    ) -> int | None:
        """Record the storage ``key`` of one tensor, and return its index if it is new, None if it was known."""
        new = key not in self.seen
        if new:
            name = storage_name(node, position)
            device, space = str(tensor.device), ops.rule(node.target).space if producer >= 0 else Space.DEVICE
            index = self.seen[key] = len(self.storages)
            facts = key in self.gradients, space, key in self.overwritten
            self.storages.append(Storage(index, name, key.nbytes, place, producer, device, *facts))
        self.owner[node.name, position] = self.seen[key]
        return self.seen[key] if new else None

    def _visit(self, node: fx.Node) -> None:
        index = len(self.operators)
        births = []
        for position, tensor, storage in placed(node):
            key = self.shared.of(storage)
            new = self._claim(node, position, tensor, key, self._place(key, Place.TEMPORARY), index)
            if new is not None:
                births.append(new)
        started = self._started_by(node)
        if not births and ops.is_view(node.target) and started is None:
            return
        writes = {self._storage(argument) for argument in ops.mutated_arguments(node)}
        if node.name in self.graph.reuse:
            writes.add(self._storage(node))
        reads = {storage for argument in node.all_input_nodes for storage in self._storages(argument)}
        if started is not None:
            reads.update(started.reads, started.writes, started.births)
        self.maker[node] = index
        phase = self.graph.phase[node.name]
        earlier_reads = tuple(sorted(reads - set(births)))
        self.operators.append(Operator(node, phase, tuple(births), earlier_reads, tuple(sorted(writes))))

    def _started_by(self, node: fx.Node) -> Operator | None:
        """The operator for whose end ``node`` waits; None if it waits for none."""
        start = started_by(node)
        return self.operators[self.maker[start]] if start is not None else None

    def _place(self, key: StorageId, otherwise: Place) -> Place:
        return Place.OUTPUT if key in self.handed else otherwise

    def _storage(self, node: fx.Node) -> int:
        return self.owner[node.name, 0]

    def _storages(self, node: fx.Node) -> list[int]:
        return [self.owner[node.name, position] for position, _ in tensors_of(node)]

    def _edges(self) -> tuple[tuple[int, int], ...]:
        edges: set[tuple[int, int]] = set()
        self._storage_edges(edges)
        self._scalar_edges(edges)
        self._update_edges(edges)
        self._chain(edges, lambda rule: rule.may_draw)
        self._chain(edges, lambda rule: rule.collective or rule.ordered)
        self._check_edges(edges)
        return tuple(sorted(edge for edge in edges if edge[0] != edge[1]))

    def _storage_edges(self, edges: set[tuple[int, int]]) -> None:
        """Order the uses of each storage: reads behind the last write, writes behind all reads since the last write."""
        writer: dict[int, int] = {s.index: s.producer for s in self.storages if s.producer >= 0}
        readers: dict[int, list[int]] = {}
        for index, operator in enumerate(self.operators):
            for storage in operator.reads:
                if storage in writer and writer[storage] < index:
                    edges.add((writer[storage], index))
            for storage in operator.writes:
                edges.update((reader, index) for reader in readers.get(storage, ()))
                if storage in writer and writer[storage] < index:
                    edges.add((writer[storage], index))
                writer[storage] = index
                readers[storage] = []
            for storage in operator.reads:
                if storage not in operator.writes:
                    readers.setdefault(storage, []).append(index)

    def _scalar_edges(self, edges: set[tuple[int, int]]) -> None:
        """Dependencies through results that are not tensors (numbers, tokens, random states)."""
        for node, index in self.maker.items():
            for argument in node.all_input_nodes:
                maker = self._maker_of(argument)
                if maker is not None:
                    edges.add((maker, index))

    def _update_edges(self, edges: set[tuple[int, int]]) -> None:
        """Order updates behind their gradients: a step that fails before the gradient exists has changed nothing."""
        by_name = {node.name: node for node in self.graph.graph.nodes}
        for name, gradient in self.graph.waits.items():
            maker = self._maker_of(by_name[gradient]) if gradient in by_name else None
            if name in by_name and maker is not None:
                edges.add((maker, self.maker[by_name[name]]))

    def _maker_of(self, node: fx.Node) -> int | None:
        while node not in self.maker:
            if node.op != "call_function" or not node.all_input_nodes:
                return None
            node = node.all_input_nodes[0]
        return self.maker[node]

    def _check_edges(self, edges: set[tuple[int, int]]) -> None:
        """Writes to the caller's tensors stay behind the checks that stand before them in the graph, as in eager."""
        last = None
        for index, operator in enumerate(self.operators):
            if ops.rule(operator.node.target).ordered:
                last = index
            elif last is not None and any(self.storages[storage].place is Place.INPUT for storage in operator.writes):
                edges.add((last, index))

    def _chain(self, edges: set[tuple[int, int]], kind: Callable[[ops.OpRule], bool]) -> None:
        """Keep the order of operators of one kind; a further run stays behind the first one, wherever that is."""
        members = {op.node.name: i for i, op in enumerate(self.operators) if kind(ops.rule(op.node.target))}
        of_first = {i: self.operators[i].node.meta.get("again") for i in members.values()}
        edges.update(itertools.pairwise(i for i, first in of_first.items() if first is None))
        edges.update((members[first], i) for i, first in of_first.items() if first in members)


def reused_argument(graph: TrainGraph, node: fx.Node) -> fx.Node:
    """Return the argument whose memory the result of ``node`` takes over; ``node`` has an entry in ``graph.reuse``.

    Raises:
        VerifyError: argument or result is no single tensor.
    """
    at = graph.reuse[node.name]
    argument = node.args[at] if at < len(node.args) else None
    if isinstance(argument, fx.Node) and all(isinstance(n.meta.get("val"), torch.Tensor) for n in (node, argument)):
        return argument
    raise VerifyError(
        f"after pass 'reuse': {node.name} is to be written over argument {at}, which is no tensor that it reads"
    )


class SharedStorages:
    """Tells which values of a graph lie in the same memory: views of one storage, or joined by ``TrainGraph.reuse``.

    The ids of a result and of the argument that it is written over differ. ``graph.reuse`` is read once, at
    construction.

    Raises:
        VerifyError: an entry of ``graph.reuse`` does not join two single tensors.
    """

    def __init__(self, graph: TrainGraph) -> None:
        self._reused: dict[StorageId, StorageId] = {}
        for node in graph.graph.nodes if graph.reuse else ():
            if node.name in graph.reuse:
                self._reused[id_of(node)] = self.of(id_of(reused_argument(graph, node)))

    def of(self, storage: StorageId) -> StorageId:
        """Return the id of the storage in whose bytes ``storage`` lies: equal for two exactly if they share memory."""
        return self._reused.get(storage, storage)

    def of_all(self, nodes: Iterable[fx.Node | None]) -> set[StorageId]:
        """Return the ids that :meth:`of` gives for all tensors that ``nodes`` stand for; a None is skipped."""
        return {self._reused.get(own, own) for own in all_ids(nodes)}


def started_by(node: fx.Node) -> fx.Node | None:
    """Return the asynchronous operator for whose end ``node`` waits; None if ``node`` does not wait."""
    position = ops.rule(node.target).finishes if node.op == "call_function" else None
    if position is None:
        return None
    start: Any = node.args[position]
    operator: fx.Node = start.args[0] if start.target is getitem else start
    return operator


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether each byte of the storage of ``tensor`` belongs to exactly one element of ``tensor``."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return whole and tensor.storage_offset() == 0 and is_dense(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` lie side by side in memory, without gap or overlap, in any dimension order."""
    expected = 1
    pairs = sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    for step, size in pairs if tensor.numel() else ():
        if step != expected:
            return False
        expected *= size
    return True


def written_inputs(graph: TrainGraph, nodes: Iterable[fx.Node]) -> set[str]:
    """Return the names of the placeholders of ``graph`` whose storage an operator in ``nodes`` writes.

    A write to a view of an input counts as well.
    """
    storages = all_ids(argument for node in nodes for argument in ops.mutated_arguments(node))
    return {node.name for node in placeholders(graph.graph) if not storages.isdisjoint(all_ids([node]))}


ASSUMED_STATE = f"assumed {Role.OPTIMIZER_STATE.value}"
"""Among :func:`input_bytes`: states of an optimizer that the graph does not have."""

SUMS = "accumulated gradient"
"""Among :func:`input_bytes`: sums of gradients over micro-batches."""


def held_storages(graph: TrainGraph) -> Iterator[tuple[fx.Node, Port, StorageId]]:
    """Yield each storage of inputs with its input's node and port, tangents left out.

    Memory that several inputs share comes once, with the first of them.
    """
    seen: set[StorageId] = set()
    for node, port in zip(placeholders(graph.graph), graph.inputs, strict=True):
        for storage in ids_of(node) if port.memory is None else (port.memory,):
            if port.role is not Role.TANGENT and storage not in seen:
                seen.add(storage)
                yield node, port, storage


def input_bytes(graph: TrainGraph) -> dict[str, Bytes]:
    """Return the bytes of :func:`held_storages` by the value of the inputs' :class:`Role`, such as "parameter".

    What is assumed of an optimizer that the graph does not have is there as :data:`ASSUMED_STATE`, and sums of
    gradients over micro-batches, one for each parameter, as :data:`SUMS`.
    """
    total: dict[str, Bytes] = {}
    for _, port, storage in held_storages(graph):
        total[port.role.value] = total.get(port.role.value, 0) + storage.nbytes
    sums = total.get(Role.PARAMETER.value, 0) if graph.sums else 0
    more = {ASSUMED_STATE: graph.assumed_state or 0, SUMS: sums}
    return total | {name: size for name, size in more.items() if size}

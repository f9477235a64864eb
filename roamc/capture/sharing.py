"""Which tensors of a graph lie in one storage, kept up to date while values move from one storage to another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from roamc.compat import FakeTensorMode, identity
from roamc.graph import Phase, tensors_of
from roamc.graph.memory import WROTE_OVER
from roamc.graph.rewrite import derived, move
from roamc.graph.storage_ids import addresses
from roamc.operators import ops

Place = tuple[fx.Node, int]
"""A node, and the position of a tensor among its results."""


class Sharing:
    """The tensors of a graph, grouped by the storage of their fake values.

    A tensor is a :data:`Place`: (node, position among the results of the node, 0 if there is one result). A caller
    that erases a node, or gives a node another value, must change ``shared`` accordingly.

    Attributes:
        graph: the graph.
        mode: the fake mode of its tensors.
        places: node to its position in the program order, counted from 0 at construction. A node that
            :meth:`Half.add` adds has the position of the node that it is put in front of.
        shared: storage, as :func:`roamc.compat.identity` gives it, to the tensors in it. Sparse tensors are left out.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph = graph
        self.mode = mode
        self.places = {node: place for place, node in enumerate(graph.nodes)}
        self.shared: dict[int, list[Place]] = {}
        for node in graph.nodes:
            for position, tensor in tensors_of(node):
                if tensor.layout is torch.strided:
                    self.shared.setdefault(identity(tensor), []).append((node, position))

    def of(self, node: fx.Node) -> list[Place]:
        """Return the tensors, as (node, position), in the storage of ``node``, which has one result.

        The list is the one in ``shared``, not a copy.
        """
        return self.shared[identity(node.meta["val"])]

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that take a tensor in the storage of ``node`` as an argument, except views.

        The output node counts as a reader. A node that reads several tensors of the storage comes several times.
        """
        for other, _ in self.of(node):
            yield from (user for user in other.users if not ops.is_view(user.target))

    def put(self, tensors: Iterable[Place], into: torch.Tensor) -> None:
        """Give ``tensors`` new fake values in the storage of ``into``, each with the geometry that it has.

        ``shared`` has them under the new storage as well; the caller removes the entries of their old one.

        Args:
            tensors: (node, position) of each; its fake value in the ``meta["val"]`` of the node is replaced.
            into: a fake tensor whose storage is in ``shared``.
        """
        tensors = list(tensors)
        with self.mode:
            for other, position in tensors:
                move(other, position, into.untyped_storage())
        self.shared[identity(into)] += tensors


class Half(Sharing):
    """The storages of a graph of forward, or of forward and backward, with the phases of its nodes.

    Attributes:
        phase: name of every operator and view to its phase. It is the caller's dictionary; :meth:`add` adds to it.
        named: names of the nodes that are outputs or are saved for backward; rewritings keep their tensors.
        since_write: storage that parts have been written to, to its readers from the last such write on. Those before
            have been looked at, and are not again: the work stays in proportion to the number of writes.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, phase: dict[str, Phase], named: Collection[str]) -> None:
        super().__init__(graph, mode)
        self.phase, self.named = phase, named
        self.since_write: dict[int, list[fx.Node]] = {}

    def is_named(self, node: fx.Node) -> bool:
        """Whether a tensor in the storage of ``node`` is an output or is saved for backward."""
        return any(other.name in self.named for other, _ in self.of(node))

    def is_written(self, node: fx.Node) -> bool:
        """Whether one of :meth:`readers` also writes to the storage of ``node``."""
        own = identity(node.meta["val"])
        return any(own in addresses(ops.mutated_arguments(reader)) for reader in self.readers(node))

    def are_forward(self, readers: Iterable[fx.Node]) -> bool:
        """Whether all ``readers`` are operators or views of forward; the output node is none."""
        return all(self.phase.get(reader.name) is Phase.FORWARD for reader in readers)

    def add(self, place: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
        """Insert a call of a view operator, or of one that writes in place, and return its node.

        Args:
            place: the new node is put in front of it, and has its position, phase and ``meta``, but for the key
                ``WROTE_OVER``, which says that eager computes a node in place.
            target: an operator with one result, which lies in a storage of the graph.
            args: of the call.
        """
        with self.graph.inserting_before(place):
            node = self.graph.create_node("call_function", target, args)
        node.meta = {key: value for key, value in place.meta.items() if key != WROTE_OVER}
        node.meta["val"] = derived(node, self.mode)
        self.places[node], self.phase[node.name] = self.places[place], self.phase[place.name]
        self.of(node).append((node, 0))
        return node


def base_of(node: fx.Node) -> fx.Node | None:
    """Return the node that ``node`` is a view of; None if it is no view, or reads other nodes as well."""
    if node.op != "call_function" or not ops.is_view(node.target) or node.all_input_nodes != [node.args[0]]:
        return None
    return node.all_input_nodes[0]


def viewed(node: fx.Node) -> fx.Node:
    """Return the node that ``node`` is a view of, directly or through other views.

    It is ``node`` itself if :func:`base_of` returns None for it.
    """
    while (base := base_of(node)) is not None:
        node = base
    return node


def reads_as_another(node: fx.Node, argument: fx.Node) -> bool:
    """Whether ``node`` reads the storage of its argument ``argument`` through another argument as well."""
    return identity(argument.meta["val"]) in addresses(set(node.all_input_nodes) - {argument})

"""Which tensors of a graph lie in one storage, kept up to date while values move from one storage to another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from roamc.compat import FakeTensorMode, identity
from roamc.graph import Phase, tensors_of
from roamc.graph.memory import WROTE_OVER, identities
from roamc.graph.rewrite import derived, move
from roamc.operators import ops

Place = tuple[fx.Node, int]
"""A node, and the position of a tensor among its results."""


class Sharing:
    """The tensors of a graph by their storages.

    Attributes:
        graph, mode: the graph, and the fake mode of its tensors.
        places: node to its position in the graph as it was; what :meth:`add` adds shares one.
        shared: storage to the tensors in it. Sparse tensors have none; they are refused later, by name.
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
        """The tensors in the storage of ``node``, which stands for one tensor."""
        return self.shared[identity(node.meta["val"])]

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Whoever reads elements in the storage of ``node``; a view reads none."""
        for other, _ in self.of(node):
            yield from (user for user in other.users if not ops.is_view(user.target))

    def put(self, tensors: Iterable[Place], into: torch.Tensor) -> None:
        """Move ``tensors`` into the storage of ``into``, each to the place that it has in its own."""
        tensors = list(tensors)
        with self.mode:
            for other, position in tensors:
                move(other, position, into.untyped_storage())
        self.shared[identity(into)] += tensors


class Half(Sharing):
    """Forward, or forward and backward in one graph.

    Attributes:
        phase: of every operator and view, the caller's own dictionary; :meth:`add` adds to it.
        named: nodes that outputs or saved values refer to by name; their tensors stay as they are.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, phase: dict[str, Phase], named: Collection[str]) -> None:
        super().__init__(graph, mode)
        self.phase, self.named = phase, named

    def is_named(self, node: fx.Node) -> bool:
        """Whether outputs or saved values refer to a tensor in the storage of ``node``."""
        return any(other.name in self.named for other, _ in self.of(node))

    def is_written(self, node: fx.Node) -> bool:
        """Whether a reader writes to the storage of ``node``."""
        own = identity(node.meta["val"])
        return any(own in identities(ops.mutated_arguments(reader)) for reader in self.readers(node))

    def are_forward(self, readers: Iterable[fx.Node]) -> bool:
        """Whether all of them are operators or views of forward."""
        return all(self.phase.get(reader.name) is Phase.FORWARD for reader in readers)

    def add(self, place: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
        """A view, or a write to one, in front of ``place``, with its position, phase and origin."""
        with self.graph.inserting_before(place):
            node = self.graph.create_node("call_function", target, args)
        node.meta = {key: value for key, value in place.meta.items() if key != WROTE_OVER}
        node.meta["val"] = derived(node, self.mode)
        self.places[node], self.phase[node.name] = self.places[place], self.phase[place.name]
        self.of(node).append((node, 0))
        return node


def base_of(node: fx.Node) -> fx.Node | None:
    """What ``node`` is a view of; None if it is no view, or reads something else as well."""
    if node.op != "call_function" or not ops.is_view(node.target) or node.all_input_nodes != [node.args[0]]:
        return None
    return node.all_input_nodes[0]


def viewed(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of, through all views; ``node`` itself if it is none."""
    while (base := base_of(node)) is not None:
        node = base
    return node


def reads_as_another(node: fx.Node, argument: fx.Node) -> bool:
    """Whether ``node`` reads the storage of ``argument``, which it reads, as another tensor too."""
    return identity(argument.meta["val"]) in identities(set(node.all_input_nodes) - {argument})

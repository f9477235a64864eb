"""Versions of storages, as in static single assignment: one operator makes each.

:mod:`roamc.rewriting.rerun` and the codecs of pass ``retain`` make a storage a second time, a new version, which some
readers of the storage read from then on. Views of a storage are made anew of each version.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from roamc.compat import FakeTensorMode
from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph, operators, output_values, placeholders
from roamc.graph.memory import MemoryModel, build_memory
from roamc.graph.rewrite import derived, mode_of
from roamc.graph.storage_ids import STORAGES, ids_of
from roamc.operators import ops
from roamc.rewriting.names import Names


class Versions:
    """Writes new versions of storages into a graph, and redirects readers to them.

    A subclass inserts calls (:meth:`call`), notes in :attr:`first` what they are versions of, and redirects readers
    (:meth:`redirect`) in the graph's order; at the end it takes the graph from :meth:`finished`. The constructor raises
    PlanError for a graph without tensors.

    Attributes:
        graph: the graph that is written into, in place.
        memory: memory model of the graph as it was given.
        mode: the fake mode of all tensors.
        names: the names of all nodes.
        phase: node name to phase of every operator, new ones included.
        views: (view, version of what it is a view of) to the same view of that version.
        first: node of a later version of a result or view to the node of the first version.
        makers: name to node of the operators that the graph had before; views are left out.
    """

    def __init__(self, graph: TrainGraph) -> None:
        mode = mode_of(graph.graph)
        if mode is None:
            raise PlanError("a graph without tensors has nothing to make again")
        self.graph = graph
        self.mode: FakeTensorMode = mode
        self.memory: MemoryModel = build_memory(graph)
        self.names = Names(graph.graph)
        self.phase: dict[str, Phase] = dict(graph.phase)
        self.views: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self.first: dict[fx.Node, fx.Node] = {}
        self.makers = {op.node.name: op.node for op in self.memory.operators}
        self._idle = {node.name for node in graph.graph.nodes if not node.users}

    def redirect(self, node: fx.Node, versions: Mapping[fx.Node, fx.Node]) -> None:
        """Replace the arguments of ``node`` by other versions, in place.

        Args:
            node: the reader.
            versions: the versions that it is to read: node of the first version of a result, as :meth:`results` returns
                it, to that of another.
        """
        node.args = fx.map_arg(node.args, lambda argument: self._version(argument, node, versions))
        node.kwargs = fx.map_arg(node.kwargs, lambda argument: self._version(argument, node, versions))

    def _version(self, node: fx.Node, at: fx.Node, versions: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """The version of ``node`` that ``at`` is to read: ``node`` itself if ``versions`` have none of its storage.

        A view of another version is made anew: a node is inserted in front of ``at``, once for each version.
        """
        node = self.first.get(node, node)
        if node in versions:
            return versions[node]
        if node.op != "call_function" or node.name in self.makers or not ops.is_view(node.target):
            return node
        base = node.args[ops.rule(node.target).view_of[0]]
        version = self._version(base, at, versions)  # type: ignore[arg-type]
        if version is base:
            return node
        if (node, version) not in self.views:
            self.views[node, version] = self._view(node, base, version, at)  # type: ignore[arg-type]
            self.first[self.views[node, version]] = node
        return self.views[node, version]

    def _view(self, node: fx.Node, base: fx.Node, version: fx.Node, at: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: version if argument is base else argument)
        view = self.call(node.target, args, kwargs, node, at)
        if node.target is operator.getitem:  # only single tensors pass from forward to backward
            version.append(view)
            self.phase[view.name] = self.phase[version.name]
        if version.meta["val"] is not base.meta["val"]:  # what a codec decodes has fake tensors of its own
            view.meta["val"] = derived(view, self.mode)
        (old, *_), (new, *_) = ids_of(base), ids_of(version)
        view.meta[STORAGES] = tuple(new if storage == old else storage for storage in ids_of(node))
        return view

    def results(self, first: fx.Node) -> list[fx.Node]:
        """Return the nodes that stand for single results of ``first``: the operator itself, or the picks of several."""
        if isinstance(first.meta.get("val"), torch.Tensor):
            return [first]
        return [user for user in first.users if user.target is operator.getitem and user.name in self.graph.phase]

    def call(self, target: Any, args: Any, kwargs: Any, like: fx.Node, at: fx.Node, name: str = "") -> fx.Node:
        """Insert the call ``target(*args, **kwargs)`` in front of ``at``, in the phase of ``at``, and return its node.

        The node gets a copy of the ``meta`` of ``like``. The caller must replace the storage ids, which are still those
        of ``like``, and may keep the fake value.

        Args:
            target: what the new node calls.
            args: its positional arguments.
            kwargs: its keyword arguments.
            like: the node that it is another version of.
            at: the node in front of which it is inserted.
            name: its name, which is taken in :attr:`names`; "" for that of ``like`` with another number.
        """
        name = name or self.names.fresh(like.name)
        with self.graph.graph.inserting_before(at):
            inserted = self.graph.graph.create_node("call_function", target, args, kwargs, name=name)
        inserted.name = name  # which FX may remember of a node that is gone, and would not give again
        inserted.meta = dict(like.meta)
        self.phase[inserted.name] = self.phase[at.name]
        return inserted

    def finished(self) -> TrainGraph:
        """Erase nodes that have lost their readers, and return the graph, :func:`up_to_date`.

        Gradients and effects stay, and so does what nothing has read before, such as a count of steps for codecs.
        """
        erase_dead(self.graph.graph, {*self.graph.gradients, *self._idle})
        return up_to_date(self.graph, self.phase)


def up_to_date(graph: TrainGraph, phase: Mapping[str, Phase]) -> TrainGraph:
    """Return ``graph``, whose FX graph was changed, with ``phase``, ``waits`` and ``saved`` brought up to date.

    Args:
        graph: its FX graph stays as it is now.
        phase: node name to phase of every operator; names of nodes that were erased are left out.
    """
    by_name = {node.name: node for node in graph.graph.nodes}
    left = {node.name: phase[node.name] for node in operators(graph.graph)}
    waits = {node: gradient for node, gradient in graph.waits.items() if node in by_name}
    changed = graph.replace(phase=left, waits=waits)
    return changed.replace(saved=saved_values(changed)) if graph.boundary else changed


def erase_dead(graph: fx.Graph, kept: set[str]) -> None:
    """Erase ``call_function`` nodes without readers, in place, such as a first run whose readers all read a later one.

    Nodes whose names are in ``kept`` stay, and so do operators that must run, such as those that draw or write.
    """
    for node in reversed(list(graph.nodes)):
        idle = node.op == "call_function" and not node.users and node.name not in kept
        if idle and not ops.must_run(node.target):
            graph.erase_node(node)


def saved_values(graph: TrainGraph) -> tuple[str, ...]:
    """Names of what passes from forward to backward now: tensors first, as AOTAutograd takes them, then other objects.

    Tensors whose version counter AOTAutograd does not check come last among the tensors. Within each group, names that
    passed before come first, in their old sequence.
    """
    ports = zip(placeholders(graph.graph), graph.inputs, strict=True)
    early = {node for node, port in ports if port.phase is Phase.FORWARD}
    early |= {node for node in operators(graph.graph) if graph.phase[node.name] is Phase.FORWARD}
    readers = [node for node in operators(graph.graph) if node not in early]
    returned = zip(output_values(graph.graph), graph.outputs, strict=True)
    read = [argument for reader in readers for argument in reader.all_input_nodes]
    read += [node for node, port in returned if node is not None and port.phase is not Phase.FORWARD]
    crossing = dict.fromkeys(node.name for node in read if node in early)
    before = set(graph.saved)
    names = [name for name in graph.saved if name in crossing]
    names += [name for name in crossing if name not in before]
    meta = {node.name: node.meta for node in graph.graph.nodes}
    return tuple(sorted(names, key=lambda name: _rank(meta[name])))


def _rank(meta: Mapping[str, Any]) -> int:
    """The place of a saved value in AOTAutograd's order: checked tensors, unchecked tensors, anything else."""
    if not isinstance(meta.get("val"), torch.Tensor):
        return 2
    return 1 if meta.get("saved_tensor_with_no_vc_check") else 0

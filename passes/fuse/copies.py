"""Copies of operators: what a group reads is made once more inside it, so that it need not be stored until then.

    before                               after
    h  = silu(gate)                      h  = silu(gate)
    y  = mul(h, up)                      y  = mul(h, up)
    ...                                  ...                               h's bytes are free here
    dup = mul(grad, h)                   h' = silu(gate); dup = mul(grad, h')        one group

A copy is written as a node of its own in front of its first reader. It has no storage once its group is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph, operators
from roamc.graph.storage_ids import STORAGES, ids_of, renewed
from roamc.operators import blocks, ops
from roamc.operators.fused import REBUILDS
from roamc.passes.fuse.decision import Decision
from roamc.rewriting.rerun_variants import may_run_again, recompute_variant
from roamc.rewriting.versions import up_to_date


@dataclass
class Writer:
    """Writes copies into an FX graph, in place.

    Attributes:
        phase: node name to phase of all operators; new nodes are added to it.
        copy_of: each copy to the operator that it repeats.
    """

    phase: dict[str, Phase]
    copy_of: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def write(self, name: str, operator: fx.Node, before: fx.Node, members: Iterable[fx.Node]) -> Written:
        """Insert a copy of ``operator`` in front of ``before``; the ``members`` that read ``operator`` read the copy.

        Where the operator reads what an earlier copy in front of ``before`` makes, so does the copy.

        Args:
            name: of the copy; no other node has it.
            operator: has one tensor as its result.
            before: one of ``members``.
            members: operators of one group; none that reads ``operator`` stands in front of ``before``.

        Returns:
            What was changed.
        """
        group = list(members)
        written = Written(self)
        mine = {self.copy_of[node]: node for node in group if node in self.copy_of and node < before}
        with before.graph.inserting_before(before):
            copy = before.graph.create_node("call_function", operator.target, operator.args, operator.kwargs, name=name)
        if copy.name != name:  # FX remembers the names of erased nodes
            copy.name = name
        copy.meta = {**operator.meta, STORAGES: renewed(ids_of(operator)), REBUILDS: operator.name}
        self.phase[name] = self.phase[before.name]
        self.copy_of[copy] = operator
        written.new.append(copy)
        self._redirect(copy, mine, written)
        for member in group:
            self._redirect(member, {operator: copy}, written)
        return written

    def _redirect(self, reader: fx.Node, copies: Mapping[fx.Node, fx.Node], written: Written) -> None:
        """Let ``reader`` read the copies of what it reads, and views of copies instead of views of those."""
        if any(blocks.base_of(argument) in copies for argument in reader.all_input_nodes):
            written.old.append((reader, (reader.args, reader.kwargs)))
            reads = {argument: self._version(argument, copies, reader, written) for argument in reader.all_input_nodes}
            reader.args, reader.kwargs = fx.map_arg((reader.args, reader.kwargs), reads.__getitem__)

    def _version(
        self, argument: fx.Node, copies: Mapping[fx.Node, fx.Node], reader: fx.Node, written: Written
    ) -> fx.Node:
        base = blocks.base_of(argument)
        if base not in copies or argument is base:
            return copies.get(argument, argument)
        viewed = argument.all_input_nodes[0]
        version = self._version(viewed, copies, reader, written)
        args, kwargs = fx.map_arg((argument.args, argument.kwargs), lambda node: version if node is viewed else node)
        with reader.graph.inserting_before(reader):
            view = reader.graph.create_node("call_function", argument.target, args, kwargs, name=argument.name)
        fresh = dict(zip(ids_of(viewed), ids_of(version), strict=True))
        view.meta = {**argument.meta, STORAGES: tuple(fresh.get(own, own) for own in ids_of(argument))}
        self.phase[view.name] = self.phase[reader.name]
        written.new.append(view)
        return view


@dataclass
class Written:
    """The changes that one copy made to its graph, so that they can be undone.

    Attributes:
        writer: the writer that made them.
        new: the copy, then views of it, in the order in which they were inserted.
        old: each node whose arguments were changed, with its positional and keyword arguments before.
    """

    writer: Writer
    new: list[fx.Node] = field(default_factory=list)
    old: list[tuple[fx.Node, tuple[Any, Any]]] = field(default_factory=list)

    def undo(self) -> None:
        """Bring the graph back to what it was; what was written later must have been undone before."""
        for node, arguments in reversed(self.old):
            node.args, node.kwargs = arguments
        for node in reversed(self.new):
            del self.writer.phase[node.name]
            self.writer.copy_of.pop(node, None)
            node.graph.erase_node(node)


def repeats(node: fx.Node) -> bool:
    """Whether a copy of ``node`` gives the same bits: it draws nothing and writes nothing, and has one tensor."""
    if node.op != "call_function" or ops.is_view(node.target) or not may_run_again(node):
        return False
    rule = ops.rule(node.target)
    return not (rule.random or rule.may_draw) and recompute_variant(node)[0] is node.target and _single(node)


def _single(node: fx.Node) -> bool:
    ids = node.meta.get(STORAGES, ())
    return len(ids) == 1 and not isinstance(node.meta["val"], list | tuple)


def with_copies(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Write all copies of ``decision`` into ``graph``, whose FX graph is changed in place, and return the graph.

    Operators with copies are erased where nothing else reads them. ``phase``, ``waits`` and ``saved`` are up to date.

    Raises:
        PlanError: the graph has no such operators, one of them may not be repeated, or a copy belongs to no group, or
            stands behind its first reader.
    """
    if not decision.copies:
        return graph
    nodes = {node.name: node for node in operators(graph.graph)}
    writer = Writer(dict(graph.phase))
    groups_of: dict[str, list[tuple[str, ...]]] = {name: [] for name, _, _ in decision.copies}
    for names in decision.groups:
        for name in dict.fromkeys(names):
            if name in groups_of:
                groups_of[name].append(names)
    for name, original, before in decision.copies:
        groups = [names for names in groups_of[name] if before in names]
        if len(groups) != 1 or original not in nodes or before not in nodes or name in nodes:
            raise PlanError(f"this graph has no operators {original}, {before} of which {name} could be a copy inside")
        first, at = nodes[original], nodes[before]
        if not repeats(first):
            raise PlanError(f"{original} cannot run once more as {name}: it draws, writes, or has several results")
        members = [nodes[member] for member in groups[0] if member in nodes]
        readers = [node for node in members if reads(node, first)]
        if not readers or any(node < at for node in readers) or not first < at:
            raise PlanError(f"{name} cannot stand in front of {before}: it has to be there before the first reader")
        nodes[name] = writer.write(name, first, at, members).new[0]
    repeated = set(writer.copy_of.values())
    for node in reversed(operators(graph.graph)):
        if not node.users and blocks.base_of(node) in repeated and node.name not in graph.gradients:
            graph.graph.erase_node(node)
    return up_to_date(graph, writer.phase)


def reads(node: fx.Node, operator: fx.Node) -> bool:
    """Whether ``node`` reads the result of ``operator``, or a view of it."""
    return any(blocks.base_of(argument) is operator for argument in node.all_input_nodes)

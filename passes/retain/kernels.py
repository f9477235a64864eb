"""Decodes in kernels of a GPU: one of its own, or that of the group that reads the decoded value.

    before                                  after
    x_1 = activation_input(y, code)         ds, db = fused(y, code, dy)
    ds, db = fused(dy, x_1)

    fused: dx = gelu_backward(dy, x_1);  db = sum(dx)      x_1 = activation_input(y, code);  then as before

Where all readers of a decoded value are groups that can take the decode in, each of them does, and the value has no
storage. What it is made of has no more bytes than it, but for the code, and lives on in its place. Else the value is
decoded once, by a kernel of its own. This follows from the graph, whatever its order, so that plans need not say it.
Only operators that read bits (:attr:`roamc.operators.table.Facts.bits`) become kernels: one by one
they take several launches. Codecs whose decodes are made of other operators stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import fx

from roamc import cost
from roamc.cost import DeviceProfile
from roamc.graph import TrainGraph, placeholders
from roamc.graph.reader_kinds import readers_of
from roamc.graph.storage_ids import STORAGES, ids_of
from roamc.operators import blocks, ops
from roamc.operators.fused import REBUILDS, fuse
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.rewriting.versions import erase_dead, up_to_date
from roamc.units import Seconds


def as_kernel(node: fx.Node) -> None:
    """Let an operator that reads bits run as one kernel, where its device has kernels that print it; changes ``node``.

    Args:
        node: a new node of a decode, with its name and its fake value.
    """
    if not ops.rule(node.target).bits:
        return
    matrix = FusedKernel.frame(node)
    if matrix is None or FusedKernel.misfit([node], matrix, 1) or FusedKernel.unwritable(node, matrix):
        return
    group, read = fuse(node, [node], FusedKernel, [node])
    node.target, node.args, node.kwargs = group, tuple(read), {}


def decoded_inside(graph: TrainGraph) -> TrainGraph:
    """Let groups decode inside themselves what they read, where all readers of a decoded value can.

    The FX graph is changed in place; a graph without such decodes is returned as it is.
    """
    decodes = sorted(filter(_is_decode, graph.graph.nodes), key=lambda node: node.name)
    if not decodes:
        return graph
    idle = {node.name for node in graph.graph.nodes if not node.users}
    for node in decodes:
        readers = (reader for reader, _ in readers_of(node))
        for reader, (group, read) in _groups_with(node, node, readers).items():
            reader.target, reader.args = group, read
    erase_dead(graph.graph, {*graph.gradients, *idle})
    return up_to_date(graph, graph.phase)


def prices(graph: TrainGraph, profile: DeviceProfile) -> dict[str, Seconds]:
    """Return node name to predicted seconds; of a decode that groups take in, by how much that makes them longer."""
    decodes = [node for node in graph.graph.nodes if _is_decode(node)]
    readers = {node: [reader for reader, _ in readers_of(node)] for node in decodes}
    inside = {node.name: seconds_inside(node, node, readers[node], profile) for node in decodes}
    return cost.prices(graph, profile) | {name: added for name, added in inside.items() if added is not None}


def seconds_inside(
    decode: fx.Node, value: fx.Node, readers: Iterable[fx.Node], profile: DeviceProfile
) -> Seconds | None:
    """Return by how many seconds groups are longer that decode for themselves; None if some reader cannot.

    Args:
        decode: a node, in this graph or another.
        value: what the readers read now; it would be what ``decode`` makes.
        readers: operators that read ``value``.
        profile: the device profile that predicts the time of groups.
    """
    groups = _groups_with(decode, value, readers) if _is_decode(decode) else {}
    if not groups:
        return None
    pairs = [(group, _group_of(reader)) for reader, (group, _) in groups.items()]
    return math.fsum(cost.group_seconds(one, profile) - cost.group_seconds(old, profile) for one, old in pairs)


def _is_decode(node: fx.Node) -> bool:
    """Whether ``node`` is a kernel that decodes, and nothing else: see :func:`as_kernel`."""
    group = node.target
    return isinstance(group, FusedKernel) and len(group.nodes) == 1 and bool(ops.rule(group.nodes[0].target).bits)


_Group = tuple[FusedKernel, tuple[fx.Node, ...]]
"""A group, and the nodes that it reads."""


def _groups_with(decode: fx.Node, value: fx.Node, readers: Iterable[fx.Node]) -> Mapping[fx.Node, _Group]:
    """Each reader of ``value`` to its group with ``decode`` in that place; empty if some reader can have none."""
    groups: dict[fx.Node, _Group] = {}
    for reader in dict.fromkeys(readers):
        if not isinstance(reader.target, FusedKernel) or reader.target.writes:
            return {}
        group, read = _joined(decode, value, reader)
        members = [node for node in group.body.nodes if node.op == "call_function"]
        if FusedKernel.misfit(members, group.matrix, 1):
            return {}
        groups[reader] = group, read
    return groups


def _joined(decode: fx.Node, value: fx.Node, reader: fx.Node) -> _Group:
    """The group of ``reader`` with the members of ``decode``, which make what it reads of ``value``, in front."""
    group, inner, body = _group_of(reader), _group_of(decode), fx.Graph()
    outer: dict[fx.Node, fx.Node] = {}
    both = *_arguments(reader), *_arguments(decode)
    for argument, place in both:
        if blocks.value_of(argument) is not value and argument not in outer:
            outer[argument] = body.placeholder(place.name)
            outer[argument].meta = dict(place.meta)
    values = {place: outer[argument] for argument, place in both if argument in outer}
    for node in inner.nodes:
        values[node] = body.node_copy(node, values.__getitem__)
    inside = [(argument, place) for argument, place in _arguments(reader) if argument not in outer]
    decoded = values[inner.results[0]]
    decoded.meta |= {STORAGES: ids_of(inside[0][1]), REBUILDS: decode.name}
    for argument, place in inside:
        values[place] = _viewed(argument, value, decoded)
    for node in group.body.nodes:
        if node.op == "call_function":
            values[node] = body.node_copy(node, values.__getitem__)
    results = tuple(values[node] for node in group.results)
    body.output(results if len(results) > 1 else results[0])
    return FusedKernel(group.name, body, group.matrix, stands_for=group.stands_for), tuple(outer)


def _group_of(node: fx.Node) -> FusedKernel:
    assert isinstance(node.target, FusedKernel), f"{node.name} is no group"
    return node.target


def _arguments(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The arguments of a group, each with its placeholder in the group's body."""
    read: list[fx.Node] = list(node.args)  # type: ignore[arg-type]
    return list(zip(read, placeholders(_group_of(node).body), strict=True))


def _viewed(argument: fx.Node, value: fx.Node, decoded: fx.Node) -> fx.Node:
    """The view of ``decoded``, a member of a group, that ``argument`` is of ``value``."""
    if argument is value:
        return decoded
    inner = argument.all_input_nodes[0]
    base = _viewed(inner, value, decoded)
    view = decoded.graph.node_copy(argument, {inner: base}.__getitem__)
    view.meta |= {STORAGES: ids_of(decoded) * len(ids_of(argument))}
    return view

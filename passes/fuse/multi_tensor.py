"""Write groups that share a launch as one node: the part of pass fuse that rewrites them once they are nodes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from roamc.errors import PlanError
from roamc.graph import TrainGraph
from roamc.graph.storage_ids import all_ids
from roamc.operators import ops
from roamc.operators.gpu import multi_tensor
from roamc.operators.gpu.fused_kernel import FusedKernel


def with_shared_launches(graph: TrainGraph, launches: Sequence[Sequence[str]]) -> TrainGraph:
    """Replace groups that share a launch by one node each; changes the FX graph in place.

    The node has the name of the last group, and stands in the place of the first one in front of which all operands
    exist.

    Args:
        graph: with a node for every group.
        launches: for each launch the names of its groups.

    Returns:
        The graph, with ``phase`` and ``waits`` up to date.

    Raises:
        PlanError: the graph has no such groups, or they cannot share a launch.
    """
    phase, waits = dict(graph.phase), dict(graph.waits)
    nodes = {node.name: node for node in graph.graph.nodes if launches and type(node.target) is FusedKernel}
    for names in launches:
        if any(name not in nodes for name in names) or len(set(names)) != len(names) or not names:
            raise PlanError(f"this graph has no groups {', '.join(names) or '(none)'} that could share a launch")
        groups = [nodes.pop(name) for name in names]
        wrong = multi_tensor.unfit([(_kernel(node), list(node.all_input_nodes)) for node in groups])
        place = _place(groups)
        wrong = wrong or _other_waits(groups, waits) or _out_of_order(groups)
        if wrong:
            raise PlanError(f"{', '.join(names)} cannot share a launch: {wrong}")
        node = groups[-1]
        kernel, read = multi_tensor.join([(_kernel(one), list(one.all_input_nodes)) for one in groups])
        gradients = [waits.pop(name) for name in names if name in waits]
        if gradients:
            unread = [name for name in gradients if name not in {argument.name for argument in read}]
            waits[node.name] = [*unread, gradients[-1]][0]
        if place is not node:
            place.prepend(node)
        node.target, node.args = kernel, tuple(read)
        for other in groups[:-1]:
            del phase[other.name]
            graph.graph.erase_node(other)
    return graph.replace(phase=phase, waits=waits) if launches else graph


def _kernel(node: fx.Node) -> FusedKernel:
    assert isinstance(node.target, FusedKernel), f"{node.name} is no group"
    return node.target


def _place(groups: Sequence[fx.Node]) -> fx.Node:
    """The first of the groups in front of which all that they read exists."""
    ready = max(argument for node in groups for argument in node.all_input_nodes)
    return min(node for node in groups if ready < node)


def _other_waits(groups: Sequence[fx.Node], waits: dict[str, str]) -> str:
    """Say which groups wait for different gradients that they do not read; "" if none do."""
    read = {argument.name for node in groups for argument in node.all_input_nodes}
    unread = {waits[node.name]: node.name for node in groups if waits.get(node.name, "") not in {*read, ""}}
    return "" if len(unread) < 2 else f"{' and '.join(unread.values())} wait for different gradients"


def _out_of_order(groups: Sequence[fx.Node]) -> str:
    """Say which operator between the groups touches what they write, or writes what they read; "" if none does."""
    read = all_ids(argument for node in groups for argument in node.all_input_nodes)
    written = all_ids(argument for node in groups for argument in ops.mutated_arguments(node))
    node, last = min(groups), max(groups)
    while node is not last:
        node = node.next
        if node in groups or node.op != "call_function" or ops.is_view(node.target):
            continue
        changed = {*all_ids([node]), *all_ids(ops.mutated_arguments(node))}
        touched = {*changed, *all_ids(node.all_input_nodes)}
        if ops.rule(node.target).ordered or not (written.isdisjoint(touched) and read.isdisjoint(changed)):
            return f"{node.name} stands between them, and uses what they write, or writes what they read"
    return ""

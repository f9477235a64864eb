"""Bring a graph's operators into an order.

Views and results picked out of tuples do no work: they move with the operator that they belong to.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Container, Sequence

from torch import fx

from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph, output_node
from roamc.graph.memory import MemoryModel, build_memory
from roamc.options import Options

PASS = "reorder"
"""Name, in ``Options.disable``, of the pass that decides the order."""


def keeps_order(options: Options) -> bool:
    """Return whether operators stay in program order: pass reorder is left out."""
    return PASS in options.disable


def arrange(graph: TrainGraph, order: Sequence[str]) -> TrainGraph:
    """Put the operators of ``graph`` into ``order``, in place; views that nothing reads are erased.

    Picks go right behind their operator, views right in front of the first node that reads them, or where forward ends
    if backward gets them from it.

    Args:
        graph: its nodes are moved.
        order: names of all operators that do work, see :class:`roamc.graph.memory.Operator`.

    Returns:
        The graph with the same FX graph, its ``phase`` without the erased nodes; an update that waits for one of them
        waits for the operator that makes it.

    Raises:
        PlanError: ``order`` is not a permutation of the operators, or has one in front of what it reads.
    """
    by_name = {node.name: node for node in graph.graph.nodes}
    operator_names = {op.node.name for op in build_memory(graph).operators}
    if set(order) != operator_names or len(order) != len(operator_names):
        raise PlanError("the plan's order is not a permutation of this graph's operators")
    placed = _arranged(graph, [by_name[name] for name in order])
    waits = {update: _standing(by_name[gradient], placed).name for update, gradient in graph.waits.items()}
    _relink(graph.graph, list(placed))
    phase = {name: node_phase for name, node_phase in graph.phase.items() if by_name[name] in placed}
    return graph.replace(phase=phase, waits=waits)


def statements(graph: TrainGraph, memory: MemoryModel) -> list[fx.Node]:
    """Return the nodes of ``graph``, the output's last, as they stand when its operators have the order of ``memory``.

    Args:
        graph: stays as it is.
        memory: of ``graph``, in its present order or in another one that :func:`arrange` may give it.
    """
    order, nodes = [operator.node for operator in memory.operators], list(graph.graph.nodes)
    at = {node: number for number, node in enumerate(nodes)}
    if all(at[first] < at[second] for first, second in itertools.pairwise(order)):
        return nodes
    return [*_arranged(graph, order), output_node(graph.graph)]


def _arranged(graph: TrainGraph, order: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """The nodes of ``graph``, but its output, with the operators in ``order``; as for :func:`arrange`."""
    operator_names = {node.name for node in order}
    placed: dict[fx.Node, None] = {n: None for n in graph.graph.nodes if n.op in ("placeholder", "get_attr")}
    names = set(graph.saved)
    saved = [node for node in graph.graph.nodes if node.name in names]
    for node in order:
        while saved and graph.phase[node.name] is not Phase.FORWARD:  # views too are made where forward hands them over
            _place(saved.pop(0), operator_names, placed)
        _place(node, operator_names, placed)
        for user in node.users:
            if user.target is operator.getitem:
                placed[user] = None
    for argument in output_node(graph.graph).all_input_nodes:
        _place(argument, operator_names, placed)
    return placed


def _standing(node: fx.Node, placed: Container[fx.Node]) -> fx.Node:
    """``node``, or what it is a view of if it is not ``placed``."""
    while node not in placed:
        node = node.all_input_nodes[0]
    return node


def _place(node: fx.Node, operator_names: set[str], placed: dict[fx.Node, None]) -> None:
    """List ``node`` behind the views that it reads, which are listed now if they were not before."""
    pending = [node]
    while pending:
        current = pending[-1]
        missing = [n for n in current.all_input_nodes if n not in placed]
        early = [n.name for n in missing if n.name in operator_names]
        if early:
            raise PlanError(f"{current.name} would run before {early[0]}, which it reads")
        if missing:
            pending.extend(missing)
            continue
        placed[current] = None
        pending.pop()


def _relink(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Put the graph's nodes in the order of ``nodes``; views that nothing reads are erased."""
    kept = set(nodes)
    for node in reversed(list(graph.nodes)):
        if node not in kept and node.op == "call_function":
            graph.erase_node(node)
    end = output_node(graph)
    for node in nodes:
        if node.op == "call_function":
            end.prepend(node)

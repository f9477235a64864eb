"""The partition of a planned graph into forward and backward, as modules of their own, for AOTAutograd.

It never runs them: it reads off them how many tensors are saved, their shapes and strides, and what backward returns.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from roamc.codegen.source import Entry, entries_of
from roamc.graph import TrainGraph


def partitioned(graph: TrainGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(forward, backward) of a graph with a boundary; forward returns the user's outputs, then what is saved."""
    forward, backward = entries_of(graph)
    return _part(graph, forward), _part(graph, backward)


def _part(graph: TrainGraph, entry: Entry) -> fx.GraphModule:
    part = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in entry.parameters:
        made[node] = part.create_node("placeholder", node.name, name=node.name)
        made[node].meta = dict(node.meta)
    for node in graph.graph.nodes:
        mine = node.op == "call_function" and graph.phase[node.name] in entry.phases
        if (mine or node.op == "get_attr") and node not in made:
            made[node] = part.node_copy(node, made.__getitem__)
    results: Any = tuple(None if node is None else made[node] for node in entry.results)
    part.output(results)
    return fx.GraphModule(graph.module, part)

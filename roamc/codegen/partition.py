"""The partition of a planned graph into forward and backward, as modules of their own.

AOTAutograd reads off them how many tensors are saved, their shapes and strides, and what backward returns. They run
only where the emitted program has failed.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from roamc.codegen.source import Entry, entries_of
from roamc.graph import TrainGraph


def partitioned(graph: TrainGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a graph with a boundary into two modules; ``graph`` stays as it is.

    The modules' operators are copies of the graph's nodes in the same order, with the same names and metadata.

    Returns:
        (forward, backward). Forward takes its inputs, and returns the user's outputs and then the saved tensors.
        Backward takes the saved tensors and then its other inputs, and returns the gradients, None where there is none.
    """
    forward, backward = entries_of(graph)
    return _part(graph, forward), _part(graph, backward)


def _part(graph: TrainGraph, entry: Entry) -> fx.GraphModule:
    """Return the operators of one function of the program as a module."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in entry.parameters:
        copies[node] = part.create_node("placeholder", node.name, name=node.name)
        copies[node].meta = dict(node.meta)
    for node in graph.graph.nodes:
        mine = node.op == "call_function" and graph.phase[node.name] in entry.phases
        if (mine or node.op == "get_attr") and node not in copies:
            copies[node] = part.node_copy(node, copies.__getitem__)
    results: Any = tuple(None if node is None else copies[node] for node in entry.results)
    part.output(results)
    return fx.GraphModule(graph.module, part)

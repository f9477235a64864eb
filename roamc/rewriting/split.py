"""Write collectives as two operators, one that starts and one that waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from roamc.errors import PlanError
from roamc.graph import TrainGraph, copy_origin
from roamc.graph.rewrite import derived, mode_of
from roamc.graph.storage_ids import number_result
from roamc.operators.split_collectives import STARTS, WAIT, can_start


def wait_name(collective: str) -> str:
    """Return the name of the operator that waits for the end of the one named ``collective``."""
    return f"{collective}_wait"


def splittable(graph: TrainGraph) -> list[str]:
    """Return the names of the collectives of ``graph`` that :func:`split` can take apart, in graph order.

    These are the collectives that can be started and waited for apart, and whose wait has a name that is free.
    """
    names = {node.name for node in graph.graph.nodes}
    return [node.name for node in graph.graph.nodes if can_start(node) and wait_name(node.name) not in names]


def split(graph: TrainGraph, collectives: Iterable[str]) -> TrainGraph:
    """Let ``collectives`` only start where they stand, and wait for each right behind; their readers read the wait.

    Args:
        graph: its nodes are changed and added to, in place.
        collectives: names of operators that are split.

    Returns:
        The graph with the same FX graph, where waits have the phase of their collectives.

    Raises:
        PlanError: ``graph`` has no such operator, or it cannot be split.
    """
    by_name = {node.name: node for node in graph.graph.nodes}
    mode, waits = mode_of(graph.graph), dict[str, str]()
    for name in collectives:
        node = by_name.get(name)
        if node is None or not can_start(node) or wait_name(name) in by_name:
            raise PlanError(f"{name} is no collective of this graph that can be split")
        waits[name] = _split(graph.graph, node, mode).name
    return graph.replace(
        phase={**graph.phase, **{wait: graph.phase[name] for name, wait in waits.items()}},
        saved=tuple(waits.get(name, name) for name in graph.saved),
        waits={update: waits.get(gradient, gradient) for update, gradient in graph.waits.items()},
        gradients=tuple(waits.get(name, name) for name in graph.gradients),
    )


def _split(graph: fx.Graph, node: fx.Node, mode: Any) -> fx.Node:
    """Split one collective; the operator that waits for it."""
    target: Mapping[Any, Any] = STARTS
    node.target = target[node.target]
    with graph.inserting_after(node):
        wait = graph.create_node("call_function", WAIT, (node,), name=wait_name(node.name))
    wait.meta["val"] = derived(wait, mode)
    copy_origin(wait, node)
    number_result(wait)
    node.replace_all_uses_with(wait, delete_user_cb=lambda user: user is not wait)
    return wait

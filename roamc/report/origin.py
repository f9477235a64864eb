"""Where an operator comes from, in the user's terms."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from torch import fx

from roamc.graph import Phase, Role, TrainGraph, placeholders, source_line


def origin(node: fx.Node, phase: Phase, parameter_names: Mapping[str, str]) -> str:
    """Return where ``node`` comes from in the user's terms.

    That is its own line of the model. Without one, in the update it is the name of the parameter, and else, with a
    leading ``"< "``, the line of the nearest operator in front of it that has one; ``""`` if none is found.

    Args:
        node: the node of an operator.
        phase: its phase.
        parameter_names: from :func:`parameter_names`.
    """
    line = source_line(node)
    if line:
        return line
    queue, seen = deque(node.all_input_nodes), set(node.all_input_nodes)
    while queue:
        current = queue.popleft()
        if phase is Phase.UPDATE and current.name in parameter_names:
            return parameter_names[current.name]
        if phase is not Phase.UPDATE and source_line(current):
            return f"< {source_line(current)}"
        fresh = [item for item in current.all_input_nodes if item not in seen]
        seen.update(fresh)
        queue.extend(fresh)
    return ""


def parameter_names(graph: TrainGraph) -> dict[str, str]:
    """Return a dict from the placeholders of ``graph`` for parameters and optimizer state to the parameters' names.

    The keys are names of nodes, the values the user's names.
    """
    roles = (Role.PARAMETER, Role.OPTIMIZER_STATE)
    pairs = zip(placeholders(graph.graph), graph.inputs, strict=True)
    return {node.name: port.name.partition(":")[0] for node, port in pairs if port.role in roles}

"""Where an operator comes from, in the user's terms: the line and the module of the model."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from roamc.graph import Phase, Port, Role, TrainGraph, module_of, operators, placeholders, source_line
from roamc.graph.origin import folded, innermost, path_of


@dataclass(frozen=True)
class Origin:
    """Where an operator comes from.

    Attributes:
        source: its own line of the model. Without one, in the update it is the name of the parameter, and else, with a
            leading ``"< "``, the line of the nearest operator in front of it that has one; "" if none is found.
        module: path of the module of the model that makes it, such as ``"h.0.mlp"``, or the name of the model's class;
            for an operator of backward, of the module whose forward it belongs to; for one of the update, and for a
            gradient that several calls make, of the module that has the parameter; ``"loss_fn"`` for the loss function.
            Without one it is that of the nearest operator in front; "" if the graph knows no modules.
        layers: ``module`` with ``*`` for the numbers of layers, such as ``"h.*.mlp"``.
    """

    source: str
    module: str
    layers: str


NOWHERE = Origin("", "", "")
"""The origin of what no operator makes, and no module has."""


class Origins:
    """Where the operators of a graph come from.

    Args:
        graph: captured or planned.
    """

    def __init__(self, graph: TrainGraph) -> None:
        roles = (Role.PARAMETER, Role.OPTIMIZER_STATE)
        pairs = zip(placeholders(graph.graph), graph.inputs, strict=True)
        self._parameters = {node: port.name.partition(":")[0] for node, port in pairs if port.role in roles}
        modules = dict.fromkeys(map(innermost, operators(graph.graph)))
        modules.pop(("", ""), None)
        self._fold = folded(path for path, _ in modules)
        self._model = next((kind for path, kind in modules if not path), graph.name.partition(" (graph")[0])
        self._known = bool(modules)

    def of(self, node: fx.Node, phase: Phase) -> Origin:
        """Return where ``node``, an operator or a tangent of the phase ``phase``, comes from."""
        module = self._module(node, phase)
        return Origin(self._source(node, phase), module, self._fold(module))

    def holder(self, node: fx.Node, port: Port) -> Origin:
        """Return the module that has the parameter or buffer ``node``, or the parameter that this state belongs to.

        Where capture knows no name of it, it is the module that reads it first. It is :data:`NOWHERE` for other inputs,
        and if the graph knows no modules.
        """
        if not self._known or port.role not in (Role.PARAMETER, Role.BUFFER, Role.OPTIMIZER_STATE):
            return NOWHERE
        if port.name == node.name:
            module = next(filter(None, map(module_of, node.users)), self._model)
        else:
            module = self._owner(port.name.partition(":")[0])
        return Origin("", module, self._fold(module))

    def _owner(self, parameter: str) -> str:
        return path_of(parameter.rpartition(".")[0]) or self._model

    def _source(self, node: fx.Node, phase: Phase) -> str:
        if line := source_line(node):
            return line
        for current in _in_front(node):
            if phase is Phase.UPDATE and current in self._parameters:
                return self._parameters[current]
            if phase is not Phase.UPDATE and source_line(current):
                return f"< {source_line(current)}"
        return ""

    def _module(self, node: fx.Node, phase: Phase) -> str:
        if not self._known:
            return ""
        for current in itertools.chain((node,), _in_front(node)):
            if phase is Phase.UPDATE and current in self._parameters:
                return self._owner(self._parameters[current])
            if phase is not Phase.UPDATE and (module := module_of(current)):
                return module
        return ""


def _in_front(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that ``node`` reads, and those that these read, the nearest first."""
    queue, seen = deque(node.all_input_nodes), set(node.all_input_nodes)
    while queue:
        current = queue.popleft()
        yield current
        fresh = [item for item in current.all_input_nodes if item not in seen]
        seen.update(fresh)
        queue.extend(fresh)

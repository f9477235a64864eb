"""The weights whose gradients pass ``project`` makes in a subspace: of what, in how many columns and bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from roamc.graph import Phase, Role, TrainGraph, operators, placeholders
from roamc.operators import ops
from roamc.operators.projection import PROJECTED_WEIGHT, PROJECTIONS
from roamc.planning.plan import Plan
from roamc.report.origin import Origins
from roamc.units import Bytes

WAITS = {
    "projection": "the projected input",
    "input": "the input",
    "neither": "neither: the input is made again",
}
"""Every :attr:`ProjectedWeight.waits`, in words."""


@dataclass(frozen=True)
class ProjectedWeight:
    """A weight whose gradient is made in a subspace, and never whole.

    Attributes:
        name: the user's name of the weight.
        source: line of the model that makes the input of the weight's product, as
            :class:`roamc.report.origin.Origin` has it; empty for an input of the step.
        rank: columns of the projection.
        columns: those of the weight.
        gradient_bytes: bytes of the gradient.
        state_bytes: bytes of the optimizer's states of the weight.
        waits: what waits for backward: "projection" where forward projects the input, "input" where backward does, and
            "neither" where backward makes that input again.
    """

    name: str
    source: str
    rank: int
    columns: int
    gradient_bytes: Bytes
    state_bytes: Bytes
    waits: str


def projected(graph: TrainGraph, plan: Plan) -> tuple[ProjectedWeight, ...]:
    """Return the weights that pass ``project`` projects, in the sequence in which their gradients are made.

    Args:
        graph: the planned graph.
        plan: its plan; without decision ``project`` the result is empty.
    """
    gradients = {str(name) for name in plan.decisions.get("project", {}).get("gradients", ())}
    states = _state_bytes(graph)
    origins = Origins(graph)
    return tuple(_row(graph, node, states, origins) for node in operators(graph.graph) if node.name in gradients)


def _row(graph: TrainGraph, gradient: fx.Node, states: dict[str, Bytes], origins: Origins) -> ProjectedWeight:
    projected_input = gradient.args[1]
    assert isinstance(projected_input, fx.Node), "a product of two matrices"
    p = next(each for each in projected_input.all_input_nodes if each.target in PROJECTIONS)
    x = next(each for each in projected_input.all_input_nodes if each is not p)
    while x.op == "call_function" and ops.is_view(x.target):
        x = x.all_input_nodes[0]
    columns, rank = p.meta["val"].shape
    name, value = str(gradient.meta[PROJECTED_WEIGHT]), gradient.meta["val"]
    is_input = x.op != "call_function"
    late = not is_input and graph.phase[x.name] is not Phase.FORWARD
    early = graph.phase[projected_input.name] is Phase.FORWARD
    return ProjectedWeight(
        name=name,
        source="" if is_input else origins.of(x, graph.phase[x.name]).source,
        rank=int(rank),
        columns=int(columns),
        gradient_bytes=value.numel() * value.itemsize,
        state_bytes=states.get(name, 0),
        waits="projection" if early else "neither" if late else "input",
    )


def _state_bytes(graph: TrainGraph) -> dict[str, Bytes]:
    """Name of each parameter to the bytes of its states."""
    totals: dict[str, Bytes] = {}
    for node, port in zip(placeholders(graph.graph), graph.inputs, strict=True):
        value = node.meta.get("val")
        if port.role is Role.OPTIMIZER_STATE and isinstance(value, torch.Tensor):
            name = port.name.partition(":")[0]
            totals[name] = totals.get(name, 0) + value.numel() * value.itemsize
    return totals

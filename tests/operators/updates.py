"""The updates of parameters by an optimizer, as groups that run as one kernel. No GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn

from roamc.graph import Phase, operators
from roamc.operators.fused import fuse
from roamc.operators.gpu.fused_kernel import FusedKernel
from tests.graphs import captured_step


class Scaled(nn.Module):
    """One parameter, times a number."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, scale: Tensor) -> Tensor:
        return self.weight * scale


def update_of(optimizer: Callable[..., torch.optim.Optimizer], weight: Tensor) -> FusedKernel:
    """The whole update of ``weight``, with its numbers as arguments."""
    one = torch.ones((), dtype=weight.dtype)
    captured = captured_step(Scaled(weight), (one,), lambda model, x: model(x).sum(), optimizer)
    nodes = [node for node in operators(captured.graph.graph) if captured.graph.phase[node.name] is Phase.UPDATE]
    group, _ = fuse(nodes[-1], nodes, FusedKernel)
    assert isinstance(group, FusedKernel)
    return group


class Summed(nn.Module):
    """Several parameters, times a number."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, scale: Tensor) -> Tensor:
        return torch.stack([(weight * scale).sum() for weight in self.weights]).sum()


def groups_of(
    optimizer: Callable[..., torch.optim.Optimizer], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> list[tuple[FusedKernel, list[fx.Node]]]:
    """The whole updates of parameters of ``shapes``, each with the nodes that it reads."""
    model = Summed([torch.empty(shape, dtype=dtype) for shape in shapes])
    graph = captured_step(model, (torch.ones((), dtype=dtype),), lambda model, x: model(x), optimizer).graph
    nodes = [node for node in operators(graph.graph) if graph.phase[node.name] is Phase.UPDATE]
    count = len(nodes) // len(shapes)
    groups = []
    for begin in range(0, len(nodes), count):
        group, read = fuse(nodes[begin + count - 1], nodes[begin : begin + count], FusedKernel)
        assert isinstance(group, FusedKernel), "the group is of another kind"
        groups.append((group, read))
    return groups

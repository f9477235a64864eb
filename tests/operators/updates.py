"""The update of one parameter by an optimizer, as a group that runs as one kernel. No GPU is needed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

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
    made = captured_step(Scaled(weight), (one,), lambda model, x: model(x).sum(), optimizer)
    nodes = [node for node in operators(made.graph.graph) if made.graph.phase[node.name] is Phase.UPDATE]
    group, _ = fuse(nodes[-1], nodes, FusedKernel)
    assert isinstance(group, FusedKernel)
    return group

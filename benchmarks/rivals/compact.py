"""CompAct's layers and optimizer as published (arXiv 2410.15352, algorithms 1 and 2; github.com/NitzanHod/compact).

Every projected layer keeps its own z = x P, with P of N(0, 1/r) made anew from a seed of the layer, and its gradient
G = dY^T z in an attribute of the weight. Adam runs on G, and the weight moves by -lr * scale * N P^T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Projector:
    """The projection of one layer, and the gradient of its weight."""

    def __init__(self, layer: nn.Linear, rank: float, seed: int) -> None:
        self.size, self.rank, self.seed = layer.in_features, round(layer.in_features * rank), seed
        self.gradient: Tensor | None = None

    def matrix(self, like: Tensor) -> Tensor:
        """P, [n, r]."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(self.size, self.rank, generator=generator) * self.rank**-0.5
        return drawn.to(like)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, projector: Projector) -> Tensor:
        ctx.save_for_backward(x @ projector.matrix(x), weight)
        ctx.projector, ctx.bias = projector, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        z, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2)
        gradient = rows.mT @ z.flatten(0, -2)
        own = ctx.projector
        own.gradient = gradient if own.gradient is None else own.gradient + gradient
        return dy @ weight, None, rows.sum(0) if ctx.bias else None, None


class _Layer(nn.Linear):
    projector: Projector

    def forward(self, x: Tensor) -> Tensor:
        """The product, and the bias."""
        result: Tensor = _Linear.apply(x, self.weight, self.bias, self.projector)
        return result


def rewrite(model: nn.Module, rank: float, dense: Sequence[str]) -> None:
    """Project every linear layer of ``model`` whose name has none of ``dense`` in it, in place."""
    for seed, (name, module) in enumerate(model.named_modules()):
        if type(module) is nn.Linear and not any(part in name for part in dense):
            module.__class__ = _Layer
            module.projector = Projector(module, rank, seed)  # type: ignore[assignment]


class Adam(torch.optim.Optimizer):
    """AdamW, and its form for projected layers of ``model``."""

    def __init__(self, model: nn.Module, lr: float, scale: float, every: int) -> None:
        super().__init__(model.parameters(), {"lr": lr})
        self.scale, self.every, self.steps = scale, every, 0
        self.projectors = {m.weight: m.projector for m in model.modules() if isinstance(m, _Layer)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step; the projections change with every ``every``-th."""
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            projector = self.projectors.get(parameter)
            gradient = parameter.grad if projector is None else projector.gradient
            if gradient is None:
                continue
            state = self.state[parameter]
            if not state:
                state.update(exp_avg=torch.zeros_like(gradient), exp_avg_sq=torch.zeros_like(gradient))
            first = state["exp_avg"].lerp_(gradient, 0.1)
            second = state["exp_avg_sq"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            moved = first / (second.sqrt() / (1 - 0.999**self.steps) ** 0.5 + 1e-8)
            size = -self.param_groups[0]["lr"] / (1 - 0.9**self.steps)
            if projector is None:
                parameter.add_(moved, alpha=size)
                continue
            parameter.add_(moved @ projector.matrix(parameter).mT, alpha=size * self.scale)
            projector.gradient = None
            projector.seed += self.steps % self.every == 0

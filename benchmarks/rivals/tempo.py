"""Tempo's layers as published (Andoorveedu et al., arXiv 2210.10246; github.com/UofT-EcoSystem/Tempo), for eager.

GELU is kept by its output and a byte mask, with the published polynomials for its slope; their last piece is evaluated
where its neighbours say that it should be (the published kernel adds the knot where it has to subtract it). In float32,
as published, slopes are off by 0.014 of their norm for inputs of N(0, 1), by up to 0.27 on the left. LayerNorm is kept
by its output, and attention's dropped scores by softmax and mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEAST = -0.751791631228899
"""Where GELU is least."""

LEFT = (
    -2.44705742e01, 3.64509157e03, -3.24039623e05, 1.72624707e07, -5.87053927e08, 1.33643456e10, -2.09622261e11,
    2.29518632e12, -1.75056809e13, 9.11525632e13, -3.08903527e14, 6.14002866e14, -5.43092154e14,
)  # fmt: skip
RIGHT = (
    (-0.1699712074799012, 0.0, (
        2.03860722e01, -1.51033017e03, 7.29893892e04, -2.08603338e06, 3.75106859e07, -4.43847941e08, 3.54134638e09,
        -1.91638067e10, 6.93203478e10, -1.60441793e11, 2.14787711e11, -1.26477496e11,
    )),
    (0.10682674544528972, 0.6468323960187936, (
        1.19132403, -1.44264915, 1.9529612, -3.84418714, 8.2541642, -16.40234298, 27.17877296, -34.79939566,
        32.32044636, -20.25396347, 7.6092532, -1.28943268,
    )),
    (0.9774323423471688, 1.1079279405461824, (
        1.40963829e-01, -2.74712808e-01, 1.30758747e-01, -3.34020163e-02, 2.21484679e-02, -1.73618287e-02,
        1.13268204e-02, -7.30845601e-03, 3.40900094e-03, -9.19837579e-04, 1.24505621e-04, -6.11869959e-06,
    )),
)  # fmt: skip
"""Pieces to the right of the least output: where each begins, the slope there, and the coefficients behind it."""


def _polynomial(coefficients: tuple[float, ...], at: Tensor) -> Tensor:
    value = torch.zeros_like(at)
    for coefficient in reversed(coefficients):
        value.add_(coefficient).mul_(at)
    return value


def slope(output: Tensor, right: Tensor) -> Tensor:
    """Return the published slope of GELU by its output and whether its input is right of :data:`LEAST`."""
    y = output.float()
    result = torch.where(y > -3.0, _polynomial(LEFT, y - RIGHT[0][0]), 0.0)
    for begin, first, coefficients in RIGHT:
        result = torch.where(right & (y >= begin), first + _polynomial(coefficients, y - begin), result)
    return torch.where(right & (y >= 3.0), 1.0, result).to(output.dtype)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = F.gelu(x)
        ctx.save_for_backward(y, x >= LEAST)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy * slope(*ctx.saved_tensors)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, _, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(y, rstd, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        y, rstd, weight, bias = ctx.saved_tensors
        normal, scaled = (y - bias) / weight, dy * weight
        rows = tuple(range(y.dim() - 1))
        mean, along = scaled.mean(-1, keepdim=True), (scaled * normal).mean(-1, keepdim=True)
        return rstd * (scaled - mean - normal * along), (dy * normal).sum(rows), dy.sum(rows), None


class _DroppedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, share: float) -> Tensor:
        dropped, mask = torch.native_dropout(weights, share, True)
        ctx.save_for_backward(weights, mask, value)
        ctx.scale = 1 / (1 - share)
        return dropped @ value

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weights, mask, value = ctx.saved_tensors
        dropped = weights * mask * ctx.scale
        return (d @ value.mT) * mask * ctx.scale, dropped.mT @ d, None


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None = None,
    dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    weights = torch.softmax(scores if mask is None else scores + mask, -1)
    mixed = _DroppedProduct.apply(weights, value, dropout) if dropout else weights @ value
    return mixed.transpose(1, 2).contiguous(), None


class _Activation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """GELU."""
        result: Tensor = _Gelu.apply(x)
        return result


class _Norm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        """The norm."""
        result: Tensor = _LayerNorm.apply(x, self.weight, self.bias, self.eps)
        return result


def rewrite(model: nn.Module) -> None:
    """Put Tempo's layers into a BERT of transformers, in place."""
    from transformers import AttentionInterface
    from transformers.activations import GELUActivation

    AttentionInterface.register("tempo", _attention)
    for module in list(model.modules()):
        if hasattr(module, "config"):
            module.config._attn_implementation = "tempo"
        if type(module) is nn.LayerNorm:
            module.__class__ = _Norm
        for name, child in module.named_children():
            if isinstance(child, GELUActivation):
                setattr(module, name, _Activation())

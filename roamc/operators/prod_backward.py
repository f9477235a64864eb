"""Backward of ``torch.prod`` as eager runs it, for traces of whole steps.

Eager asks whether an element is 0, and divides the product by each element where none is. A trace has no elements to
ask for: torch multiplies all other elements, which rounds otherwise. Here backward is one operator, which asks when it
runs:

    y = prod(x, dim)    -->  gx = roamc::prod_backward(gy, x, y, dim, keepdim)    in the trace of its backward
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from roamc.compat import FakeTensor
from roamc.compat_operators import decompositions
from roamc.operators.random import LIBRARY

aten = torch.ops.aten

LIBRARY.define("prod_backward(Tensor grad, Tensor self, Tensor result, int? dim, bool keepdim) -> Tensor")


def _fake(grad: Tensor, x: Tensor, result: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    return _kept(grad, x, dim, keepdim) * x


torch.library.register_fake("roamc::prod_backward", _fake, lib=LIBRARY)


@torch.library.impl(LIBRARY, "prod_backward", "CompositeExplicitAutograd")
def _prod_backward(grad: Tensor, x: Tensor, result: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    zeros = x.numel() - int(torch.count_nonzero(x))
    others = _others(x, dim) if zeros and (dim is not None or zeros == 1) else None  # first: there is no gradient yet
    a, b = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (grad, x))
    gradient = torch.empty_like(_fake(a, b, result, dim, keepdim), device=x.device)
    if others is None and zeros:
        return gradient.zero_()
    if others is None:
        others = torch.div(_kept(result, x, dim, keepdim), x, out=gradient)
    return torch.mul(_kept(grad, x, dim, keepdim), others.conj().resolve_conj(), out=gradient)


prod_backward = torch.ops.roamc.prod_backward.default
"""``roamc::prod_backward(grad, x, result, dim, keepdim)``: gradient of ``x``; no ``dim`` for the product of all."""


def _kept(reduced: Tensor, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    """A tensor of the product's shape, with as many dimensions as ``x``."""
    return reduced if dim is None or keepdim or x.dim() < 2 else reduced.unsqueeze(dim)


def _others(x: Tensor, dim: int | None) -> Tensor:
    """For each element of ``x``, which may be 0, the product of all before it times that of all after it."""
    if dim is None:
        return _others(x.contiguous().view(-1), 0).view_as(x)
    if x.numel() == 0 or x.dim() == 0 or x.size(dim) == 1:
        return torch.ones_like(x)
    one, most = torch.ones_like(x.narrow(dim, 0, 1)), x.size(dim) - 1
    before = torch.cat([one, x.narrow(dim, 0, most)], dim).cumprod(dim)
    after = torch.cat([one, x.narrow(dim, 1, most).flip(dim)], dim).cumprod(dim).flip(dim)
    return before * after if torch.is_grad_enabled() else before.mul_(after)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
        return torch.prod(x) if dim is None else torch.prod(x, dim, keepdim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int | None, bool], output: Tensor) -> None:
        x, *ctx.settings = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, result = ctx.saved_tensors
        if torch.is_grad_enabled():  # backward is differentiated
            return _kept(grad, x, *ctx.settings) * _others(x, ctx.settings[0]).conj(), None, None
        return prod_backward(grad, x, result, *ctx.settings), None, None


_product: Callable[..., Tensor] = _Product.apply


def _prod(x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(x, FakeTensor) or not torch.is_grad_enabled() or not x.requires_grad or x.dim() == 0:
        return NotImplemented
    return _product(x.to(dtype or x.dtype), dim, keepdim)


def products_as_eager() -> AbstractContextManager[None]:
    """Return a context manager inside of which products that this thread traces have gradients with eager's bits."""
    return decompositions({aten.prod.default: _prod, aten.prod.dim_int: _prod})

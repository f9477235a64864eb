"""Dropout with the bits of eager, for traces of whole steps.

torch's trace makes ``native_dropout`` of every dropout, which multiplies by ``1 / (1 - p)`` as a float64 number. Eager
does so on a GPU; on a CPU it divides a mask of zeros and ones by ``1 - p`` in the dtype of ``x``, and multiplies by the
quotients:

    y = dropout(x, p)    -->  mask = dropout_mask(size, stride, 1 - p)        True with probability 1 - p
                              y = native_dropout_backward(x, mask, scale)     scale = 1 / (1 - p), rounded as by eager
    its backward              gx = native_dropout_backward(gy, mask, scale)

All other dropouts are torch's operators one after the other, as eager runs them: one that drops nothing returns ``x``
itself, to which in-place operators write, and one that drops everything draws no numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roamc.compat import FakeTensor
from roamc.compat_operators import decompositions, in_parts
from roamc.operators.random import FLOATS, dropout_mask, rounded

aten = torch.ops.aten


class _Product(torch.autograd.Function):
    """``x * mask * scale``; torch's own formula for backward makes a mask of floats."""

    @staticmethod
    def forward(x: Tensor, mask: Tensor, scale: float) -> Tensor:
        return aten.native_dropout_backward.default(x, mask, scale)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        _, mask, ctx.scale = inputs
        ctx.save_for_backward(mask)
        ctx.save_for_forward(mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _product(grad, *ctx.saved_tensors, ctx.scale), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _product(tangent, *ctx.saved_tensors, ctx.scale)


_product: Callable[..., Tensor] = _Product.apply


def scale_of(keep: float, dtype: torch.dtype) -> float:
    """Return what eager multiplies the kept elements of a dropout by, on a CPU.

    Args:
        keep: probability with which an element is kept, above 0.
        dtype: of the elements, one of :data:`roamc.operators.random.FLOATS`.

    Returns:
        ``1 / keep``, computed in float32 for narrower dtypes, and rounded to ``dtype``; infinite where ``dtype`` has no
        such number.
    """
    return rounded(1 / keep if dtype is torch.float64 else float(np.float32(1) / np.float32(keep)), dtype)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Decompose ``aten.dropout``."""
    drops = train and 0 < p < 1 and x.numel() > 0
    if drops and isinstance(x, FakeTensor) and x.device.type == "cpu" and x.dtype in FLOATS:
        scale = scale_of(1.0 - p, x.dtype)
        if scale < float("inf"):  # else what is dropped would be no number, 0 times that
            like = torch.empty_like(x, dtype=torch.bool)
            mask = dropout_mask(list(like.shape), list(like.stride()), 1.0 - p, device=like.device)
            return _product(x, mask, scale)
    return in_parts(aten.dropout.default)(x, p, train)  # type: ignore[no-any-return]


def as_eager() -> AbstractContextManager[None]:
    """Return a context manager inside of which the dropouts that this thread traces have the values of eager."""
    return decompositions({aten.dropout.default: _dropout})

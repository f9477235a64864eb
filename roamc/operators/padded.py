"""Matrices whose rows begin at multiples of 128 bytes, so that products on a GPU read and write them fast.

    y = roamc.padded_mm(a, b)      # aten.mm, [rows, 50257] in memory of [rows, 50304]
    y = roamc.padded_rows(x)       # x, [..., 50257] in memory of [..., 50304]

What lies behind the columns of a row is never read. cuBLAS has its fast kernels for rows that begin at multiples of 16
bytes; 128 are a line of the cache. Pass ``padding`` puts the operators in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from roamc.compat import OpOverload
from roamc.operators.onednn import defined
from roamc.units import Bytes, rounded_up

aten = torch.ops.aten

PADDED: Bytes = 128
"""Rows begin at multiples of it."""


def pitch_of(columns: int, itemsize: Bytes) -> int:
    """Return how many elements of ``itemsize`` bytes there are from one row of ``columns`` to the next."""
    return rounded_up(columns, PADDED // itemsize)


def padded_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return new memory for a tensor of ``shape``, of one dimension or more, like ``tensor``, with padded rows."""
    columns = int(shape[-1])
    return tensor.new_empty((*shape[:-1], pitch_of(columns, tensor.itemsize))).narrow(-1, 0, columns)


def padded_mm(self: Tensor, mat2: Tensor, *, out: Tensor) -> None:
    """Write ``self @ mat2`` to ``out``, whose rows may lie apart."""
    torch.mm(self, mat2, out=out)


def padded_addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, out: Tensor) -> None:
    """Write ``self + mat1 @ mat2`` to ``out``, whose rows may lie apart; ``self`` is broadcast to it."""
    torch.addmm(self, mat1, mat2, out=out)


def padded_rows(self: Tensor, *, out: Tensor) -> None:
    """Copy ``self`` to ``out``, whose rows may lie apart."""
    out.copy_(self)


def _padded_product(*args: Tensor) -> Tensor:
    return padded_like(args[-1], (args[-2].shape[0], args[-1].shape[1]))


ANY_DEVICE = "CompositeExplicitAutograd"
"""torch's dispatch key of a kernel that runs on every device."""

rows_padded: OpOverload = defined(padded_rows, ["self"], lambda tensor: padded_like(tensor, tensor.shape), ANY_DEVICE)
"""``roamc::padded_rows(x)``: a copy with padded rows of a tensor of one dimension or more."""

WITH_PADDED_ROWS: dict[Any, OpOverload] = {
    aten.mm.default: defined(padded_mm, ["self", "mat2"], _padded_product, ANY_DEVICE),
    aten.addmm.default: defined(padded_addmm, ["self", "mat1", "mat2"], _padded_product, ANY_DEVICE),
}
"""ATen's operator to the one that gives the same product with padded rows; both take the same arguments, tensors."""

KERNELS: dict[OpOverload, Callable[..., None]] = {
    WITH_PADDED_ROWS[aten.mm.default]: padded_mm,
    WITH_PADDED_ROWS[aten.addmm.default]: padded_addmm,
    rows_padded: padded_rows,
}
"""Operator of this module to the function that writes its result to ``out``."""

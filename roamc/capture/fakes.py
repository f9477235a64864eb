"""Fake kernels in the place of torch's, where torch's refuse what the CPU runs or note another layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roamc.compat import OpOverload

aten = torch.ops.aten

ROW_BYTES = 16
"""Rows of ``_grouped_mm``'s result begin at multiples of this (but on ROCm)."""


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Any:
    """torch's takes bfloat16 alone, as CUDA's first kernel did, and notes rows as dense."""
    if a.device.type != "cpu":
        return NotImplemented
    dtype = out_dtype or a.dtype
    padding = 1 if torch.version.hip else max(1, ROW_BYTES // dtype.itemsize)
    rows, columns = a.size(-2), b.size(-1)
    width = -(-columns // padding) * padding
    if a.dim() != b.dim():
        size, stride = [rows, columns], [width, 1]
    else:
        groups = a.size(0) if a.dim() == 3 else (0 if offs is None else offs.size(0))
        size, stride = [groups, rows, columns], [rows * width, width, 1]
    return torch.empty_strided(size, stride, dtype=dtype, device=a.device)


FAKES: dict[OpOverload, Callable[..., Any]] = {aten._grouped_mm.default: _grouped_mm}
"""Operator to a function that makes its result from fake tensors, or gives NotImplemented: torch's is used then."""

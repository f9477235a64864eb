"""Fake kernels in the place of torch's, where torch's refuse what the CPU runs or note another layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roamc.compat import OpOverload, suggested_format

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


def _batch_norm(overload: OpOverload) -> Callable[..., Any]:
    """torch's notes the strides of the input for the result; the CPU's kernels give rows or channels last."""

    def fake(x: Tensor, *others: Any, **keywords: Any) -> Any:
        if x.device.type != "cpu":
            return NotImplemented
        told = overload(*(_on_meta(value) for value in (x, *others)), **keywords)
        result, *statistics = (torch.empty(value.shape, dtype=value.dtype, device=x.device) for value in told)
        return (torch.empty_like(result, memory_format=suggested_format(x)), *statistics)

    return fake


def _batch_norm_backward(grad: Tensor, x: Tensor, *others: Any) -> Any:
    """torch's notes the strides of the gradient that comes in; the CPU's kernel gives rows or channels last."""
    if x.device.type != "cpu":
        return NotImplemented
    told = aten.native_batch_norm_backward.default(*(_on_meta(value) for value in (grad, x, *others)))
    first, *rest = (v if v is None else torch.empty(v.shape, dtype=v.dtype, device=x.device) for v in told)
    return (first if first is None else torch.empty_like(first, memory_format=suggested_format(x)), *rest)


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


BATCH_NORMS: tuple[OpOverload, ...] = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
)
"""What ``nn.BatchNorm1d`` to ``3d`` become: the result first, then statistics."""

FAKES: dict[OpOverload, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    **{overload: _batch_norm(overload) for overload in BATCH_NORMS},
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
"""Operator to a function that makes its result from fake tensors, or gives NotImplemented: torch's is used then."""

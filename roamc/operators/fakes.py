"""Fake kernels that replace torch's where those refuse what the CPU runs, or give other strides or dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from roamc.compat import OpOverload
from roamc.compat_operators import decompositions, suggested_format, whole
from roamc.operators import ops
from roamc.operators.pointwise import laid_out
from roamc.operators.table import Strides

aten = torch.ops.aten

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes of inputs that norms may keep statistics of in float32."""

ROW_BYTES = 16
"""Rows of ``_grouped_mm``'s result begin at multiples of this many bytes, except with ROCm."""


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Any:
    """Return the fake result of ``_grouped_mm`` on a CPU, with rows padded to :data:`ROW_BYTES`; else NotImplemented.

    torch's fake kernel takes bfloat16 alone, as CUDA's first kernel did, and gives rows without padding.
    """
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
    """Return a fake kernel of the batch norm ``overload``; it returns NotImplemented for an input not on a CPU.

    Its result 0 is contiguous or channels last, as the input suggests. torch's fake kernels give the result the
    strides of the input, and the statistics, results 1 and 2, as a GPU does.
    """
    names = [argument.name for argument in overload._schema.arguments]

    def fake(x: Tensor, *others: Any, **keywords: Any) -> Any:
        if x.device.type != "cpu":
            return NotImplemented
        on_meta = overload(*(_on_meta(value) for value in (x, *others)), **keywords)
        result, _, _, *running = (torch.empty(value.shape, dtype=value.dtype, device=x.device) for value in on_meta)
        arguments = dict(zip(names, (x, *others), strict=False)) | keywords
        length = x.size(1) if arguments.get("training", False) else 0
        dtype = statistics_dtype(x, [arguments.get(name) for name in ("weight", "bias", "running_mean", "running_var")])
        statistics = [torch.empty(length, dtype=dtype, device=x.device) for _ in range(2)]
        return (torch.empty_like(result, memory_format=suggested_format(x)), *statistics, *running)

    return fake


def statistics_dtype(x: Tensor, parameters: Iterable[Tensor | None]) -> torch.dtype:
    """Return the dtype in which the CPU's norms keep mean and deviation.

    Args:
        x: the input of the norm.
        parameters: weight, bias, running mean and running variance, as far as the norm has them.

    Returns:
        float32 if ``x`` is bfloat16 or float16 and a parameter is float32; else the dtype of ``x``.
    """
    wide = any(parameter is not None and parameter.dtype is torch.float32 for parameter in parameters)
    return torch.float32 if wide and x.dtype in NARROW else x.dtype


def _batch_norm_backward(grad: Tensor, x: Tensor, *others: Any) -> Any:
    """Return the fake gradients of a batch norm's input, weight and bias; NotImplemented if ``x`` is not on a CPU.

    The input's gradient is contiguous or channels last; torch's fake kernel gives it the strides of ``grad``.
    """
    if x.device.type != "cpu":
        return NotImplemented
    on_meta = aten.native_batch_norm_backward.default(*(_on_meta(value) for value in (grad, x, *others)))
    first, *rest = (v if v is None else torch.empty(v.shape, dtype=v.dtype, device=x.device) for v in on_meta)
    return (first if first is None else torch.empty_like(first, memory_format=suggested_format(x)), *rest)


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _pointwise(overload: OpOverload) -> Callable[..., Any]:
    """Return a fake kernel whose result has the strides of the real one, see :mod:`roamc.operators.pointwise`."""

    def fake(*arguments: Any, **keywords: Any) -> Any:
        operands = [value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor)]
        devices = {operand.device.type for operand in operands}
        if "meta" in devices or len(devices) > 1 or all(operand.is_contiguous() for operand in operands):
            return NotImplemented
        on_meta = overload(*map(_on_meta, arguments), **{name: _on_meta(value) for name, value in keywords.items()})
        if not isinstance(on_meta, Tensor):
            return NotImplemented
        noted = torch.empty_strided(on_meta.shape, on_meta.stride(), dtype=on_meta.dtype, device=operands[0].device)
        mended = laid_out(overload, operands, noted)
        return noted if mended is None else mended

    return fake


BATCH_NORMS: tuple[OpOverload, ...] = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
)
"""The operators that ``nn.BatchNorm1d`` to ``3d`` become; they return the result first, then statistics."""

WHOLE: tuple[OpOverload, ...] = (
    *(aten.softshrink.default, aten.hardshrink.default),
    *(aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default),
    *(aten.upsample_linear1d.vec, aten.upsample_trilinear3d.vec),
    *(aten.upsample_bilinear2d.vec, aten.upsample_bilinear2d.default),
    *(aten.upsample_bicubic2d.vec, aten.upsample_bicubic2d.default),
    *(aten.upsample_nearest1d.vec, aten.upsample_nearest1d.default),
    *(aten.upsample_nearest2d.vec, aten.upsample_nearest2d.default),
    *(aten.upsample_nearest3d.vec, aten.upsample_nearest3d.default),
    *(aten._upsample_nearest_exact1d.vec, aten._upsample_nearest_exact1d.default),
    *(aten._upsample_nearest_exact2d.vec, aten._upsample_nearest_exact2d.default),
    *(aten._upsample_nearest_exact3d.vec, aten._upsample_nearest_exact3d.default),
    *(aten._upsample_bilinear2d_aa.vec, aten._upsample_bicubic2d_aa.vec, aten.stft.center),
)
"""Operators that torch takes apart in a trace, and eager does not, or otherwise.

The parts take longer, round otherwise, or give results and gradients in another order of memory, in which the next
operator rounds otherwise.
"""


def kept_whole() -> AbstractContextManager[None]:
    """Return a context manager inside of which operators of :data:`WHOLE` that this thread traces stay whole."""
    return decompositions({target: whole(target) for target in WHOLE})


FAKES: dict[OpOverload, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    **{overload: _batch_norm(overload) for overload in BATCH_NORMS},
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
"""Operator to its fake kernel, for those that have one of their own; see :func:`fake_kernel`."""


@functools.cache
def fake_kernel(target: object) -> Callable[..., Any] | None:
    """Return what makes the results of an operator while a step is traced, in the place of torch's fake kernel.

    Args:
        target: an operator, or anything else that can be called in a trace.

    Returns:
        A function of the operator's arguments; where it returns NotImplemented torch's fake kernel is used. None for an
        operator that has no entry in :data:`FAKES` and whose rule leaves ``strides`` to torch.
    """
    if not isinstance(target, OpOverload):
        return None
    by_column = ops.rule(target).strides is not Strides.AS_NOTED
    return FAKES.get(target) or (_pointwise(target) if by_column else None)

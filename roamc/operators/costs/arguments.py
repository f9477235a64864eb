"""Tests of arguments: of strides, which a CPU's kernel reads as they are or else copies first, and of half precision.

Read off the heap with torch 2.13, operator by operator (``benchmarks/workspace.py --operators``).
"""

from __future__ import annotations

import torch

from roamc.units import Bytes

INDEX: Bytes = 8
"""Bytes of a position in a tensor, such as an index or the place of a pixel, whatever dtype the argument has."""

INLINE_DIMS = 5
"""The sizes and strides of a tensor object with more dimensions lie in a block of their own."""

HALF = (torch.bfloat16, torch.float16)
"""Dtypes of half precision, which kernels on a CPU compute in float32."""


def is_half(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has half precision."""
    return tensor.dtype in HALF


def computed_size(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of an element in the dtype in which ``tensor`` is computed: float32 for half precision."""
    return max(4, tensor.itemsize)


def matrix(tensor: torch.Tensor) -> bool:
    """Whether matrix products read ``tensor`` as it is: its rows, or its columns, are dense and do not overlap.

    Only the last two dimensions matter; a vector, or a single row or column, passes.
    """
    if tensor.dim() < 2 or min(tensor.shape[-2:]) <= 1:
        return True
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    return (column == 1 and row >= columns) or (row == 1 and column >= rows)


def plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is contiguous, the last dimension fastest."""
    return tensor.is_contiguous()


def fits_channels_last(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, of four or five dimensions, lies channels last; it may be contiguous as well."""
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return form is not None and tensor.is_contiguous(memory_format=form)


def channels_last(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, of four or five dimensions, lies channels last and is not contiguous as well."""
    return fits_channels_last(tensor) and not tensor.is_contiguous()


def image(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is contiguous or lies channels last."""
    return tensor.is_contiguous() or channels_last(tensor)


def in_order(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, of two dimensions or more, is contiguous, or is so with its last two dimensions exchanged."""
    return tensor.is_contiguous() or tensor.mT.is_contiguous()


def triangular(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is contiguous, or its matrices of whatever strides lie one after the other without gaps."""
    step = tensor.shape[-1] * tensor.shape[-2]
    for dim in range(tensor.dim() - 3, -1, -1):
        if tensor.stride(dim) != step:
            return tensor.is_contiguous()
        step *= tensor.shape[dim]
    return True

"""What operators that read, sort or add by index take for themselves on a CPU: read off the heap with torch 2.13."""

from __future__ import annotations

import torch

from roamc.operators.call import Call, tensor_at
from roamc.units import Bytes

INDEX: Bytes = 8
"""Of an index, whatever dtype it is given in."""

MEAN, LARGEST = 1, 2
"""Modes of ``_embedding_bag``."""

SPREAD = 16
"""Columns from which on rows with one index each are sorted, not scattered element by element."""


def bags(call: Call, made: torch.Tensor) -> Bytes:
    """Of which bag every index is, for means; else the bags themselves."""
    indices, offsets = tensor_at(call, 1), tensor_at(call, 2)
    return INDEX * (max(indices.numel(), offsets.numel()) if _mode(call, 4) == MEAN else offsets.numel())


def bags_backward(call: Call, made: torch.Tensor) -> Bytes:
    """The indices and their places, sorted too, and of which bag they are; of largest elements, these and theirs."""
    gradient, indices, offsets = (tensor_at(call, at) for at in range(3))
    if _mode(call, 8) == LARGEST:
        return gradient.numel() * (INDEX + gradient.itemsize) + INDEX * offsets.numel()
    return 5 * INDEX * indices.numel()


def bags_dense_backward(call: Call, made: torch.Tensor) -> Bytes:
    """Of the gradient of a table: the indices, sorted too, and their places; of largest elements, these and theirs."""
    gradient, indices = tensor_at(call, 0), tensor_at(call, 1)
    if _mode(call, 7) == LARGEST:
        return gradient.numel() * (INDEX + gradient.itemsize) + INDEX * gradient.shape[0]
    return 4 * INDEX * indices.numel()


def _mode(call: Call, position: int) -> int:
    return call.args[position] if len(call.args) > position else 0


def median(call: Call, made: torch.Tensor) -> Bytes:
    """A copy to sort, unless the elements to choose from lie side by side; with them all, always."""
    read = tensor_at(call, 0)
    ordered = len(call.args) > 1 and read.dim() > 0 and read.stride(call.args[1]) == 1
    return 0 if ordered else read.nbytes


def scatter_reduce(call: Call, made: torch.Tensor) -> Bytes:
    """Means count and mark, in half precision in float32; where whole rows have one index, it is sorted instead."""
    index, source = tensor_at(call, 2), tensor_at(call, 3)
    half = made.itemsize == 2 and made.is_floating_point()
    if _by_rows(tensor_at(call, 0), call.args[1], index, source):
        return 4 * INDEX * index.shape[0]
    if call.args[4] != "mean":
        return 4 * made.numel() if half else 0
    return made.nbytes + max(made.nbytes, source.nbytes) + made.numel() * (4 if half else 1)


def _by_rows(tensor: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether all of a row goes to one row, as the index's strides say: torch then sorts the rows."""
    if dim or not index.dim() or tensor.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return False
    expanded = index.stride(0) > 0 and not any(index.stride()[1:]) and index.shape[1:] == source.shape[1:]
    wide = index.numel() >= SPREAD * index.shape[0]
    return expanded and wide and tensor.is_contiguous() and source.is_contiguous()


def index_reduce(call: Call, made: torch.Tensor) -> Bytes:
    """Means count: ones like the source, summed like it."""
    index, source = tensor_at(call, 2), tensor_at(call, 3)
    return made.nbytes + source.nbytes + 4 * INDEX * index.numel() if call.args[4] == "mean" else 0


def masked_scatter_backward(call: Call, made: torch.Tensor) -> Bytes:
    """The mask as numbers and their running sums: by several threads; one alone takes a result or three."""
    return 2 * INDEX * tensor_at(call, 1).numel()

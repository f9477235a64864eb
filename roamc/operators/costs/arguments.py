"""How arguments lie that torch's kernels on a CPU read as they are; others are copied first.

Read off the heap with torch 2.13, operator by operator (``benchmarks/workspace.py --operators``).
"""

from __future__ import annotations

import torch


def matrix(tensor: torch.Tensor) -> bool:
    """Rows or columns lie side by side, none over another: what products read as it is."""
    if tensor.dim() < 2 or min(tensor.shape[-2:]) <= 1:
        return True
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    return (column == 1 and row >= columns) or (row == 1 and column >= rows)


def plain(tensor: torch.Tensor) -> bool:
    """All elements in order."""
    return tensor.is_contiguous()


def channels_last(tensor: torch.Tensor) -> bool:
    """Channels last, and not in order as well."""
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return form is not None and tensor.is_contiguous(memory_format=form) and not tensor.is_contiguous()


def image(tensor: torch.Tensor) -> bool:
    """In order, or channels last."""
    return tensor.is_contiguous() or channels_last(tensor)


def in_order(tensor: torch.Tensor) -> bool:
    """All matrices lie behind each other, by rows or by columns."""
    return tensor.is_contiguous() or tensor.mT.is_contiguous()

"""Workspace of softmax on a CPU in half precision: what each thread takes to compute in float32.

Along the last dimension softmax takes one row, and its like nothing. Along another, torch takes as many neighbouring
rows together as fit a buffer of :data:`TOGETHER` elements, at least :data:`FEWEST`; softmax itself takes
:data:`VECTORS`. Measured with torch 2.13 on a
machine with AVX-512, with 8 to 50,000 elements in a row: exact, but for some hundred bytes.
"""

from __future__ import annotations

from math import prod

import torch

from roamc.operators.call import Call, tensor_at
from roamc.units import Bytes

TOGETHER = 1 << 16
"""Elements in one buffer."""

FEWEST = 32
"""Rows that are computed together at least; more are a multiple of it."""

VECTORS = 64
"""Rows that softmax computes together, forward."""


def softmax_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Return the bytes that each thread takes in a call of ``_softmax`` that gives ``result``.

    In half precision they are :data:`VECTORS` rows in float32, along the last dimension one row; in other dtypes 0.
    """
    row, _ = _row(result, call.args[1])
    if result.itemsize == 2 and result.dim() and not row:
        return 4 * result.shape[-1]
    return 4 * VECTORS * row


def log_softmax_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Return the bytes that each thread takes in a call of ``_log_softmax`` in half precision.

    The call's result is ``result``. They are a buffer of neighbouring rows in float32, and the largest element and the
    sum of every row. Along the last dimension and in other dtypes they are 0.
    """
    row, rows = _row(result, call.args[1])
    return 4 * _together(row, rows) * (row + 2)


def softmax_backward_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Return the bytes that each thread takes in a call of ``_softmax_backward_data`` in half precision.

    They are two buffers of neighbouring rows in float32, for gradient and result, and the sum of every row. Along the
    last dimension and in other dtypes they are 0. The call's ``result`` is not read.
    """
    row, rows = _row(tensor_at(call, 1), call.args[2])
    return 4 * _together(row, rows) * (2 * row + 1)


def log_softmax_backward_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Return the bytes that each thread takes in a call of ``_log_softmax_backward_data`` in half precision.

    They are a buffer of neighbouring rows in float32, and the sum of every row. Along the last dimension and in other
    dtypes they are 0. The call's ``result`` is not read.
    """
    row, rows = _row(tensor_at(call, 1), call.args[2])
    return 4 * _together(row, rows) * (row + 1)


def _row(tensor: torch.Tensor, dim: int) -> tuple[int, int]:
    """Return the elements of a row along ``dim`` and how many rows lie side by side; (0, 0) if nothing is taken."""
    if tensor.itemsize != 2 or not tensor.dim() or dim % tensor.dim() == tensor.dim() - 1:
        return 0, 0
    return tensor.shape[dim], prod(tensor.shape[dim % tensor.dim() + 1 :])


def _together(row: int, rows: int) -> int:
    return min(rows, max(FEWEST, TOGETHER // max(1, row) // FEWEST * FEWEST))

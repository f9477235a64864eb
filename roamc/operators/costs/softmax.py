"""Workspace of softmax on a CPU: what each thread takes, in half precision to compute in float32.

Along the last dimension softmax takes one row in half precision, and its logarithm two numbers for each of the rows
that it takes together. Along another, torch takes as many neighbouring rows together as fit :data:`TOGETHER` bytes, at
least :data:`FEWEST`; softmax itself takes :data:`VECTORS`. Measured with torch 2.13 on machines with AVX2 and AVX-512,
with 8 to 50,000 elements in a row: exact, but for some hundred bytes.
"""

from __future__ import annotations

from math import prod

import torch

from roamc.operators.call import Call, rows_of, tensor_at
from roamc.operators.costs.arguments import computed_size, is_half
from roamc.units import Bytes

TOGETHER: Bytes = 1 << 17
"""Bytes of the neighbouring rows that are computed together, in the dtype of the call."""

LAST = 1 << 13
"""Elements of the rows along the last dimension that the logarithm computes together."""

FEWEST = 32
"""Rows that are computed together at least; more are a multiple of it."""

VECTORS = 64
"""Rows that softmax computes together, forward."""


def softmax_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in ``_softmax`` in half precision; in other dtypes 0.

    It is :data:`VECTORS` rows in float32; along the last dimension one row.
    """
    if not is_half(result) or not result.dim():
        return 0
    row, _ = _row(result, call.args[1])
    return 4 * VECTORS * row if row else 4 * result.shape[-1]


def log_softmax_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in ``_log_softmax``.

    It is the largest element and the sum of every row that it computes together, and in half precision, but for rows
    along the last dimension, these rows in float32.
    """
    row, rows = _row(result, call.args[1])
    if row:
        return computed_size(result) * _together(row, rows, result) * ((row if is_half(result) else 0) + 2)
    last = result.shape[-1] if result.dim() else 1
    return 2 * computed_size(result) * min(rows_of(result) if result.dim() else 1, max(1, LAST // max(1, last)))


def softmax_backward_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in ``_softmax_backward_data``; along the last dimension 0.

    It is the sum of every row that it computes together, and in half precision two buffers of these rows in float32,
    for gradient and result.
    """
    return _backward_per_thread(call, 2)


def log_softmax_backward_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """As :func:`softmax_backward_per_thread`, with one such buffer."""
    return _backward_per_thread(call, 1)


def _backward_per_thread(call: Call, buffers: int) -> Bytes:
    tensor = tensor_at(call, 1)
    row, rows = _row(tensor, call.args[2])
    return computed_size(tensor) * _together(row, rows, tensor) * ((buffers * row if is_half(tensor) else 0) + 1)


def _row(tensor: torch.Tensor, dim: int) -> tuple[int, int]:
    """Return the elements of a row along ``dim``, and how many rows lie side by side; (0, 0) along the last one."""
    if not tensor.dim() or dim % tensor.dim() == tensor.dim() - 1:
        return 0, 0
    return tensor.shape[dim], prod(tensor.shape[dim % tensor.dim() + 1 :])


def _together(row: int, rows: int, tensor: torch.Tensor) -> int:
    """Return the number of rows that are computed together."""
    return min(rows, max(FEWEST, TOGETHER // tensor.itemsize // max(1, row) // FEWEST * FEWEST))

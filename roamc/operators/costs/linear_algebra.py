"""What factors, inverses and functions of matrices take for themselves on a CPU: read off the heap with torch 2.13.

A batch of matrices counts once, the buffers of LAPACK once for all of them, its pivots and flags matrix by matrix.
"""

from __future__ import annotations

import torch

from roamc.operators.call import Call, rows_of, tensor_at
from roamc.units import Bytes

EXPONENTIAL, EXPONENTIALS = 12, 14
"""``matrix_exp`` of one matrix, and of many: so many times the argument where numbers are so large that it has to
square often, which cannot be known. Of small numbers, 5 to 10 times of one and 10 of many."""

PIVOT: Bytes = 4
"""Of every row that LAPACK may have swapped;"""

FLAGS: Bytes = 32
"""and other things noted of every matrix."""

LINES = 48
"""Rows or columns that LAPACK has beside matrices, at most."""

TALL = 11 / 6
"""From so many times as many rows as columns on, or the other way round, matrices are first made square."""


def exponential(call: Call, made: torch.Tensor) -> Bytes:
    """Powers and sums of them, at the upper end: see :data:`EXPONENTIAL`."""
    count = _matrices(made)
    return made.nbytes * (EXPONENTIAL if count == 1 else EXPONENTIALS) + 2 * FLAGS * count


def inverse(call: Call, made: torch.Tensor) -> Bytes:
    """The factors, and a pivot a row."""
    return made.nbytes + rows_of(made) * PIVOT + _matrices(made) * FLAGS


def pivots(call: Call, made: torch.Tensor) -> Bytes:
    """Signs or places that pivots stand for, twice the size of these."""
    read = tensor_at(call, 0)
    return rows_of(read) * 2 * PIVOT + _matrices(read) * FLAGS


def singular(call: Call, made: torch.Tensor) -> Bytes:
    """The argument, and the buffer of one matrix: with vectors three squares, four of what is made square first."""
    read = tensor_at(call, 0)
    full = call.args[1] if len(call.args) > 1 else False
    vectors = call.args[2] if len(call.args) > 2 else True
    short, long = sorted(read.shape[-2:])
    tall = long > TALL * short
    buffer = LINES * short + (short * short * (4 if tall else 3) if vectors else 0)
    if full and vectors and tall:
        buffer += 3 * LINES * long
    return read.nbytes + buffer * read.itemsize


def pseudo_inverse(call: Call, made: torch.Tensor) -> Bytes:
    """Singular vectors, and products of them."""
    short = min(made.shape[-2:])
    squares = _matrices(made) * short * short * made.itemsize
    first = made.nbytes + (LINES + 4 * short) * short * made.itemsize
    return squares + max(first, 2 * made.nbytes) + 3 * squares // max(1, short)


def eigen(call: Call, made: torch.Tensor) -> Bytes:
    """The buffer of one matrix: two squares of it and some rows."""
    side = tensor_at(call, 0).shape[-1]
    return (2 * side + LINES) * side * tensor_at(call, 0).itemsize


def reflectors(call: Call, made: torch.Tensor) -> Bytes:
    """A factor a row or column, and the buffer of one matrix: blocks of an eighth of its columns."""
    read = tensor_at(call, 0)
    short, long = sorted(read.shape[-2:])
    return _matrices(read) * short * read.itemsize + max(LINES, short) * long * read.itemsize // 8


def copied_factor(call: Call, made: torch.Tensor) -> Bytes:
    """The factor is copied."""
    return tensor_at(call, 1).nbytes + _matrices(made) * FLAGS


def _matrices(tensor: torch.Tensor) -> int:
    return rows_of(tensor) // max(1, tensor.shape[-2])

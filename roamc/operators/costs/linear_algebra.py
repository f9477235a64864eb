"""Workspace of factors, inverses and functions of matrices on a CPU: read off the heap with torch 2.13.

LAPACK's buffer is counted once for all matrices of a batch, its pivots and flags once for each.
"""

from __future__ import annotations

import torch

from roamc.operators.call import Call, rows_of, tensor_at
from roamc.operators.costs.arguments import in_order
from roamc.units import Bytes, rounded_up

EXPONENTIAL, EXPONENTIALS = 12, 14
"""Workspace of ``matrix_exp`` in sizes of its argument, for one matrix and for a batch.

This is the upper end, for numbers so large that it squares often. Small numbers, which cannot be known before, take 5
to 10 sizes for one matrix and 10 for a batch.
"""

PIVOT: Bytes = 4
"""Bytes of one pivot: the row with which LAPACK swapped a row."""

FLAGS: Bytes = 32
"""Bytes of status that are kept for every matrix."""

STATUS: Bytes = 5
"""Bytes of LAPACK's status for every matrix, and of the flag that it is an error, of operators that raise for it."""

LINES = 48
"""Most rows or columns that LAPACK's buffer has beside whole matrices."""

EIGEN_LINES = 400
"""Lines of LAPACK's buffer for eigenvectors of a matrix that is not symmetric."""

BLOCK = 64
"""Most reflectors that LAPACK applies together."""

SQUARED = 16
"""Lines of the longer side that LAPACK's buffer has at least where several threads make reflectors."""

TALL = 11 / 6
"""Matrices whose longer side is more than this many times the shorter are made square first."""


def exponential(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``linalg_matrix_exp``: powers of the matrix and sums of them, see :data:`EXPONENTIAL`."""
    count = _matrices(result)
    return result.nbytes * (EXPONENTIAL if count == 1 else EXPONENTIALS) + 2 * FLAGS * count


def inverse(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``linalg_inv_ex``: the factors, a pivot for each row, and LAPACK's status for each matrix."""
    return result.nbytes + rows_of(result) * PIVOT + _matrices(result) * FLAGS


def pivots(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of a determinant: two pivots for each row of the argument, and a status for each matrix."""
    read = tensor_at(call, 0)
    return rows_of(read) * 2 * PIVOT + _matrices(read) * FLAGS


def factored_symmetric(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``linalg_ldl_factor_ex``: LAPACK's buffer for one matrix."""
    return LINES * result.shape[-1] * result.itemsize


def unpacked(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``lu_unpack``: two pivots for each row or column of the shorter side.

    For matrices of a batch that are not square it is a copy of their square part, if that is more.
    """
    read = tensor_at(call, 0)
    short, long = sorted(read.shape[-2:])
    square = _matrices(read) * short * short * read.itemsize if short < long and read.dim() > 2 else 0
    return max(square, _matrices(read) * short * 2 * PIVOT)


def factored(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``linalg_lu``: factors, pivots and status, and that of :func:`unpacked`."""
    read = tensor_at(call, 0)
    return read.nbytes + _matrices(read) * (min(read.shape[-2:]) * PIVOT + STATUS) + unpacked(call, result)


def pivots_checked(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``linalg_lu_solve``: a flag for each pivot."""
    return tensor_at(call, 1).numel()


def solved_by_triangle(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``linalg_solve_triangular``: a copy of the triangle for each result.

    It is 0 if the triangles lie in order and none is shared.
    """
    triangles = tensor_at(call, 0)
    if triangles.shape[:-2] == result.shape[:-2] and in_order(triangles):
        return 0
    return _matrices(result) * triangles.shape[-1] ** 2 * triangles.itemsize


def status(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of an operator that raises if LAPACK says so, see :data:`STATUS`."""
    return STATUS * _matrices(result)


def copied_result(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of an operator that computes its result elsewhere and copies it, with :func:`status`."""
    return result.nbytes + status(call, result)


def singular(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_linalg_svd``: a copy of the argument, and LAPACK's buffer for one matrix.

    With vectors the buffer holds three squares of the shorter side, or four if the matrix is made square first, which
    takes some lines of the longer side.
    """
    read = tensor_at(call, 0)
    full = call.args[1] if len(call.args) > 1 else False
    vectors = call.args[2] if len(call.args) > 2 else True
    short, long = sorted(read.shape[-2:])
    tall = long > TALL * short
    buffer = LINES * short + (short * short * (4 if tall else 3) if vectors else 0)
    if tall:
        buffer += (3 * LINES if full and vectors else SQUARED) * long
    return read.nbytes + buffer * read.itemsize


def pseudo_inverse(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``linalg_pinv``: singular vectors, products of them, and LAPACK's buffer."""
    short, long = sorted(result.shape[-2:])
    squares = _matrices(result) * short * short * result.itemsize
    tall = SQUARED * long if long > TALL * short else 0
    first = result.nbytes + ((LINES + 4 * short) * short + tall) * result.itemsize
    return squares + max(first, 2 * result.nbytes) + 3 * squares // max(1, short)


def eigen(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_linalg_eigh``: LAPACK's buffer, as large as two matrices and :data:`LINES` rows."""
    side = tensor_at(call, 0).shape[-1]
    return (2 * side + LINES) * side * tensor_at(call, 0).itemsize


def eigen_general(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``linalg_eig``: copies, the parts of the values, and LAPACK's buffer.

    Copied are the argument, and the vectors as LAPACK gives them.
    """
    read = tensor_at(call, 0)
    return 2 * read.nbytes + result.nbytes + EIGEN_LINES * read.shape[-1] * read.itemsize


def eigen_values(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``linalg_eigvals``: as for :func:`eigen_general`, without vectors."""
    read = tensor_at(call, 0)
    return read.nbytes + result.nbytes + LINES * read.shape[-1] * read.itemsize


def reflectors(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``linalg_qr`` and ``linalg_householder_product``.

    It is a factor for each row or column of the shorter side, and LAPACK's buffer, see :func:`householder`.
    """
    read = tensor_at(call, 0)
    return _matrices(read) * min(read.shape[-2:]) * read.itemsize + householder(call, result)


def householder(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``geqrf``: LAPACK's buffer for one matrix, in lines of the longer side.

    It has 3/8 as many as the shorter side up to 192, then 3/16; 96 at least if there are so many, else 16 at least. A
    single thread takes a third.
    """
    read = tensor_at(call, 0)
    short, long = sorted(read.shape[-2:])
    lines = max(min(max(short, SQUARED), 2 * LINES), 3 * min(short, 512) // 8, 3 * short // 16)
    return lines * long * read.itemsize


def reflected(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``ormqr``: LAPACK's buffer for one matrix, in lines of the longer side, and a square.

    There are as many lines as reflectors, in whole groups of 8, and 64 at most.
    """
    reflectors_of_one = tensor_at(call, 1).shape[-1]
    lines = min(BLOCK, rounded_up(reflectors_of_one, BLOCK // 8))
    return (lines * max(result.shape[-2:]) + BLOCK * (BLOCK + 1)) * result.itemsize


def copied_factor(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``cholesky_solve``: a copy of the factor, and LAPACK's status for each matrix."""
    return tensor_at(call, 1).nbytes + _matrices(result) * FLAGS


def _matrices(tensor: torch.Tensor) -> int:
    return rows_of(tensor) // max(1, tensor.shape[-2])

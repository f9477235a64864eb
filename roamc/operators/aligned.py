"""Matrix products in 16 bits on a GPU by aligned copies, for matrices such as those of 50,257 columns.

cuBLAS has its fast kernels only for matrices whose rows all begin at multiples of 16 bytes; with others an H200 took
five to eight times as long. These operators copy such factors to memory where rows do, and the result from there, piece
by piece. They sum in another order than ``aten.mm`` and ``addmm``, and stand in a program only with
``numerics="fast"``, where pass ``products`` puts them. The pieces follow from shapes alone, and so do the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from roamc.compat import OpOverload
from roamc.operators.onednn import product_operator
from roamc.units import Bytes, rounded_up

aten = torch.ops.aten

ALIGNED: Bytes = 16
"""Rows of a matrix are aligned where each begins at a multiple of it."""

PIECE: Bytes = 1 << 28
"""Bytes of the copies of one piece, about."""

ROWS = 128
"""Rows, or columns, of a piece are a multiple of it."""


def is_aligned(matrix: Tensor) -> bool:
    """Whether rows, or columns, of ``matrix`` lie one behind the other and begin at multiples of :data:`ALIGNED`."""
    near, far = sorted(matrix.stride())
    return (
        near == 1 and far * matrix.itemsize % ALIGNED == 0 and matrix.storage_offset() * matrix.itemsize % ALIGNED == 0
    )


def aligned_mm(self: Tensor, mat2: Tensor, *, out: Tensor) -> None:
    """Write ``self @ mat2``, a product of matrices of one dtype, to ``out``, which must not overlap them."""
    _product(lambda rows, columns, first, second, out: torch.mm(first, second, out=out), self, mat2, out)


def aligned_addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, out: Tensor) -> None:
    """Write ``self + mat1 @ mat2`` to ``out``; ``self`` is broadcast to it, and no factor may overlap it."""
    added = self.expand(out.shape)

    def multiply(rows: slice, columns: slice, first: Tensor, second: Tensor, out: Tensor) -> None:
        torch.addmm(added[rows, columns], first, second, out=out)

    _product(multiply, mat1, mat2, out)


def piece_of(first: Tensor, second: Tensor, result: Tensor) -> tuple[int, int]:
    """Return the dimension of the result along which a product goes piece by piece, and the lines of a piece.

    It is 0 for rows, if the second factor needs no copy, else 1 for columns.
    """
    along = 0 if is_aligned(second) else 1
    split = second if along else first
    line = sum(matrix.shape[1 - along] * matrix.itemsize for matrix in (split, result) if not is_aligned(matrix))
    lines = PIECE // max(line, 1) // ROWS * ROWS
    return along, max(ROWS, min(lines, result.shape[along]))


def copied_bytes(first: Tensor, second: Tensor, result: Tensor) -> Bytes:
    """Return the bytes of the copies that a product has at one time: a whole factor, and a piece of the others."""
    along, lines = piece_of(first, second, result)
    whole, split = (first, second) if along else (second, first)
    copies = [(whole, whole.shape[along])] + [(matrix, lines) for matrix in (split, result)]
    return sum(_bytes(matrix, along, count) for matrix, count in copies if not is_aligned(matrix))


def _bytes(matrix: Tensor, along: int, lines: int) -> Bytes:
    """Bytes of an aligned copy of so many lines along a dimension of ``matrix``."""
    sizes = list(matrix.shape)
    sizes[along] = min(lines, sizes[along])
    near, far = _aligned_steps(matrix, sizes)
    return sizes[1 - near] * far * matrix.itemsize


def _product(multiply: Callable[..., object], first: Tensor, second: Tensor, out: Tensor) -> None:
    along, lines = piece_of(first, second, out)
    whole = _aligned(first if along else second)
    for begin in range(0, out.shape[along], lines):
        piece = slice(begin, begin + lines)
        rows, columns = (slice(None), piece) if along else (piece, slice(None))
        target = out[rows, columns]
        place = target if is_aligned(target) else _like(target)
        part = _aligned(second[:, piece] if along else first[piece])
        multiply(rows, columns, *((whole, part) if along else (part, whole)), place)
        if place is not target:
            target.copy_(place)
        del place, part  # before the next ones are allocated


def _aligned(matrix: Tensor) -> Tensor:
    return matrix if is_aligned(matrix) else _like(matrix).copy_(matrix)


def _like(matrix: Tensor) -> Tensor:
    """New memory for a matrix whose near dimension is that of ``matrix``, with aligned rows."""
    near, far = _aligned_steps(matrix, matrix.shape)
    strides = (1, far) if near == 0 else (far, 1)
    return torch.empty_strided(matrix.shape, strides, dtype=matrix.dtype, device=matrix.device)


def _aligned_steps(matrix: Tensor, sizes: Sequence[int]) -> tuple[int, int]:
    """The near dimension of an aligned copy of ``sizes`` of ``matrix``, whose stride is 1, and the other's stride."""
    near = min((0, 1), key=matrix.stride)
    return near, rounded_up(sizes[near], ALIGNED // matrix.itemsize)


WRITERS: dict[OpOverload, Callable[..., None]] = {aten.mm.default: aligned_mm, aten.addmm.default: aligned_addmm}
"""ATen's operator to the function that writes the result for the same arguments to ``out``."""

BY_COPIES: dict[OpOverload, OpOverload] = {
    original: product_operator(original, writer, "CPU", "CUDA") for original, writer in WRITERS.items()
}
"""ATen's operator to the one of this module; both take the same arguments, which are tensors."""

KERNELS: dict[OpOverload, Callable[..., None]] = {BY_COPIES[original]: writer for original, writer in WRITERS.items()}
"""Operator of this module to the function that writes its result to ``out``."""

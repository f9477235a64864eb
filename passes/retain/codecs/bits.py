"""bits: masks of one byte an element are kept with one bit an element.

The row of bytes, n of them, all 0 or 1, is cut into eight parts. Byte j of the code has as its bit k byte j of part k:

    parts    0  1  2  3 | 4  5  6  7        n bytes
             + 16 *       \\_________/
             0  1 | 2  3                    n / 2
             +  4 * \\___/
             0 | 1                          n / 4
             +   2 *
             code                           n / 8

Every operator works on bytes in memory's sequence: no wider temporaries, and vector code. The last part is filled up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from roamc.graph.memory import fills_storage
from roamc.passes.retain.codecs.codec import Coding, Saved, flat
from roamc.units import Bytes

aten = torch.ops.aten

PARTS = 8
"""Elements in each byte of a code."""


@dataclass(frozen=True)
class Bits(Coding):
    """A coding of bool tensors of one shape and stride: bytes of 0 and 1 become one bit each, packed eight to a byte.

    :func:`bits_of` makes it for a tensor's geometry. The tensor must fill its storage; the bits are packed in the
    sequence of memory, not of the indices.

    Attributes:
        shape: of the tensors, in elements.
        stride: of the tensors, in elements, of a dense tensor; ``decode`` gives a tensor with these.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the code: one bit for each element, rounded up to whole bytes."""
        return -(-math.prod(self.shape) // PARTS)

    def encode(self, value: Tensor, /, *_: Tensor) -> Tensor:
        """Return the code, uint8[ceil(n / 8)], of a bool tensor whose n elements lie side by side in memory."""
        row = aten.view.dtype(flat(value), torch.uint8)
        missing = self.nbytes * PARTS - row.numel()
        if missing:
            row = aten.constant_pad_nd.default(row, [0, missing])
        parts = aten.view.default(row, [PARTS, self.nbytes])
        # Operators, where indices would do: those ask for the device, which a plan for a GPU need not have.
        half = aten.add.Tensor(aten.slice.Tensor(parts, 0, 0, 4), aten.slice.Tensor(parts, 0, 4, PARTS), alpha=16)
        quarter = aten.add.Tensor(aten.slice.Tensor(half, 0, 0, 2), aten.slice.Tensor(half, 0, 2, 4), alpha=4)
        code: Tensor = aten.add.Tensor(aten.select.int(quarter, 0, 0), aten.select.int(quarter, 0, 1), alpha=2)
        return code

    def decode(self, code: Tensor, /, *_: Tensor) -> Tensor:
        """Return the bool tensor, with ``shape`` and ``stride``, of which :meth:`encode` made ``code``."""
        number = aten.view.default(aten.arange.default(PARTS, dtype=torch.uint8, device=code.device), [PARTS, 1])
        shifted = aten.bitwise_right_shift.Tensor(aten.view.default(code, [1, self.nbytes]), number)
        parts = aten.bitwise_and.Tensor(shifted, aten.slice.Tensor(number, 0, 1, 2))  # number 1 is a one
        row = aten.view.dtype(parts, torch.bool)
        mask: Tensor = aten.as_strided.default(row, self.shape, self.stride)
        return mask


def bits_of(tensor: Tensor) -> Bits:
    """Return the coding of bool tensors with the shape and the strides of ``tensor``."""
    return Bits(tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())))


def fit(saved: Saved) -> Bits | None:
    """Return the coding of a bool value that fills its storage; None for any other value."""
    tensor = saved.tensor
    return bits_of(tensor) if tensor.dtype == torch.bool and fills_storage(tensor) else None

"""signs: of a relu whose result backward compares with zero and does not use otherwise, one bit an element is kept.

``threshold_backward(gradient, result, 0)`` is zero where ``result <= 0`` and else the gradient. It gets a tensor of
zeros and ones. A relu is never below zero, so the ones stand where it is not zero; NaN is not zero, -0.0 is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from roamc.graph.memory import fills_storage
from roamc.operators import ops
from roamc.operators.ops import Need
from roamc.passes.retain.codecs.bits import Bits, bits_of
from roamc.passes.retain.codecs.codec import Read, Saved
from roamc.units import Bytes

aten = torch.ops.aten


@dataclass(frozen=True)
class Signs:
    """The coding of a floating tensor of one geometry by where it is above zero, or NaN."""

    mask: Bits
    dtype: torch.dtype

    @property
    def nbytes(self) -> Bytes:
        """One bit an element, whole bytes."""
        return self.mask.nbytes

    def encode(self, value: Tensor) -> Tensor:
        """uint8[ceil(n / 8)] for a tensor of n elements that lie side by side."""
        return self.mask.encode(aten._to_copy.default(value, dtype=torch.bool))

    def decode(self, code: Tensor) -> Tensor:
        """Zeros and ones of the dtype, in the shape and strides of the value."""
        numbers = aten.view.dtype(self.mask.decode(code), torch.uint8)  # torch casts these five times as fast as bools
        signs: Tensor = aten._to_copy.default(numbers, dtype=self.dtype)
        return signs


def fit(saved: Saved) -> Signs | None:
    """Results of relu that fill their storage and of which everybody behind forward reads only the sign."""
    tensor = saved.tensor
    if not ops.rule(saved.node.target).nonnegative or not tensor.is_floating_point() or not fills_storage(tensor):
        return None
    if not saved.late or not all(_reads_sign(read, saved.node) for read in saved.late):
        return None
    return Signs(bits_of(tensor), tensor.dtype)


def _reads_sign(read: Read, value: fx.Node) -> bool:
    """Whether the reader only compares with zero."""
    return read.argument is value and ops.needs(read.reader.target, read.reader.args).get(read.position) is Need.SIGN

"""signs: of a relu whose result backward compares with zero and does not use otherwise, one bit an element is kept.

``threshold_backward(gradient, result, 0)`` is zero where ``result <= 0`` and else the gradient, bit for bit; NaN is not
below anything, and -0.0 is not above 0. ``masked_fill(gradient, result <= 0, 0)`` is the same. (Of a gradient that is
NaN itself, vector code for narrow dtypes may write another NaN.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from roamc.compat import OpOverload
from roamc.passes.retain.codecs.bits import Bits, bits_of
from roamc.passes.retain.codecs.codec import Read, Saved, fills_storage
from roamc.units import Bytes

aten = torch.ops.aten

READERS = {aten.threshold_backward.default: aten.masked_fill.Scalar}
"""Readers of a sign to the operators that read it off a mask, from the same position."""

POSITION = 1
"""Of the value among their arguments; behind it stands the threshold, or what the gradient is filled with: 0 both."""


@dataclass(frozen=True)
class Signs:
    """The coding of a floating tensor of one geometry by where it is not above zero."""

    mask: Bits

    @property
    def nbytes(self) -> Bytes:
        """One bit an element, whole bytes."""
        return self.mask.nbytes

    @property
    def decoded_bytes(self) -> Bytes:
        """A mask of one byte an element."""
        return self.mask.decoded_bytes

    @property
    def readers(self) -> Mapping[OpOverload, OpOverload]:
        """They read the mask."""
        return READERS

    def encode(self, value: Tensor) -> Tensor:
        """uint8[ceil(n / 8)] for a tensor of n elements that lie side by side."""
        return self.mask.encode(aten.le.Scalar(value, 0))

    def decode(self, code: Tensor) -> Tensor:
        """The mask: bool, in the shape and strides of the value."""
        return self.mask.decode(code)


def fit(saved: Saved) -> Signs | None:
    """Floating tensors that fill their storage and of which everybody behind forward reads only the sign."""
    tensor = saved.tensor
    signs = tensor.is_floating_point() and fills_storage(tensor) and bool(saved.late)
    if not signs or not all(_reads_sign(read, saved.node) for read in saved.late):
        return None
    return Signs(bits_of(tensor))


def _reads_sign(read: Read, value: fx.Node) -> bool:
    """Whether the reader compares with zero, and a mask would give a result that lies as its result does."""
    reader = read.reader
    if reader.target not in READERS or read.argument is not value or read.position != POSITION:
        return False
    gradient, _, threshold = reader.args
    if threshold != 0 or not isinstance(gradient, fx.Node) or gradient is value:
        return False
    mask = value.meta["val"]
    with mask.fake_mode:
        instead: Tensor = READERS[reader.target](gradient.meta["val"], torch.empty_like(mask, dtype=torch.bool), 0)
    made: Tensor = reader.meta["val"]
    return instead.stride() == made.stride() and instead.shape == made.shape and instead.dtype == made.dtype

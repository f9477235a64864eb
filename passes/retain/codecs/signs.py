"""signs: the result of a relu that backward only compares with zero is kept with one bit an element.

``threshold_backward(gradient, result, 0)`` is zero where ``result <= 0`` and else the gradient. In the place of
``result`` it gets a tensor of zeros and ones. A relu is never below zero, so the ones stand where it is not zero; NaN
is not zero, -0.0 is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from roamc.graph.memory import fills_storage
from roamc.operators import ops
from roamc.operators.ops import Need
from roamc.passes.retain.codecs.bits import Bits, bits_of
from roamc.passes.retain.codecs.codec import Coding, Read, Saved
from roamc.units import Bytes

aten = torch.ops.aten


@dataclass(frozen=True)
class Signs(Coding):
    """A coding of floating tensors of one shape and stride, without negative elements: where they are not zero.

    Attributes:
        mask: the coding of the bool tensor that is True where the value is above zero or NaN.
        dtype: dtype of the value.
    """

    mask: Bits
    dtype: torch.dtype

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the code: one bit for each element, rounded up to whole bytes."""
        return self.mask.nbytes

    def encode(self, value: Tensor, /, *_: Tensor) -> Tensor:
        """Return the code, uint8[ceil(n / 8)], of a floating tensor without negative elements.

        The n elements of ``value`` lie side by side in memory.
        """
        return self.mask.encode(aten._to_copy.default(value, dtype=torch.bool))

    def decode(self, code: Tensor, /, *_: Tensor) -> Tensor:
        """Return 1 where the value was above zero or NaN, else 0: of ``dtype``, with the value's shape and strides."""
        numbers = aten.view.dtype(self.mask.decode(code), torch.uint8)  # torch casts these five times as fast as bools
        signs: Tensor = aten._to_copy.default(numbers, dtype=self.dtype)
        return signs


def fit(saved: Saved) -> Signs | None:
    """Return the coding of a relu's result of which readers behind forward need only the sign; else None.

    The value must fill its storage. The sign says whether an element is above zero (:attr:`Need.SIGN`).
    """
    tensor = saved.tensor
    if not ops.rule(saved.node.target).nonnegative or not tensor.is_floating_point() or not fills_storage(tensor):
        return None
    if not saved.late or not all(_reads_sign(read, saved.node) for read in saved.late):
        return None
    return Signs(bits_of(tensor), tensor.dtype)


def _reads_sign(read: Read, value: fx.Node) -> bool:
    """Whether the reader reads the value itself, not a view, and only compares it with zero."""
    return read.argument is value and ops.needs(read.reader.target, read.reader.args).get(read.position) is Need.SIGN

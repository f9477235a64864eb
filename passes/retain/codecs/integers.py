"""integers: indices of 64 bits are kept in the smallest integer dtype that holds all that they can be.

What an index can be follows from the operator that makes it, such as a pooling over H * W places, or from one that
has read it in forward: that one raises an error if an index is out of its range, and then there is no backward.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roamc.graph import tensors_of
from roamc.graph.memory import fills_storage, is_dense
from roamc.operators import ops
from roamc.operators.index_ranges import Range
from roamc.passes.retain.codecs.codec import Coding, Read, Saved
from roamc.units import Bytes

aten = torch.ops.aten

NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)
"""Integer dtypes that a code may have, smallest first."""


@dataclass(frozen=True)
class Integers(Coding):
    """A coding that casts integers to a narrower dtype.

    Attributes:
        count: number of elements.
        wide: dtype of the value.
        narrow: dtype of the code.
    """

    count: int
    wide: torch.dtype
    narrow: torch.dtype

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the code."""
        return self.count * self.narrow.itemsize

    def encode(self, value: Tensor, /, *_: Tensor) -> Tensor:
        """Return the numbers of ``value`` in the dtype ``narrow``, with the shape and strides of ``value``."""
        code: Tensor = aten._to_copy.default(value, dtype=self.narrow)
        return code

    def decode(self, code: Tensor, /, *_: Tensor) -> Tensor:
        """Return the numbers of ``code`` in the dtype ``wide``, with the shape and strides of ``code``."""
        value: Tensor = aten._to_copy.default(code, dtype=self.wide)
        return value


def fit(saved: Saved) -> Integers | None:
    """Return the coding in the smallest integer dtype that holds every number that the value can have.

    None if the value is not int64, int32 or int16, does not fill its storage, or if its range is unknown or fits in no
    smaller dtype.
    """
    tensor = saved.tensor
    if tensor.dtype not in (torch.int64, torch.int32, torch.int16) or not fills_storage(tensor):
        return None
    within = range_of(saved)
    narrow = next((dtype for dtype in NARROW if within is not None and _holds(dtype, within)), tensor.dtype)
    if narrow.itemsize >= tensor.dtype.itemsize:
        return None
    return Integers(int(tensor.numel()), tensor.dtype, narrow)


def range_of(saved: Saved) -> Range | None:
    """Return the narrowest range of numbers that the value's operator or a reader in forward guarantees.

    None if neither guarantees a range.
    """
    return min(_all_ranges(saved), key=lambda within: within.high - within.low, default=None)


def _holds(dtype: torch.dtype, within: Range) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= within.low and within.high <= limits.max


def _all_ranges(saved: Saved) -> Iterator[Range]:
    node = saved.node
    picked = node.target is operator.getitem
    pick: Any = node.args[1] if picked else 0
    maker = node.all_input_nodes[0] if picked else node
    makes = ops.rule(maker.target).index_ranges.get(pick)
    if makes is not None:
        yield makes(maker)
    for read in saved.early:
        checks = ops.rule(read.reader.target).checked_ranges.get(read.position)
        if checks is not None and _is_whole(read, saved):
            yield checks(read.reader)


def _is_whole(read: Read, saved: Saved) -> bool:
    """Whether all numbers are read, each once."""
    _, tensor = next(tensors_of(read.argument))
    return bool(tensor.numel() == saved.tensor.numel() and tensor.dtype == saved.tensor.dtype and is_dense(tensor))

"""integers: indices of 64 bits are kept in the smallest integer dtype that holds all that they can be.

What an index can be follows from the operator that makes it, such as a pooling over H * W places, or from one that
has read it in forward: that one raises an error if an index is out of its range, and then there is no backward.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from roamc.graph import tensors_of
from roamc.graph.memory import fills_storage, is_dense
from roamc.operators import ops
from roamc.passes.retain.codecs.codec import Read, Saved
from roamc.units import Bytes

aten = torch.ops.aten

NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)
"""Smallest first."""


class Range(NamedTuple):
    """The least and the largest of what numbers can be."""

    low: int
    high: int


@dataclass(frozen=True)
class Integers:
    """The coding of integers of one dtype as another, narrower one.

    Attributes:
        count: how many numbers.
        wide: their dtype.
        narrow: that of the code.
    """

    count: int
    wide: torch.dtype
    narrow: torch.dtype

    @property
    def nbytes(self) -> Bytes:
        """Of the narrow numbers."""
        return self.count * self.narrow.itemsize

    def encode(self, value: Tensor) -> Tensor:
        """The numbers in the narrow dtype, laid out as before."""
        code: Tensor = aten._to_copy.default(value, dtype=self.narrow)
        return code

    def decode(self, code: Tensor) -> Tensor:
        """The numbers in the wide dtype."""
        value: Tensor = aten._to_copy.default(code, dtype=self.wide)
        return value


def fit(saved: Saved) -> Integers | None:
    """Integers that fill their storage and whose range is known."""
    tensor = saved.tensor
    if tensor.dtype not in (torch.int64, torch.int32, torch.int16) or not fills_storage(tensor):
        return None
    within = range_of(saved)
    narrow = next((dtype for dtype in NARROW if within is not None and _holds(dtype, within)), tensor.dtype)
    if narrow.itemsize >= tensor.dtype.itemsize:
        return None
    return Integers(int(tensor.numel()), tensor.dtype, narrow)


def range_of(saved: Saved) -> Range | None:
    """What the numbers can be: the narrowest that their maker or a reader in forward says; None if none does."""
    known = [found for found in _all_ranges(saved) if found is not None]
    return min(known, key=lambda found: found.high - found.low, default=None)


def _holds(dtype: torch.dtype, within: Range) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= within.low and within.high <= limits.max


def _all_ranges(saved: Saved) -> Iterator[Range | None]:
    made = saved.node
    picked = made.target is operator.getitem
    pick, maker = (made.args[1], made.all_input_nodes[0]) if picked else (0, made)
    rule = MAKERS.get((maker.target, pick))
    if rule is not None:
        yield rule(maker)
    for read in saved.early:
        checked = READERS.get((read.reader.target, read.position))
        if checked is not None and _is_whole(read, saved):
            yield checked(read.reader)


def _is_whole(read: Read, saved: Saved) -> bool:
    """Whether all numbers are read, each once."""
    _, tensor = next(tensors_of(read.argument))
    return bool(tensor.numel() == saved.tensor.numel() and tensor.dtype == saved.tensor.dtype and is_dense(tensor))


Rule = Callable[[fx.Node], Range | None]


def _argument(node: fx.Node, name: str) -> Any:
    """An argument by its name in the schema, given or not."""
    return ops.argument_of(node.target, node.args, node.kwargs, name)


def _shape(node: fx.Node, name: str) -> tuple[int, ...]:
    value: Tensor = _argument(node, name).meta["val"]
    return tuple(map(int, value.shape))


def _below(count: int) -> Range:
    return Range(0, max(count - 1, 0))


def _places(dims: int) -> Rule:
    """Places of the last ``dims`` dimensions of the input, counted through."""

    def rule(node: fx.Node) -> Range:
        return _below(math.prod(_shape(node, "self")[-dims:]))

    return rule


def _along(name: str) -> Rule:
    """Places along the dimension ``dim`` of the argument ``name``, or in all of it where no dimension is given."""

    def rule(node: fx.Node) -> Range:
        shape, dim = _shape(node, name), _argument(node, "dim")
        return _below(shape[dim] if isinstance(dim, int) and shape else math.prod(shape))

    return rule


def _row(node: fx.Node) -> Range:
    return _below(_shape(node, "weight")[0])


def _class(node: fx.Node) -> Range:
    """A class, or the number that stands for none."""
    ignored, classes = int(_argument(node, "ignore_index")), _below(_classes(node))
    return Range(min(ignored, classes.low), max(ignored, classes.high))


def _classes(node: fx.Node) -> int:
    shape = _shape(node, "self")
    return shape[1] if len(shape) > 1 else shape[0]


MAKERS: dict[tuple[Any, Any], Rule] = {
    (aten.max_pool2d_with_indices.default, 1): _places(2),
    (aten.max_pool3d_with_indices.default, 1): _places(3),
    (aten.adaptive_max_pool2d.default, 1): _places(2),
    (aten.adaptive_max_pool3d.default, 1): _places(3),
    **{(target, 0): _along("self") for target in (aten.argmax.default, aten.argmin.default, aten.argsort.default)},
    **{
        (target, 1): _along("self")
        for target in (
            *(aten.topk.default, aten.sort.default, aten.sort.stable, aten.kthvalue.default, aten.mode.default),
            *(aten.max.dim, aten.min.dim, aten.median.dim, aten.cummax.default, aten.cummin.default),
        )
    },
}
"""(Operator, result) to the range of that result."""

READERS: dict[tuple[Any, int], Rule] = {
    (aten.embedding.default, 1): _row,
    (aten.gather.default, 2): _along("self"),
    (aten.index_select.default, 2): _along("self"),
    (aten.nll_loss_forward.default, 1): _class,
    (aten.nll_loss2d_forward.default, 1): _class,
}
"""(Operator, position) to the range outside of which it raises an error."""

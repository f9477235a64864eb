"""shapes: readers that look at the shape of a value alone, and not at what is in it.

They are given one element, expanded to that shape. The value need not be kept for them, in any form.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from roamc.compat import OpOverload
from roamc.graph import tensors_of
from roamc.passes.retain.codecs.codec import Read
from roamc.rewrite import given

aten = torch.ops.aten

NAME = "shapes"
"""In the place of a codec, for a value that nobody behind forward needs the elements of."""

READERS: dict[OpOverload, int] = {
    aten.max_pool2d_with_indices_backward.default: 1,
    aten.max_pool3d_with_indices_backward.default: 1,
    aten.adaptive_max_pool2d_backward.default: 1,
    aten.adaptive_max_pool3d_backward.default: 1,
    aten.avg_pool2d_backward.default: 1,
    aten.avg_pool3d_backward.default: 1,
    aten._adaptive_avg_pool2d_backward.default: 1,
}
"""Operator to the position of the argument of which it reads the shape, and where that lies in memory."""


def stand_in(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element, whatever it is, in the given shape."""
    one = aten.empty.memory_format([1] * len(shape), dtype=dtype, device=device)
    expanded: Tensor = aten.expand.default(one, shape)
    return expanded


def reads_shape(read: Read, value: fx.Node) -> bool:
    """Whether the reader needs no element of the value, and gives a result that lies as before.

    On a GPU these operators make a contiguous copy of that argument first: a stand-in would be copied to full size.
    """
    reader = read.reader
    if not isinstance(reader.target, OpOverload) or READERS.get(reader.target) != read.position:
        return False
    tensor = value.meta["val"]
    if read.argument is not value or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    args, keywords = given(reader)
    with tensor.fake_mode:
        other = stand_in(tuple(tensor.shape), tensor.dtype, tensor.device)
        fresh = reader.target(*args[: read.position], other, *args[read.position + 1 :], **keywords)
    (_, made) = next(tensors_of(reader))
    return bool(fresh.stride() == made.stride() and fresh.dtype == made.dtype)

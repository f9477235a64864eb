"""shapes: stand-ins for readers that look at the shape of a value alone, and not at its elements.

Such a reader is given one element, expanded to that shape. The value need not be kept for it, in any form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from roamc.graph import tensors_of
from roamc.graph.rewrite import given
from roamc.operators import ops
from roamc.operators.ops import Need
from roamc.passes.retain.codecs.codec import Read

aten = torch.ops.aten

NAME = "shapes"
"""Used as codec name of a value of which no reader behind forward needs the elements."""


def stand_in(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return one uninitialised element of this dtype and device, expanded to ``shape`` without more bytes."""
    one = aten.empty.memory_format([1] * len(shape), dtype=dtype, device=device)
    expanded: Tensor = aten.expand.default(one, shape)
    return expanded


def reads_shape(read: Read, value: fx.Node) -> bool:
    """Return whether the reader needs only the shape of ``value``, and a stand-in gives it the same strides and dtype.

    False if the value is not contiguous, not on a CPU, or read through a view. On a GPU such readers first make a
    contiguous copy of the argument: a stand-in would be copied to full size.

    Args:
        read: the reader and its argument; the reader is run on fake tensors.
        value: the node of the value.
    """
    reader = read.reader
    target: Any = reader.target
    if ops.needs(target, reader.args).get(read.position) is not Need.SHAPE:
        return False
    tensor = value.meta["val"]
    if read.argument is not value or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    args, keywords = given(reader)
    with tensor.fake_mode:
        other = stand_in(tuple(tensor.shape), tensor.dtype, tensor.device)
        fresh = target(*args[: read.position], other, *args[read.position + 1 :], **keywords)
    (_, result) = next(tensors_of(reader))
    return bool(fresh.stride() == result.stride() and fresh.dtype == result.dtype)

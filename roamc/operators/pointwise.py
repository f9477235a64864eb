"""Strides of results of pointwise operators where torch's fake kernels give others than the real kernels.

torch's kernels order the dimensions of a result by the strides of all operands in turn, passing over dimensions that
are expanded (``TensorIterator``; strides of operands that are promoted on a CPU are those of a promoted copy). The fake
kernels compute 16-bit floats through copies in float32, which an expanded operand leaves without its order, and some
follow a decomposition that reads its operands in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from roamc.compat import FakeTensorMode, OpOverload
from roamc.compat_operators import ordered_strides
from roamc.graph.rewrite import given
from roamc.operators import ops
from roamc.operators.table import Strides


def with_real_strides(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return the result of a pointwise operator with the strides that the real kernel gives it.

    Args:
        node: of an operator whose rule has other ``strides`` than ``AS_NOTED``; its value is the fake result.
        mode: the fake mode of its tensors.

    Returns:
        A fake tensor; None if ``node.meta["val"]`` has these strides, or is not one tensor of floats.
    """
    noted = node.meta["val"]
    if not isinstance(noted, Tensor) or not isinstance(node.target, OpOverload):
        return None
    arguments, keywords = given(node)
    with mode:
        return laid_out(node.target, (*arguments, *keywords.values()), noted)


def laid_out(target: OpOverload, arguments: Iterable[Any], noted: Tensor) -> Tensor | None:
    """Return a tensor like ``noted``, the result of a pointwise operator, with the strides of the real kernel.

    Args:
        target: the operator; its rule has other ``strides`` than ``AS_NOTED``.
        arguments: of the call; all but tensors of one dimension or more are passed over.
        noted: what torch's fake kernel gives.

    Returns:
        A new tensor; None if ``noted`` has these strides, or there are fewer than two operands, or none of floats.
    """
    operands = [value for value in arguments if isinstance(value, Tensor) and value.dim()]
    backwards = ops.rule(target).strides is Strides.OPERANDS_BACKWARDS
    return ordered_by(operands[::-1] if backwards else operands, noted)


def ordered_by(operands: Sequence[Tensor], noted: Tensor) -> Tensor | None:
    """Return a tensor like ``noted`` with the strides that a kernel gives it which reads ``operands`` in this order.

    Args:
        operands: tensors of one dimension or more; the strides of the first decide before those of the others.
        noted: what torch's fake kernel gives.

    Returns:
        A new tensor; None if ``noted`` has these strides or is no elementwise result of ``operands``, all tensors are
        contiguous, there are fewer than two operands, or the operands are not of a float dtype.
    """
    if len(operands) < 2 or all(tensor.is_contiguous() for tensor in (noted, *operands)):
        return None
    if torch.broadcast_shapes(*(operand.shape for operand in operands)) != noted.shape:  # a loss that was reduced
        return None
    common = functools.reduce(torch.promote_types, (operand.dtype for operand in operands))
    if not common.is_floating_point:
        return None
    promoted = [_promoted(operand, common) for operand in operands]
    promoted = [tensor if tensor.shape == noted.shape else tensor.expand(noted.shape) for tensor in promoted]
    strides = ordered_strides(promoted)
    if all(size == 1 or a == b for size, a, b in zip(noted.shape, strides, noted.stride(), strict=True)):
        return None
    return torch.empty_strided(noted.shape, strides, dtype=noted.dtype, device=noted.device)


def _promoted(operand: Tensor, common: torch.dtype) -> Tensor:
    """What the kernel reads: on a CPU, operands of another dtype are copied first."""
    if operand.dtype is common or operand.device.type != "cpu":
        return operand
    return torch.empty_like(operand, dtype=common)

"""The kind of a node, which says what bounds its time: that of its operator, for some refined by the arguments."""

from __future__ import annotations

import torch
from torch import fx

from roamc.compat_operators import tensors_in
from roamc.operators import ops
from roamc.operators.call import Call, call_of, fakes
from roamc.operators.costs.kinds import LIGHT

QUICK_POWERS = (2, 3, -1, -2, 1, 0, 2.0, 3.0, -1.0, -2.0, 1.0, 0.0)
"""Exponents that torch computes by multiplication or division; 0.5 and -0.5, computed as roots, are not among them."""


def kind_of(node: fx.Node) -> str:
    """Return the kind of ``node``, a ``call_function`` node: a key of :data:`roamc.operators.costs.kinds.KINDS`."""
    call = call_of(node)
    cost = ops.rule(call.target).cost
    if cost.exponent is not None and len(call.args) > cost.exponent:
        exponent = call.args[cost.exponent]
        if exponent in (0.5, -0.5):
            return "root"
        return _pointwise(call, node) if exponent in QUICK_POWERS else cost.kind
    if cost.kind == "pointwise":
        return _pointwise(call, node)
    return _convolution(call, cost.kind) if cost.kind in ("convolution", "convolution_backward") else cost.kind


def is_light(node: fx.Node) -> bool:
    """Whether another run of ``node`` is cheap on any device: see :data:`roamc.operators.costs.kinds.LIGHT`."""
    return kind_of(node) in LIGHT


def _pointwise(call: Call, node: fx.Node) -> str:
    """Return "mixed" if the dtypes of the arguments differ, "strided" if strides do, else "pointwise"."""
    read = [tensor for tensor in tensors_in(fakes([*call.args, *call.kwargs.values()])) if tensor.dim()]
    result = next(tensors_in(node.meta.get("val")), None)
    if result is None:
        return "pointwise"
    if len({tensor.dtype for tensor in read}) > 1 and not ops.rule(call.target).cost.any_dtypes:
        return "mixed"
    whole = [tensor for tensor in read if tensor.shape == result.shape and result.numel() > 1]
    return "pointwise" if all(_steps(tensor) == _steps(result) for tensor in whole) else "strided"


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of the dimensions with more than one element, without expanded ones, whose stride is 0."""
    return tuple(int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and step)


def _convolution(call: Call, kind: str) -> str:
    """Return the kind of a convolution by its groups, window and direction; ``kind`` gives the direction."""
    backward = kind.removeprefix("convolution")
    weight = fakes(call.args[2 if backward else 1])
    groups = call.args[-2 if backward else 8] if len(call.args) > 8 else 1
    if isinstance(groups, int) and groups > 1:
        return f"convolution_grouped{backward}"
    return f"{'convolution_1x1' if all(size == 1 for size in weight.shape[2:]) else 'convolution'}{backward}"

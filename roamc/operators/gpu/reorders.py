"""Copies of permuted results: the kernel goes through their elements in the order in which its members make them.

t = transpose(add, 1, 2); r = clone(t)     add[b, h, s, d] is stored where r[b, s, h, d] lies
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from roamc.operators import ops
from roamc.operators.gpu.results import made_by


def reordered(node: fx.Node) -> tuple[fx.Node, tuple[int, ...]] | None:
    """Return what ``node`` copies in another order of dimensions: an operator with one result, and the order.

    Returns:
        The operator, and for each dimension of its result the stride, in elements, from one index to the next in the
        result of ``node``. None if ``node`` copies nothing, or what it copies is no view with other dimensions first.
    """
    argument = node.args[0] if ops.rule(node.target).copies else None
    if not isinstance(argument, fx.Node):
        return None
    base, _ = made_by(argument)
    if base is argument or base.op != "call_function":
        return None
    strides = _strides_of_copy(argument.meta["val"], base.meta["val"], node.meta["val"])
    return None if strides is None else (base, strides)


def _strides_of_copy(view: torch.Tensor, base: object, copy: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of ``copy``, which has the shape of ``view``, along the dimensions of ``base``; None if in order."""
    if (
        not isinstance(base, torch.Tensor)
        or view.dtype is not base.dtype
        or view.storage_offset() != base.storage_offset()
    ):
        return None
    dims = [(int(n), int(s), int(c)) for n, s, c in zip(view.shape, view.stride(), copy.stride(), strict=True) if n > 1]
    base_dims = [(int(n), int(s)) for n, s in zip(base.shape, base.stride(), strict=True)]
    large = [dim for dim in base_dims if dim[0] > 1]
    if sorted(dim[:2] for dim in dims) != sorted(large) or len({stride for _, stride in large}) < len(large):
        return None
    if [dim[:2] for dim in dims] == large or dims[-1][:2] != large[-1]:  # as it is, or columns would lie apart
        return None
    place = {stride: step for _, stride, step in dims}
    return tuple(place[stride] if size > 1 else 1 for size, stride in base_dims)


def reorders(nodes: Sequence[fx.Node]) -> bool:
    """Whether some of ``nodes`` copies what another one makes in another order."""
    return any((order := reordered(node)) is not None and order[0] in nodes for node in nodes)

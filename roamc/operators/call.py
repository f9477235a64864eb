"""What a node calls, and the fake tensors among its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from roamc.compat_operators import tensors_in
from roamc.operators.random import replay


@dataclass(frozen=True)
class Call:
    """One call of an operator: ``target`` with positional ``args`` and ``kwargs``, in which nodes stand for tensors."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_of(node: fx.Node) -> Call:
    """Return the call that ``node`` makes; for a ``replay`` it is the call of the random operator that is replayed."""
    if node.target is replay:
        return Call(node.args[1], tuple(node.args[2:]), dict(node.kwargs))
    return Call(node.target, tuple(node.args), dict(node.kwargs))


def fakes(value: Any) -> Any:
    """Return ``value`` with its nodes replaced by their fake values, also in nested lists, tuples and dicts.

    A node without a fake value becomes None.
    """
    return fx.node.map_arg(value, lambda node: node.meta.get("val"))


def tensor_at(call: Call, position: int) -> torch.Tensor:
    """Return the fake tensor that is positional argument ``position`` of ``call``; of a list, the first tensor in it.

    Raises:
        StopIteration: the argument is no tensor.
    """
    value = call.args[position]
    parts = value if isinstance(value, list | tuple) else (value,)
    return next(tensor for part in parts for tensor in tensors_in(fakes(part)))


def broadcast_elements(call: Call) -> int:
    """Return the elements of the first two positional arguments of ``call``, tensors, broadcast to one shape."""
    return prod(torch.broadcast_shapes(tensor_at(call, 0).shape, tensor_at(call, 1).shape))


def rows_of(tensor: torch.Tensor) -> int:
    """Return how many rows ``tensor`` has along its last dimension: elements divided by the size of that dimension."""
    return tensor.numel() // max(1, tensor.shape[-1])

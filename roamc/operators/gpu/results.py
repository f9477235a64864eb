"""What the members of a kernel make: one tensor or several, and which of these are sums over rows."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from roamc.operators import ops


def made_by(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the operator that makes what ``node`` is or views, and which of its results this is, from 0.

    ``node`` may be the operator, the pick of one of its results, or a view of either through any number of views.
    """
    position = 0
    while node.op == "call_function" and ops.is_view(node.target) and node.all_input_nodes:
        if picks(node):
            position = node.args[1]  # type: ignore[assignment]
        node = node.all_input_nodes[0]
    return node, position


def picks(node: fx.Node) -> bool:
    """Whether ``node`` picks one result of an operator that has several."""
    return node.op == "call_function" and node.target is operator.getitem and not ops.is_view(node.args[0].target)  # type: ignore[union-attr]


def results_of(node: fx.Node) -> Sequence[torch.Tensor | None]:
    """Return the fake tensors that the operator ``node`` makes, in order, None for one that it leaves out."""
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def first_of(node: fx.Node) -> torch.Tensor:
    """Return the first fake tensor that the operator ``node`` makes."""
    return next(tensor for tensor in results_of(node) if tensor is not None)


def shape_of_operands(node: fx.Node) -> torch.Size:
    """Return the shape to which the operator ``node`` broadcasts its operands: of its result, or of what it reduces."""
    rowwise = ops.rule(node.target).rowwise
    reduces = rowwise is not None and (rowwise.keepdim is not None or rowwise.sizes is not None)
    shape: torch.Size = (node.args[0] if reduces else node).meta["val"].shape  # type: ignore[union-attr]
    return shape


def sums_over_rows(node: fx.Node) -> tuple[int, ...]:
    """Return the positions of those results of the operator ``node`` that are sums over all dimensions but the last."""
    columnwise = ops.rule(node.target).columnwise
    if columnwise is None or columnwise.dim is None:
        return () if columnwise is None else columnwise.results
    source, dims = node.args[0], node.args[columnwise.dim] if columnwise.dim < len(node.args) else None
    rank = source.meta["val"].dim() if isinstance(source, fx.Node) else 0
    if rank < 2 or not isinstance(dims, list | tuple):
        return ()
    return columnwise.results if sorted(dim % rank for dim in dims) == list(range(rank - 1)) else ()


def is_sum_over_rows(node: fx.Node) -> bool:
    """Whether ``node``, an operator or a pick of one of its results, is a sum over all dimensions but the last."""
    source, position = made_by(node)
    return position in sums_over_rows(source)

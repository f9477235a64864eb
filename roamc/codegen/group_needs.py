"""Which elements of which values a member of a group reads and writes, by the rules of broadcasting alone.

A member goes through the elements of one shape, such as [16, 128, 384], row by row. The element of an operand that it
reads there has a number: how many elements it lies behind the first one of its value in memory.

    mul(x, weight)  over [16, 128, 384]     x: strides (49152, 384, 1)     weight: strides (0, 0, 1)

What the judges of groups compare programs with; nothing here knows how groups are emitted.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from roamc.codegen.calls import by_name
from roamc.codegen.group_verdicts import GroupFault, Verdict
from roamc.compat import OpOverload
from roamc.compat_operators import is_pointwise
from roamc.operators import ops
from roamc.operators.activations import PARTS
from roamc.operators.schemas import name_of
from roamc.operators.table import Rowwise

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Need:
    """The elements of one value that an operator of a group reads or writes, one for each that it goes through.

    Attributes:
        value: an input of the group, or the operator that makes the value; never a view.
        sizes: of the shape that the operator goes through; the last one is the length of a row.
        strides: elements of the value from one index to the next, for each dimension; 0 where elements are shared.
        offset: number of the element that is read first, in elements behind the first of the value.
        whole: the operator takes the whole argument as it is, whichever elements it goes through.
    """

    value: fx.Node
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    whole: bool = False

    @property
    def columns(self) -> int:
        """Elements of one row."""
        return self.sizes[-1] if self.sizes else 1

    @property
    def rows(self) -> int:
        """Number of rows."""
        return math.prod(self.sizes[:-1])

    @property
    def step(self) -> int:
        """Elements of the value from one column to the next."""
        return self.strides[-1] if self.sizes else 0

    @cached_property
    def starts(self) -> Int64s:
        """int64[rows], how many elements the first element of each row lies behind the first of the value in memory."""
        starts = np.full(1, self.offset, dtype=np.int64)
        for size, stride in zip(self.sizes[:-1], self.strides[:-1], strict=True):
            starts = np.add.outer(starts, np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return starts

    def at(self, elements: Int64s) -> Int64s:
        """Return which elements of the value are read where the operator goes through ``elements``.

        Args:
            elements: numbers of elements of the shape that the operator goes through, counted row by row, from 0.

        Returns:
            int64, of the same shape: how many elements each lies behind the first of the value in memory.
        """
        if self._in_order:
            return self.offset + elements
        numbers, inside = np.full(elements.shape, self.offset, dtype=np.int64), 1
        for size, stride in reversed(list(zip(self.sizes, self.strides, strict=True))):
            if stride:
                numbers += elements // inside % size * stride
            inside *= size
        return numbers

    @cached_property
    def _in_order(self) -> bool:
        """Whether the elements of the value follow each other as those that the member goes through."""
        inside = 1
        for size, stride in reversed(list(zip(self.sizes, self.strides, strict=True))):
            if size > 1 and stride != inside:
                return False
            inside *= size
        return True


def needs_of(node: fx.Node) -> dict[str, Need]:
    """Return which elements the operator ``node`` reads, by the name of the argument in the operator's schema.

    Args:
        node: a call of an operator whose row of the table has ``rowwise``; all of its nodes have fake values.

    Raises:
        GroupFault: an operand cannot be broadcast, or is a view of another dtype.
    """
    rowwise, names = rows_of(node)
    per_row, whole = read_per_row(node), {names[at] for at in rowwise.whole}
    bits = {names[at] for at in ops.rule(node.target).bits}
    sizes, needs = shape_of(node), {}
    called: Any = node.target
    for name, argument in by_name(called, node.args, node.kwargs).items():
        if not isinstance(argument, fx.Node) or is_number(argument):
            continue
        tensor = tensor_of(argument)
        shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        value, offset = value_under(argument)
        if name in bits:
            needs[name] = Need(value, (PARTS, tensor.numel()), (0, 1), offset)
            continue
        if name in whole and shape:
            needs[name] = Need(value, shape, strides, offset, whole=True)
            continue
        if name in per_row:
            shape, strides = (*shape, 1), (*strides, 0)
        needs[name] = Need(value, sizes, _broadcast(argument, shape, strides, sizes), offset)
    return needs


def read_per_row(node: fx.Node) -> set[str]:
    """Return the names of the arguments of which the operator ``node`` reads one element for each row.

    An operator that has such arguments takes any other of one dimension so, such as the gradient of each row's loss.
    """
    rowwise, names = rows_of(node)
    if not rowwise.per_row:
        return set()
    called: Any = node.target
    arguments = by_name(called, node.args, node.kwargs).items()
    tensors = {name: tensor_of(one) for name, one in arguments if isinstance(one, fx.Node) and not is_number(one)}
    whole = {names[at] for at in rowwise.whole}
    return {name for name, tensor in tensors.items() if tensor.dim() == 1 and name not in whole}


def result_of(node: fx.Node) -> Need:
    """Return where a result is written: one element for each that its operator goes through, each row or each column.

    Args:
        node: an operator with one result, or the pick of one of several.

    Raises:
        GroupFault: the result has none of these shapes.
    """
    member, position = _picked(node)
    tensor, sizes = tensor_of(node), shape_of(member)
    strides = tuple(map(int, tensor.stride()))
    rowwise, _ = rows_of(member)
    if position in adds_over_rows(member):
        return Need(node, sizes[-1:], strides[-1:])
    if rowwise.keepdim is None and (rowwise.sizes is None or tuple(tensor.shape) == sizes):
        return Need(node, sizes, strides)
    if rowwise.keepdim is None and tuple(map(int, tensor.shape)) != (*sizes[:-1], 1):
        raise GroupFault(Verdict.SHAPE, f"{tuple(tensor.shape)} is no result along rows of {sizes}", node.name)
    padded_strides = strides if tensor.dim() == len(sizes) else (*strides, 0)
    return Need(node, (*sizes[:-1], 1), (*padded_strides[:-1], 0))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape that the operator ``node`` goes through: that of its result, or of what it reduces.

    Raises:
        GroupFault: it reduces neither the last dimension alone nor all others.
    """
    rowwise, _ = rows_of(node)
    if rowwise.dim is None and rowwise.sizes is None:
        return tuple(map(int, tensor_of(node).shape))
    source = node.args[0]
    if not isinstance(source, fx.Node):
        raise GroupFault(Verdict.DIMENSION, "works along a dimension of no tensor", node.name)
    shape = tuple(map(int, tensor_of(source).shape))
    if rowwise.sizes is not None:
        if len(shape) < 2 or list(node.args[rowwise.sizes]) != [shape[-1]]:  # type: ignore[arg-type]
            raise GroupFault(Verdict.DIMENSION, "works along another than the last", node.name)
        return shape
    if adds_over_rows(node):
        return shape
    result_shape = tuple(map(int, tensor_of(node).shape))
    assert rowwise.dim is not None, "an operator along rows names their dimension or its size"
    if not goes_along_last(node.args[rowwise.dim] if rowwise.dim < len(node.args) else None, len(shape)):
        raise GroupFault(Verdict.DIMENSION, "works along another than the last", node.name)
    return result_shape if rowwise.keepdim is None else shape


def rows_of(node: fx.Node) -> tuple[Rowwise, list[str]]:
    """Return how the operator ``node`` treats rows, by the operator table, and the names of its arguments.

    An operator that torch tags as pointwise treats each element apart.

    Raises:
        GroupFault: nothing says that the operator treats rows apart.
    """
    target = node.target
    rowwise = ops.rule(target).rowwise
    if rowwise is None and is_pointwise(target):
        rowwise = Rowwise()
    if rowwise is None or not isinstance(target, OpOverload):
        raise GroupFault(Verdict.UNKNOWN, "nothing says that it treats rows apart", node.name)
    return rowwise, [argument.name for argument in target._schema.arguments]


def is_number(node: fx.Node) -> bool:
    """Whether ``node``, an argument of a group, is a number, which has no elements."""
    return isinstance(node.meta.get("val"), float)


def adds_over_rows(node: fx.Node) -> tuple[int, ...]:
    """Return the positions of those results of the operator ``node`` that are sums over all dimensions but the last."""
    columnwise = ops.rule(node.target).columnwise
    if columnwise is None or columnwise.dim is None:
        return () if columnwise is None else columnwise.results
    dims, source = node.args[columnwise.dim], node.args[0]
    rank = tensor_of(source).dim() if isinstance(source, fx.Node) else 0
    if rank < 2 or not isinstance(dims, list | tuple):
        return ()
    added = {dim % rank for dim in dims if isinstance(dim, int)}
    return columnwise.results if added == set(range(rank - 1)) else ()


def values_of(member: fx.Node) -> list[fx.Node]:
    """Return the nodes that stand for the results of an operator: itself, or the first pick of each of several."""
    if isinstance(member.meta.get("val"), torch.Tensor):
        return [member]
    first: dict[object, fx.Node] = {}
    for user in member.users:
        if user.target is operator.getitem:
            first.setdefault(user.args[1], user)
    return list(first.values())


def is_sum_over_rows(value: fx.Node) -> bool:
    """Whether ``value``, an operator or a pick of one of its results, is a sum over all dimensions but the last."""
    member, position = _picked(value)
    return position in adds_over_rows(member)


def position_of(value: fx.Node) -> int:
    """Return the position among its operator's results of ``value``, an operator (0) or a pick of one result."""
    return _picked(value)[1]


def _picked(node: fx.Node) -> tuple[fx.Node, int]:
    """The member of which ``node`` is the result, and which one."""
    base = node.args[0] if node.target is operator.getitem else None
    return (base, node.args[1]) if isinstance(base, fx.Node) else (node, 0)  # type: ignore[return-value]


def goes_along_last(dims: Any, rank: int) -> bool:
    """Whether ``dims``, a number or a list of numbers, names the last of ``rank`` dimensions and no other."""
    listed = dims if isinstance(dims, list | tuple) else [dims]
    return len(listed) == 1 and isinstance(listed[0], int) and rank > 0 and listed[0] % rank == rank - 1


def members_of(body: fx.Graph) -> list[fx.Node]:
    """Return the operators of ``body``, the graph of a group, in order; views are left out."""
    return [node for node in body.nodes if node.op == "call_function" and not ops.is_view(node.target)]


def tensor_of(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor that ``node`` stands for.

    Raises:
        GroupFault: it stands for something else.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise GroupFault(Verdict.UNKNOWN, f"{name_of(node.target)} gives no tensor", node.name)
    return value


def extent_of(tensor: torch.Tensor) -> int:
    """Return how many elements of memory ``tensor`` spans, from its first element to the end of its last."""
    return 1 + sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def member_of(value: fx.Node) -> fx.Node:
    """Return the operator of which ``value`` is the result, or the pick of one result; an input as it is."""
    return _picked(value)[0]


def value_under(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the input or member that ``node`` is or is a view of, and at which of its elements the view begins.

    Raises:
        GroupFault: ``node`` is a view of several tensors, or of another dtype.
    """
    value = node
    while value.op == "call_function" and ops.is_view(value.target):
        member, position = _picked(value)
        if member is not value and not ops.is_view(member.target):
            value = next(one for one in values_of(member) if position_of(one) == position)
            break
        pieces = member if member is not value else value  # what a split makes is picked
        if len(pieces.all_input_nodes) != 1 or tensor_of(value).dtype is not tensor_of(pieces.all_input_nodes[0]).dtype:
            raise GroupFault(Verdict.UNKNOWN, "is a view of several tensors, or of another dtype", value.name)
        value = pieces.all_input_nodes[0]
    return value, int(tensor_of(node).storage_offset()) - int(tensor_of(value).storage_offset())


def _broadcast(
    node: fx.Node, shape: tuple[int, ...], strides: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[int, ...]:
    lacking = len(sizes) - len(shape)
    if lacking < 0:
        raise GroupFault(Verdict.SHAPE, "has more dimensions than its reader goes through", node.name)
    full = (1,) * lacking + shape
    if any(size not in (1, reader_size) for size, reader_size in zip(full, sizes, strict=True)):
        raise GroupFault(Verdict.SHAPE, f"shape {shape} does not broadcast to {sizes}", node.name)
    return tuple(0 if size == 1 else stride for size, stride in zip(full, (0,) * lacking + strides, strict=True))

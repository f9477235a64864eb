"""Which elements of its operands a kernel reads: the elements of a group numbered in one way, operands by strides.

A group works on all elements of one matrix, numbered row by row. A pointwise operator may see the same numbers as
another shape, [2048, 1024] for [16, 128, 1024]: the order of the numbers is the same. Operands that lie in memory in
another order, or are expanded, are read by their strides.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from roamc.operators import ops
from roamc.operators.blocks import Matrix
from roamc.operators.gpu.results import picks

Dims = tuple[tuple[int, int], ...]
"""Sizes and strides in elements, from the outermost dimension to the innermost; those of one element are left out."""


class Reach(enum.Enum):
    """Which elements a value of a group has: one for each element, ROW or COLUMN of the matrix, or ONE for all."""

    ALL = "all"
    ROW = "row"
    COLUMN = "column"
    ONE = "one"


@dataclass(frozen=True)
class Access:
    """How a kernel reads an operand, or writes the result.

    Attributes:
        dims: (size, stride) of each dimension, strides in elements, the innermost last; a stride is 0 where one element
            is read again.
        columns: number of columns of the group's matrix.
    """

    dims: Dims
    columns: int

    @property
    def reach(self) -> Reach:
        """Whether the operand has an element for each of the matrix, for each row, for each column, or one for all."""
        parts = self.parts
        if parts is None:
            return Reach.ALL if any(stride for _, stride in self.dims) else Reach.ONE
        rows, columns = (any(stride for _, stride in part) for part in parts)
        return {(1, 1): Reach.ALL, (1, 0): Reach.ROW, (0, 1): Reach.COLUMN, (0, 0): Reach.ONE}[rows, columns]

    @property
    def parts(self) -> tuple[Dims, Dims] | None:
        """``dims`` cut in two, those from row to row and those within a row; None if a dimension cannot be cut so."""
        inner: list[tuple[int, int]] = []
        outer = list(self.dims)
        inside = 1
        while inside < self.columns and outer:
            size, stride = outer.pop()
            if size * inside > self.columns:
                if self.columns % inside or size % (self.columns // inside):
                    return None
                within = self.columns // inside
                outer.append((size // within, stride * within))
                size = within
            inner.insert(0, (size, stride))
            inside *= size
        return tuple(outer), tuple(inner)

    def offset(self, *, rows: bool, shift: int = 0) -> str:
        """Return the expression, in Triton, of where an element lies: its offset from the operand's first element.

        Args:
            rows: the expression is in the variables ``row`` and ``column``; else in ``index``, the number of the
                element, row by row.
            shift: the element wanted is so many columns to the right of ``column``.
        """
        parts = self.parts
        column = f"(column {'-' if shift < 0 else '+'} {abs(shift)})" if shift else "column"
        if not rows:
            return _place(self.dims, "index")
        if parts is None:
            return _place(self.dims, f"(row * {self.columns} + {column})")
        places = [_place(part, name) for part, name in zip(parts, ("row", column), strict=True)]
        return " + ".join(place for place in places if place != "0") or "0"

    @property
    def last(self) -> int:
        """The largest offset that is read or written, in elements from the first."""
        return sum((size - 1) * stride for size, stride in self.dims)


def _place(dims: Dims, number: str) -> str:
    terms: list[str] = []
    inside = 1
    for position, (size, stride) in reversed(list(enumerate(_merged(dims)))):
        text = number if inside == 1 else f"{number} // {inside}"
        text += f" % {size}" if position else ""
        if stride:
            terms.insert(
                0, (f"({text})" if " " in text and stride != 1 else text) + (f" * {stride}" if stride != 1 else "")
            )
        inside *= size
    return " + ".join(terms) or "0"


def _merged(dims: Dims) -> Dims:
    """Join neighbours whose elements follow each other at one stride."""
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if merged and merged[-1][1] == stride * size:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    return tuple(merged)


def access_of(tensor: torch.Tensor, shape: Sequence[int], columns: int) -> Access | None:
    """Return how ``tensor``, broadcast to ``shape``, is read or written; None if it cannot be broadcast.

    Args:
        tensor: any tensor with plain sizes and strides, such as a fake one.
        shape: the shape to broadcast to.
        columns: number of columns of the group's matrix.
    """
    lacking = len(shape) - tensor.dim()
    sizes = (1,) * max(lacking, 0) + tuple(tensor.shape)
    if lacking < 0 or any(size not in (1, full_size) for size, full_size in zip(sizes, shape, strict=True)):
        return None
    strides = (0,) * lacking + tuple(tensor.stride())
    dims = (
        (int(full_size), int(stride) if size > 1 else 0)
        for size, full_size, stride in zip(sizes, shape, strides, strict=True)
    )
    return Access(_merged(tuple((size, stride) for size, stride in dims if size > 1)), columns)


def access_along(sizes: Sequence[int], strides: Sequence[int], columns: int) -> Access:
    """Return how elements are written that lie at ``strides`` along dimensions of ``sizes``; ``columns`` as above."""
    dims = zip(map(int, sizes), map(int, strides), strict=True)
    return Access(_merged(tuple(dim for dim in dims if dim[0] > 1)), columns)


def along_columns(access: Access) -> Access:
    """Return ``access``, which has one element for each row, with that element repeated for all columns of the row."""
    return Access((*access.dims, (access.columns, 0)) if access.columns > 1 else access.dims, access.columns)


def frame_of(node: fx.Node) -> Matrix | None:
    """Return the rows and columns of the group that ends with ``node``: those of its result, or of what it reduces.

    Columns are the last dimension, rows all others. None if ``node`` makes several tensors, none, or one without
    elements.
    """
    source = node.args[0] if picks(node) else node
    assert isinstance(source, fx.Node), f"{node.name} is no result of a node"
    rowwise, value = ops.rule(source.target).rowwise, source.meta.get("val")
    if rowwise is not None and isinstance(source.args[0], fx.Node) and value is not None:
        reduces = isinstance(value, torch.Tensor) and rowwise.keepdim is not None
        value = source.args[0].meta.get("val") if reduces or rowwise.sizes is not None else value
    if not isinstance(value, torch.Tensor) or not value.numel():
        return None
    columns = int(value.shape[-1]) if value.dim() else 1
    return Matrix(math.prod(value.shape) // columns, columns)


def shape_reach(shape: Sequence[int], frame: Matrix) -> Reach | None:
    """Return ALL if ``shape`` has as many elements as the matrix ``frame``, ROW if as many as its rows, else None."""
    if math.prod(shape) == frame.numel:
        return Reach.ALL
    return Reach.ROW if math.prod(shape) == frame.rows else None


def keeps_order(view: fx.Node, frame: Matrix) -> bool:
    """Whether ``view`` has the elements of its one argument in the same order, so that a kernel need not move them.

    ``view`` may also repeat an element for each row of ``frame``, the group's matrix, over the columns. The argument is
    made in the group, and may lie in memory in any order.
    """
    (base,) = view.all_input_nodes
    inner, result = base.meta["val"], view.meta["val"]
    if not isinstance(result, torch.Tensor) or not isinstance(inner, torch.Tensor):
        return False
    by_strides = any(argument.name == "stride" for argument in view.target._schema.arguments)  # type: ignore[union-attr]
    if result.dtype is not inner.dtype or (by_strides and not inner.is_contiguous()):
        return False
    stand_in = torch.empty(inner.shape, device="meta", dtype=inner.dtype)
    args = [stand_in if value is base else value for value in view.args]
    try:
        viewed = view.target(*args, **view.kwargs)  # type: ignore[operator]
    except RuntimeError:  # it has that shape only as it lies in memory
        return False
    if not isinstance(viewed, torch.Tensor) or viewed.storage_offset() or viewed.shape != result.shape:
        return False
    return in_order(viewed, inner.numel(), viewed.shape, frame)


def in_order(tensor: torch.Tensor, numel: int, shape: Sequence[int], frame: Matrix) -> bool:
    """Whether ``tensor``, broadcast to ``shape``, reads the first ``numel`` elements of its memory in order, each once.

    If ``numel`` is the number of rows of ``frame``, the group's matrix, and ``shape`` has all elements of ``frame``,
    each element must be read along its whole row instead.
    """
    access = access_of(tensor, shape, frame.columns)
    total = math.prod(shape)
    spread = ((numel, 1), (total // max(numel, 1), 0))
    spread = spread if numel == frame.rows and total == frame.numel else ((numel, 1), (1, 0))
    return access is not None and access.dims == tuple(dim for dim in spread if dim[0] > 1) and total >= numel

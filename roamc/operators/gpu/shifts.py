"""Members of a kernel that move columns: slices of a row, and parts of a row put side by side.

A program holds whole rows of the group's matrix. A member that has fewer columns, or whose reader wants it further to
the left or right, is computed at a *shift*: at the lane of column ``c`` it has its own column ``c + shift``, and
anything where there is no such column.

    x[..., 32:]                   at shift 0     x at shift 32
    cat([a, b], -1)               at shift 0     a at shift 0 for columns below 32, else b at shift -32
    slice_backward(g, start=32)   at shift 0     g at shift -32 for columns from 32 on, else 0

So a value may be computed more than once, but nothing goes through memory between lanes. What is read from memory at a
shift is read again by other lanes of the same program, and comes from a cache.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roamc.operators import ops
from roamc.operators.blocks import Matrix
from roamc.operators.gpu.frame import keeps_order
from roamc.operators.gpu.lines import DoesNotPrintError
from roamc.operators.gpu.results import made_by, picks, results_of

MOST_SHIFTS = 6
"""Shifts at which one member is computed at most. A rotary embedding takes three."""


@dataclass(frozen=True)
class Part:
    """An operand of a member that puts operands side by side.

    Attributes:
        node: the operand.
        begin: column of the result at which its first column lies.
        width: its columns.
    """

    node: fx.Node
    begin: int
    width: int


def width_of(shape: Sequence[int], frame: Matrix) -> int | None:
    """Return how many columns of the matrix ``frame`` a tensor of ``shape`` has for each of its rows.

    That is all, or fewer for one whose last dimension is shorter than that of the matrix. A tensor with one element for
    each row has it for all columns. None for a tensor that is no such matrix.
    """
    numel = math.prod(shape)
    if numel in (frame.numel, frame.rows):
        return frame.columns
    narrow = len(shape) > 0 and 1 < shape[-1] < frame.columns and numel == frame.rows * shape[-1]
    return int(shape[-1]) if narrow else None


def part_of(frame: Matrix, shape: Sequence[int]) -> Matrix:
    """Return the columns of ``frame`` that a tensor of ``shape`` has; ``frame`` itself for one that is no such part."""
    width = width_of(shape, frame)
    return frame if width in (None, frame.columns) else Matrix(frame.rows, width)


def parts_of(node: fx.Node) -> tuple[Part, ...]:
    """Return the operands that the member ``node`` puts side by side along the last dimension, from left to right.

    Raises:
        DoesNotPrintError: it puts them side by side along another dimension, or apart, or one has no elements.
    """
    assembly = ops.rule(node.target).assembly
    assert assembly is not None, f"{node.name} puts nothing side by side"
    arguments: list[Any] = list(node.args)
    listed = arguments[assembly.parts]
    nodes: list[fx.Node] = list(listed) if isinstance(listed, list | tuple) else [listed]
    result: torch.Tensor = node.meta["val"]
    dim = arguments[assembly.dim] if assembly.dim < len(arguments) else 0
    begin = arguments[assembly.start] if assembly.start is not None else 0
    step = arguments[assembly.step] if assembly.step is not None else 1
    tensors: list[torch.Tensor] = [part.meta["val"] for part in nodes]
    along = result.dim() > 0 and dim in (-1, result.dim() - 1) and step == 1
    if not along or any(one.dim() != result.dim() or not one.numel() for one in tensors):
        raise DoesNotPrintError(f"{node.name} puts nothing side by side along the last dimension")
    begin = begin + result.shape[-1] if begin < 0 else begin
    if begin < 0 or begin + sum(int(one.shape[-1]) for one in tensors) > result.shape[-1]:
        raise DoesNotPrintError(f"{node.name} leaves out columns")
    parts = []
    for part, tensor in zip(nodes, tensors, strict=True):
        parts.append(Part(part, int(begin), int(tensor.shape[-1])))
        begin += int(tensor.shape[-1])
    return tuple(parts)


def moves_columns(nodes: Iterable[fx.Node]) -> bool:
    """Whether some of the members ``nodes`` puts operands side by side, so that members are computed at shifts."""
    return any(ops.rule(node.target).assembly is not None for node in nodes)


def shift_between(argument: fx.Node, base: fx.Node, frame: Matrix) -> int | None:
    """Return at how many columns to the right of its own first column a view begins in a member's result.

    Args:
        argument: the result, or a view of it through any number of views.
        base: the member.
        frame: the matrix of the group.

    Returns:
        0 for a view with all columns; None for one that has the elements in another order.
    """
    view, shift = argument, 0
    while view is not base and not picks(view):
        inner = _viewed(view)
        step = _columns_before(view, inner, frame)
        if step is None:
            if view.target is operator.getitem or len(view.all_input_nodes) != 1:
                return None
            if not keeps_order(view, part_of(frame, view.meta["val"].shape)):
                return None
        shift, view = shift + (step or 0), inner
    return shift


def _viewed(view: fx.Node) -> fx.Node:
    """What a view is a view of; of a pick among several views, what these are views of."""
    inner = view.all_input_nodes[0]
    return inner.all_input_nodes[0] if view.target is operator.getitem and ops.is_view(inner.target) else inner


def columns_before(part: torch.Tensor, whole: torch.Tensor) -> int | None:
    """Return how many columns of ``whole`` lie in front of those of ``part``, a slice of its last dimension.

    None if ``part`` is no such slice of two columns or more, or has all columns. Both tensors lie in one storage.
    """
    if part.dim() != whole.dim() or not part.dim() or not 1 < part.shape[-1] < whole.shape[-1]:
        return None
    if part.shape[:-1] != whole.shape[:-1] or part.dtype is not whole.dtype or not part.stride()[-1]:
        return None
    if any(n > 1 and a != b for n, a, b in zip(part.shape, part.stride(), whole.stride(), strict=True)):
        return None
    before, remainder = divmod(int(part.storage_offset() - whole.storage_offset()), int(part.stride()[-1]))
    return before if not remainder and 0 <= before <= whole.shape[-1] - part.shape[-1] else None


def _columns_before(view: fx.Node, inner: fx.Node, frame: Matrix) -> int | None:
    """How many columns of ``inner`` lie in front of those of ``view``, a slice of its rows; None for another view."""
    part, whole = view.meta["val"], inner.meta["val"]
    if not isinstance(part, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return None
    before = columns_before(part, whole)
    return before if before is None or math.prod(part.shape[:-1]) == frame.rows else None


def shifts_of(
    members: Sequence[fx.Node], results: Iterable[fx.Node], frame: Matrix, reduce: Collection[fx.Node]
) -> dict[fx.Node, tuple[int, ...]]:
    """Return at which shifts each member is computed, in ascending order; no views among ``members``.

    Args:
        members: the members of the group, in order.
        results: members that are computed at shift 0 in any case.
        frame: the matrix of the group.
        reduce: those of ``members`` that work along whole rows.

    Raises:
        DoesNotPrintError: a member would be computed at too many shifts, or works along rows and is wanted at a shift.
    """
    shifts: dict[fx.Node, set[int]] = {node: set() for node in members}
    for node in results:
        shifts[node].add(0)
    for node in reversed(members):
        at = shifts[node] or {0}
        if len(at) > MOST_SHIFTS or (node in reduce and at != {0}):
            raise DoesNotPrintError(f"{node.name} is wanted for other columns")
        shifts[node] = at
        for argument, begin in _reads(node):
            base, _ = made_by(argument)
            if base in shifts and is_per_row(argument.meta["val"].shape, frame):
                shifts[base].add(0)
            elif base in shifts:
                moved = shift_between(argument, base, frame) or 0
                shifts[base].update(shift - begin + moved for shift in at)
    return {node: tuple(sorted(at)) for node, at in shifts.items()}


def is_per_row(shape: Sequence[int], frame: Matrix) -> bool:
    """Whether a tensor of ``shape`` has one element for each row of ``frame``, the same for all columns."""
    return frame.columns > 1 and math.prod(shape) == frame.rows


def _reads(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The operands of a member, each with the column of the result at which its first column lies."""
    if ops.rule(node.target).assembly is not None:
        return [(part.node, part.begin) for part in parts_of(node)]
    return [(argument, 0) for argument in node.all_input_nodes]


def unfit_shifts(members: Sequence[fx.Node], frame: Matrix, reduce: Collection[fx.Node], longest: int) -> str:
    """Say why the members of a group cannot be computed at the shifts at which others read them; "" if they can.

    Args:
        members: the members, in order; no views.
        frame: the matrix of the group.
        reduce: those of ``members`` that work along whole rows.
        longest: elements of the longest row that a program holds.
    """
    if not moves_columns(members):
        return ""
    packed = next((node.name for node in members if ops.rule(node.target).bits), None)
    if packed is not None:
        return f"{packed} reads bits by the numbers of elements, and columns are moved"
    if frame.columns > longest:
        return f"rows of {frame.columns} elements are read in pieces, and columns are moved"
    whole = [node for node in members if any(one is not None and _is_whole(one, frame) for one in results_of(node))]
    try:
        shifts_of(members, whole, frame, reduce)
    except DoesNotPrintError as reason:
        return str(reason)
    return ""


def _is_whole(tensor: torch.Tensor, frame: Matrix) -> bool:
    """Whether a tensor may be a result of the group: it has all elements of the matrix, or one for each row."""
    return tensor.numel() in (frame.numel, frame.rows)

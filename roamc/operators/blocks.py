"""Operators that run on blocks of rows, one after the other on each block, so that values between them stay in a cache.

A tensor of a shape such as [16, 128, 384] has 16 x 128 rows of 384 elements. Every operand of a group is seen as a
matrix of these rows and columns, by two strides:

    (384, 1)   all elements          (1, 0)   one for each row, such as a mean
    (0, 1)     one for each column   (0, 0)   one for all

An operator whose row of the table has ``rowwise`` gives for a block of rows, bit for bit, what it gives for them among
all, if vector code meets its elements in the same groups: see :func:`block_rows`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roamc.compat_operators import tensors_in
from roamc.graph import output_node, tensors_of
from roamc.operators import ops
from roamc.operators.out_variants import FormKind, form_of
from roamc.operators.table import Rowwise
from roamc.units import Bytes

TOGETHER = 64
"""Elements: the most that vector code on a CPU works on at a time, 2 registers of 512 bits in 16-bit floats."""

GRAIN = 1 << 15
"""Elements: torch splits pointwise work among threads only above, see ``at::internal::GRAIN_SIZE``."""

BLOCK_BYTES: Bytes = 1 << 20
"""Bytes of one value in a block: half of a core's second-level cache, of which operands and results take the rest."""


@dataclass(frozen=True)
class Matrix:
    """The rows and columns that all operands of a group are seen as.

    Attributes:
        rows: product of all sizes but the last.
        columns: the last size.
    """

    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of elements of the matrix."""
        return self.rows * self.columns


Steps = tuple[int, int]
"""Strides, in elements, from row to row and from column to column; 0 where all rows or columns share elements."""

AS_IT_IS: Steps = (-1, -1)
"""In the place of strides: an operand that is no part of the matrix, and that an operator takes as it is."""


def matrix_of(shape: Sequence[int]) -> Matrix | None:
    """Return the matrix that a tensor of ``shape`` is seen as; None with less than two rows or two columns."""
    if len(shape) < 2 or shape[-1] < 2:
        return None
    rows = math.prod(shape[:-1])
    return Matrix(rows, int(shape[-1])) if rows > 1 else None


def matrix_of_node(node: fx.Node) -> Matrix | None:
    """Return the matrix that ``node`` works on: that of its result or, for a reduction along rows, of its argument.

    None if the result is no single tensor, or the matrix would have less than two rows or two columns.
    """
    rowwise, value = ops.rule(node.target).rowwise, node.meta.get("val")
    if rowwise is not None and rowwise.keepdim is not None and isinstance(node.args[0], fx.Node):
        value = value if not isinstance(value, torch.Tensor) else node.args[0].meta.get("val")
    return matrix_of(value.shape) if isinstance(value, torch.Tensor) else None


def steps_of(tensor: torch.Tensor, shape: Sequence[int]) -> Steps | None:
    """Return the strides by which ``tensor``, broadcast to ``shape``, is seen as a matrix.

    Returns:
        (from row to row, from column to column), in elements; 0 where all rows or columns share elements. None if the
        rows do not follow each other at one stride, the columns lie apart, or ``tensor`` cannot be broadcast.
    """
    lacking = len(shape) - tensor.dim()
    if lacking < 0:
        return None
    sizes, strides = (1,) * lacking + tuple(tensor.shape), (0,) * lacking + tuple(tensor.stride())
    if any(size not in (1, full_size) for size, full_size in zip(sizes, shape, strict=True)):
        return None
    broadcast = [0 if size == 1 else int(stride) for size, stride in zip(sizes, strides, strict=True)]
    row = _one_stride(shape[:-1], broadcast[:-1])
    column = broadcast[-1]
    if row is None or column > 1 or (column and 0 < row < shape[-1]):
        return None
    return row, column


def _one_stride(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride at which the elements of dimensions follow each other in order; None if it is not the same for all."""
    step: int | None = None
    expected = 0
    for size, stride in reversed(list(zip(sizes, strides, strict=True))):
        if size == 1:
            continue
        if step is None:
            step = stride
        elif stride != expected:
            return None
        expected = stride * size
    return step or 0


def fits(node: fx.Node, matrix: Matrix) -> bool:
    """Whether ``node``, a ``call_function`` node, can run on blocks of rows of ``matrix`` and write into given memory.

    Its result is one dense tensor on a CPU with all elements of the matrix, or one for each row.
    """
    return result_steps(node, matrix) is not None and _operands_fit(node, matrix)


def result_steps(node: fx.Node, matrix: Matrix) -> Steps | None:
    """Return the strides of the result of ``node`` as a part of ``matrix``: from row to row and from column to column.

    They are (columns, 1) for a result with all elements of ``matrix``, and (1, 0) for one with an element for each row.
    None if ``node`` does not treat rows apart, or its result has another shape, lies otherwise in memory, or is on no
    CPU.
    """
    rule, result = ops.rule(node.target), node.meta.get("val")
    if rule.rowwise is None or rule.numbered or rule.bits:
        return None
    if not isinstance(result, torch.Tensor) or result.device.type != "cpu":
        return None
    if form_of(node, 1).kind not in (FormKind.OUT, FormKind.KERNEL) or result.is_conj() or result.is_neg():
        return None
    if not result.is_contiguous() or result.storage_offset() or (rule.rowwise.rank not in (0, result.dim())):
        return None
    if rule.rowwise.keepdim is not None:
        return (1, 0) if _reduces_last(node, matrix) else None
    if matrix_of(result.shape) == matrix:
        return (matrix.columns, 1) if _along_last(node, rule.rowwise.dim) else None
    alone = result.dim() > 1 and result.shape[-1] == 1 and result.numel() == matrix.rows
    return (1, 0) if alone and rule.rowwise == Rowwise() else None


def _along_last(node: fx.Node, position: int | None) -> bool:
    """Whether the argument at ``position`` names the last dimension; true for None."""
    if position is None:
        return True
    named = node.args[position] if position < len(node.args) else None
    rank = node.meta["val"].dim()
    return isinstance(named, int) and named % rank == rank - 1


def _reduces_last(node: fx.Node, matrix: Matrix) -> bool:
    """Whether ``node`` reduces the last dimension of a tensor with all elements of ``matrix``, and no other."""
    argument = node.args[0]
    tensor = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    if not isinstance(tensor, torch.Tensor) or matrix_of(tensor.shape) != matrix or len(node.args) < 2:
        return False
    dims = node.args[1]
    return isinstance(dims, list | tuple) and [dim % tensor.dim() for dim in dims] == [tensor.dim() - 1]  # type: ignore[operator]


def _operands_fit(node: fx.Node, matrix: Matrix) -> bool:
    return all(operand_steps(node, argument, matrix) is not None for argument in node.all_input_nodes)


def operand_steps(node: fx.Node, argument: fx.Node, matrix: Matrix) -> Steps | None:
    """Return the strides by which ``node`` reads ``argument`` as a part of ``matrix``.

    They are (from row to row, from column to column), in elements, 0 where all rows or columns share elements. None if
    ``node`` cannot read ``argument`` so. It is :data:`AS_IT_IS` for a number, a tensor without dimensions and one that
    is the same for all rows.
    """
    tensor = argument.meta.get("val")
    if isinstance(tensor, float):  # a number that is an argument of the group
        return AS_IT_IS
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return None
    rowwise = ops.rule(node.target).rowwise
    if rowwise is None or any(argument in tensors_listed(value) for value in node.args):
        return None
    if is_per_row(node, argument):
        return (1, 0) if tensor.numel() == matrix.rows and tensor.is_contiguous() else None
    if not tensor.dim() or _among(node, argument, rowwise.whole):
        return AS_IT_IS
    if rowwise == Rowwise():
        return steps_of(tensor, node.meta["val"].shape)
    steps = steps_of(tensor, tensor.shape) if matrix_of(tensor.shape) == matrix else None
    return steps if steps is not None and all(steps) else None


def _among(node: fx.Node, argument: fx.Node, positions: Sequence[int]) -> bool:
    """Whether ``argument`` is an argument of ``node`` at one of ``positions``."""
    return any(at < len(node.args) and node.args[at] is argument for at in positions)


def tensors_listed(value: Any) -> list[fx.Node]:
    """Return the nodes in ``value``, an argument of an operator, if it is a list or a tuple; else an empty list."""
    return [item for item in value if isinstance(item, fx.Node)] if isinstance(value, list | tuple) else []


def view_fits(view: fx.Node, base: fx.Node, matrix: Matrix) -> bool:
    """Whether blocks of rows can be cut of ``view``, a view of a member's result, as they are cut of that result.

    It is so too if the result has one element for each row and ``view`` spreads these over the columns.

    Args:
        view: its only tensor argument is ``base`` or another such view.
        base: the member, an operator of the group.
        matrix: the rows and columns of the group.
    """
    tensor, steps = view.meta.get("val"), result_steps(base, matrix)
    if not isinstance(tensor, torch.Tensor) or tensor.storage_offset() or tensor.is_conj() or tensor.is_neg():
        return False
    if steps == (1, 0) and tensor.numel() == matrix.rows:
        return tensor.is_contiguous()
    return matrix_of(tensor.shape) == matrix and steps_of(tensor, tensor.shape) == steps


def is_per_row(reader: fx.Node, node: fx.Node) -> bool:
    """Whether ``node`` is an argument of ``reader`` of one dimension, with one element for each row of the group."""
    rowwise = ops.rule(reader.target).rowwise
    return rowwise is not None and _among(reader, node, rowwise.per_row)


def input_steps(node: fx.Node, matrix: Matrix) -> Steps:
    """Return the strides, as :func:`operand_steps` does, by which a group's members read its input ``node``.

    Raises:
        ValueError: two members see it differently, or one cannot.
    """
    steps = {operand_steps(user, node, matrix) for user in node.users if not ops.is_view(user.target)}
    if len(steps) != 1 or None in steps:
        raise ValueError(f"{node.name} is seen as {steps}")
    return steps.pop()  # type: ignore[return-value]


def base_of(node: fx.Node) -> fx.Node:
    """Return the node that ``node`` is a view of, through any number of views; ``node`` itself if it views none."""
    while node.op == "call_function" and ops.is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def value_of(node: fx.Node) -> fx.Node:
    """Return what ``node`` is a view of, through any number of views; ``node`` itself if it views nothing.

    It is an operator with one result, or the ``getitem`` that picks one of several results.
    """
    while node.op == "call_function" and ops.is_view(node.target) and node.all_input_nodes:
        (base, *_) = node.all_input_nodes
        if node.target is operator.getitem and not ops.is_view(base.target):
            return node
        node = base
    return node


def last_of(members: Sequence[fx.Node]) -> fx.Node:
    """Return the last operator of ``members``, which are in graph order, views and picks of results among them."""
    return next(node for node in reversed(members) if not ops.is_view(node.target))


def results_of(body: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the nodes in the output of ``body``: members whose results are the group's, then values that it writes.

    The members come in the order in which they run. A value is written over an argument of the group, see
    :attr:`roamc.operators.fused.Fused.writes`.
    """
    return tuple(output_node(body).all_input_nodes)


def last_member(body: fx.Graph) -> fx.Node:
    """Return the last ``call_function`` node of ``body``, the graph of a group, that is no view."""
    last: fx.Node = [node for node in body.nodes if node.op == "call_function" and not ops.is_view(node.target)][-1]
    return last


def same_form(node: fx.Node, base: fx.Node) -> bool:
    """Whether the results of the members ``node`` and ``base`` agree in dtype, number of elements and last size.

    Both then have an element for each element of the group's matrix, or both one for each row. Each member has one
    tensor as its result.
    """
    one, other = only_tensor(node), only_tensor(base)
    return one.dtype == other.dtype and (one.shape[-1:] == other.shape[-1:]) and one.numel() == other.numel()


def must_align(nodes: Iterable[fx.Node], matrix: Matrix) -> bool:
    """Whether blocks have to begin at a multiple of :data:`TOGETHER` rows.

    They have to where a member works element by element and the columns of ``matrix`` are no multiple of
    :data:`TOGETHER`, or where its result has one element for each row.

    Args:
        nodes: the members of the group.
        matrix: the rows and columns of the group.
    """
    for node in nodes:
        if ops.rule(node.target).rowwise == Rowwise():
            steps = result_steps(node, matrix)
            if matrix.columns % TOGETHER or steps == (1, 0):
                return True
    return False


# -- how many rows ------------------------------------------------------------------------------------------------


def same_groups(numel: int, threads: int) -> bool:
    """Whether torch splits ``numel`` elements among threads only at multiples of :data:`TOGETHER`, or not at all.

    Then vector code works on the same elements together as one thread alone would, whatever their dtype.

    Args:
        numel: elements of a tensor that an operator goes through one by one.
        threads: torch's number of threads.
    """
    shared = min(threads, -(-numel // GRAIN))
    return shared <= 1 or -(-numel // shared) % TOGETHER == 0


def may_block(nodes: Iterable[fx.Node], matrix: Matrix, threads: int, *, broadcast: bool) -> bool:
    """Whether blocks of rows of ``matrix`` have the bits of the whole, run by ``threads`` threads.

    Operators that work row by row have them in any case.

    Args:
        nodes: the members.
        matrix: the rows and columns.
        threads: torch's number of threads.
        broadcast: some operand has one element for each row or column: then vector code begins anew with each row.
    """
    if not any(ops.rule(node.target).rowwise == Rowwise() for node in nodes):
        return True
    whole = same_groups(matrix.numel, threads) and same_groups(matrix.rows, threads)
    parted = min(threads, -(-matrix.numel // GRAIN)) > 1
    return whole and not (broadcast and parted and matrix.columns % TOGETHER)


def block_rows(matrix: Matrix, itemsize: int, threads: int, *, aligned: bool, pointwise: bool) -> int:
    """Return how many rows one block has, so that a block of one value takes about :data:`BLOCK_BYTES`.

    The last block never has a single row, since torch adds up one row in another order than several. All rows of
    ``matrix`` are one block where no size of blocks near the wanted one keeps this and the rules below.

    Args:
        matrix: the rows and columns of the group.
        itemsize: bytes of the largest element.
        threads: torch's number of threads.
        aligned: blocks begin at a multiple of :data:`TOGETHER` rows; without it at any row.
        pointwise: some member works element by element: then the threads that share a block, and those that share the
            last one, must begin at a multiple of :data:`TOGETHER` elements, too.
    """
    unit = threads * (TOGETHER if aligned else 1)
    ideal = max(1, BLOCK_BYTES // (matrix.columns * itemsize * unit))
    for units in (*range(ideal, max(0, ideal - TRIES), -1), *range(ideal + 1, ideal + TRIES)):
        rows: int = units * unit
        parts = {min(rows, matrix.rows), matrix.rows % rows} - {0}
        if rows == 1 or (rows < matrix.rows and 1 in parts):
            continue
        if not pointwise or all(same_groups(n, threads) and same_groups(n * matrix.columns, threads) for n in parts):
            return min(rows, matrix.rows)
    return matrix.rows


TRIES = 16
"""Sizes of blocks that are tried below and above the one that is wanted."""


def widest(nodes: Iterable[fx.Node]) -> int:
    """Return the bytes of the largest element among the results of ``nodes``; 1 if no result is a tensor."""
    return max((t.itemsize for node in nodes for _, t in tensors_of(node)), default=1)


def only_tensor(node: fx.Node) -> torch.Tensor:
    """Return the single fake tensor that ``node`` stands for.

    Raises:
        ValueError: ``node`` stands for no tensor, or for several.
    """
    (tensor,) = tensors_in(node.meta["val"])
    return tensor

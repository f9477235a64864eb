"""What the operators of a group give for numbers in memory, for the judge of kernels to compare with.

Memory holds numbers that follow from the place alone, so that nothing is allocated and a wrong place gives other
numbers. Floats of all dtypes are computed in 64 bits: rounding is no matter of the judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from roamc.codegen.calls import argument_of, by_name
from roamc.codegen.group_needs import (
    Need,
    adds_over_rows,
    is_number,
    is_sum_over_rows,
    members_of,
    position_of,
    read_per_row,
    rows_of,
    tensor_of,
    values_of,
)
from roamc.codegen.group_verdicts import GroupFault, Verdict
from roamc.codegen.kernel_columns import Columns, assembled, copies, moves_columns, needs_of, result_of, shape_of
from roamc.codegen.triton_stand_in import WIDE, widened
from roamc.compat_operators import on_cpu
from roamc.operators import ops
from roamc.operators.activations import ACTIVATIONS, FIRST, PARTS, SHIFT, Table
from roamc.operators.counter import kept


@dataclass(frozen=True)
class Matrix:
    """The matrix whose elements the lanes of a group's kernel go through: the shape of its last operator's result.

    Attributes:
        members: the operators of the group.
        needs: each of them to what it needs of its operands, by the names of its arguments.
        columns: size of the last dimension; 1 without dimensions.
        numel: number of elements.
    """

    members: Sequence[fx.Node]
    needs: Mapping[fx.Node, Mapping[str, Need]]
    columns: int
    numel: int

    def numbers(self, need: Need, elements: Tensor) -> Tensor:
        """Return the numbers of the elements of an operand that a member needs at elements of the matrix.

        Args:
            need: of the member; the operand may have one element for each row.
            elements: int64 of any shape.
        """
        counted = elements if math.prod(need.sizes) == self.numel else elements // self.columns
        return torch.from_numpy(need.at(counted.numpy()))


def matrix_of(body: fx.Graph) -> Matrix:
    """Return the matrix of the group with the operators in ``body``."""
    members = members_of(body)
    sizes = shape_of(members[-1])
    return Matrix(members, {node: needs_of(node) for node in members}, sizes[-1] if sizes else 1, math.prod(sizes))


class Memory:
    """The numbers in memory.

    Args:
        matrix: of the group.
        least: smallest float; the largest is 1.75.
        number_of: returns for an argument of the kernel a number that no other argument has.
    """

    def __init__(self, matrix: Matrix, least: float, number_of: Callable[[fx.Node], int]) -> None:
        self._least, self._columns, self._number_of = least, matrix.columns, number_of
        numbered = (node for node in matrix.members if ops.rule(node.target).numbered)
        self._seeds = {need.value for node in numbered for need in matrix.needs[node].values()}
        self._bits = {need.value for node in matrix.members for need in bits_of(node, matrix.needs)}
        self._ignored = {need.value: label for node in matrix.members for need, label in _labels(node, matrix.needs)}

    def content(self, node: fx.Node, places: Tensor) -> Tensor:
        """Return the numbers of an operand at ``places``, int64 of any shape: they look like random ones."""
        mixed = places.to(torch.int64) * -7046029254386353131 + (1 + self._number_of(node)) * 2654435761
        mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
        if node in self._seeds:  # all bits of a seed count
            return mixed ^ (mixed >> 32)
        if node in self._bits:
            return ((mixed ^ (mixed >> 32)) & 255).to(torch.uint8)
        mixed = (mixed ^ (mixed >> 32)) & ((1 << 30) - 1)
        dtype = WIDE if is_number(node) else tensor_of(node).dtype
        if dtype is torch.bool:
            return mixed % 2 == 1
        if not dtype.is_floating_point:
            small = mixed % min(100, self._columns)
            ignored = self._ignored.get(node)
            return (small if ignored is None else torch.where(mixed % 5 == 0, ignored, small)).to(dtype)
        return mixed.to(WIDE) * ((1.75 - self._least) / (1 << 30)) + self._least

    def number(self, node: fx.Node) -> Tensor:
        """Return what stands for a number that the kernel is passed."""
        return self.content(node, torch.zeros((), dtype=torch.int64, device="cpu"))


def entries(table: Table, places: Tensor) -> Tensor:
    """Return the numbers of a table at ``places``, integers of any shape, in 64 bits.

    Raises:
        GroupFault: the table has no such places.
    """
    numbers = table.on(torch.device("cpu"))
    if places.numel() and not (places.min() >= 0 and places.max() < numbers.numel()):
        raise GroupFault(Verdict.OUTSIDE, f"numbers {int(places.min())} to {int(places.max())} of a table are read")
    return numbers[places.to(torch.int64)].to(WIDE)


def bits_of(node: fx.Node, needs: Mapping[fx.Node, Mapping[str, Need]]) -> list[Need]:
    """Return what a member reads as one bit for each of its elements."""
    called: Any = node.target
    return [needs[node][called._schema.arguments[at].name] for at in ops.rule(called).bits]


def _labels(node: fx.Node, needs: Mapping[fx.Node, Mapping[str, Need]]) -> list[tuple[Need, int]]:
    """What a member reads as labels, and the label that it ignores."""
    operator: Any = node.target
    label = by_name(operator, node.args, node.kwargs).get("ignore_index")
    return [(needs[node]["target"], label)] if isinstance(label, int) and "target" in needs[node] else []


class Expected:
    """What the operators of a group give for some elements of its matrix.

    Args:
        matrix: of the group.
        memory: what its operands hold.
        shifted: which columns lanes want, where members move columns; else None.
        elements: int64[n], or int64[rows, columns] where programs hold rows.
        counts: how many of these rows each program has; empty without rows.

    Attributes:
        values: each member, or result of one with several, to its numbers: one for each element or each row; of a sum
            over rows one for each program and column.
    """

    def __init__(
        self, matrix: Matrix, memory: Memory, shifted: Columns | None, elements: Tensor, counts: Sequence[int]
    ) -> None:
        self.matrix, self.memory, self.shifted = matrix, memory, shifted
        self.elements, self.counts = elements, counts
        self.values: dict[fx.Node, Tensor] = {}
        for node in matrix.members:
            self.values |= self._results_of(node)

    def _results_of(self, node: fx.Node) -> dict[fx.Node, Tensor]:
        """The results of a member, each with an element for each of the matrix or each row.

        A sum over rows has one for each column and program, of the rows of that program alone.
        """
        operands = {name: self._operand(node, need) for name, need in self.matrix.needs[node].items()}
        down = adds_over_rows(node)
        ends = np.cumsum(self.counts) if down else [None]
        runs = [self._call(node, operands, slice(a, b)) for a, b in zip((0, *ends[:-1]), ends, strict=True)]
        results = {}
        for value in values_of(node):
            parts = [run[position_of(value)] for run in runs]
            results[value] = (
                torch.stack([part.reshape(-1) for part in parts]) if is_sum_over_rows(value) else _joined(parts)
            )
        return results

    def _call(self, node: fx.Node, operands: Mapping[str, Tensor], rows: slice) -> Sequence[Tensor]:
        """The results of a member for some rows of its operands."""
        called: Any = node.target
        if moves_columns(node):
            return [assembled(node, [value[rows] for value in operands.values()])]
        if ops.rule(node.target).numbered:
            return [self._numbered(node, operands)]
        if ops.rule(node.target).bits:
            return [self._activation_input(node, operands, rows)]
        if copies(node):
            return [value[rows] if value.dim() else value for value in operands.values()]
        (rowwise, names), per_row = rows_of(node), read_per_row(node)
        passed = {name: widened(node, name, value) for name, value in by_name(called, node.args, node.kwargs).items()}
        passed |= {
            name: self.memory.number(value).item()
            for name, value in passed.items()
            if isinstance(value, fx.Node) and is_number(value)
        }
        for name, value in operands.items():
            passed[name] = value if not value.dim() or self.matrix.needs[node][name].whole else value[rows]
            if name in per_row:
                passed[name] = passed[name][:, 0]
            elif rowwise.sizes is not None:
                passed[name] = self._as_it_is(tensor_of(argument_of(node, name)), passed[name])
        if rowwise.dim is not None:
            dim = 0 if adds_over_rows(node) else -1
            passed[names[rowwise.dim]] = [dim] if isinstance(passed[names[rowwise.dim]], list | tuple) else dim
        if rowwise.sizes is not None:
            passed[names[rowwise.sizes]] = [self.matrix.columns]
        if rowwise.keepdim is not None:
            passed[names[rowwise.keepdim]] = True
        alone = {argument.name for argument in called._schema.arguments if argument.kwarg_only}
        positional = [value for name, value in passed.items() if name not in alone]
        result = on_cpu(called)(*positional, **{name: passed[name] for name in passed if name in alone})
        return result if isinstance(result, list | tuple) else [result]

    def _numbered(self, node: fx.Node, operands: Mapping[str, Tensor]) -> Tensor:
        """The elements of a mask that follow from their numbers, which are those of the group's matrix."""
        if tensor_of(node).numel() != self.matrix.numel:
            raise GroupFault(Verdict.SHAPE, "has another number of elements than its group", node.name)
        return kept(operands["seed"], self.elements, float(node.args[3]))  # type: ignore[arg-type]

    def _activation_input(self, node: fx.Node, operands: Mapping[str, Tensor], rows: slice) -> Tensor:
        """The inputs of an activation, by the table of its operator and the bits of the elements' numbers."""
        tensor, (packed,) = tensor_of(node), bits_of(node, self.matrix.needs)
        if tensor.numel() != self.matrix.numel or tensor.numel() % PARTS or not tensor.is_contiguous():
            raise GroupFault(Verdict.SHAPE, "has other elements than the bits that it reads", node.name)
        y, bits = operands["result"], operands["right"].to(torch.int64)
        side = (bits >> (self.elements // packed.sizes[-1])) & 1
        table = Table(str(node.args[2]), tensor.dtype)
        if tensor.dtype is not torch.float32:
            wide = y.float().view(torch.int32) >> 16 if tensor.dtype is torch.bfloat16 else y.half().view(torch.int16)
            return entries(table, (wide.to(torch.int64) & 0xFFFF) + (side << 16))[rows]
        activation, half = ACTIVATIONS[table.function], table.on(side.device).numel() // 2
        r = (y - activation.lowest) / y.clamp(max=-activation.edge) * -1
        cell = ((r.float().view(torch.int32) >> SHIFT) - FIRST).clamp(0, half // 2 - 1)
        place = 2 * cell + half * side
        return (entries(table, place) + entries(table, place + 1) * r)[rows]

    def _as_it_is(self, tensor: Tensor, value: Tensor) -> Tensor:
        """An operand, with all elements of some rows, as an operator takes it that does not broadcast."""
        if tensor.dim() == 1:
            return value[0].contiguous()
        return value[:, :1].contiguous() if tensor.shape[-1] == 1 else value.contiguous()

    def _operand(self, node: fx.Node, need: Need) -> Tensor:
        """What a member reads at the elements; a whole operand as it is."""
        if need.whole or (need.value not in self.values and not tensor_of(need.value).dim()):
            strides = torch.arange(1 if not need.whole else need.sizes[0], device="cpu") * (need.strides or (0,))[0]
            content = self.memory.content(need.value, need.offset + strides)
            return content if need.whole else content[0]
        if self.shifted is not None:
            rows = self.elements[:, :1] // self.matrix.columns
            if need.value in self.values:
                return self.shifted.slice_of(need, self.values[need.value], rows, node)
            return self.memory.content(need.value, self.shifted.numbers(need, rows))
        per_row = math.prod(need.sizes) != self.matrix.numel
        elements = self.elements[..., :1] if per_row and self.elements.dim() > 1 else self.elements
        numbers = self.matrix.numbers(need, elements)
        if need.value not in self.values:
            return self.memory.content(need.value, numbers)
        value, result = self.values[need.value], result_of(need.value)
        lies = self.matrix.numbers(result, elements)
        if (numbers != lies).any():
            raise GroupFault(
                Verdict.ELEMENTS, f"needs other elements of {need.value.name} than those of its row", node.name
            )
        return value.expand(elements.shape)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]

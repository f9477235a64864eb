"""What of a member's call prints in a kernel: its operands, and why a call does not print."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from roamc.operators import blocks, ops
from roamc.operators.activations import PARTS
from roamc.operators.blocks import Matrix
from roamc.operators.gpu.frame import Access, access_along, access_of, along_columns, in_order
from roamc.operators.gpu.lines import INTEGERS, PRINTABLE, DoesNotPrintError
from roamc.operators.gpu.partial_sums import WIDEST
from roamc.operators.gpu.printed import Printed, printed
from roamc.operators.gpu.reorders import reordered
from roamc.operators.gpu.results import first_of, made_by, results_of, shape_of_operands, sums_over_rows
from roamc.operators.gpu.shifts import Part, is_per_row, part_of, parts_of, shift_between, width_of


@dataclass(frozen=True)
class Operand:
    """A positional argument of a member, or one of those that the member puts side by side.

    Attributes:
        value: a node, a number, or None.
        access: how the node is read, if it is not made in the group.
        shift: columns of the operand, or of the member that it is a slice of, to the left of the member's own ones.
        per_row: the operand is made in the group, and has one element for each row, the same for all columns.
    """

    value: Any
    access: Access | None = None
    shift: int = 0
    per_row: bool = False


def operands_of(node: fx.Node, frame: Matrix, inside: Collection[fx.Node]) -> list[Operand]:
    """Return what a member reads: its positional arguments, or the operands that it puts side by side.

    Args:
        node: the member.
        frame: the matrix of the group.
        inside: the members of the group; what ``node`` reads of others is loaded from memory.

    Raises:
        DoesNotPrintError: the call has no form in a kernel.
    """
    printer = printed(node.target)
    if printer is None:
        raise DoesNotPrintError(f"{node.name} does not print")
    if set(node.kwargs) - set(printer.keywords) or not all(map(_is_plain, results_of(node))):
        raise DoesNotPrintError(f"{node.name} has arguments or a result that do not print")
    result = first_of(node)
    _check_results(node, printer, frame)
    _check_dim(node, printer, frame)
    number_names = [argument.name for argument in node.all_input_nodes if is_number(argument)]
    if number_names and not printer.number_arguments:
        raise DoesNotPrintError(f"{node.name} takes the number {number_names[0]}, which is not known before it runs")
    tensors = [result, *(argument.meta.get("val") for argument in node.all_input_nodes if not is_number(argument))]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in PRINTABLE or tensor.device != result.device:
            raise DoesNotPrintError(f"{node.name} has a tensor of another device or dtype")
        if tensor.is_neg():
            raise DoesNotPrintError(f"{node.name} has a tensor that lies in memory with other signs")
    numbers = [number for number in node.args if isinstance(number, int | float)]
    if common_dtype(node, printer) is torch.uint8 and min(numbers, default=0) < 0:
        raise DoesNotPrintError(f"{node.name} takes a number below zero, which Triton has not among those of 8 bits")
    if ops.rule(node.target).assembly is not None:
        if math.prod(result.shape[:-1]) != frame.rows:
            raise DoesNotPrintError(f"{node.name} has not {frame.rows} rows")
        return [_operand_beside(node, part, frame, inside) for part in parts_of(node)]
    left_out = node.target._schema.arguments[len(node.args) :]  # type: ignore[union-attr]
    defaults = [Operand(argument.default_value) for argument in left_out if not argument.kwarg_only]
    return [*(_operand(node, at, frame, inside) for at in range(len(node.args))), *defaults]


def _is_plain(result: object) -> bool:
    """Whether a result is a tensor of plain numbers, or one that is left out."""
    return result is None or (isinstance(result, torch.Tensor) and not result.is_conj())


def _check_results(node: fx.Node, printer: Printed, frame: Matrix) -> None:
    """Raise DoesNotPrintError unless results have elements that kernels make, where they make them."""
    down = sums_over_rows(node)
    for position, result in enumerate(results_of(node)):
        if result is None:
            continue
        if (result.dtype is torch.bool and not printer.booleans) or (result.dtype in INTEGERS and not printer.integers):
            raise DoesNotPrintError(f"{node.name} makes {result.dtype}, which does not print")
        if ops.rule(node.target).numbered and result.numel() != frame.numel:
            raise DoesNotPrintError(f"{node.name} has another number of elements than its group")
        if position in down:
            if frame.columns > WIDEST:
                raise DoesNotPrintError(f"{node.name} adds up over rows of more than {WIDEST} elements")
        elif width_of(result.shape, frame) is None:
            raise DoesNotPrintError(
                f"{node.name} has neither {frame.rows} x {frame.columns} elements nor one for each row"
            )


def _check_dim(node: fx.Node, printer: Printed, frame: Matrix) -> None:
    """Raise DoesNotPrintError unless a member works element by element, or along the rows of the frame."""
    if printer.along is None:
        return
    source = node.args[0].meta["val"]  # type: ignore[union-attr]
    dims = node.args[printer.along] if printer.along < len(node.args) else None
    dims = [dims] if isinstance(dims, int) else dims
    rowwise = ops.rule(node.target).rowwise
    by_size = rowwise is not None and rowwise.sizes is not None
    if source.dim() < (2 if by_size else 1):
        raise DoesNotPrintError(f"{node.name} has no rows")
    if by_size or sums_over_rows(node):
        last = not by_size or list(dims) == [frame.columns]  # type: ignore[arg-type]
    else:
        last = isinstance(dims, list | tuple) and [dim % source.dim() for dim in dims] == [source.dim() - 1]
    if not last or source.shape[-1] != frame.columns or source.numel() != frame.numel:
        raise DoesNotPrintError(f"{node.name} does not work along rows of {frame.columns}")


def _operand_beside(node: fx.Node, part: Part, frame: Matrix, inside: Collection[fx.Node]) -> Operand:
    """An operand of ``node``, which puts it beside others."""
    shape = part.node.meta["val"].shape
    if width_of(shape, frame) is None:
        raise DoesNotPrintError(f"{part.node.name} has not the rows of {node.name}")
    operand = _read(node, part.node, shape, frame, inside)
    return replace(operand, shift=operand.shift - part.begin)


def _operand(node: fx.Node, at: int, frame: Matrix, inside: Collection[fx.Node]) -> Operand:
    argument, rule = node.args[at], ops.rule(node.target)
    if not isinstance(argument, fx.Node) or is_number(argument):
        return Operand(argument)
    if rule.rowwise is not None and at in rule.rowwise.whole and argument.meta["val"].dim():
        if blocks.base_of(argument) in inside:
            raise DoesNotPrintError(f"{node.name} reads {argument.name} at places that it finds itself")
        return Operand(argument)
    if at in rule.bits:
        return Operand(argument, _access_of_bits(node, argument, frame, inside))
    order = reordered(node) if rule.copies else None
    if order is not None and order[0] in inside:
        return Operand(order[0])
    if rule.copies and argument.meta["val"].stride()[-1:] not in ((1,), ()):
        raise DoesNotPrintError(f"{node.name} copies columns that lie apart")
    return _read(node, argument, shape_of_operands(node), frame, inside)


def _access_of_bits(node: fx.Node, argument: fx.Node, frame: Matrix, inside: Collection[fx.Node]) -> Access:
    """How the bytes of bits are read, one for each element of ``node``: the tensor's eight parts read all of them."""
    result, nbytes = node.meta["val"], argument.meta["val"].numel()
    whole = result.is_contiguous() and result.numel() == frame.numel and argument.meta["val"].is_contiguous()
    if not whole or result.numel() % PARTS or blocks.base_of(argument) in inside:
        raise DoesNotPrintError(f"{node.name} has other elements than the bits of {argument.name} say in order")
    return access_along((PARTS, nbytes), (0, 1), frame.columns)


def _read(node: fx.Node, argument: fx.Node, shape: torch.Size, frame: Matrix, inside: Collection[fx.Node]) -> Operand:
    """How ``node`` reads ``argument``, broadcast to ``shape``."""
    rowwise = ops.rule(node.target).rowwise
    tensor, matrix = argument.meta["val"], part_of(frame, shape)
    base, position = made_by(argument)
    per_row = tensor.dim() == 1 and rowwise is not None and rowwise.per_row != ()
    if base in inside:
        order = reordered(base)
        if order is not None and order[0] in inside:
            raise DoesNotPrintError(f"{node.name} reads {base.name}, which is made in another order")
        if position in sums_over_rows(base):
            raise DoesNotPrintError(f"{node.name} reads {base.name}, a sum over rows, before all rows are added")
        shift = shift_between(argument, base, frame)
        if shift is None:
            raise DoesNotPrintError(f"{argument.name} has the elements of {base.name} in another order")
        plain = per_row or tensor.shape == shape
        if not plain and not in_order(torch.empty(tensor.shape, device="meta"), tensor.numel(), shape, matrix):
            raise DoesNotPrintError(f"{node.name} takes the elements of {base.name} in another order")
        return Operand(argument, shift=shift, per_row=is_per_row(tensor.shape, frame))
    access = access_of(tensor.unsqueeze(-1) if per_row else tensor, shape, matrix.columns)
    if access is None:
        raise DoesNotPrintError(f"{argument.name} cannot be read by {node.name}")
    if math.prod(shape) != matrix.numel:  # an element for each row, the same for all columns
        access = along_columns(access)
    return Operand(argument, access)


def is_number(node: fx.Node) -> bool:
    """Whether ``node``, an argument of a group, is a number, which may be another one at every step."""
    return isinstance(node.meta.get("val"), float)


def needs_rows(node: fx.Node) -> bool:
    """Whether a kernel with the member ``node`` has whole rows in one program."""
    if ops.rule(node.target).assembly is not None:
        return True
    printer, rowwise = printed(node.target), ops.rule(node.target).rowwise
    return (printer is not None and printer.along is not None) or (rowwise is not None and rowwise.per_row != ())


def common_dtype(node: fx.Node, printer: Printed) -> torch.dtype | None:
    """What the operands of a member are converted to before it works; None for nothing."""
    if printer.common == "each":
        return None
    if printer.common == "operands":
        first, second = (a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args[:2])
        return torch.result_type(first, second)  # type: ignore[arg-type]
    if printer.along is not None:  # it adds up in float32 what it reads
        return torch.float32
    return first_of(node).dtype


def reduces(node: fx.Node) -> bool:
    """Whether the member ``node`` works along whole rows, or adds up over rows."""
    printer = printed(node.target)
    return printer is not None and printer.along is not None

"""For the judge of kernels: which columns of its operands a member reads where members move columns.

A lane of a kernel is one element of the group's matrix. Where a member puts operands side by side, other members are
computed for the lanes to the left or right of their own columns.

    cat([neg, x[..., :32]], -1)    lanes 0 to 31 want columns 0 to 31 of neg, lanes 32 to 63 columns 0 to 31 of x

What each lane wants follows from the body alone: from the results back, by the rules of slices and of operators that
put operands side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from roamc.codegen import group_needs
from roamc.codegen.calls import by_name
from roamc.codegen.group_needs import Need, tensor_of
from roamc.codegen.group_verdicts import GroupFault, Verdict
from roamc.graph import output_node
from roamc.operators import ops

Needs = Mapping[fx.Node, Mapping[str, Need]]


def moves_columns(node: fx.Node) -> bool:
    """Whether the operator ``node`` puts operands side by side."""
    return ops.rule(node.target).assembly is not None


def copies(node: fx.Node) -> bool:
    """Whether all that the operator ``node`` does is to copy its argument to other places."""
    return ops.rule(node.target).copies


def needs_of(node: fx.Node) -> dict[str, Need]:
    """Return which elements the operator ``node`` reads, as :func:`roamc.codegen.group_needs.needs_of` does.

    An operator that puts operands side by side reads each with the shape that it has, by a name such as ``tensors[1]``.
    A copy goes through the elements of a member's result in the order in which that member makes them.

    Raises:
        GroupFault: an operand cannot be broadcast, or is a view of another dtype.
    """
    if copies(node):
        return {next(iter(_named(node))): _copied(node)[0]}
    return group_needs.needs_of(node) if not moves_columns(node) else dict(zip(*_parts(node), strict=True))


def result_of(node: fx.Node) -> Need:
    """Return where a result is written, as :func:`roamc.codegen.group_needs.result_of` does.

    Raises:
        GroupFault: the result has no shape that a member goes through.
    """
    if copies(node):
        return _copied(node)[1]
    if not moves_columns(node):
        return group_needs.result_of(node)
    tensor = tensor_of(node)
    return Need(node, tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape that the operator ``node`` goes through, as :func:`roamc.codegen.group_needs.shape_of` does.

    Raises:
        GroupFault: it reduces neither the last dimension alone nor all others.
    """
    if copies(node):
        return _copied(node)[1].sizes
    return tuple(map(int, tensor_of(node).shape)) if moves_columns(node) else group_needs.shape_of(node)


def _copied(node: fx.Node) -> tuple[Need, Need]:
    """What a copy reads and what it writes, element by element."""
    view: Any = node.args[0]
    value, offset = group_needs.value_under(view)
    source, result = tensor_of(view), tensor_of(node)
    dims = [(int(n), int(s), int(t)) for n, s, t in zip(source.shape, source.stride(), result.stride(), strict=True)]
    lies = tensor_of(value)
    places = {stride: (size, to) for size, stride, to in dims if size > 1}
    own = [(int(size), int(stride)) for size, stride in zip(lies.shape, lies.stride(), strict=True)]
    long = [(size, stride) for size, stride in own if size > 1]
    permuted = value.op == "call_function" and len(places) == len(long) == sum(size > 1 for size, *_ in dims)
    if permuted and all(stride in places and places[stride][0] == size for size, stride in long):
        dims = [(size, stride, places[stride][1] if size > 1 else 0) for size, stride in own]
    sizes, strides, to = (tuple(column) for column in zip(*dims, strict=True)) if dims else ((), (), ())
    return Need(value, sizes, strides, offset), Need(node, sizes, to)


def _parts(node: fx.Node) -> tuple[list[str], list[Need]]:
    """The names of the operands that ``node`` puts side by side, and which elements it reads of each."""
    named, assembly = _named(node), ops.rule(node.target).assembly
    assert assembly is not None, f"{node.name} moves no columns"
    name = list(named)[assembly.parts]
    listed = named[name] if isinstance(named[name], list | tuple) else [named[name]]
    needs = []
    for part in listed:
        tensor = tensor_of(part)
        value, offset = group_needs.value_under(part)
        needs.append(Need(value, tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), offset))
    return [f"{name}[{at}]" for at, _ in enumerate(needs)], needs


def _named(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by their names, in the order of the schema, defaults among them."""
    called: Any = node.target
    return by_name(called, node.args, node.kwargs)


def _begins(node: fx.Node) -> list[int]:
    """The columns of the result of ``node`` at which its operands begin.

    Raises:
        GroupFault: it puts them side by side along another dimension than the last, or apart.
    """
    at, assembly = list(_named(node).values()), ops.rule(node.target).assembly
    assert assembly is not None, f"{node.name} moves no columns"
    rank, size = tensor_of(node).dim(), int(tensor_of(node).shape[-1])
    step = 1 if assembly.step is None else at[assembly.step]
    if at[assembly.dim] % rank != rank - 1 or step != 1:
        raise GroupFault(Verdict.DIMENSION, "puts nothing side by side along the last dimension", node.name)
    start = 0 if assembly.start is None else at[assembly.start]
    begin, begins = start + size if start < 0 else start, []
    for need in _parts(node)[1]:
        begins.append(begin)
        begin += need.sizes[-1]
    return begins


def assembled(node: fx.Node, operands: Sequence[Tensor]) -> Tensor:
    """Return what a member that puts operands side by side makes of some rows, with ATen's own operator.

    Args:
        node: the member.
        operands: all columns of these rows of each operand, in order.
    """
    called: Any = node.target
    arguments, assembly = list(_named(node).values()), ops.rule(node.target).assembly
    assert assembly is not None, f"{node.name} moves no columns"
    several = isinstance(arguments[assembly.parts], list | tuple)
    arguments[assembly.parts] = list(operands) if several else operands[0]
    arguments[assembly.dim] = 1
    if assembly.sizes is not None:
        arguments[assembly.sizes] = [len(operands[0]), int(tensor_of(node).shape[-1])]
    result: Tensor = called(*arguments)
    return result


class Columns:
    """Which columns of values the members of a group read in its rows, and which ones its lanes want.

    Args:
        body: the operators of the group, with fake values.
        needs: what each member reads.
        rows: rows of the group's matrix.
        width: its columns.

    Attributes:
        shifts: for each member and name of an operand, at how many columns to the right of their own lanes want it.

    Raises:
        GroupFault: a member puts operands side by side in another way than along the rows of the matrix.
    """

    def __init__(self, body: fx.Graph, needs: Needs, rows: int, width: int) -> None:
        self.needs, self.rows, self.width = needs, rows, width
        self.shifts: dict[tuple[fx.Node, str], tuple[int, ...]] = {}
        reader_shifts: dict[fx.Node, set[int]] = {node: set() for node in needs}
        for result in output_node(body).all_input_nodes:
            reader_shifts[group_needs.member_of(result)].add(0)
        for node in reversed(list(needs)):
            begins = self._checked_begins(node) if moves_columns(node) else [0] * len(needs[node])
            for (name, need), begin in zip(needs[node].items(), begins, strict=True):
                shifts = {shift - begin for shift in reader_shifts[node]}
                self.shifts[node, name] = tuple(sorted(shifts))
                member = group_needs.member_of(need.value)
                if member in reader_shifts:
                    before = self._columns_before(need, node)
                    reader_shifts[member].update({0} if before is None else {shift + before for shift in shifts})

    def _checked_begins(self, node: fx.Node) -> list[int]:
        if any(math.prod(need.sizes[:-1]) != self.rows for need in (result_of(node), *self.needs[node].values())):
            raise GroupFault(Verdict.DIMENSION, f"does not have {self.rows} rows", node.name)
        return _begins(node)

    def _width(self, need: Need) -> int:
        """Columns of a value in each row of the matrix; 1 for one element for each row."""
        return math.prod(need.sizes) // self.rows

    def numbers(self, need: Need, rows: Tensor) -> Tensor:
        """Return the numbers of all elements of a value in some rows of the matrix, [rows, columns of the value].

        Args:
            need: the value, and the shape in which it is gone through.
            rows: numbers of rows, [rows, 1].
        """
        width = self._width(need)
        columns = torch.arange(width, dtype=torch.int64, device="cpu")
        return torch.from_numpy(need.at((rows * width + columns).numpy()))

    def slice_of(self, need: Need, value: Tensor, rows: Tensor, reader: fx.Node) -> Tensor:
        """Return the columns of a member's value that another member reads.

        Args:
            need: which elements the reader takes of it.
            value: all of its columns in ``rows``; or one, for a value with one element for each row.
            rows: numbers of rows, [rows, 1].
            reader: the member that reads it.

        Raises:
            GroupFault: the reader takes other elements than some columns in the rows of the value.
        """
        numbers, lies = self.numbers(need, rows), self.numbers(result_of(need.value), rows)
        before = self._columns_before(need, reader)
        part = slice(None) if before is None else slice(before, before + numbers.shape[-1])
        fits = before is None or numbers.shape == lies[:, part].shape
        if not fits or (numbers != lies[:, part]).any():
            raise self._other_elements(need, reader)
        return value[:, part].expand(numbers.shape)

    def _columns_before(self, need: Need, reader: fx.Node) -> int | None:
        """The column of a member's value at which its reader begins; None for one element for each row."""
        row = torch.zeros((1, 1), dtype=torch.int64, device="cpu")
        lies, numbers = self.numbers(result_of(need.value), row), self.numbers(need, row)
        if lies.numel() == 1:
            return None
        same = (lies[0] == numbers[0, 0]).nonzero()
        if not len(same):
            raise self._other_elements(need, reader)
        return int(same[0, 0])

    def _other_elements(self, need: Need, reader: fx.Node) -> GroupFault:
        detail = f"needs other elements of {need.value.name} than those of its row"
        return GroupFault(Verdict.ELEMENTS, detail, reader.name)

    def check_load(
        self, operand: fx.Node, places: Tensor, active: Tensor, lanes: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """Check that each lane reads the element that some member wants there, and that no other lane reads.

        Args:
            operand: what is loaded.
            places: numbers of the elements that are read.
            active: lanes that read.
            lanes: row and column of each lane, and whether it has an element of the matrix.

        Returns:
            The lanes that have to read.

        Raises:
            GroupFault: no member wants what is read.
        """
        fault = GroupFault(Verdict.VALUE, f"{operand.name} is read, which nobody needs")
        for (node, name), shifts in self.shifts.items():
            need = self.needs[node][name]
            for shift in shifts if need.value is operand and not need.whole else ():
                wrong, must_read = self._check_at(need, shift, (places, active), lanes)
                if wrong is None:
                    return must_read
                fault = wrong if fault.verdict is not Verdict.MASK else fault
        raise fault

    def _check_at(
        self, need: Need, shift: int, read: tuple[Tensor, Tensor], lanes: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[GroupFault | None, Tensor]:
        """Say what is wrong with a load if it is to read ``need`` at ``shift``; and which lanes have to read."""
        (rows, columns, valid), width, name = lanes, self._width(need), need.value.name
        columns = columns + shift
        same = width == 1 or (need.step == 0 and need.sizes[-1] == width)  # for all columns
        has = (columns >= 0) & (columns < width) | same
        must_read = valid & has
        elements = rows * width + columns.clamp(0, width - 1)
        numbers = torch.from_numpy(need.at(torch.where(must_read, elements, 0).numpy()))
        places, active, numbers, must_read = torch.broadcast_tensors(*read, numbers, must_read)
        if (places != numbers)[must_read].any():
            at = int((places != numbers)[must_read].nonzero()[0])
            detail = f"element {int(places[must_read][at])} of {name} is read, and not {int(numbers[must_read][at])}"
            return GroupFault(Verdict.ELEMENTS, detail), must_read
        if (must_read & ~active).any():
            return GroupFault(Verdict.MASK, f"some elements of {name} are not read"), must_read
        if (shift != 0 or width < self.width) and (active & ~has).any():
            return GroupFault(Verdict.MASK, f"{name} is read beside its columns"), must_read
        return None, must_read

"""One Triton kernel for a group of operators.

A group of pointwise operators runs over all elements by their number. A group that adds up along rows has whole rows in
one program; rows that are too long to be held are read once for each sum that depends on another, and once more for the
result. A group that adds up over rows ends with a second kernel, see :mod:`roamc.operators.gpu.partial_sums`.

    @triton.jit
    def fused_mul_3(x, weight, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, COLUMNS)[None, :]
        inside = (row < 2048) & (column < 768)
        x_value = tl.load(x + row * 768 + column, inside, 0)
        pow_1 = x_value * x_value  # model.py:12
        total = tl.sum(tl.where(column < 768, pow_1, 0.0), 1, keep_dims=True)
        ...
        tl.store(out + row * 768 + column, mul_3, inside)
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roamc.graph import placeholders, source_line
from roamc.operators import blocks, ops
from roamc.operators.blocks import Matrix
from roamc.operators.gpu.frame import Access, Reach, access_of, along_columns, in_order, keeps_order, shape_reach
from roamc.operators.gpu.lines import DOWN, FLOATS, INTEGERS, PRINTABLE, REDUCED, DoesNotPrintError, Lines, Value
from roamc.operators.gpu.partial_sums import TOGETHER, WIDEST, PartialSums, partial_sums
from roamc.operators.gpu.printed import Printed, printed
from roamc.operators.gpu.results import (
    first_of,
    is_sum_over_rows,
    made_by,
    picks,
    results_of,
    shape_of_operands,
    sums_over_rows,
)

LONGEST_ROW = 16384
"""Elements: rows up to this length are held whole, padded to a power of two; longer ones are read in pieces."""

PIECE = 4096
"""Elements of a longer row that are read at a time."""

BLOCK = 1024
"""Elements of one program of a group without sums."""

RESERVED = frozenset({"tl", "triton", "out", "row", "column", "index", "inside", "start", "ROWS", "COLUMNS", "BLOCK"})


@dataclass(frozen=True)
class KernelText:
    """A kernel as text.

    Attributes:
        source: defines the function, with the decorator ``triton.jit``; needs the names ``triton`` and ``tl``.
        function: its name. It takes the operands in order, then the results, then the constants. What is written over
            operands goes to these; numbers are passed as they are.
        constants: names and values of the compile-time constants.
        programs: how many programs the launch has.
        warps: warps of 32 threads that run one program.
        reads: how often an element of an operand is read; 1 if rows are held whole.
        partials: how sums over rows end; None if there are none.
    """

    source: str
    function: str
    constants: dict[str, int]
    programs: int
    warps: int
    reads: int
    partials: PartialSums | None = None


def unfit(node: fx.Node, frame: Matrix, inside: Collection[fx.Node]) -> str:
    """Say why ``node`` cannot be printed in a kernel; "" if it can.

    Args:
        node: an operator.
        frame: the matrix of the group.
        inside: the members of the group; what ``node`` reads of others is loaded from memory.
    """
    lines = Lines(frame.columns, rows=True, taken=())
    lines.pointers = {argument: argument.name for argument in node.all_input_nodes}
    try:
        operands = _operands(node, frame, inside)
        values = [_tried(lines, operand) for operand in operands]
        _write(lines, node, values)
    except DoesNotPrintError as reason:
        return str(reason)
    return ""


def _tried(lines: Lines, operand: _Operand) -> Value:
    """A value with the dtype of an operand, to try whether a member prints."""
    given = operand.value
    if isinstance(given, fx.Node) and is_number(given):
        return lines.argument(given)
    if isinstance(given, fx.Node):
        return Value(given.name, "", Reach.ALL, 0, given.meta["val"].dtype)
    return lines.constant(given, torch.float32)


def _write(lines: Lines, node: fx.Node, values: Sequence[Value]) -> list[Value | None]:
    """Write the lines of a member and return its results, named after it; None for one that it leaves out.

    Args:
        lines: what is written so far.
        node: the member.
        values: its positional arguments, each of its own dtype; a number as one of float32.
    """
    found, dtype = printed(node.target), first_of(node).dtype
    assert found is not None, f"{node.name} does not print"
    common = _common_dtype(node, found)
    lines.comment = source_line(node)
    lines.dtype = torch.float32 if dtype in FLOATS else dtype
    if common is not None:
        convert = lines.cast if found.rounds_numbers else lines.as_operand
        values = [convert(value, common) for value in values]
    made = lines.let(found.write, *values) if isinstance(found.write, str) else found.write(lines, node, values)
    several = [made] if isinstance(made, Value) else made
    return [
        value if value is None or value.reduced == DOWN else lines.named(node.name, value, tensor.dtype)  # type: ignore[union-attr]
        for value, tensor in zip(several, results_of(node), strict=True)
    ]


def kernel_text(
    name: str, body: fx.Graph, frame: Matrix, written: Mapping[fx.Node, fx.Node] | None = None
) -> KernelText:
    """Print the kernel of a group.

    Args:
        name: of the function.
        body: placeholders, members and views with fake values; the output node has the results, then what is written
            over operands.
        frame: the matrix of the group.
        written: placeholder to the member whose result is written over it; None for none.

    Raises:
        DoesNotPrintError: a member has no form in a kernel.
    """
    return _Kernel(name, body, frame, written or {}).text()


# -- what of a call prints ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operand:
    """A positional argument of a member.

    Attributes:
        value: a node, a number, or None.
        access: how the node is read, if it is not made in the group.
    """

    value: Any
    access: Access | None = None


def _operands(node: fx.Node, frame: Matrix, inside: Collection[fx.Node]) -> list[_Operand]:
    """Return the positional arguments of a member; raises DoesNotPrintError if the call does not print."""
    found = printed(node.target)
    if found is None:
        raise DoesNotPrintError(f"{node.name} does not print")
    if set(node.kwargs) - set(found.keywords) or not all(map(_is_plain, results_of(node))):
        raise DoesNotPrintError(f"{node.name} has arguments or a result that do not print")
    made = first_of(node)
    _check_results(node, found, frame)
    _check_dim(node, found, frame)
    given = [argument.name for argument in node.all_input_nodes if is_number(argument)]
    if given and not found.number_arguments:
        raise DoesNotPrintError(f"{node.name} takes the number {given[0]}, which is not known before it runs")
    tensors = [made, *(argument.meta.get("val") for argument in node.all_input_nodes if not is_number(argument))]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in PRINTABLE or tensor.device != made.device:
            raise DoesNotPrintError(f"{node.name} has a tensor of another device or dtype")
        if tensor.is_neg():
            raise DoesNotPrintError(f"{node.name} has a tensor that lies in memory with other signs")
    numbers = [number for number in node.args if isinstance(number, int | float)]
    if _common_dtype(node, found) is torch.uint8 and min(numbers, default=0) < 0:
        raise DoesNotPrintError(f"{node.name} takes a number below zero, which Triton has not among those of 8 bits")
    left_out = node.target._schema.arguments[len(node.args) :]  # type: ignore[union-attr]
    defaults = [_Operand(argument.default_value) for argument in left_out if not argument.kwarg_only]
    return [*(_operand(node, at, frame, inside) for at in range(len(node.args))), *defaults]


def _is_plain(made: object) -> bool:
    """Whether a result is a tensor of plain numbers, or one that is left out."""
    return made is None or (isinstance(made, torch.Tensor) and not made.is_conj())


def _check_results(node: fx.Node, found: Printed, frame: Matrix) -> None:
    """Raise DoesNotPrintError unless results have elements that kernels make, where they make them."""
    down = sums_over_rows(node)
    for position, made in enumerate(results_of(node)):
        if made is None:
            continue
        if (made.dtype is torch.bool and not found.booleans) or (made.dtype in INTEGERS and not found.integers):
            raise DoesNotPrintError(f"{node.name} makes {made.dtype}, which does not print")
        if position in down:
            if frame.columns > WIDEST:
                raise DoesNotPrintError(f"{node.name} adds up over rows of more than {WIDEST} elements")
        elif shape_reach(made.shape, frame) is None:
            raise DoesNotPrintError(
                f"{node.name} has neither {frame.rows} x {frame.columns} elements nor one for each row"
            )


def _check_dim(node: fx.Node, found: Printed, frame: Matrix) -> None:
    """Raise DoesNotPrintError unless a member works element by element, or along the rows of the frame."""
    if found.along is None:
        return
    source = node.args[0].meta["val"]  # type: ignore[union-attr]
    dims = node.args[found.along] if found.along < len(node.args) else None
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


def _operand(node: fx.Node, at: int, frame: Matrix, inside: Collection[fx.Node]) -> _Operand:
    argument = node.args[at]
    rowwise = ops.rule(node.target).rowwise
    if not isinstance(argument, fx.Node) or is_number(argument):
        return _Operand(argument)
    if rowwise is not None and at in rowwise.whole and argument.meta["val"].dim():
        if blocks.base_of(argument) in inside:
            raise DoesNotPrintError(f"{node.name} reads {argument.name} at places that it finds itself")
        return _Operand(argument)
    tensor, shape = argument.meta["val"], shape_of_operands(node)
    base, position = made_by(argument)
    per_row = tensor.dim() == 1 and rowwise is not None and rowwise.per_row != ()
    if base in inside:
        if position in sums_over_rows(base):
            raise DoesNotPrintError(f"{node.name} reads {base.name}, a sum over rows, before all rows are added")
        chain = argument
        while chain is not base and not picks(chain):
            if len(chain.all_input_nodes) != 1 or not keeps_order(chain, frame):
                raise DoesNotPrintError(f"{chain.name} has the elements of {base.name} in another order")
            chain = chain.all_input_nodes[0]
        stand_in = torch.empty(tensor.shape, device="meta")
        if not per_row and not in_order(stand_in, tensor.numel(), shape, frame):
            raise DoesNotPrintError(f"{node.name} takes the elements of {base.name} in another order")
        return _Operand(argument)
    access = access_of(tensor.unsqueeze(-1) if per_row else tensor, shape, frame.columns)
    if access is None:
        raise DoesNotPrintError(f"{argument.name} cannot be read by {node.name}")
    if math.prod(shape) != frame.numel:  # an element for each row, the same for all columns
        access = along_columns(access)
    return _Operand(argument, access)


def is_number(node: fx.Node) -> bool:
    """Whether ``node``, an argument of a group, is a number, which may be another one at every step."""
    return isinstance(node.meta.get("val"), float)


# -- the kernel -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """A result of the group.

    Attributes:
        name: of the pointer that it is written to.
        value: what is written.
        written: where its elements lie.
        reach: ALL, or ROW if it has one element for each row, or COLUMN if it is a sum over rows.
    """

    name: str
    value: Value
    written: Access
    reach: Reach

    @property
    def per_row(self) -> bool:
        """Whether it has one element for each row."""
        return self.reach is Reach.ROW


class _Kernel:
    """Prints one kernel: first its values in order, then the lines that compute them, once or in several passes."""

    def __init__(self, name: str, body: fx.Graph, frame: Matrix, written: Mapping[fx.Node, fx.Node]) -> None:
        self.name, self.body, self.frame = name, body, frame
        self.members = [n for n in body.nodes if n.op == "call_function" and not ops.is_view(n.target)]
        made = blocks.results_of(body)
        results = made[: len(made) - len(written)]
        whole = all(node.meta["val"].numel() == frame.numel for node in made)
        self.rows = not whole or any(_needs_rows(node) for node in self.members)
        self.lines = Lines(frame.columns, rows=self.rows, taken=(*RESERVED, *keyword.kwlist))
        self.made: dict[fx.Node, list[Value | None]] = {}
        for node in placeholders(body):
            self.lines.pointers[node] = self.lines.name(node.name)
        outs = ["out"] if len(results) == 1 else [self.lines.name(f"{node.name}_out") for node in results]
        self.outs = dict(zip(results, outs, strict=True))
        self.operands = {node: self.lines.pointers[operand] for operand, node in written.items()}

    def text(self) -> KernelText:
        inside = set(self.members)
        for node in self.members:
            self._member(node, inside)
        self.stored = [self._result(node, name) for node, name in (*self.outs.items(), *self.operands.items())]
        needed = _closure([one.value for one in self.stored])
        self.lines.values = [value for value in self.lines.values if value in needed]
        down = [one for one in self.stored if one.reach is Reach.COLUMN]
        if down:
            return self._with_partials(down)
        body = self._in_rows() if self.rows else self._flat()
        constants, programs, warps = self._launch()
        source = self._function(self.outs.values(), constants, body)
        return KernelText(source, self.name, constants, programs, warps, self._passes() if self._pieces else 1)

    def _function(self, outs: Iterable[str], constants: Iterable[str], body: Sequence[str]) -> str:
        names = [*self.lines.pointers.values(), *outs, *(f"{name}: tl.constexpr" for name in constants)]
        return f"@triton.jit\ndef {self.name}({', '.join(names)}):\n" + "".join(f"    {line}\n" for line in body)

    def _with_partials(self, down: Sequence[_Stored]) -> KernelText:
        """The kernel of a group that adds up over rows, and the one that ends these sums."""
        constants, _, warps = self._launch(TOGETHER)
        partials = partial_sums(self.name, self.frame, constants["ROWS"], [self.stored.index(one) for one in down])
        ended = f"{self.lines.name('partials')}"
        outs = [one.name for one in self.stored[: len(self.outs)] if one.reach is not Reach.COLUMN]
        constants = {**constants, "CHUNK": partials.chunk}
        source = self._function([*outs, ended], constants, self._in_chunks(down, partials, ended))
        source = partials.source([one.name for one in down]) + "\n" + source
        return KernelText(source, self.name, constants, partials.parts, warps, 1, partials)

    # -- values -----------------------------------------------------------------------------------------------------

    def _member(self, node: fx.Node, inside: Collection[fx.Node]) -> None:
        self.lines.comment = source_line(node)
        values = [self._value(operand) for operand in _operands(node, self.frame, inside)]
        self.made[node] = _write(self.lines, node, values)

    def _result(self, node: fx.Node, name: str) -> _Stored:
        source, position = made_by(node)
        written, value = written_as(node, self.frame), self.made[source][position]
        assert value is not None, f"{node.name} is left out"
        if is_sum_over_rows(node):
            return _Stored(name, value, written, Reach.COLUMN)
        if node.meta["val"].numel() == self.frame.numel:
            return _Stored(name, value, written, Reach.ALL)
        return _Stored(name, value, along_columns(written), Reach.ROW)

    def _value(self, operand: _Operand) -> Value:
        given = operand.value
        if isinstance(given, fx.Node) and is_number(given):
            return self.lines.argument(given)
        if not isinstance(given, fx.Node):
            return self.lines.constant(given, torch.float32)
        if operand.access is not None:
            return self.lines.load(given, operand.access)
        base, position = made_by(given)
        # The same for all rows, such as weights of classes: the member's own text reads it.
        value = self.made[base][position] if base in self.made else self.lines.constant(0, torch.int64)
        assert value is not None, f"{given.name} is left out"
        return value

    # -- lines ------------------------------------------------------------------------------------------------------

    def _flat(self) -> list[str]:
        numel = self.frame.numel
        lines = [
            f"index = tl.program_id(0){self._wide} * BLOCK + tl.arange(0, BLOCK)",
            f"inside = index < {numel}",
        ]
        for value in self.lines.values:
            lines += [_assigned(value, "" if value.reach is Reach.ONE else "inside")]
            for one in self._done(value):
                place = _with(one.written.offset(rows=False), "index")
                lines.append(f"tl.store({one.name} + {place}, {value.name}, inside)")
        return lines

    def _done(self, value: Value) -> list[_Stored]:
        """The results that ``value`` is: each is stored right behind its line, so that it leaves the registers."""
        return [one for one in self.stored if one.value is value]

    def _in_rows(self) -> list[str]:
        rows, columns = self.frame.rows, self.frame.columns
        lines = [f"row = tl.program_id(0){self._wide} * ROWS + tl.arange(0, ROWS)[:, None]"]
        if not self._pieces:
            lines += [
                f"column = tl.arange(0, COLUMNS)[None, :]{self._wide}",
                f"inside = (row < {rows}) & (column < {columns})",
            ]
            return [*lines, *self._each(self.lines.values)]
        for level in range(self._passes()):
            lines += self._pass(level)
        return [*lines, *(self._store(one) for one in self.stored if one.per_row)]

    def _each(self, values: Sequence[Value]) -> list[str]:
        """The lines of values of whole rows, each result stored right behind its line."""
        lines = []
        for value in values:
            lines += [self._reduction(value)] if value.reduced else [_assigned(value, self._mask(value))]
            lines += map(self._store, self._done(value))
        return lines

    def _in_chunks(self, down: Sequence[_Stored], partials: PartialSums, ended: str) -> list[str]:
        """The lines of a kernel in which a program goes through several blocks of rows, and adds up over them."""
        rows, columns = self.frame.rows, self.frame.columns
        sums = list(dict.fromkeys(one.value for one in down))
        shared = self._shared_by_rows()
        lines = ["part = tl.program_id(0)", f"column = tl.arange(0, COLUMNS)[None, :]{self._wide}"]
        lines += self._each(shared)
        lines += [f"{value.name} = tl.zeros((ROWS, COLUMNS), tl.float32)" for value in sums]
        inner = [
            f"row = part{self._wide} * CHUNK + start + tl.arange(0, ROWS)[:, None]",
            f"inside = (row < {rows}) & (column < {columns})",
        ]
        inner += self._each([v for v in self.lines.values if v not in shared and v not in sums])
        inner += [f"{v.name} = {v.name} + tl.where(inside, {v.reads[0].name}, 0.0)" for v in sums]
        lines += ["for start in range(0, CHUNK, ROWS):", *(f"    {line}" for line in inner)]
        for number, one in enumerate(down):
            place = partials.place(number, ended, "part")
            lines.append(f"tl.store({place}, tl.sum({one.value.name}, 0, keep_dims=True), column < {columns})")
        return lines

    def _shared_by_rows(self) -> list[Value]:
        """The values that are the same for all rows, and that are no results, in order."""
        shared: dict[Value, None] = {}
        for value in self.lines.values:
            same = value.reach in (Reach.COLUMN, Reach.ONE) and not value.reduced and not self._done(value)
            if same and all(read in shared for read in value.reads if read in self.lines.values):
                shared[value] = None
        return list(shared)

    def _pass(self, level: int) -> list[str]:
        """The lines of one pass over rows in pieces: the sums and results that depend on as many sums before them."""
        sums = [value for value in self.lines.values if value.reduced and value.reads[0].level == level]
        done = [one for one in self.stored if not one.per_row and one.value.level == level]
        wanted = [value.reads[0] for value in sums] + [one.value for one in done]
        needed = _closure(wanted)
        here = [value for value in self.lines.values if not value.reduced and value.level <= level]
        once = [value for value in here if value.reach in (Reach.ROW, Reach.ONE) and value.level == level]
        lines = [_assigned(value, self._mask(value)) for value in once]
        lines += [f"{v.name} = tl.full((ROWS, COLUMNS), {REDUCED[v.reduced].start}, tl.float32)" for v in sums]
        if wanted:
            lines += [f"for start in range(0, {self.frame.columns}, COLUMNS):"]
            inner = [f"column = start + tl.arange(0, COLUMNS)[None, :]{self._wide}"]
            inner += [f"inside = (row < {self.frame.rows}) & (column < {self.frame.columns})"]
            looped = [v for v in here if v in needed and v.reach in (Reach.ALL, Reach.COLUMN)]
            for value in looped:
                inner.append(_assigned(value, self._mask(value)))
                inner += [self._store(one) for one in done if one.value is value]
            inner += [self._accumulated(value) for value in sums]
            inner += [self._store(one) for one in done if one.value not in looped]
            lines += [f"    {line}" for line in inner]
        lines += [f"{v.name} = {REDUCED[v.reduced].function}({v.name}, 1, keep_dims=True)" for v in sums]
        return lines

    def _reduction(self, value: Value) -> str:
        how, of = REDUCED[value.reduced], value.reads[0].name
        padded = self.frame.columns & (self.frame.columns - 1)
        of = f"tl.where(column < {self.frame.columns}, {of}, {how.start})" if padded else of
        return f"{value.name} = {how.function}({of}, 1, keep_dims=True)"

    def _accumulated(self, value: Value) -> str:
        how, name = REDUCED[value.reduced], value.name
        of = f"tl.where(inside, {value.reads[0].name}, {how.start})"
        return f"{name} = {how.join.format(name, of)}"

    def _store(self, one: _Stored) -> str:
        mask = f"row < {self.frame.rows}" if one.per_row else "inside"
        place = _with(one.written.offset(rows=True), "row", *([] if one.per_row else ["column"]))
        return f"tl.store({one.name} + {place}, {one.value.name}, {mask})"

    def _mask(self, value: Value) -> str:
        rows, columns = f"row < {self.frame.rows}", f"column < {self.frame.columns}"
        return {Reach.ALL: "inside", Reach.ROW: rows, Reach.COLUMN: columns, Reach.ONE: ""}[value.reach]

    # -- how it is launched -------------------------------------------------------------------------------------------

    @property
    def _pieces(self) -> bool:
        return self.rows and self.frame.columns > LONGEST_ROW

    def _passes(self) -> int:
        return max(value.level for value in self.lines.values) + 1

    @property
    def _wide(self) -> str:
        """Text that makes numbers of elements 64 bits wide where 32 would not do."""
        accesses = [*(one.written for one in self.stored), *(access for _, access in self.lines.loaded)]
        largest = max([self.frame.numel, *(access.last for access in accesses)])
        return ".to(tl.int64)" if largest + 2 * PIECE >= 1 << 31 else ""

    def _launch(self, together: int = BLOCK) -> tuple[dict[str, int], int, int]:
        if not self.rows:
            return {"BLOCK": BLOCK}, -(-self.frame.numel // BLOCK), 4
        columns = PIECE if self._pieces else 1 << (self.frame.columns - 1).bit_length()
        rows = max(1, together // columns)
        warps = min(16, max(4, rows * columns // 512))
        return {"ROWS": rows, "COLUMNS": columns}, -(-self.frame.rows // rows), warps


def written_as(node: fx.Node, frame: Matrix) -> Access:
    """Return where the elements of the result of ``node`` lie in memory.

    Raises:
        DoesNotPrintError: the result is no single tensor, or its elements overlap.
    """
    made = node.meta["val"]
    if not isinstance(made, torch.Tensor):
        raise DoesNotPrintError(f"{node.name} has several results")
    written = access_of(made, made.shape, frame.columns)
    if written is None or any(not stride for _, stride in written.dims):
        raise DoesNotPrintError(f"elements of {node.name} share memory")
    if is_sum_over_rows(node) and not made.is_contiguous():
        raise DoesNotPrintError(f"elements of {node.name} lie apart")
    return written


def unfit_writes(nodes: Sequence[fx.Node], written: Mapping[fx.Node, fx.Node], frame: Matrix) -> str:
    """Say why a kernel cannot write over operands; "" if it can.

    Each program has to read what it writes, and nothing that another one writes.

    Args:
        nodes: the members.
        written: placeholder to the member whose result is written over it.
        frame: the matrix of the group.
    """
    if written and any(_needs_rows(node) or node.meta["val"].numel() != frame.numel for node in nodes):
        return "a group with an element for each row writes no argument"
    for operand, node in written.items():
        place = access_of(node.meta["val"], node.meta["val"].shape, frame.columns)
        read = {
            None if ops.is_view(user.target) else access_of(operand.meta["val"], shape_of_operands(user), frame.columns)
            for user in operand.users
        }
        if read != {place}:
            return f"{operand.name} is not read element by element, and written"
    return ""


def _needs_rows(node: fx.Node) -> bool:
    found, rowwise = printed(node.target), ops.rule(node.target).rowwise
    return (found is not None and found.along is not None) or (rowwise is not None and rowwise.per_row != ())


def _common_dtype(node: fx.Node, found: Printed) -> torch.dtype | None:
    """What the operands of a member are converted to before it works; None for nothing."""
    if found.common == "each":
        return None
    if found.common == "operands":
        first, second = (a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args[:2])
        return torch.result_type(first, second)  # type: ignore[arg-type]
    if found.along is not None:  # it adds up in float32 what it reads
        return torch.float32
    return first_of(node).dtype


def _assigned(value: Value, mask: str) -> str:
    text = value.text.replace("{mask}", mask) if mask else value.text.replace(", {mask}, 0", "")
    return f"{value.name} = {text}" + (f"  # {value.comment}" if value.comment else "")


def _with(place: str, *numbers: str) -> str:
    """Return the text of a place in memory for each element of a block, also where ``numbers`` make no difference."""
    return " + ".join([*(f"{number} * 0" for number in numbers if number not in place), place]).removesuffix(" + 0")


def _closure(values: Sequence[Value]) -> set[Value]:
    """All values that ``values`` are computed of, themselves included."""
    found: set[Value] = set()
    left = list(values)
    while left:
        value = left.pop()
        if value not in found:
            found.add(value)
            left += value.reads
    return found

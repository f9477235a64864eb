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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from roamc.graph import placeholders, source_line
from roamc.operators import blocks, ops
from roamc.operators.activations import Table
from roamc.operators.blocks import Matrix
from roamc.operators.gpu.frame import Access, Reach, access_along, access_of, along_columns, shape_reach
from roamc.operators.gpu.lines import DOWN, FLOATS, REDUCED, DoesNotPrintError, Lines, Value
from roamc.operators.gpu.operands import Operand, common_dtype, is_number, needs_rows, operands_of, reduces
from roamc.operators.gpu.partial_sums import TOGETHER, PartialSums, partial_sums
from roamc.operators.gpu.printed import printed
from roamc.operators.gpu.reorders import reordered, reorders
from roamc.operators.gpu.results import first_of, is_sum_over_rows, made_by, results_of, shape_of_operands
from roamc.operators.gpu.shifts import moves_columns, shifts_of

LONGEST_ROW = 16384
"""Elements: rows up to this length are held whole, padded to a power of two; longer ones are read in pieces."""

PIECE = 4096
"""Elements of a longer row that are read at a time."""

BLOCK = 1024
"""Elements of one program of a group without sums."""

TOGETHER_IN_A_LOAD = 16
"""Elements that a thread loads at once, at most: 16 bytes, of elements of one byte."""

NUMBER = "fp64"
"""Triton's name for the type of a number that a kernel is passed: ATen inverts a divisor before it rounds it."""

RESERVED = frozenset({"tl", "triton", "out", "row", "column", "index", "inside", "start", "ROWS", "COLUMNS", "BLOCK"})


@dataclass(frozen=True)
class KernelText:
    """A kernel as text.

    Attributes:
        source: defines the function, with the decorator ``triton.jit``; needs the names ``triton`` and ``tl``.
        function: its name. It takes the operands in order, then the results, tables, and the constants. What is
            written over operands goes to these; numbers are passed as they are.
        constants: names and values of the compile-time constants.
        programs: how many programs the launch has.
        warps: warps of 32 threads that run one program.
        reads: how often an element of an operand is read; 1 if rows are held whole.
        partials: how sums over rows end; None if there are none.
        tables: what the function takes behind the results (and partial sums), in front of the constants.
    """

    source: str
    function: str
    constants: dict[str, int]
    programs: int
    warps: int
    reads: int
    partials: PartialSums | None = None
    tables: tuple[Table, ...] = ()

    @property
    def joins(self) -> bool:
        """Whether elements of several lanes become one, as in sums: the order depends on how programs are divided."""
        return any(f"{how.function}(" in self.source for how in REDUCED.values())


def head_of(name: str, operands: Mapping[fx.Node, str], outs: Iterable[str], constants: Iterable[str]) -> str:
    """Return the first lines of a kernel.

    Args:
        name: of the kernel.
        operands: nodes to the names of the kernel's pointers and numbers.
        outs: names of further pointers.
        constants: names of compile-time constants.
    """
    read = [f'{text}: "{NUMBER}"' if is_number(node) else text for node, text in operands.items()]
    names = [*read, *outs, *(f"{constant}: tl.constexpr" for constant in constants)]
    return f"@triton.jit\ndef {name}({', '.join(names)}):\n"


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
        operands = operands_of(node, frame, inside)
        values = [_tried(lines, operand) for operand in operands]
        _write(lines, node, values)
    except DoesNotPrintError as reason:
        return str(reason)
    return ""


def _tried(lines: Lines, operand: Operand) -> Value:
    """A value with the dtype of an operand, to try whether a member prints."""
    argument = operand.value
    if isinstance(argument, fx.Node) and is_number(argument):
        return lines.argument(argument)
    if isinstance(argument, fx.Node):
        return Value(argument.name, "", Reach.ALL, 0, argument.meta["val"].dtype)
    return lines.constant(argument, torch.float32)


def _write(lines: Lines, node: fx.Node, values: Sequence[Value]) -> list[Value | None]:
    """Write the lines of a member and return its results, named after it; None for one that it leaves out.

    Args:
        lines: what is written so far.
        node: the member.
        values: its positional arguments, each of its own dtype; a number as one of float32.
    """
    printer, dtype = printed(node.target), first_of(node).dtype
    assert printer is not None, f"{node.name} does not print"
    common = common_dtype(node, printer)
    lines.comment = source_line(node)
    lines.dtype = torch.float32 if dtype in FLOATS else dtype
    if common is not None:
        convert = lines.cast if printer.rounds_numbers else lines.as_operand
        values = [convert(value, common) for value in values]
    output = lines.let(printer.write, *values) if isinstance(printer.write, str) else printer.write(lines, node, values)
    several = [output] if isinstance(output, Value) else output
    side = "right" if lines.shift > 0 else "left"
    name = f"{node.name}_{side}_{abs(lines.shift)}" if lines.shift else node.name
    return [
        value if value is None or value.reduced == DOWN else lines.named(name, value, tensor.dtype)  # type: ignore[union-attr]
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


def element_lines(
    body: fx.Graph,
    frame: Matrix,
    written: Mapping[fx.Node, fx.Node],
    pointers: Mapping[fx.Node, str],
    taken: Collection[str],
) -> tuple[list[str], str]:
    """Print the lines of a group without sums and results, for a kernel that says itself which elements they are for.

    Args:
        body: as in :func:`kernel_text`.
        frame: the matrix of the group.
        written: placeholder to the member whose result is written over it.
        pointers: placeholder to the name that it has in the kernel.
        taken: names that the kernel has already.

    Returns:
        The lines, which need ``index`` and ``inside``, and the text that makes numbers of elements 64 bits wide where
        32 would not do.
    """
    kernel = _Kernel("", body, frame, written, pointers, taken)
    return kernel.element_lines(), kernel.wide


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

    def __init__(
        self,
        name: str,
        body: fx.Graph,
        frame: Matrix,
        written: Mapping[fx.Node, fx.Node],
        pointers: Mapping[fx.Node, str] | None = None,
        taken: Iterable[str] = (),
    ) -> None:
        self.name, self.body, self.frame = name, body, frame
        self.members = [n for n in body.nodes if n.op == "call_function" and not ops.is_view(n.target)]
        outputs = blocks.results_of(body)
        results = outputs[: len(outputs) - len(written)]
        whole = all(node.meta["val"].numel() == frame.numel for node in outputs)
        self.rows = not whole or any(needs_rows(node) for node in self.members)
        self.lines = Lines(frame.columns, rows=self.rows, taken=(*RESERVED, *keyword.kwlist, *taken))
        self.shifts: dict[fx.Node, tuple[int, ...]] = dict.fromkeys(self.members, (0,))
        if moves_columns(self.members):
            reduce = [node for node in self.members if reduces(node)]
            self.shifts = shifts_of(self.members, [made_by(node)[0] for node in outputs], frame, reduce)
        self.made: dict[tuple[fx.Node, int], list[Value | None]] = {}
        for node in placeholders(body):
            self.lines.pointers[node] = self.lines.name(node.name) if pointers is None else pointers[node]
        outs = ["out"] if len(results) == 1 else [self.lines.name(f"{node.name}_out") for node in results]
        self.outs = dict(zip(results, outs, strict=True))
        self.operands = {node: self.lines.pointers[operand] for operand, node in written.items()}

    def text(self) -> KernelText:
        self._compute()
        down = [one for one in self.stored if one.reach is Reach.COLUMN]
        if down:
            return self._with_partials(down)
        body = self._in_rows() if self.rows else self._flat()
        constants, programs, warps = self._launch()
        source = self._function(self.outs.values(), constants, body)
        reads = self._passes() if self._pieces else 1
        return KernelText(source, self.name, constants, programs, warps, reads, tables=tuple(self.lines.tables))

    def element_lines(self) -> list[str]:
        """The lines for the elements ``index``, those that are ``inside``, of a group without sums."""
        self._compute()
        return self._for_each_element()

    def _compute(self) -> None:
        """Write the values that the results need."""
        inside = set(self.members)
        for node in self.members:
            self._member(node, inside)
        self.stored = [self._result(node, name) for node, name in (*self.outs.items(), *self.operands.items())]
        needed = _closure([one.value for one in self.stored])
        self.lines.values = [value for value in self.lines.values if value in needed]

    def _function(self, outs: Iterable[str], constants: Iterable[str], body: Sequence[str]) -> str:
        outs = [*outs, *self.lines.tables.values()]
        return head_of(self.name, self.lines.pointers, outs, constants) + "".join(f"    {line}\n" for line in body)

    def _with_partials(self, down: Sequence[_Stored]) -> KernelText:
        """The kernel of a group that adds up over rows, and the one that ends these sums."""
        constants, _, warps = self._launch(TOGETHER)
        partials = partials_of(self.name, self.frame, [self.stored.index(one) for one in down])
        ended = f"{self.lines.name('partials')}"
        outs = [one.name for one in self.stored[: len(self.outs)] if one.reach is not Reach.COLUMN]
        constants = {**constants, "CHUNK": partials.chunk}
        source = self._function([*outs, ended], constants, self._in_chunks(down, partials, ended))
        source = partials.source([one.name for one in down]) + "\n" + source
        tables = tuple(self.lines.tables)
        return KernelText(source, self.name, constants, partials.parts, warps, 1, partials, tables)

    # -- values -----------------------------------------------------------------------------------------------------

    def _member(self, node: fx.Node, inside: Collection[fx.Node]) -> None:
        operands = operands_of(node, self.frame, inside)
        for shift in self.shifts[node]:
            self.lines.comment, self.lines.shift = source_line(node), shift
            self.made[node, shift] = _write(self.lines, node, [self._value(operand, shift) for operand in operands])

    def _result(self, node: fx.Node, name: str) -> _Stored:
        source, position = made_by(node)
        whole = shape_reach(node.meta["val"].shape, self.frame) is not None or is_sum_over_rows(node)
        if not whole:
            raise DoesNotPrintError(f"{node.name} has fewer columns than its group")
        written, value = written_as(node, self.frame, self.members), self.made[source, 0][position]
        assert value is not None, f"{node.name} is left out"
        if is_sum_over_rows(node):
            return _Stored(name, value, written, Reach.COLUMN)
        if node.meta["val"].numel() == self.frame.numel:
            return _Stored(name, value, written, Reach.ALL)
        return _Stored(name, value, along_columns(written), Reach.ROW)

    def _value(self, operand: Operand, shift: int) -> Value:
        """What a member that is computed at ``shift`` reads."""
        argument = operand.value
        if isinstance(argument, fx.Node) and is_number(argument):
            return self.lines.argument(argument)
        if not isinstance(argument, fx.Node):
            return self.lines.constant(argument, torch.float32)
        if operand.access is not None:
            return self.lines.load(argument, operand.access, shift + operand.shift)
        base, position = made_by(argument)
        results = self.made.get((base, 0 if operand.per_row else shift + operand.shift))
        # The same for all rows, such as weights of classes: the member's own text reads it.
        value = self.lines.constant(0, torch.int64) if results is None else results[position]
        assert value is not None, f"{argument.name} is left out"
        return value

    # -- lines ------------------------------------------------------------------------------------------------------

    def _flat(self) -> list[str]:
        numel = self.frame.numel
        first = f"index = tl.program_id(0){self.wide} * BLOCK + tl.arange(0, BLOCK)"
        return [first, f"inside = index < {numel}", *self._for_each_element()]

    def _for_each_element(self) -> list[str]:
        lines = []
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
        lines = [f"row = tl.program_id(0){self.wide} * ROWS + tl.arange(0, ROWS)[:, None]"]
        if not self._pieces:
            lines += [
                f"column = tl.arange(0, COLUMNS)[None, :]{self.wide}",
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
        lines = ["part = tl.program_id(0)", f"column = tl.arange(0, COLUMNS)[None, :]{self.wide}"]
        lines += self._each(shared)
        lines += [f"{value.name} = tl.zeros((ROWS, COLUMNS), tl.float32)" for value in sums]
        inner = [
            f"row = part{self.wide} * CHUNK + start + tl.arange(0, ROWS)[:, None]",
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
        stores = [store for store in self.stored if not store.per_row and store.value.level == level]
        roots = [value.reads[0] for value in sums] + [store.value for store in stores]
        needed = _closure(roots)
        available = [value for value in self.lines.values if not value.reduced and value.level <= level]
        once = [value for value in available if value.reach in (Reach.ROW, Reach.ONE) and value.level == level]
        lines = [_assigned(value, self._mask(value)) for value in once]
        lines += [f"{v.name} = tl.full((ROWS, COLUMNS), {REDUCED[v.reduced].start}, tl.float32)" for v in sums]
        for begin, end, inside in self._loops() if roots else ():
            lines += [f"for start in range({begin}, {end}, COLUMNS):"]
            inner = [f"column = start + tl.arange(0, COLUMNS)[None, :]{self.wide}", f"inside = {inside}"]
            looped = [v for v in available if v in needed and v.reach in (Reach.ALL, Reach.COLUMN)]
            for value in looped:
                inner.append(_assigned(value, self._mask(value)))
                inner += [self._store(store) for store in stores if store.value is value]
            inner += [self._accumulated(value) for value in sums]
            inner += [self._store(store) for store in stores if store.value not in looped]
            lines += [f"    {line}" for line in inner]
        lines += [f"{v.name} = {REDUCED[v.reduced].function}({v.name}, 1, keep_dims=True)" for v in sums]
        return lines

    def _loops(self) -> list[tuple[str, str, str]]:
        """First and last column of each loop over the pieces of rows, and which elements are inside.

        Loads and stores under a mask along columns that does not end at a multiple of :data:`TOGETHER_IN_A_LOAD` go
        element by element, so that whole pieces have a loop without one.
        """
        rows, columns = f"row < {self.frame.rows}", self.frame.columns
        masked = f"({rows}) & (column < {columns})"
        if columns % TOGETHER_IN_A_LOAD == 0:
            return [("0", f"{columns}", masked)]
        whole = f"{columns} // COLUMNS * COLUMNS"
        return [("0", whole, rows), (whole, f"{columns}", masked)]

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
        if value.within is None:
            return {Reach.ALL: "inside", Reach.ROW: rows, Reach.COLUMN: columns, Reach.ONE: ""}[value.reach]
        first, end = value.within
        masks = ["inside"] if value.reach is Reach.ALL else []
        masks += [f"column < {end}"] if not masks or end < self.frame.columns else []
        masks += [f"column >= {first}"] if first else []
        return masks[0] if len(masks) == 1 else " & ".join(m if m == "inside" else f"({m})" for m in masks)

    # -- how it is launched -------------------------------------------------------------------------------------------

    @property
    def _pieces(self) -> bool:
        return self.rows and self.frame.columns > LONGEST_ROW

    def _passes(self) -> int:
        return max(value.level for value in self.lines.values) + 1

    @property
    def wide(self) -> str:
        """The text that makes numbers of elements 64 bits wide where 32 would not do."""
        accesses = [*(one.written for one in self.stored), *(access for _, access, _ in self.lines.loaded)]
        largest = max([self.frame.numel, *(access.last for access in accesses)])
        return ".to(tl.int64)" if largest + 2 * PIECE >= 1 << 31 else ""

    def _launch(self, together: int = BLOCK) -> tuple[dict[str, int], int, int]:
        if not self.rows:
            return {"BLOCK": BLOCK}, -(-self.frame.numel // BLOCK), 4
        columns = PIECE if self._pieces else _padded(self.frame.columns)
        rows = _rows_at_a_time(columns, together)
        warps = min(16, max(4, rows * columns // 512))
        return {"ROWS": rows, "COLUMNS": columns}, -(-self.frame.rows // rows), warps


def _rows_at_a_time(columns: int, elements: int) -> int:
    """How many rows of ``columns`` a program works on that has about so many ``elements`` at a time."""
    return max(1, elements // columns)


def partials_of(name: str, frame: Matrix, results: Sequence[int]) -> PartialSums:
    """Return how the sums over rows of a group end; follows without its kernel's text.

    Args:
        name: of the kernel's function.
        frame: the matrix of the group; it has no rows longer than :data:`LONGEST_ROW`.
        results: positions of the sums among the results of the group.
    """
    return partial_sums(name, frame, _rows_at_a_time(_padded(frame.columns), TOGETHER), results)


def _padded(columns: int) -> int:
    """The power of two that holds a row of ``columns``."""
    return 1 << (columns - 1).bit_length()


def written_as(node: fx.Node, frame: Matrix, inside: Collection[fx.Node]) -> Access:
    """Return where the elements of the result of ``node`` lie in memory, in the order in which its group makes them.

    Args:
        node: a member, or the pick of one of its results.
        frame: the matrix of the group.
        inside: the members of the group.

    Raises:
        DoesNotPrintError: the result is no single tensor, or its elements overlap.
    """
    result = node.meta["val"]
    if not isinstance(result, torch.Tensor):
        raise DoesNotPrintError(f"{node.name} has several results")
    order = reordered(node)
    written = access_of(result, result.shape, frame.columns)
    if order is not None and order[0] in inside:
        written = access_along(order[0].meta["val"].shape, order[1], frame.columns)
    if written is None or any(not stride for _, stride in written.dims):
        raise DoesNotPrintError(f"elements of {node.name} share memory")
    if is_sum_over_rows(node) and not result.is_contiguous():
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
    if written and (moves_columns(nodes) or reorders(nodes)):
        return "a group that moves elements writes no argument"
    if written and any(needs_rows(node) or node.meta["val"].numel() != frame.numel for node in nodes):
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


def _assigned(value: Value, mask: str) -> str:
    text = value.text.replace("{mask}", mask) if mask else value.text.replace(", {mask}, 0", "")
    return f"{value.name} = {text}" + (f"  # {value.comment}" if value.comment else "")


def _with(place: str, *numbers: str) -> str:
    """Return the text of a place in memory for each element of a block, also where ``numbers`` make no difference."""
    return " + ".join([*(f"{number} * 0" for number in numbers if number not in place), place]).removesuffix(" + 0")


def _closure(values: Sequence[Value]) -> set[Value]:
    """All values that ``values`` are computed of, themselves included."""
    reached: set[Value] = set()
    left = list(values)
    while left:
        value = left.pop()
        if value not in reached:
            reached.add(value)
            left += value.reads
    return reached

"""The lines of a kernel while it is printed: values, which elements they have, and sums along rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx

from roamc.operators.activations import Table
from roamc.operators.gpu.frame import Access, Reach

FLOATS = {torch.float32: "tl.float32", torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16"}
INTEGERS = {torch.int64: "tl.int64", torch.int32: "tl.int32", torch.int16: "tl.int16", torch.uint8: "tl.uint8"}
PRINTABLE = {*FLOATS, *INTEGERS, torch.bool}
"""Dtypes of operands and results that kernels know."""


@dataclass(frozen=True)
class Reduction:
    """How a reduction along rows prints.

    Attributes:
        function: the function of Triton that reduces a block.
        start: text of the number that leaves any other as it is.
        join: text that reduces two numbers, ``{0}`` and ``{1}``.
    """

    function: str
    start: str
    join: str


REDUCED = {
    "sum": Reduction("tl.sum", "0.0", "{0} + {1}"),
    "max": Reduction("tl.max", 'float("-inf")', "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"),
}


DOWN = "down"
"""Marks a sum over rows. No other value reads it: it is there only when all programs are done."""


class DoesNotPrintError(Exception):
    """An operator, or a call of it, has no form in a kernel; the message says why."""


@dataclass(frozen=True, eq=False)
class Value:
    """A value in a kernel.

    Attributes:
        name: of its variable.
        text: the expression that it is assigned.
        reach: whether it has one element for each element of the matrix, each row, each column, or one for all.
        level: how many reductions along a row come before it, one after the other: so many times a kernel has to read
            rows before it, if they are too long to be held at once.
        dtype: its dtype in the graph; in the kernel a value of 16 bits is held in float32.
        reads: the values in ``text``.
        reduced: "sum" or "max" for a reduction along rows of the only value that it reads; :data:`DOWN` for the sum of
            that value over rows; else "".
        aliases: the value whose variable this is, under another dtype.
        number: the number that it is; None for other values, which have a line or are an argument.
        comment: the line of the user's model that made it, as ``file.py:line``; "" if there is none.
        argument: whether it is a number that the kernel is passed.
        within: [first, last) columns at which it is loaded; None for all.
    """

    name: str
    text: str
    reach: Reach
    level: int
    dtype: torch.dtype
    reads: tuple[Value, ...] = ()
    reduced: str = ""
    aliases: Value | None = None
    number: float | None = None
    comment: str = ""
    argument: bool = False
    within: tuple[int, int] | None = None


class Lines:
    """The values of a kernel, in the order in which its lines compute them.

    Args:
        columns: elements of a row of the matrix.
        rows: the kernel has the variables ``row`` and ``column``; else ``index`` alone, the number of the element.
        taken: names that values must not have.

    Attributes:
        shift: at how many columns to the right of the lane's own the member is computed that is being written.
        tables: tables to the names of their pointers.
    """

    def __init__(self, columns: int, *, rows: bool, taken: Iterable[str]) -> None:
        self.columns, self.rows = columns, rows
        self.values: list[Value] = []
        self.taken = set(taken)
        self.comment = ""
        self.shift = 0
        self.pointers: dict[fx.Node, str] = {}
        self.tables: dict[Table, str] = {}
        self.loaded: dict[tuple[fx.Node, Access, int], Value] = {}
        self.dtype = torch.float32
        self.unnamed: set[Value] = set()
        self._elements: dict[int, Value] = {}
        self._arguments: dict[fx.Node, Value] = {}

    # -- what a printer of an operator calls ---------------------------------------------------------

    def let(self, text: str, *reads: Value) -> Value:
        """Write a line that computes ``text``, in which ``{0}``, ``{1}`` stand for ``reads``; return its value."""
        return self._unnamed(text.format(*(value.name for value in reads)), reads, self.dtype)

    def total(self, value: Value) -> Value:
        """Write the sum of ``value`` along each row, in float32; return it, one element for each row."""
        return self._reduce(value, "sum")

    def largest(self, value: Value) -> Value:
        """Write the largest element of ``value`` in each row; return it, one element for each row."""
        return self._reduce(value, "max")

    def total_down(self, value: Value) -> Value:
        """Write the sum of ``value`` over all rows, in float32; return it, one element for each column.

        No other value of the kernel may read it: it is there only when all programs are done.
        """
        value = self._full(value)
        return self._keep(Value(self.name("down"), "", Reach.COLUMN, value.level, self.dtype, (value,), DOWN))

    def pick(self, table: fx.Node, place: Value) -> Value:
        """Write a load of one element of ``table``, a node with one dimension; return it in float32.

        Args:
            table: the node of a tensor of one dimension.
            place: the value that is the index into ``table``.
        """
        stride = table.meta["val"].stride(0)
        text = f"tl.load({self.pointers[table]} + {place.name} * {stride}).to(tl.float32)"
        return self._add("picked", text, (place,), self.dtype)

    def entry(self, table: Table, place: str, *reads: Value) -> Value:
        """Write a load of one number of ``table``, which the kernel is passed; return it in float32.

        Args:
            table: the table.
            place: the text of the number's place, in which ``{0}``, ``{1}`` stand for ``reads``; none is outside.
            reads: values.
        """
        pointer = self.tables.get(table) or self.tables.setdefault(table, self.name(f"{table.function}_table"))
        return self.let(f"tl.load({pointer} + {place}){'' if table.dtype.itemsize == 4 else '.to(tl.float32)'}", *reads)

    def element(self) -> Value:
        """Return the number of the element that each lane has, counted row by row; may write a line for it."""
        if not self.rows:
            return Value("index", "", Reach.ALL, 0, torch.int64)
        element = self._elements.get(self.shift)
        if element is None:
            text = f"row * {self.columns} + column"
            text += f" {'-' if self.shift < 0 else '+'} {abs(self.shift)}" if self.shift else ""
            element = self._keep(Value(self.name("element"), text, Reach.ALL, 0, torch.int64))
            self._elements[self.shift] = element
        return element

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Return ``value`` converted to ``dtype``; writes a line if the conversion takes one.

        Raises:
            DoesNotPrintError: a float would become an integer.
        """
        if value.dtype is dtype:
            return value
        if value.number is not None:
            return self.constant(torch.tensor(value.number, dtype=dtype, device="cpu").item(), dtype)
        if dtype is torch.bool:
            return self._unnamed(f"{value.name} != 0", (value,), dtype)
        if dtype in INTEGERS:
            if value.dtype in FLOATS:
                raise DoesNotPrintError("floats become integers")
            return self._unnamed(f"{value.name}.to({INTEGERS[dtype]})", (value,), dtype)
        if dtype is torch.float32 and value.dtype in FLOATS:  # it is held so already
            return replace(value, dtype=dtype, aliases=value)
        text = value.name if value.dtype in FLOATS else f"{value.name}.to(tl.float32)"
        return self._unnamed(rounded(text, dtype), (value,), dtype)

    def as_operand(self, value: Value, dtype: torch.dtype) -> Value:
        """Return ``value`` converted to ``dtype``, in which an operator works; see :meth:`cast`.

        A number keeps the precision of float32 where ``dtype`` has 16 bits.
        """
        if value.argument and dtype in FLOATS:
            return replace(value, dtype=dtype, aliases=value)
        if value.number is not None and dtype in FLOATS:
            return self.constant(value.number, dtype)
        return value if value.name == "None" else self.cast(value, dtype)  # None: an argument that is left out

    def number(self, value: object) -> str:
        """Return the text of ``value``, a number, in Triton; 1 and 0 for True and False.

        Raises:
            DoesNotPrintError: it is -0.0, which Triton 3.6 takes for 0.0.
        """
        if isinstance(value, bool):
            return str(int(value))
        if value == 0 and math.copysign(1, value) < 0:
            raise DoesNotPrintError("-0.0 would lose its sign")
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        return repr(value)

    # -- what the kernel's printer calls ----------------------------------------------------------------

    def argument(self, node: fx.Node) -> Value:
        """Return the value of ``node``, a number that the kernel is passed in float64, in float32."""
        if node not in self._arguments:
            text = f"tl.cast({self.pointers[node]}, tl.float32)"
            value = Value(self.name("t"), text, Reach.ONE, 0, torch.float32, argument=True)
            self._arguments[node] = self._keep(value)
        return self._arguments[node]

    def load(self, node: fx.Node, access: Access, shift: int = 0) -> Value:
        """Return the elements of the operand ``node`` as ``access`` reads them; only the first call writes a load.

        Args:
            node: the operand.
            access: how it is read.
            shift: columns to the right of the lane's own; what is the same for all columns has no shift.
        """
        same = access.reach in (Reach.ROW, Reach.ONE)  # for all columns
        shift = 0 if same else shift
        loaded = self.loaded.get((node, access, shift))
        if loaded is None:
            dtype = node.meta["val"].dtype
            text = f"tl.load({self.pointers[node]} + {access.offset(rows=self.rows, shift=shift)}, {{mask}}, 0)"
            text += ".to(tl.float32)" if dtype in (torch.float16, torch.bfloat16) else ""
            text = text.replace(" + 0,", ",")
            name = self.name(f"{self.pointers[node]}_value")
            within = max(0, -shift), min(self.columns, access.columns - shift)
            loaded = Value(name, text, access.reach, 0, dtype, comment=self.comment)
            loaded = loaded if same or within == (0, self.columns) else replace(loaded, within=within)
            self.values.append(loaded)
            self.loaded[node, access, shift] = loaded
        return loaded

    def constant(self, value: object, dtype: torch.dtype) -> Value:
        """Return the number ``value`` as a value of ``dtype``, a float if that is a float type; no line is written."""
        number = float(value) if dtype in FLOATS and isinstance(value, int | float) else value
        original = value if isinstance(value, int | float) else None
        return Value(self.number(number), "", Reach.ONE, 0, dtype, number=original)

    def named(self, name: str, value: Value, dtype: torch.dtype) -> Value:
        """Write a line that rounds ``value`` to ``dtype`` and assigns it to a variable; return the new value.

        Args:
            name: of the variable: that of the operator whose result it is.
            value: the result, not yet rounded.
            dtype: dtype of the result in the graph.
        """
        done = value.dtype is dtype or dtype not in FLOATS
        if self.values and self.values[-1] is value and value in self.unnamed:
            self.values.pop()  # its text becomes that of the named line
            text = value.text if done or dtype is torch.float32 else rounded(f"({value.text})", dtype)
            return self._add(name, text, value.reads, dtype)
        text = value.name if done else rounded(value.name, dtype)
        return self._add(name, text, (value,), dtype)

    def _unnamed(self, text: str, reads: tuple[Value, ...], dtype: torch.dtype) -> Value:
        value = self._add("t", text, reads, dtype)
        self.unnamed.add(value)
        return value

    def _add(self, name: str, text: str, reads: tuple[Value, ...], dtype: torch.dtype) -> Value:
        reads = tuple(value.aliases or value for value in reads)
        level = max((value.level for value in reads), default=0)
        by_column = [Reach.COLUMN] if "(column" in text else []
        reach = Reach.ALL if "COLUMNS" in text else joined([*(value.reach for value in reads), *by_column])
        return self._keep(Value(self.name(name), text, reach, level, dtype, reads, comment=self.comment))

    def _reduce(self, value: Value, how: str) -> Value:
        value = self._full(value)
        name = self.name("total" if how == "sum" else "largest")
        return self._keep(Value(name, "", Reach.ROW, value.level + 1, self.dtype, (value,), how, comment=self.comment))

    def _full(self, value: Value) -> Value:
        """Return a value with all elements of the matrix: one that several share counts for each of them."""
        value = value.aliases or value
        if value.reach is Reach.ALL:
            return value
        return self._unnamed(f"{value.name} + tl.zeros((ROWS, COLUMNS), tl.float32)", (value,), self.dtype)

    def _keep(self, value: Value) -> Value:
        self.values.append(value)
        return value

    def name(self, name: str) -> str:
        """Return ``name``, or ``name`` and a number if it is taken; what is returned is taken from now on."""
        free, number = name, 0
        while free in self.taken:
            number += 1
            free = f"{name}_{number}"
        self.taken.add(free)
        return free


def rounded(text: str, dtype: torch.dtype) -> str:
    """Return the expression that rounds the float32 of expression ``text`` to ``dtype`` and keeps it in float32."""
    return text if dtype is torch.float32 else f"{text}.to({FLOATS[dtype]}).to(tl.float32)"


def joined(reaches: Iterable[Reach]) -> Reach:
    """Return the :class:`Reach` of a value that is computed element by element from values with ``reaches``.

    ``ROW`` and ``COLUMN`` together give ``ALL``; without values, or of single elements alone, it is ``ONE``.
    """
    distinct = {reach for reach in reaches if reach is not Reach.ONE}
    return distinct.pop() if len(distinct) == 1 else (Reach.ALL if distinct else Reach.ONE)

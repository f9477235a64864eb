"""The source of a group of operators that runs on blocks of rows: one ``out=`` kernel after the other on each block.

    def silu_backward(grad, up, gate, *, out, rows):
        block_0 = torch.empty((rows, 1024), dtype=torch.float32)
        grad = grad.as_strided((2048, 1024), (1024, 1)).split(rows)
        ...
        for grad, up, gate, out in zip(grad, up, gate, out):
            if len(out) < rows:
                block_0 = block_0[:len(out)]
            mul_out(grad, up, out=block_0)                                  # model.py:31
            silu_backward_grad_input(block_0, gate, grad_input=out)         # model.py:31

What a group writes over its operands is written block by block, where no member reads the old elements any more:

            mul_out(v, beta, out=v)                                         # in the place of mul_(v, beta)

Every statement calls ATen's own kernel or one of :mod:`roamc.operators.kernels`, so nothing is compiled.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from roamc.graph import placeholders, source_line
from roamc.operators import blocks, ops
from roamc.operators.blocks import Matrix, Steps
from roamc.operators.kernels import kernel_of
from roamc.operators.out_variants import FormKind, form_of
from roamc.units import Bytes

RESERVED = frozenset({"torch", "out", "rows"})
"""Names that the function uses itself."""


@dataclass(frozen=True)
class Text:
    """The source of one function.

    Attributes:
        source: defines the function. It takes the arguments of the group, ``out`` for the result if there is one, and
            ``rows``, how many rows a block has.
        function: its name.
        constants: global names of the source to objects: torch, kernels, arguments that have no literal form.
        bytes_per_row: bytes that it allocates for each row of a block.
    """

    source: str
    function: str
    constants: Mapping[str, Any] = field(repr=False)
    bytes_per_row: Bytes


def text_of(name: str, body: fx.Graph, matrix: Matrix, written: Mapping[fx.Node, fx.Node] | None = None) -> Text:
    """Return the source of the function that runs ``body``, block after block of rows.

    The operators of ``body`` are those that :func:`roamc.operators.blocks.fits` accepts.

    Args:
        name: of the function, an FX node's.
        body: placeholders, operators and views with fake values; the output node has the last operator's result, if
            that is the group's, then what is written over arguments.
        matrix: the rows and columns that all of its tensors are seen as.
        written: placeholder to the node of ``body`` whose result is written over it; None for none.
    """
    return _Writer(body, matrix, written or {}).write(name)


class _Writer:
    """Writes one statement for each member; memory of values inside is taken again after their last use."""

    def __init__(self, body: fx.Graph, matrix: Matrix, written: Mapping[fx.Node, fx.Node]) -> None:
        self.body, self.matrix, self.written = body, matrix, written
        self.result = None if len(written) == len(blocks.results_of(body)) else blocks.last_member(body)
        self.held = {node: node for node in written}  # operand to what lies in its block
        self.names: dict[fx.Node, str] = {}
        self.seen: dict[fx.Node, Steps] = {}
        self.constants: dict[str, Any] = {"torch": torch}
        self.free: dict[tuple[torch.dtype, int], list[str]] = {}
        self.kinds: dict[str, tuple[torch.dtype, int]] = {}
        self.last = self._last_uses()
        self.homes = self._homes()
        self.taken: set[str] = set(RESERVED)
        self.order = {node: at for at, node in enumerate(body.nodes)}

    def write(self, name: str) -> Text:
        function = self._identifier(name)
        inputs = placeholders(self.body)
        for node in inputs:
            self.names[node] = self._identifier(node.name)
        outs = ["out"] if self.result is not None else []
        head = [f"def {function}({', '.join([*(self.names[node] for node in inputs), '*', *outs, 'rows'])}):"]
        parted, prepared = self._prepared(inputs)
        statements: list[str] = []
        for node in self.body.nodes:
            if node.op == "call_function" and ops.is_view(node.target):
                self._view(node)
            elif node.op == "call_function":
                statements.append(self._member(node))
        statements += [
            f"{self.names[operand]}.copy_({self.names[node]})"
            for operand, node in self.written.items()
            if self.held[operand] is not node
        ]
        lines = list(prepared)
        if self.result is not None:
            lines.append(f"    out = {self._as_matrix('out', self.seen[self.result])}.split(rows)")
        lines += [f"    {block} = {self._empty(kind)}" for block, kind in self.kinds.items()]
        over = [*parted, *outs]
        run_over = ", ".join(over)
        lines.append(
            f"    for {run_over} in zip({run_over}):" if len(over) > 1 else f"    for {run_over} in {run_over}:"
        )
        if self.kinds:
            lines.append(f"        if len({self.first}) < rows:")
            lines += [f"            {block} = {block}[:len({self.first})]" for block in self.kinds]
        lines += [f"        {statement}" for statement in statements]
        each = sum(dtype.itemsize * columns for dtype, columns in self.kinds.values())
        return Text("\n".join([*head, *lines]) + "\n", function, self.constants, each)

    @property
    def first(self) -> str:
        """The name of a block with all rows and columns of the block that runs."""
        return "out" if self.result is not None else self.names[next(iter(self.written))]

    def _homes(self) -> dict[fx.Node, fx.Node]:
        """Member to the operand that its result, or one made over that, is written to in the end."""
        homes: dict[fx.Node, fx.Node] = {}
        for operand, last in self.written.items():
            node = last
            while node.op == "call_function" and node not in homes and not ops.is_view(node.target):
                homes[node] = operand
                node = next(iter(node.all_input_nodes), node)  # an operator in place writes over its first argument
        return homes

    def _may_go_home(self, node: fx.Node, operand: fx.Node) -> bool:
        """Whether ``node`` may write to the block of an operand: nothing reads later what lies there."""
        stored = self.held[operand]
        reader = self.last.get(stored)
        if reader is not None and self.order[reader] > self.order[node]:
            return False
        if stored is self.written[operand] or not blocks.same_form(node, operand):
            return False
        return stored not in self._bases(node) or _may_write_over(node, stored)

    def _bases(self, node: fx.Node) -> set[fx.Node]:
        return {blocks.base_of(argument) for argument in node.all_input_nodes}

    def _last_uses(self) -> dict[fx.Node, fx.Node]:
        """Member to the last member that reads its result or a view of it."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self.body.nodes:
            if node.op == "call_function" and not ops.is_view(node.target):
                for argument in node.all_input_nodes:
                    last[blocks.base_of(argument)] = node
        return last

    # -- operands -----------------------------------------------------------------------------------

    def _prepared(self, inputs: list[fx.Node]) -> tuple[list[str], list[str]]:
        """The names of operands that are split into blocks, and the lines that make matrices of all operands."""
        parted, lines = [], []
        for node in inputs:
            self.seen[node] = row, _ = blocks.input_steps(node, self.matrix)
            if self.seen[node] == blocks.AS_IT_IS:
                continue
            name = self.names[node]
            lines.append(f"    {name} = {self._as_matrix(name, self.seen[node])}" + (".split(rows)" if row else ""))
            if row:
                parted.append(name)
        return parted, lines

    def _as_matrix(self, name: str, steps: Steps) -> str:
        shape = self.matrix.rows if steps[0] else 1, self.matrix.columns if steps[1] else 1
        return f"{name}.as_strided({shape}, {steps})"

    def _operand(self, node: fx.Node, reader: fx.Node) -> str:
        """The text of an operand: a block, for an operator that takes an element for each row without columns."""
        return f"{self.names[node]}.view(-1)" if blocks.is_per_row(reader, node) else self.names[node]

    def _literal(self, value: Any, reader: fx.Node) -> str:
        if isinstance(value, fx.Node):
            return self._operand(value, reader)
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._literal(item, reader) for item in value)}]"
        if value is None or isinstance(value, bool | int | str | torch.dtype | torch.memory_format | torch.layout):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        return self._constant("constant", value)

    # -- members --------------------------------------------------------------------------------------

    def _view(self, node: fx.Node) -> None:
        """Note that a view of a value inside is the same block; one for each row stays so where it is spread out."""
        base = node.all_input_nodes[0]
        self.names[node], self.seen[node] = self.names[base], self.seen[base]

    def _member(self, node: fx.Node) -> str:
        """The statement that runs a member on one block."""
        form = form_of(node, 1)
        function: Any = form.overload if form.kind is FormKind.OUT else kernel_of(node.target).function  # type: ignore[union-attr]
        keyword_of_result = form.arguments[0] if form.kind is FormKind.OUT else "out"
        steps = blocks.result_steps(node, self.matrix) or (0, 0)
        arguments = self._arguments(node, steps)
        self.seen[node], self.names[node] = steps, self._place(node, steps)
        called = self._constant(_function_name(function), function)
        line = source_line(node)
        comment = f"  # {line}" if line else ""
        return f"{called}({', '.join([*arguments, f'{keyword_of_result}={self.names[node]}'])}){comment}"

    def _arguments(self, node: fx.Node, steps: Steps) -> list[str]:
        """The arguments of a member for one block: dimensions by their place in the matrix, operands in full shape."""
        rowwise = ops.rule(node.target).rowwise
        assert rowwise is not None, f"{node.name} is no member"
        values = [self._literal(value, node) for value in node.args]
        if rowwise.dim is not None:
            values[rowwise.dim] = "[-1]" if isinstance(node.args[rowwise.dim], list | tuple) else "-1"
        if rowwise.keepdim is not None:
            values[rowwise.keepdim :] = ["True"]
        elif rowwise.dim is None and not rowwise.per_row and steps[1]:
            self._spread(node, values)
        return values + [f"{key}={self._literal(value, node)}" for key, value in node.kwargs.items()]

    def _spread(self, node: fx.Node, values: list[str]) -> None:
        """Give the first operand the shape of the result where no operand has it, since ``out=`` must fit exactly."""
        steps_by_node = {node: self.seen[node] for node in node.all_input_nodes if self.seen[node] != blocks.AS_IT_IS}
        if any(row for row, _ in steps_by_node.values()) and any(column for _, column in steps_by_node.values()):
            return
        at = next(at for at, value in enumerate(node.args) if isinstance(value, fx.Node) and value in steps_by_node)
        values[at] = f"{values[at]}.expand(len({self.first}), {self.matrix.columns})"

    def _place(self, node: fx.Node, steps: Steps) -> str:
        """The block that a member writes to: ``out`` for the last, or an operand's that it is written over in the end.

        Others get memory of their own, or of what they read last.
        """
        mine = [base for base, reader in self.last.items() if reader is node and self.names[base] in self.kinds]
        mine = [base for base in mine if base not in self.written.values()]
        for base in mine:
            self.free.setdefault(self.kinds[self.names[base]], []).append(self.names[base])
        if node is self.result:
            return "out"
        home = self.homes.get(node)
        if home is not None and self._may_go_home(node, home):
            self.held[home] = node
            return self.names[home]
        kind = blocks.only_tensor(node).dtype, self.matrix.columns if steps[1] else 1
        protected = {self.names[base] for base in mine if not _may_write_over(node, base)}
        for block in self.free.get(kind, ()):
            if block not in protected:
                self.free[kind].remove(block)
                return block
        block = self._identifier(f"block_{len(self.kinds)}")
        self.kinds[block] = kind
        return block

    def _empty(self, kind: tuple[torch.dtype, int]) -> str:
        dtype, columns = kind
        return f"torch.empty((rows, {columns}), dtype={dtype})"

    def _identifier(self, name: str) -> str:
        while name in self.taken or keyword.iskeyword(name):
            name += "_"
        self.taken.add(name)
        return name

    def _constant(self, name: str, value: Any) -> str:
        """Enter ``value`` among the constants, and return its name: ``name``, with underscores if that is taken."""
        identifier = next((key for key, other in self.constants.items() if other is value), None)
        if identifier is None:
            identifier = self._identifier(name)
            self.constants[identifier] = value
        return identifier


def _function_name(function: Any) -> str:
    schema = getattr(function, "_schema", None)
    if schema is None:
        return str(function.__name__)
    return f"{schema.name.removeprefix('aten::').replace('::', '_')}_{schema.overload_name or 'default'}"


def _may_write_over(node: fx.Node, base: fx.Node) -> bool:
    """Whether ``node`` may write its result over the value of ``base`` wherever it reads that value."""
    places = [at for at, value in enumerate(node.args) if isinstance(value, fx.Node) and blocks.base_of(value) is base]
    allowed = ops.rule(node.target).overwrites
    read = sum(blocks.base_of(argument) is base for argument in node.all_input_nodes)
    return len(places) >= read and all(at in allowed for at in places) and blocks.same_form(node, base)

"""The text of printed graphs as plain data, line by line; nothing is executed, and torch is not needed.

    class inner_f(torch.nn.Module):
        def forward(self, primals, tangents):
            primals_1: "f32[8, 16][16, 1]cpu"  # PlainAOTInput(idx=0)
            # File: net.py:3 in forward, code: return (x @ w).relu()
            mm: "f32[8, 16][16, 1]cpu" = torch.ops.aten.mm.default(primals_1, primals_2);  primals_2 = None
            return pytree.tree_unflatten([mm, None], self._out_spec)

Graphs of torch 2.0 to 2.14 are read: with and without a class, annotations with quotes and without, with and without
strides and devices, inputs in the signature, one to a line or all on one. In a submodule's class, which follows that of
its graph and is indented, stands what a higher-order operator runs.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from roamc.errors import DumpError

MOST_LINE = 1 << 16
"""Most characters of a line."""

MOST_TEXT = 1 << 24
"""Most characters of a graph."""

MOST_STATEMENTS = 100_000

MOST_NESTING = 32
"""Most brackets that are open at one place."""

TANGENTS = "tangents"
"""How the names of gradients that are handed in begin."""

Value = Any
"""A constant, a list or tuple of values, :class:`Name`, :class:`Dotted`, :class:`Item` or :class:`Call`."""


@dataclass(frozen=True)
class Name:
    """A value of the graph."""

    name: str


@dataclass(frozen=True)
class Dotted:
    """A constant or function by its path, such as ``torch.float32``."""

    path: str


@dataclass(frozen=True)
class Item:
    """One of several results."""

    value: Value
    index: int


@dataclass(frozen=True)
class Call:
    """A call of what a path names; an infix operator is a call of ``operator.mul``, for example."""

    path: str
    args: tuple[Value, ...]
    kwargs: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Origin:
    """What the comments in front of operators say of them.

    Attributes:
        file: of the user's line; "" if none is known.
        line: its number.
        function: that it is in.
        code: the line itself.
        checkpoint: number of the checkpoint that runs the operator again, None outside of checkpoints.
        policy: what the checkpoint does with its results, as ``PREFER_RECOMPUTE``; "" for nothing.
        annotation: a dict that the user has attached to operators, as a literal; "" for none.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    code: str = ""
    checkpoint: str | None = None
    policy: str = ""
    annotation: str = ""


@dataclass(frozen=True)
class Input:
    """An input: its name, its annotation if it has one, and the comment behind it."""

    name: str
    annotation: str | None
    comment: str = ""


@dataclass(frozen=True)
class Statement:
    """``name: annotation = value``; ``name`` is "" for a call without a result. ``line`` counts from 1 in the file."""

    line: int
    name: str
    annotation: str | None
    value: Value
    origin: Origin


@dataclass(frozen=True)
class Result:
    """What the graph returns at one place, and the comment behind it."""

    value: Value
    comment: str = ""


@dataclass(frozen=True)
class GraphText:
    """One printed graph.

    Attributes:
        name: of its class; "forward" without one.
        line: of the file, where it begins.
        inputs: in their sequence, tangents behind the others.
        statements: the operators.
        results: what it returns.
        joint: whether its signature is that of forward and backward in one.
    """

    name: str
    line: int
    inputs: tuple[Input, ...]
    statements: tuple[Statement, ...]
    results: tuple[Result, ...]
    joint: bool

    @property
    def has_tangents(self) -> bool:
        """Whether gradients are handed in: it is backward, or forward and backward in one, which :attr:`joint` says."""
        return any(each.name.startswith(TANGENTS) for each in self.inputs)


_CLASS = re.compile(r"^(\s*)([^\s\"'#][^\"'#]*? )?class ([\w<>.]+)\(torch\.nn\.Module\):")
"""Its indentation; what torch 2.0 to 2.5 print in front of it, such as ``<eval_with_key>.9 `` or a path; its name."""
_FORWARD = re.compile(r"^(\s*)def forward\(")
_SIGNATURE_ENDS = re.compile(r"\)(?:\s*->[^:]*)?:\s*(?:#.*)?$")
_CODE_AND_COMMENT = re.compile(r"""^((?:[^"'#]|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*)(?:#\s*(.*))?$""")
_UNQUOTED = re.compile(
    r"""\b(\w+): ((?:f|bf|i|u|b|c)\d+\w*\[[^\]"']*\](?:\[[^\]"']*\])?(?:[a-z]+(?::\d+)?)?|Sym\([^"']*?\))"""
    r"""(?=\s*(?:[=,;)#]|$))"""
)
_DECLARED = re.compile(r'(\w+): "([^"]*)"')
FILE = re.compile(
    r"\bFile: (?P<file>.{0,1000}?):(?P<line>\d{1,9})(?: in (?P<function>[^,]{0,200}))?, code: ?(?P<code>.*)$"
)
"""In a comment: the user's line."""
_MARK = re.compile(
    r"^#\s*(?:Annotation: (?P<annotation>\{.*?\}) ?)?(?:ac_graph_id: (?P<checkpoint>\w+)(?: - (?P<policy>[A-Z_]+))?"
    r"|recompute: (?P<alone>[A-Z_]+))?"
)
_FORMATTED_CALL = re.compile(r"^\s*%\w+ : ")

INFIX: Mapping[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.FloorDiv: "floordiv",
    ast.Div: "truediv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}
"""Infix operators to their functions in the module ``operator``."""


def graphs(lines: Sequence[str], file: str, first: int = 1) -> tuple[GraphText, ...]:
    """Return the graphs that are printed in ``lines``; submodules of higher-order operators are left out.

    Args:
        lines: without prefixes, see :func:`roamc.capture.dump.prefixes.without_prefixes`.
        file: its name, for messages.
        first: the number of the first of ``lines`` in the file.

    Raises:
        DumpError: a graph is cut off, too long, or not as torch prints graphs; or there is none.
    """
    begun = list(_beginnings(lines))
    if not begun:
        _refuse_other(lines, file)
    ends = [at for at, _, _ in begun[1:]] + [len(lines)]
    top = min(indent for _, indent, _ in begun)
    return tuple(
        _Reader(lines[at:end], file, first + at, name).graph()
        for (at, indent, name), end in zip(begun, ends, strict=True)
        if indent == top
    )


def _beginnings(lines: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """(line, indentation, name) of every class, or forward without one."""
    inside = False
    for at, line in enumerate(lines):
        if len(line) > MOST_LINE:
            continue  # what reads it refuses it
        if match := _CLASS.match(line):
            inside = True
            yield at, 0 if match[2] else len(match[1]), match[3]
        elif match := _FORWARD.match(line):
            if not inside:
                yield at, len(match[1]), "forward"
            inside = False


def _refuse_other(lines: Sequence[str], file: str) -> NoReturn:
    if any(_FORMATTED_CALL.match(line) for line in lines):
        advice = "print(graph) leaves shapes out: print gm.print_readable(), or log with TORCH_TRACE=folder"
        raise DumpError(f"{file}: {advice}")
    raise DumpError(f"{file}: no graph of torch is in it. Log one with TORCH_TRACE=folder python train.py")


class _Reader:
    """Reads one graph, from its first line on."""

    def __init__(self, lines: Sequence[str], file: str, first: int, name: str) -> None:
        self.lines, self.file, self.first, self.name = lines, file, first, name
        self.at = 0
        self.inputs: list[Input] = []
        self.statements: list[Statement] = []
        self.results: tuple[Result, ...] | None = None
        self.origin = Origin()
        self.joint = False

    def graph(self) -> GraphText:
        if sum(map(len, self.lines)) > MOST_TEXT:
            self.fail(f"a graph of more than {MOST_TEXT >> 20} MB")
        try:
            self._signature()
            while self.results is None:
                self._line()
        except RecursionError:
            self.fail(f"an expression of more than {MOST_NESTING} parts within each other")
        return GraphText(self.name, self.first, tuple(self.inputs), tuple(self.statements), self.results, self.joint)

    def fail(self, reason: str) -> NoReturn:
        raise DumpError(f"{self.file}:{self.first + min(self.at, len(self.lines)) - 1}: {reason}")

    def _next(self) -> str:
        """The next line; ``at`` counts the lines that were read."""
        if self.at == len(self.lines):
            self.fail(
                f"the text ends after {len(self.statements)} statements, before the graph's return: it was cut off "
                "(GitHub cuts at 65,536 characters). Take the whole file"
            )
        line = self.lines[self.at]
        self.at += 1
        if len(line) > MOST_LINE:
            self.fail(f"a line of more than {MOST_LINE} characters")
        return line

    def _signature(self) -> None:
        while not _FORWARD.match(line := self._next()):
            pass
        block = [line]
        while not _SIGNATURE_ENDS.search(block[-1]):
            block.append(self._next())
        comments = [self._divided(line) for line in block]
        code = "".join(_UNQUOTED.sub(r'\1: "\2"', part) for part, _ in comments).strip()
        arguments = [each for each in self._parsed(f"{code} pass", ast.FunctionDef).args.args if each.arg != "self"]
        self.joint = [each.arg for each in arguments] == ["primals", "tangents"]
        if not self.joint:
            behind = {name[1]: text for part, text in comments if text and (name := re.match(r"\s*(\w+)", part))}
            self.inputs = [Input(each.arg, _text(each.annotation), behind.get(each.arg, "")) for each in arguments]

    def _line(self) -> None:
        line = self._next()
        stripped = line.strip()
        if stripped.startswith("#"):
            self._comment(stripped)
            return
        code, comment = self._divided(line)
        parts, comments, depth = [code.rstrip()], [comment], 0 if _is_declaration(code) else _open(code)
        while depth > 0:  # each line is looked at once: a stranger's file may have any number of them
            more, said = self._divided(self._next())
            parts.append(more.rstrip())
            comments.append(said)
            depth += _open(more)
        code, comment = _UNQUOTED.sub(r'\1: "\2"', "\n".join(parts).strip()), "\n".join(comments)
        if not code or "tree_flatten_spec(" in code:
            return
        if code.startswith("return"):
            self._return(code, comment.split("\n"))
        elif _is_declaration(code):
            self.inputs += [Input(name, annotation, comment) for name, annotation in _DECLARED.findall(code)]
        else:
            self._statement(code)

    def _comment(self, comment: str) -> None:
        place, mark = FILE.search(comment), _MARK.match(comment)
        if place is None and "No stacktrace" not in comment:
            return
        marks = mark.groupdict() if mark else {}
        checkpoint = marks.get("checkpoint")
        policy, annotation = marks.get("policy") or marks.get("alone") or "", marks.get("annotation") or ""
        if place is None:
            self.origin = Origin(checkpoint=checkpoint, policy=policy, annotation=annotation)
            return
        function = place["function"] or "forward"
        self.origin = Origin(place["file"], int(place["line"]), function, place["code"], checkpoint, policy, annotation)

    def _return(self, code: str, comments: Sequence[str]) -> None:
        value = self._parsed(code, ast.Return).value
        if isinstance(value, ast.Call) and _path(value.func).endswith("tree_unflatten"):
            value = value.args[0] if value.args else None
        several = isinstance(value, ast.Tuple | ast.List)
        parts: Sequence[ast.expr | None] = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
        said = [text for text in comments if text] if several else comments
        comments = said if len(said) == len(parts) else [""] * len(parts)
        values = [None if part is None else self._value(part) for part in parts]
        self.results = tuple(map(Result, values, comments))

    def _statement(self, code: str) -> None:
        if len(self.statements) == MOST_STATEMENTS:
            self.fail(f"more than {MOST_STATEMENTS} statements")
        for each in self._module(code).body:
            match each:
                case ast.Assign(value=ast.Constant(value=None)):
                    continue  # a value is not needed any more
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    annotation = None
                case ast.AnnAssign(target=ast.Name(id=name), annotation=said, value=ast.expr() as value):
                    annotation = _text(said)
                case ast.Expr(value=ast.Call() as value):
                    name, annotation = "", None
                case _:
                    self.fail(f"no statement of a graph: {code[:60]!r}")
            line = self.first + self.at - 1
            self.statements.append(Statement(line, name, annotation, self._value(value), self.origin))

    def _divided(self, line: str) -> tuple[str, str]:
        """A line's code and the comment behind it."""
        match = _CODE_AND_COMMENT.match(line)
        if match is None:
            self.fail(f"a string does not end: {line.strip()[:60]!r}")
        return match[1], (match[2] or "").strip()

    def _module(self, code: str) -> ast.Module:
        if _deepest(code) > MOST_NESTING:
            self.fail(f"more than {MOST_NESTING} brackets are open")
        try:
            return ast.parse(code, filename="<graph>")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self.fail(f"no statement of a graph: {code[:60]!r}")

    def _parsed(self, code: str, kind: type[Any]) -> Any:
        body = self._module(f"def f():\n  {code}" if kind is ast.Return else code).body
        part = body[0].body[0] if kind is ast.Return and isinstance(body[0], ast.FunctionDef) else body[0]
        if len(body) != 1 or not isinstance(part, kind):
            self.fail(f"no statement of a graph: {code[:60]!r}")
        return part

    def _value(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | complex | str):
                return value
            case ast.Name(id="inf" | "nan" as name):
                return math.inf if name == "inf" else math.nan
            case ast.Name(id=name):
                return Name(name)
            case ast.Attribute():
                return Dotted(_path(node) or self.fail(f"no value: {ast.unparse(node)[:60]!r}"))
            case ast.List(elts=parts):
                return [self._value(part) for part in parts]
            case ast.Tuple(elts=parts):
                return tuple(map(self._value, parts))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._negative(operand)
            case ast.Subscript(value=value, slice=ast.Constant(value=int(index))):
                return Item(self._value(value), index)
            case ast.Call(func=function, args=args, keywords=keywords) if path := _path(function):
                named = {each.arg: self._value(each.value) for each in keywords if each.arg is not None}
                return Call(path, tuple(map(self._value, args)), named)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in INFIX:
                return Call(f"operator.{INFIX[type(op)]}", (self._value(left), self._value(right)))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in INFIX:
                return Call(f"operator.{INFIX[type(op)]}", (self._value(left), self._value(right)))
        self.fail(f"no value of a graph: {ast.unparse(node)[:60]!r}")

    def _negative(self, operand: ast.expr) -> Value:
        value = self._value(operand)
        return -value if isinstance(value, int | float | complex) else Call("operator.neg", (value,))


def _is_declaration(code: str) -> bool:
    """Whether a line declares inputs, and is no statement with a value."""
    return "=" not in _DECLARED.sub("", code) and bool(_DECLARED.match(code.strip()))


def _text(annotation: ast.expr | None) -> str | None:
    return annotation.value if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str) else None


def _path(node: ast.expr) -> str:
    """``a.b.c`` of a name or its attributes; "" for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


_STRING = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""")


def _open(code: str) -> int:
    """How many brackets are open behind ``code``."""
    bare = _STRING.sub("", code)
    return sum(map(bare.count, "([{")) - sum(map(bare.count, ")]}"))


def _deepest(code: str) -> int:
    depth = most = 0
    for bracket in re.findall(r"[(\[{)\]}]", _STRING.sub("", code)):
        depth += 1 if bracket in "([{" else -1
        most = max(most, depth)
    return most

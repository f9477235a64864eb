"""What an annotation of a printed graph says of a value: ``f32[8, s0][s0, 1]cuda:0``, or ``Sym(4*s0)``."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from roamc.errors import DumpError

MOST_SIZE = 1 << 62
"""Above any number of elements that has an address."""

MOST_DIMENSIONS = 64
"""Most that operators of torch take."""

MOST_EXPRESSION = 4_096
"""Most characters of a size."""

_ANNOTATION = re.compile(
    r"^(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:\[(?P<stride>[^\]]*)\])?(?P<device>[a-z]+(?::\d+)?)?$"
)
SYMBOL = re.compile(r"\b[su]\d+\b")
"""The name of a symbolic size."""

_INFIX: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

_FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "Max": max,
    "Min": min,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ModularIndexing": lambda value, divisor, modulus: value // divisor % modulus,
    "floor": math.floor,
    "ceiling": math.ceil,
    "CeilToInt": math.ceil,
    "Integer": int,
    "Add": lambda *values: sum(values),
    "Mul": lambda *values: math.prod(values),
}
"""What torch and sympy print in sizes."""


@dataclass(frozen=True)
class TensorType:
    """A dtype as torch prints it, such as "bf16", and the geometry; strides and device are None where not said."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    device: str | None = None


@dataclass(frozen=True)
class Number:
    """A size, with its value."""

    value: int


@dataclass(frozen=True)
class Sizes:
    """Values of symbolic sizes such as ``s0``; ``file`` is for messages."""

    values: Mapping[str, int]
    file: str

    def of(self, text: str, line: int | None = None) -> int:
        """Return the value of an expression such as ``2*s0 + 1``, as torch prints it or as sympy's ``srepr`` does.

        Args:
            text: the expression.
            line: of the file, for messages; None for a file that is no text.

        Raises:
            DumpError: a symbol has no value, or the expression is none of sizes.
        """
        if re.fullmatch(r"\s*-?\d{1,18}\s*", text):
            return int(text)
        place = self.file if line is None else f"{self.file}:{line}"
        missing = sorted(set(SYMBOL.findall(text)) - self.values.keys())
        if missing:
            advice = " ".join(f"--set {name}=N" for name in missing)
            raise DumpError(f"{place}: the graph leaves a size open: give {advice}")
        if len(text) > MOST_EXPRESSION:
            raise DumpError(f"{place}: no size: {text[:60]!r}")
        try:
            value = self._value(ast.parse(text.strip(), mode="eval", filename="<size>").body)
        except OverflowError:
            raise DumpError(f"{place}: a size above 2**62: {text[:60]!r}") from None
        except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
            raise DumpError(f"{place}: no size: {text[:60]!r}") from None
        return value

    def _value(self, node: ast.expr) -> int:
        value = self._any(node)
        if abs(value) > MOST_SIZE:
            raise OverflowError
        return value

    def _any(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                if name not in self.values:
                    raise ValueError(name)
                return self.values[name]
            case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(name))]):
                return self._value(ast.Name(name))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))) if 0 <= power <= 8:
                return int(self._value(left) ** power)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _INFIX:
                return _INFIX[type(op)](self._value(left), self._value(right))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*map(self._value, args))
        raise ValueError


def parsed(annotation: str | None, sizes: Sizes, line: int) -> TensorType | Number | None:
    """Return what an annotation says; None if there is none, or one of something else than a tensor or size.

    Args:
        annotation: as the graph has it, without quotes.
        sizes: values of the symbols in it.
        line: of the file, for messages.

    Raises:
        DumpError: a size has no value, or is none.
    """
    if annotation is None:
        return None
    text = annotation.strip()
    if text.startswith("Sym(") and text.endswith(")"):
        return Number(sizes.of(text[4:-1], line))
    match = _ANNOTATION.match(text)
    if match is None:
        return None

    def numbers(part: str) -> tuple[int, ...]:
        return tuple(sizes.of(each, line) for each in _apart(part)) if part.strip() else ()

    shape, stride = numbers(match["shape"]), None if match["stride"] is None else numbers(match["stride"])
    check_possible(shape, stride, f"{sizes.file}:{line}", text)
    return TensorType(match["dtype"], shape, stride, match["device"])


def _apart(sizes: str) -> Iterator[str]:
    """The sizes of a list, apart at commas that stand in no brackets."""
    begin = depth = 0
    for at, letter in enumerate(sizes):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            yield sizes[begin:at]
            begin = at + 1
    yield sizes[begin:]


def check_possible(shape: tuple[int, ...], stride: tuple[int, ...] | None, place: str, text: str = "") -> None:
    """Refuse a tensor whose bytes no address has.

    Args:
        shape: its sizes.
        stride: its strides; None for a dense one.
        place: file and line, for the message.
        text: what the file says of it; empty for its sizes.

    Raises:
        DumpError: there is no such tensor.
    """
    if len(shape) > MOST_DIMENSIONS:
        raise DumpError(f"{place}: a tensor of {len(shape)} dimensions; roamc reads up to {MOST_DIMENSIONS}")
    spans = [(size - 1) * step for size, step in zip(shape, stride or (), strict=False)]
    wrong = stride is not None and len(stride) != len(shape)
    if wrong or min((*shape, *(stride or ())), default=0) < 0 or max(math.prod(shape), sum(spans)) > MOST_SIZE >> 4:
        raise DumpError(f"{place}: no tensor that can exist: {(text or str(shape))[:60]!r}")

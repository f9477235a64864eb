"""Operators that a file may name: a closed table from torch's schemas. No text of a file reaches an attribute."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from roamc import compat_operators
from roamc.capture.dump.text import INFIX
from roamc.compat import OpOverload
from roamc.errors import DumpError
from roamc.operators.schemas import argument_of

MOST_RESULTS = 4_096
"""Most results of one operator, or steps that it is taken apart into: each of them takes time and memory."""

MOST_NUMBER = 1 << 63

NAMESPACES = frozenset({"aten", "prims", "rngprims", "_c10d_functional"})

FILES = frozenset({("aten", "from_file"), ("aten", "save")})
"""Operators that open files."""

DTYPES: Mapping[str, torch.dtype] = {
    **{"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16},
    **{"i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "b8": torch.bool},
    **{"u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64},
    **{"c32": torch.complex32, "c64": torch.complex64, "c128": torch.complex128},
    **{"f8e4m3fn": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2},
    **{"f8e4m3fnuz": torch.float8_e4m3fnuz, "f8e5m2fnuz": torch.float8_e5m2fnuz},
}
"""dtypes by the names that annotations have."""

CONSTANTS: Mapping[str, object] = {
    **{str(dtype): dtype for dtype in DTYPES.values()},
    **{str(each): each for each in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)},
    **{str(each): each for each in (torch.preserve_format, torch.strided, torch.sparse_coo)},
}
"""What a graph names by a path besides operators."""


@functools.cache
def _names() -> frozenset[tuple[str, str, str]]:
    every = compat_operators.schema_names()
    return frozenset(each for each in every if each[0] in NAMESPACES and each[:2] not in FILES)


def operator_of(path: str) -> OpOverload | None:
    """Return the operator with a path such as ``torch.ops.aten.mm.default``; None if the table has none."""
    parts = path.split(".")
    if len(parts) != 5 or parts[:2] != ["torch", "ops"]:
        return None
    namespace, name, overload = parts[2:]
    if (namespace, name, overload) not in _names():
        return None
    target = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return target if isinstance(target, OpOverload) else None


def _power(base: float, exponent: float) -> float:
    if abs(exponent) > 64:
        raise OverflowError("a power above 64")
    result: float = base**exponent
    return result


NUMBERS: Mapping[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in (*INFIX.values(), "neg", "pos", "and_", "or_")},
    **{"operator.pow": _power, "math.trunc": math.trunc, "torch.sym_int": int, "torch.sym_float": float},
    **{"torch.sym_max": max, "torch.sym_min": min, "torch.sym_not": operator.not_, "torch.sym_sqrt": math.sqrt},
    "torch.sym_ite": lambda condition, first, second: first if condition else second,
}
"""Functions of sizes by their names in a file."""


def number(path: str, values: Sequence[Any]) -> float:
    """Return the result of one of :data:`NUMBERS`.

    Raises:
        DumpError: a value is no number, or the result is none that a size can be.
    """
    if not all(isinstance(value, int | float) for value in values):
        raise DumpError(f"{path} of tensors is no operator of ATen: this is the graph of dynamo, not the joint graph")
    try:
        result: float = NUMBERS[path](*values)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise DumpError(f"{path}: {error}") from None
    if isinstance(result, complex) or (isinstance(result, int) and abs(result) >= MOST_NUMBER):
        raise DumpError(f"{path} gives a number that no size can be")
    return result


_STEPS = ("diff", "matrix_power", "linalg_matrix_power")
"""Operators that are taken apart into as many steps as an argument says."""

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "quantized_lstm", "quantized_gru")
"""Operators that are taken apart into the steps of a sequence."""


def check_results(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse an operator that gives more results, or takes more steps, than can be derived in a moment.

    Raises:
        DumpError: says how many there are.
    """
    name = target._opname
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    numbers = [each for each in (*args, *kwargs.values()) if isinstance(each, int) and not isinstance(each, bool)]
    if name in ("split", "unsafe_split"):
        most = -(-_along_dim(target, args, kwargs, tensors) // (max(1, numbers[0]) if numbers else 1))
    elif name == "unbind":
        most = _along_dim(target, args, kwargs, tensors)
    elif name in _RECURRENT:
        most = max(tensors[0].shape[:2], default=0) if tensors else 0
    elif name in _STEPS or any(str(each.type) == "List[Tensor]" for each in target._schema.returns):
        most = max(numbers, default=0)
    else:
        return
    if most > MOST_RESULTS:
        raise DumpError(
            f"{target} may give {most} results; roamc reads graphs with at most {MOST_RESULTS} of one operator"
        )


def _along_dim(
    target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]
) -> int:
    """The size of the axis that ``dim`` names; the largest one where it names none."""
    dim = argument_of(target, args, kwargs, "dim")
    shape = tensors[0].shape if tensors else ()
    named = isinstance(dim, int) and -len(shape) <= dim < len(shape)
    return shape[dim] if named else max(shape, default=0)

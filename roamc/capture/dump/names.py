"""Operators that a file may name: a closed table from torch's schemas. No text of a file reaches an attribute."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from roamc import compat_operators
from roamc.compat import OpOverload

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

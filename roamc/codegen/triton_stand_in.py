"""What the source of a kernel has in the place of Triton where a judge runs it: torch on the CPU.

Several programs run at once; they are the first dimension of every block. Floats of all dtypes have 64 bits, and
integers those that Triton gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, fx

from roamc.codegen.group_verdicts import GroupFault, Verdict
from roamc.operators.activations import Table
from roamc.operators.schemas import stem

WIDE = torch.float64
"""The dtype in which floats are computed."""


FLOATS_OF = {torch.int32: torch.float32, torch.int16: torch.float16}
"""Dtype of integers to that of the floats whose bits a kernel takes for them."""

JOINS = frozenset({"sum", "max"})
"""Names of the functions of :class:`Language` that make one element of several lanes."""


class Runs(Protocol):
    """A judge that runs a kernel: gives it the elements that it loads, and checks what it stores.

    Blocks have the shape (programs, rows, columns), or one that broadcasts to it.
    """

    def program_id(self, axis: int) -> Tensor:
        """Return the numbers of the programs that run, an integer tensor of shape (programs, 1, 1).

        Raises:
            GroupFault: ``axis`` is not 0; launches have one.
        """

    def load(self, pointer: Pointer, mask: Tensor | None = None, other: float = 0) -> Tensor:
        """Return the elements at ``pointer`` where ``mask`` is True, else ``other``.

        Raises:
            GroupFault: the kernel may not read there.
        """

    def store(self, pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
        """Keep the elements of ``value`` for the places at ``pointer`` where ``mask`` is True.

        Raises:
            GroupFault: the kernel may not write there.
        """


@dataclass(frozen=True, eq=False)
class Pointer:
    """What the kernel has in the place of an operand, a result or a table.

    Attributes:
        node: the operand, or the member whose result it is; None for partial sums and tables.
        places: offset of each element of a block, in elements from the first of that tensor.
        table: the table.
    """

    node: fx.Node | None
    places: Tensor
    table: Table | None = None

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.node, self.places + other, self.table)


class Language:
    """What the kernel has in the place of ``triton.language``: the same functions, on tensors of torch.

    Args:
        run: gives the programs' numbers, what is loaded, and takes what is stored.
        over_rows: the kernel may also sum along axis 0, over rows.
    """

    constexpr = int
    float16 = bfloat16 = float32 = float64 = WIDE
    int64, int32, int16, int8, uint8, int1 = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool
    exp, exp2, log, log2, rsqrt, sqrt_rn = torch.exp, torch.exp2, torch.log, torch.log2, torch.rsqrt, torch.sqrt
    sin, cos, erf, abs = torch.sin, torch.cos, torch.erf, torch.abs

    class PropagateNan:
        """The values of ``propagate_nan``, as in Triton; :meth:`maximum` and :meth:`minimum` always propagate NaNs."""

        ALL = "all"

    def __init__(self, run: Runs, *, over_rows: bool = False) -> None:
        self.over_rows = over_rows
        self.program_id, self.load, self.store = run.program_id, run.load, run.store

    @staticmethod
    def arange(start: int, end: int) -> Tensor:
        """Return the numbers from ``start`` up to ``end``, which is left out, as int32."""
        return torch.arange(start, end, dtype=torch.int32, device="cpu")

    @staticmethod
    def cast(value: Any, dtype: torch.dtype, bitcast: bool = False) -> Tensor:
        """Return a number, or a tensor, in ``dtype``; with ``bitcast`` the bits of floats as integers of as many."""
        if bitcast:
            bits: Tensor = value.to(FLOATS_OF[dtype]).view(dtype)
            return bits
        return torch.as_tensor(value, dtype=dtype, device="cpu")

    @staticmethod
    def full(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
        """Return a block of ``shape`` filled with ``value``."""
        return torch.full(shape, value, dtype=dtype, device="cpu")

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a block of ``shape`` filled with zeros."""
        return torch.zeros(shape, dtype=dtype, device="cpu")

    @staticmethod
    def where(chosen: Tensor, one: Any, other: Any) -> Tensor:
        """Return the elements of ``one`` where ``chosen`` is not 0, else those of ``other``."""
        kind = next((value.dtype for value in (one, other) if isinstance(value, Tensor)), WIDE)
        one, other = (torch.as_tensor(value, dtype=kind, device="cpu") for value in (one, other))
        return torch.where(chosen != 0, one, other)

    @staticmethod
    def maximum(one: Any, other: Any, propagate_nan: str = "") -> Tensor:
        """Return the larger of ``one`` and ``other``, element by element."""
        return torch.maximum(*_pair(one, other))

    @staticmethod
    def minimum(one: Any, other: Any, propagate_nan: str = "") -> Tensor:
        """Return the smaller of ``one`` and ``other``, element by element."""
        return torch.minimum(*_pair(one, other))

    @staticmethod
    def div_rn(one: Any, other: Any) -> Tensor:
        """Return ``one / other``, element by element."""
        return torch.true_divide(*_pair(one, other))

    @staticmethod
    def philox(seed: Tensor, c0: Any, c1: Any, c2: Any, c3: Any) -> tuple[Tensor, ...]:
        """Return the four words of Philox-4x32-10 as numbers of 32 bits without sign, held in int64.

        Args:
            seed: the key, of 64 bits.
            c0: the lowest 32 bits of the counter, whatever their sign.
            c1: the next ones.
            c2: the next ones.
            c3: the highest ones.
        """
        low, bits = np.uint64(0xFFFFFFFF), np.uint64(32)
        whole = (np.asarray(part, dtype=np.int64).view(np.uint64) & low for part in (c0, c1, c2, c3))
        counter, key = list(np.broadcast_arrays(*whole)), np.asarray(seed, dtype=np.int64).view(np.uint64)
        keys = [key & low, key >> bits]
        for _ in range(10):
            first, second = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
            left = (second >> bits) ^ counter[1] ^ keys[0], second & low
            counter = [*left, (first >> bits) ^ counter[3] ^ keys[1], first & low]
            keys = [(keys[0] + np.uint64(0x9E3779B9)) & low, (keys[1] + np.uint64(0xBB67AE85)) & low]
        return tuple(torch.from_numpy(word.astype(np.int64)) for word in counter)

    def sum(self, value: Tensor, axis: int, keep_dims: bool = False) -> Tensor:
        """Return the sum along ``axis``: 1 adds up the columns of each row, 0 the rows, in kernels ``over_rows`` alone.

        Raises:
            GroupFault: another axis.
        """
        if axis == 0 and self.over_rows:
            return value.sum(-2, keepdim=keep_dims)
        _check_axis(axis)
        return value.sum(-1, keepdim=keep_dims)

    @staticmethod
    def max(value: Tensor, axis: int, keep_dims: bool = False) -> Tensor:
        """Return the largest element of each row.

        Raises:
            GroupFault: ``axis`` is not 1.
        """
        _check_axis(axis)
        return value.amax(-1, keepdim=keep_dims)


def _check_axis(axis: int) -> None:
    if axis != 1:
        raise GroupFault(Verdict.DIMENSION, f"axis {axis} of a block is reduced")


def _pair(one: Any, other: Any) -> tuple[Tensor, Tensor]:
    kind = one.dtype if isinstance(one, Tensor) else other.dtype
    first, second = (torch.as_tensor(value, dtype=kind, device="cpu") for value in (one, other))
    return first, second


class Jit:
    """What the kernel has in the place of ``triton``."""

    @staticmethod
    def jit(function: Callable[..., None]) -> Callable[..., None]:
        """Return the function as it is."""
        return function


ROUNDED = frozenset({"masked_fill", "where", "threshold_backward", "eq", "ne", "lt", "le", "gt", "ge"})
"""Operators that round a number to the dtype of their tensors before they take it."""


def widened(node: fx.Node, name: str, value: Any) -> Any:
    """Return an argument for a call of an operator on floats of 64 bits.

    Args:
        node: the call in the group.
        name: of the argument.
        value: the argument.
    """
    if name == "half_to_float":
        return False
    if isinstance(value, torch.device):  # the numbers of the judge are on the CPU
        return torch.device("cpu")
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return WIDE
    if stem(node.target) == "div" and name == "other" and isinstance(value, int | float) and value:
        with np.errstate(all="ignore"):  # ATen multiplies by the reciprocal of a number
            return float(1 / np.float64(np.float32(1 / np.float64(value))))
    if isinstance(value, float) and stem(node.target).partition(".")[0] in ROUNDED:
        kind = next(
            argument.meta["val"].dtype
            for argument in node.all_input_nodes
            if argument.meta["val"].dtype is not torch.bool
        )
        return torch.tensor(value, dtype=kind, device="cpu").item() if kind.is_floating_point else value
    return value

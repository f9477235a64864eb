"""Inputs of GELU and SiLU from their outputs and one bit: on which side of the only minimum the input lies.

    right = bits(x >= least)                                   # where the activation rises, one bit an element
    x = roamc.activation_input(gelu(x), right, "gelu")         # to the digits that the output has left

The bits lie in the sequence of memory: of n elements and their ceil(n / 8) bytes, element e is bit e // ceil(n / 8) of
byte e % ceil(n / 8). Whoever reads neighbours reads neighbours there too.

Outputs of 16 bits are looked up in a table of all 2**17 pairs of output and side. An entry is the mean of the inputs of
that dtype that give the output, or the exact inverse where none does. Outputs of 32 bits are interpolated in

    r = (y - lowest) / max(-y, edge)                           # lowest: the output at the minimum

which is 0 at the minimum, large where y rises to 0 on the left, and grows on with y on the right. A cell is all r with
the same leading bits; in it, x is a number plus another times r. At the minimum x goes with the root of r, on the left
with the logarithm of -y: both are smooth in the logarithm of r, as cells are. The slopes at these inputs are off by
:data:`ERRORS`.

Inputs far on the left have one output, -0.0, and no slope: any of them is right. NaN arrives as NaN, infinity as
infinity; an output of 32 bits above 2**104 as infinity as well. Each table is made once in a process. Each operation
rounds once, so that the kernels of groups (:mod:`roamc.operators.gpu.printed`) have the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from roamc.compat import OpOverload, without_modes
from roamc.operators.random import LIBRARY
from roamc.units import Bytes

PARTS = 8
"""Elements in each byte of the bits, one of each part of the tensor; parts are worked through one after the other."""

PIECES = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Type of a device to the most elements that are worked through at a time; on a CPU a cache holds them."""

TAKEN: dict[torch.dtype, Bytes] = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 16}
"""Dtype to the bytes taken for each of these elements: for the number of its entry, or for r, a cell and its line."""

LAUNCHES: dict[int, tuple[int, Bytes]] = {2: (6, 47), 4: (14, 145)}
"""Bytes of an element to the kernels of torch that a piece takes, and the bytes that these move for an element."""

SHIFT = 15
"""Bits of a float32 that do not tell its cell: 8 bits of the fraction do, and the exponent."""

FIRST = (127 - 26) << (23 - SHIFT)
"""Leading bits of r in the first cell, which begins at 0 and ends near 2**-26: no r of float32 outputs is smaller."""

TURN = 1 << 20
"""r where y is 0. From r = TURN - 1 on, where -y is ``edge``, r goes with y; the left side ends at TURN."""

BISECTIONS = 64
"""Halvings of an interval that leave one number of float64."""

LIBRARY.define("activation_input(Tensor result, Tensor right, str function) -> Tensor")


@dataclass(frozen=True)
class Activation:
    """A function that falls from 0 to one minimum and then rises.

    Attributes:
        value: the function, of float64.
        least: where it has its minimum.
        far: an input where, and left of which, its slope is nearly 0: what stands for all of them.
        same: an output from which on the input is the same, to float32.
    """

    value: Callable[[Tensor], Tensor]
    least: float
    far: float
    same: float

    @functools.cached_property
    def lowest(self) -> float:
        """The output at the minimum, as a float32."""
        return float(self.value(_doubles([self.least])).float())

    @property
    def edge(self) -> float:
        """The smallest -y that r is divided by."""
        return -self.lowest / TURN

    def inverse(self, y: Tensor, *, right: bool) -> Tensor:
        """Return the inputs at the minimum's right, or left, with outputs ``y``, float64; NaN for NaN."""
        low, high = (torch.where(y > 0, y, self.least), y + 1) if right else (y * 0 + self.far, y * 0 + self.least)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            beyond = (self.value(middle) > y) == right
            low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
        return low


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * torch.erfc(-math.sqrt(0.5) * x)


def _gelu_by_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(_gelu, -0.7517915246935645, -14.0, 8.0),
    "gelu_by_tanh": Activation(_gelu_by_tanh, -0.7524614220710162, -14.0, 8.0),
    "silu": Activation(_silu, -1.278464542761074, -110.0, 24.0),
}
"""Name to function: ``aten.gelu``, that with ``approximate="tanh"``, and ``aten.silu``."""

ERRORS = {torch.float32: 4e-6, torch.bfloat16: 2.6e-3, torch.float16: 6e-4}
"""Dtype to the most by which slopes of any activation are off, as a part of their norm, for inputs of N(0, 1).

That of float32 is of processors without AVX-512, where ATen's GELU is off by up to 8 steps of a float32 at its minimum;
with AVX-512 it is 1.5e-6.
"""


def write_activation_input(result: Tensor, right: Tensor, function: str, *, out: Tensor) -> None:
    """Write to ``out`` the inputs with which an activation gives ``result``.

    Args:
        result: the outputs, float32, bfloat16 or float16.
        right: uint8[ceil(n / 8)], the bits of n elements in the sequence of memory of ``out``: whether the input is at
            least :attr:`Activation.least`.
        function: a name in :data:`ACTIVATIONS`.
        out: is written; like ``result``, without gaps.
    """
    dims = sorted(range(out.dim()), key=out.stride, reverse=True)
    y, x = result.permute(dims).reshape(-1), out.permute(dims).view(-1)
    write, size = _look_up if out.itemsize == 2 else _interpolate, piece_elements(out)
    for bit in range(PARTS):
        part = slice(bit * len(right), (bit + 1) * len(right))
        write(y[part], right, bit, function, size, out=x[part])


def piece_elements(result: Tensor) -> int:
    """Return how many elements of ``result`` are worked through at a time."""
    return max(1, min(PIECES[result.device.type], -(-result.numel() // PARTS)))


def launches(result: Tensor) -> tuple[int, Bytes]:
    """Return how many kernels :func:`write_activation_input` launches for ``result``, and the bytes that they move."""
    part, size = -(-result.numel() // PARTS), piece_elements(result)
    parts = [min(part, result.numel() - begin) for begin in range(0, result.numel(), max(1, part))]
    count, nbytes = LAUNCHES[result.itemsize]
    return count * sum(-(-each // size) for each in parts), nbytes * result.numel()


def _look_up(y: Tensor, right: Tensor, bit: int, function: str, size: int, *, out: Tensor) -> None:
    table = table_of(function, y.dtype, y.device)
    numbers, sides = y.new_empty(size, dtype=torch.int32), y.new_empty(size, dtype=torch.int32)
    for begin in range(0, y.numel(), size):
        part = slice(begin, begin + size)
        number, high = (each[: out[part].numel()] for each in (numbers, sides))
        _write_sides(right[part], bit, out=high)
        number.copy_(y[part].view(torch.uint16)).add_(high, alpha=1 << 16)
        torch.index_select(table, 0, number, out=out[part])


def _interpolate(y: Tensor, right: Tensor, bit: int, function: str, size: int, *, out: Tensor) -> None:
    activation, table = ACTIVATIONS[function], table_of(function, y.dtype, y.device)
    cells = table.numel() // 2
    ratios, cuts, lines = y.new_empty(size), y.new_empty(size), y.new_empty(size, dtype=torch.int64)
    for begin in range(0, y.numel(), size):
        part = slice(begin, begin + size)
        r, cut, line = (each[: out[part].numel()] for each in (ratios, cuts, lines))
        torch.clamp(y[part], max=-activation.edge, out=cut)
        torch.sub(y[part], activation.lowest, out=r).div_(cut).neg_()
        cell = torch.bitwise_right_shift(r.view(torch.int32), SHIFT, out=cut.view(torch.int32))
        high = line.view(torch.int32)[: cell.numel()]
        _write_sides(right[part], bit, out=high)
        cell.sub_(FIRST).clamp_(0, cells - 1).add_(high, alpha=cells)
        torch.index_select(table, 0, cell, out=line)
        base, steepness = line.view(torch.float32).view(-1, 2).unbind(1)
        torch.add(base, r.mul_(steepness), out=out[part])


def _write_sides(right: Tensor, bit: int, *, out: Tensor) -> None:
    """Write 1 to ``out``, int32, where ``bit`` is set in the bytes ``right``, else 0."""
    out.copy_(right[: len(out)]).bitwise_right_shift_(bit).bitwise_and_(1)


@functools.cache
def table_of(function: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what inputs of an activation are found with: for the left side of the minimum, then for the right.

    Args:
        function: a name in :data:`ACTIVATIONS`.
        dtype: of outputs and inputs.
        device: where they are.

    Returns:
        For 16 bits an input of ``dtype`` for each bit pattern of an output; for float32 two numbers for each cell, held
        in one int64, so that they are looked up together.
    """
    activation = ACTIVATIONS[function]
    of_side = functools.partial(_lines if dtype is torch.float32 else _inputs, activation, dtype)
    with without_modes(), torch.no_grad():  # kernels are printed under fake modes, too
        return torch.cat([of_side(right=False), of_side(right=True)]).to(device)


@dataclass(frozen=True)
class Table:
    """What the kernel of a group finds inputs with, see :func:`table_of`.

    Attributes:
        function: a name in :data:`ACTIVATIONS`.
        dtype: of outputs and inputs, and of the table's numbers.
    """

    function: str
    dtype: torch.dtype

    def on(self, device: torch.device) -> Tensor:
        """Return the numbers on ``device``; of float32 the two of a cell lie side by side."""
        return table_of(self.function, self.dtype, device).view(self.dtype)


def _inputs(activation: Activation, dtype: torch.dtype, *, right: bool) -> Tensor:
    every = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.uint16).view(dtype).double()
    x = every[every.isfinite() & ((every >= activation.least) == right)].clamp(min=activation.far)
    outputs = activation.value(x).to(dtype).view(torch.uint16).long()
    count, total = (torch.bincount(outputs, weights, minlength=1 << 16) for weights in (None, x))
    return torch.where(count > 0, total / count, activation.inverse(every, right=right)).to(dtype)


def _lines(activation: Activation, dtype: torch.dtype, *, right: bool) -> Tensor:
    last = torch.tensor(activation.same / activation.edge, dtype=dtype, device="cpu").view(torch.int32) >> SHIFT
    begins = torch.arange(FIRST, int(last) + 2, dtype=torch.int32, device="cpu") << SHIFT
    r = begins.view(dtype).double()
    r[0] = 0
    y = torch.where(r < TURN - 1, activation.lowest / (1 + r), activation.lowest + activation.edge * r)
    lowest = float(activation.value(_doubles([activation.least])))
    x = activation.inverse(y.clamp(min=lowest) if right else y.clamp(min=lowest, max=0), right=right)
    slope = x.diff() / r.diff()
    base = x[:-1] - slope * r[:-1]
    if right:
        base[-1], slope[-1] = activation.lowest, activation.edge
    return torch.stack([base, slope], 1).float().view(torch.int64).view(-1)


def _doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


@torch.library.impl(LIBRARY, "activation_input", "CompositeExplicitAutograd")
def _activation_input(result: Tensor, right: Tensor, function: str) -> Tensor:
    out = _fake(result, right, function)
    write_activation_input(result, right, function, out=out)
    return out


def _fake(result: Tensor, right: Tensor, function: str) -> Tensor:
    if result.dtype not in TAKEN:
        raise TypeError(f"outputs of {result.dtype}: inputs are found of {', '.join(map(str, TAKEN))}")
    return torch.empty_like(result)


torch.library.register_fake("roamc::activation_input", _fake, lib=LIBRARY)

activation_input: OpOverload = torch.ops.roamc.activation_input.default
"""``roamc::activation_input(result, right, function)``: the inputs with which an activation gives ``result``."""

KERNELS: dict[OpOverload, Callable[..., None]] = {activation_input: write_activation_input}
"""Operator of this module to the function that writes its result to ``out``."""

"""Random projections that follow from numbers alone: nothing is drawn, every rank and every run makes the same bits.

    n = roamc.count()                                     # int64[]: how often this process has counted before
    p = roamc.projection(counter, seed, stream, n, r, "gaussian", dtype=dtype, device=device)   # [n, r], E[p p^T] = 1
    z = x @ p                                                                                   # [tokens, r]

    gaussian      elements of N(0, 1 / r), each one of 2**16 numbers of equal probability
    orthonormal   q * sqrt(n / r), where the columns of q are r of the n columns of a signed Hadamard matrix. Such a
                  matrix has a power of two of rows: for another n there is one on the diagonal for each power of two
                  that n is the sum of, the largest first. For r = n it is the identity: with no column left out nothing
                  has to be spread, and an optimizer that works element by element does what it does without p.

Eight elements take one run of :func:`roamc.operators.counter.philox`, whose key is ``seed`` and ``stream`` and whose
counter is ``counter`` and the number of the elements: half a word is the number of an element in a table. All that
follows is sums, products, quotients and square roots in float32, which every device rounds in one way.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from roamc.compat import OpOverload
from roamc.operators.counter import WORDS, philox
from roamc.operators.random import LIBRARY
from roamc.units import Bytes

Counter = float | Tensor

BASES = ("gaussian", "orthonormal")
"""The distributions of projections, by name."""

COMPACT = "compact"
"""The codec that projects, see :mod:`roamc.passes.retain.codecs.compact`; pass ``count`` counts for it."""

PIECE, PIECE_ON_A_GPU = 1 << 16, 1 << 20
"""Elements that are made at a time, multiples of :data:`NUMBERS`. A piece stays in a CPU's cache; on a GPU it is to be
longer than the launches of its operators."""

DRAWS = {"gaussian": 2, "orthonormal": 1}
"""Basis to how many numbers a CPU draws in the time of an element, as measured."""

LAUNCHES: dict[str, tuple[int, int, Bytes]] = {"gaussian": (1, 178, 319), "orthonormal": (190, 16, 300)}
"""Basis to the kernels of torch that all of it and that a piece take, and the bytes that are moved for an element."""

NUMBERS = 2 * WORDS
"""Numbers of 16 bits that one run of Philox gives."""

GRID = 1 << 20
"""Elements of N(0, 1) are multiples of one part of this: no rounding before changes one, on whatever processor."""

BYTES_OF_A_RUN: Bytes = 88
"""What a Gaussian projection takes, while it is made, for each run of Philox in a piece."""

BYTES_OF_AN_ELEMENT, BYTES_OF_A_ROW, BYTES_OF_A_COLUMN = 16, 40, 8
"""What an orthonormal one takes for each element of a piece, and for each row and column."""

BYTES_OF_A_CHOICE: Bytes = 52
"""And what it takes for each row before, while it chooses columns."""

A_FEW: Bytes = 32
"""What either takes beside that, at most."""

for _overload, _counter in (("", "Scalar"), (".counted", "Tensor")):
    LIBRARY.define(
        f"projection{_overload}({_counter} counter, int seed, int stream, int n, int r, str basis, *, "
        "ScalarType dtype, Device device) -> Tensor"
    )
LIBRARY.define("count() -> Tensor")

COUNT = [itertools.count()]
"""The numbers that :func:`write_count` has still to give. All programs share them: those of one model that are planned
for several batch shapes would else have the same projections in steps one after the other."""


def write_count(*, out: Tensor) -> None:
    """Write how often this process has counted before to ``out``: int64[] on the CPU."""
    out.fill_(next(COUNT[0]))


@torch.library.impl(LIBRARY, "count", "CompositeExplicitAutograd")
def _count() -> Tensor:
    return torch.tensor(next(COUNT[0]))


def write_projection(
    counter: Counter, seed: int, stream: int, n: int, r: int, basis: str, *, out: Tensor, **geometry: Any
) -> None:
    """Write a projection of rows of ``n`` elements to ``r`` to ``out``.

    Args:
        counter: number of the projection in its stream, from 0; a float stands for the integer below it, a tensor on
            the CPU, such as ``roamc.count`` returns, for its one element.
        seed: of all streams, in ``[0, 2**32)``.
        stream: which of the sequences of projections that have this seed, in ``[0, 2**32)``.
        n: rows of ``out``.
        r: columns of ``out``, at most ``n``.
        basis: one of :data:`BASES`.
        out: ``[n, r]`` of a floating-point dtype; is written.
        geometry: dtype and device of ``out``; not read.
    """
    first = int(counter) << 32
    key = torch.full((), _signed(seed | stream << 32), dtype=torch.int64, device=out.device)
    if basis == "gaussian":
        flat = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        size = _piece(out.device)
        for begin in range(0, n * r, size):
            piece = flat.view(-1)[begin : begin + size]
            piece.copy_(_normals(key, first + begin // NUMBERS, piece.numel()).mul_(1 / math.sqrt(r)))
        if flat is not out:
            out.copy_(flat)
    elif r == n:
        out.zero_().diagonal().fill_(1)
    else:
        _write_columns(key, first, out)


def is_rank(rank: float) -> bool:
    """Whether ``rank`` is a share above 0 and up to 1, or a whole number of columns above 1."""
    return 0 < rank <= 1 or (rank > 1 and float(rank).is_integer())


def columns_of(rank: float, n: int) -> int:
    """Return the columns of projections of rows of ``n`` elements.

    Args:
        rank: a share of ``n`` up to 1, or a number of columns above 1.
        n: elements of a row.
    """
    return max(1, round(n * rank)) if rank <= 1 else int(rank)


def piece_bytes(n: int, r: int, basis: str, device: torch.device) -> Bytes:
    """Return the most bytes that :func:`write_projection` takes beside ``out``, which is contiguous."""
    if basis == "gaussian":
        return BYTES_OF_A_RUN * -(-min(_piece(device), n * r) // NUMBERS) + A_FEW
    elements = min(max(1, _piece(device) // r), n) * r
    spread = BYTES_OF_AN_ELEMENT * elements + BYTES_OF_A_ROW * n + BYTES_OF_A_COLUMN * r
    return (max(spread, BYTES_OF_A_CHOICE * n) if r < n else 0) + A_FEW


def launches(result: Tensor, basis: str) -> tuple[int, Bytes]:
    """Return how many kernels :func:`write_projection` launches on a GPU for ``result``, and the bytes they move."""
    once, count, nbytes = LAUNCHES[basis]
    return once + count * -(-result.numel() // _piece(result.device)), nbytes * result.numel()


def _piece(device: torch.device) -> int:
    return PIECE if device.type == "cpu" else PIECE_ON_A_GPU


def _signed(bits: int) -> int:
    return bits - (bits >> 63 << 64)


def _words(key: Tensor, first: int, count: int) -> tuple[Tensor, ...]:
    """The four words of each of the runs of Philox that give ``count`` words, from counter ``first`` on."""
    return philox(key, torch.arange(first, first - -count // WORDS, device=key.device))


def _normals(key: Tensor, first: int, count: int) -> Tensor:
    """``count`` numbers of N(0, 1), float32, from counter ``first`` on."""
    bits = torch.empty((-(-count // NUMBERS), WORDS), dtype=torch.int32, device=key.device)
    for at, word in enumerate(philox(key, torch.arange(first, first + len(bits), device=key.device))):
        bits[:, at] = word
    number = bits.view(torch.int16).view(-1)[:count].to(torch.int32).bitwise_and_((1 << 16) - 1)
    return quantiles(key.device).index_select(0, number)


@functools.cache
def quantiles(device: torch.device) -> Tensor:
    """Return the means of 2**16 equally probable parts of N(0, 1), float32, scaled so that their variance is 1."""
    bounds = torch.special.ndtri(torch.arange((1 << 16) + 1, dtype=torch.float64, device="cpu") / (1 << 16))
    density = torch.exp(bounds.square() / -2)
    means = density[:-1] - density[1:]
    means *= GRID / means.square().mean().sqrt()
    return (means.round() / GRID).float().to(device)


def _write_columns(key: Tensor, first: int, out: Tensor) -> None:
    """Write some columns of a signed block Hadamard matrix to ``out``, each element times the square root of n / r."""
    n, r = out.shape
    words = torch.stack(_words(key, first, n), -1).view(-1)[:n]
    chosen = torch.argsort(words >> 1, stable=True)[:r]
    block, place, size = _blocks(n, out.device)
    scale = (1 - 2 * (words & 1)).to(torch.float32) / size.sqrt() * math.sqrt(n / r)
    rows = max(1, _piece(out.device) // r)
    for begin in range(0, n, rows):
        of = slice(begin, begin + rows)
        signs = _signs(place[of, None], place[chosen]).masked_fill_(block[of, None] != block[chosen], 0)
        out[of] = signs.to(torch.float32).mul_(scale[of, None])
        del signs


def _signs(rows: Tensor, columns: Tensor) -> Tensor:
    """Elements of a Hadamard matrix: -1 where the numbers of row and column have an odd number of bits in common."""
    bits = rows & columns
    for shift in (16, 8, 4, 2, 1):
        bits ^= bits >> shift
    return bits.bitwise_and_(1).mul_(-2).add_(1)


def _blocks(n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Number, place in it, and size in float32, of the block on the diagonal for each of ``n`` rows."""
    sizes = torch.tensor([*_powers(n)], device=device)
    block = torch.repeat_interleave(sizes, output_size=n)
    begins = sizes.cumsum(0) - sizes
    return block, torch.arange(n, device=device) - begins[block], sizes[block].to(torch.float32)


def _powers(n: int) -> Iterator[int]:
    """The powers of two that ``n`` is the sum of, the largest first."""
    while n:
        yield 1 << n.bit_length() - 1
        n -= 1 << n.bit_length() - 1


@torch.library.impl(LIBRARY, "projection", "CompositeExplicitAutograd")
@torch.library.impl(LIBRARY, "projection.counted", "CompositeExplicitAutograd")
def _projection(*numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    out = _fake(*numbers, dtype=dtype, device=device)
    write_projection(*numbers, out=out)
    return out


def _fake(*numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    _counter, _seed, _stream, n, r, _basis = numbers
    return torch.empty((n, r), dtype=dtype, device=device)


for _name in ("roamc::projection", "roamc::projection.counted"):
    torch.library.register_fake(_name, _fake, lib=LIBRARY)
torch.library.register_fake("roamc::count", lambda: torch.empty((), dtype=torch.int64), lib=LIBRARY)

projection: OpOverload = torch.ops.roamc.projection.default
"""``roamc::projection(counter, seed, stream, n, r, basis, *, dtype, device)``, see :func:`write_projection`."""

counted: OpOverload = torch.ops.roamc.projection.counted
"""The same with a counter that is a tensor, made by :data:`count`."""

count: OpOverload = torch.ops.roamc.count.default
"""``roamc::count()``: how often this process has counted before. No generator moves."""

PROJECTIONS = (projection, counted)
"""The operators that make a projection."""

PROJECTED_WEIGHT = "weight"
"""Key in ``node.meta`` of a projected gradient; the value is the user's name of the weight."""

KERNELS: dict[OpOverload, Callable[..., None]] = {
    projection: write_projection,
    counted: write_projection,
    count: write_count,
}
"""Operator of this module to the function that writes its result to ``out``."""

"""Dropout masks from a counter: what is kept follows from a seed of 16 bytes and the number of the element.

    seeds = roamc.draw_seeds(2, device="cuda")                   # int64[2, 2], drawn from the device's generator
    mask  = roamc.counter_mask(seeds[0], [8, 64], [64, 1], 0.9)  # the same bits at every call
    own   = roamc.own_seeds(seeds, 64, group)                    # of 256 elements that follow those of lower ranks
    rows  = roamc.counter_mask(own[0], [4, 64], [64, 1], 0.9)    # of two ranks, rows [4 * rank, 4 * rank + 4) of mask

Element ``i`` of a mask, counted row by row, is word ``i % 4`` of what Philox-4x32-10 makes of the key ``seed[0]`` and
the counter ``seed[1] + i // 4``, compared with a number. So four elements take one run of Philox, and a kernel that
reads any elements computes them in its registers. Philox is that of Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011, and of ``triton.language.philox``.

Ranks that have rows of a mask each begin at another counter: the rank is read where ``own_seeds`` runs, so that all
have one program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from roamc.compat import OpOverload
from roamc.compat_groups import rank_in
from roamc.operators.random import LIBRARY
from roamc.units import Bytes

ROUNDS = 10

WORDS = 4
"""Words of 32 bits that one run of Philox gives."""

PIECE = 1 << 20
"""Elements of a mask that :func:`write_counter_mask` makes at a time; a multiple of :data:`WORDS`."""

PIECE_BYTES: Bytes = 48 * PIECE
"""Bytes that it takes for these: eight int64 for each run of Philox, and for each element its word, compared."""

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57

KEY_STEPS = 0x9E3779B9, 0xBB67AE85

LOW = 0xFFFFFFFF

LIBRARY.define(
    "draw_seeds(int count, *, Device? device=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
LIBRARY.define("counter_mask(Tensor seed, SymInt[] size, SymInt[] stride, float keep) -> Tensor")
LIBRARY.define("own_seeds(Tensor seeds, int step, Any group_name) -> Tensor")


def write_seeds(count: int, *, out: Tensor, device: torch.device | None = None) -> None:
    """Draw ``count`` seeds, of two numbers each, into ``out``, int64[count, 2], from the generator of its device."""
    out.random_()


@torch.library.impl(LIBRARY, "draw_seeds", "CompositeExplicitAutograd")
def _draw_seeds(count: int, *, device: torch.device | None = None) -> Tensor:
    return torch.empty((count, 2), dtype=torch.int64, device=device).random_()


def write_own_seeds(seeds: Tensor, step: int, group_name: Any, *, out: Tensor) -> None:
    """Write the seeds of this rank's parts of masks, int64[count, 2], to ``out``.

    Args:
        seeds: int64[count, 2], those of the whole masks.
        step: the part of each rank begins so many counters behind that of the rank before; one counter stands for
            :data:`WORDS` elements.
        group_name: the process group whose ranks have one part each, or its name.
        out: is written.
    """
    out.copy_(seeds)
    out[:, 1] += rank_in(group_name) * step


@torch.library.impl(LIBRARY, "own_seeds", "CompositeExplicitAutograd")
def _own_seeds(seeds: Tensor, step: int, group_name: Any) -> Tensor:
    out = torch.empty_like(seeds, memory_format=torch.contiguous_format)
    write_own_seeds(seeds, step, group_name, out=out)
    return out


def _fake_own_seeds(seeds: Tensor, step: int, group_name: Any) -> Tensor:
    return torch.empty_like(seeds, memory_format=torch.contiguous_format)


def limit_of(keep: float) -> int:
    """Return the number below which a word, read as a signed number of 32 bits, stands for an element that is kept.

    A word is below it with probability ``keep``, up to 2**-33.
    """
    return round(keep * (1 << 32)) - (1 << 31)


def philox(key: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of Philox-4x32-10, int64 in [0, 2**32), for a key and the low half of the counter.

    Args:
        key: int64, the key of 64 bits; broadcasts with ``counter``.
        counter: int64, the lower 64 bits of the counter; the upper ones are 0.
    """
    c0, c1, c2, c3 = counter & LOW, (counter >> 32) & LOW, torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = key & LOW, (key >> 32) & LOW
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # 64 bits, whatever their sign
        c0, c1 = ((second >> 32) & LOW) ^ c1 ^ k0, second & LOW
        c2, c3 = ((first >> 32) & LOW) ^ c3 ^ k1, first & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return c0, c1, c2, c3


def kept(seed: Tensor, elements: Tensor, keep: float) -> Tensor:
    """Return which elements of a mask are kept.

    Args:
        seed: int64[2].
        elements: int64, numbers of elements of the mask, counted row by row; of any shape, which the result has.
        keep: probability with which an element is kept.
    """
    words = torch.stack(philox(seed[0], seed[1] + (elements >> 2)), -1)
    word = words.gather(-1, (elements & 3).unsqueeze(-1)).squeeze(-1)
    return _is_kept(word, keep)


def _is_kept(word: Tensor, keep: float) -> Tensor:
    return word - ((word >> 31) << 32) < limit_of(keep)


def write_counter_mask(seed: Tensor, size: Sequence[int], stride: Sequence[int], keep: float, *, out: Tensor) -> None:
    """Write to ``out``, a bool tensor of shape ``size`` with any strides, what is kept: True with probability ``keep``.

    Args:
        seed: int64[2] on the device of ``out``.
        size: shape of ``out``.
        stride: strides of ``out``; not read.
        keep: probability with which an element is True.
        out: is written.
    """
    numel = math.prod(size)
    flat = out.view(-1) if out.is_contiguous() else torch.empty(numel, dtype=torch.bool, device=out.device)
    for begin in range(0, numel, PIECE):
        piece = flat[begin : begin + PIECE]
        counter = torch.arange(begin // WORDS, -(-(begin + piece.numel()) // WORDS), device=seed.device)
        words = torch.stack(philox(seed[0], seed[1] + counter), -1).reshape(-1)
        piece.copy_(_is_kept(words[: piece.numel()], keep))
    if not out.is_contiguous():
        out.copy_(flat.view(tuple(size)))


@torch.library.impl(LIBRARY, "counter_mask", "CompositeExplicitAutograd")
def _counter_mask(seed: Tensor, size: Sequence[int], stride: Sequence[int], keep: float) -> Tensor:
    out = torch.empty_strided(size, stride, dtype=torch.bool, device=seed.device)
    write_counter_mask(seed, size, stride, keep, out=out)
    return out


def _fake(seed: Tensor, size: Sequence[int], stride: Sequence[int], keep: float) -> Tensor:
    return torch.empty_strided(size, stride, dtype=torch.bool, device=seed.device)


torch.library.register_fake("roamc::counter_mask", _fake, lib=LIBRARY)
torch.library.register_fake("roamc::own_seeds", _fake_own_seeds, lib=LIBRARY)

draw_seeds: OpOverload = torch.ops.roamc.draw_seeds.default
"""``roamc::draw_seeds(count, *, device)``: draws int64[count, 2], a seed in each row."""

counter_mask: OpOverload = torch.ops.roamc.counter_mask.default
"""``roamc::counter_mask(seed, size, stride, keep)``: a bool tensor that follows from ``seed``, a row of the above."""

own_seeds: OpOverload = torch.ops.roamc.own_seeds.default
"""``roamc::own_seeds(seeds, step, group_name)``: the seeds of this rank's parts of masks, which have ``seeds``."""

KERNELS: dict[OpOverload, Callable[..., None]] = {
    draw_seeds: write_seeds,
    counter_mask: write_counter_mask,
    own_seeds: write_own_seeds,
}
"""Operator of this module to the function that writes its result to ``out``."""

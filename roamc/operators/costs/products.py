"""What matrix products in half precision take for themselves on a CPU: the buffers of oneDNN's kernels, a set a thread.

Read off the heap with torch 2.13 on a machine with AVX-512 for bfloat16: of 2,400 products of 1 to 8,192 rows and
columns, in order and transposed, none takes more, and half of them 0.85 or more of it. Products of float32 take
nothing.
"""

from __future__ import annotations

import torch

from roamc.units import Bytes

THREADS = 2
"""Buffers of so many threads are counted: a plan is not to depend on the machine that makes it."""

ROWS, COLUMNS = 256, 64
"""A thread makes a block of the result of so many rows and columns,"""

WIDE, TALL = 1024, 4096
"""or in several rounds one of so many columns, or rows;"""

DEPTH = 512
"""from this much of the first factor at a time; twice that where it is in order and longer."""

PADDED = 32
"""Columns that a copied block of the first factor has more."""

SELF: Bytes = 28 << 10


def products(first: torch.Tensor, second: torch.Tensor, made: torch.Tensor) -> Bytes:
    """Bytes beside ``first [..., rows, depth] @ second [..., depth, columns]`` while it is computed."""
    rows, depth, columns = first.shape[-2], first.shape[-1], second.shape[-1]
    in_order = first.stride(-1) == 1
    if made.dtype is torch.float16:
        return 0 if in_order else 4 * rows * columns
    if made.dtype is not torch.bfloat16:
        return 0
    most = 2 * DEPTH if in_order and depth > 2 * DEPTH else DEPTH
    deep = min(_whole(depth), most)
    copied = not in_order or (rows >= WIDE and depth >= TALL)
    high, broad = min(rows, ROWS), min(_whole(columns), COLUMNS)
    block = high * broad
    if copied and depth > deep:
        block = max(high * min(_whole(columns), WIDE), min(rows, TALL) * broad)
    copy = 2 * high * (deep + PADDED) if copied else 0
    return THREADS * (copy + 2 * deep * COLUMNS + 4 * block) + SELF


def _whole(count: int) -> int:
    return -(-count // COLUMNS) * COLUMNS

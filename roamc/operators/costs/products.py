"""Workspace of matrix products in half precision on a CPU: the buffers of oneDNN's kernels, a set for each thread.

Read off the heap with torch 2.13 on a machine with AVX-512 for bfloat16: of 2,400 products of 1 to 8,192 rows and
columns, in order and transposed, none takes more than this formula says, and half of them take 0.85 of it or more.
Products of float32 take nothing.
"""

from __future__ import annotations

import torch

from roamc.units import Bytes

THREADS = 2
"""Threads whose buffers are counted: a fixed number, so that a plan does not depend on the machine that makes it."""

ROWS, COLUMNS = 256, 64
"""Most rows and columns of the block of the result that a thread makes in one round."""

WIDE, TALL = 1024, 4096
"""Most columns, or rows, of a block that is made in several rounds over the depth."""

DEPTH = 512
"""Columns of the first factor read in one round; up to twice as many if its rows are contiguous and longer."""

PADDED = 32
"""Columns added to a copied block of the first factor."""

SELF: Bytes = 28 << 10
"""Bytes that a product of bfloat16 takes in any case."""


def products(first: torch.Tensor, second: torch.Tensor, made: torch.Tensor) -> Bytes:
    """Return the workspace in bytes of ``made = first [..., rows, depth] @ second [..., depth, columns]``."""
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

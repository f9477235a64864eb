"""Workspace of fused attention on a CPU: torch's kernel takes a block of queries, and for it block after block of keys.

A block of scores is (queries of a block) x (keys of a block). Every thread has buffers of its own, whatever it does.
"""

from __future__ import annotations

import torch

from roamc.operators.call import Call, tensor_at
from roamc.units import Bytes

QUERIES = ((768, 256), (192, 64), (0, 32))
"""(queries of the call, queries in a block): the first pair holds whose first number the call reaches."""

KEYS = 512
"""Keys in a block."""


PACKED: Bytes = 64 << 10
"""Bytes that products in half precision take for each thread in the backward pass."""


def per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in fused attention forward.

    It is a block of scores, the block's rows of the result, and the largest score and the sum of every row, in float32;
    in half precision also a copy of the block of scores in that precision.
    """
    query, key = tensor_at(call, 0), tensor_at(call, 1)
    sums = 4 * min(query.shape[-2], _together(query.shape[-2])) * (query.shape[-1] + 2)
    return sums + _block(query, key) * (4 if query.itemsize == 4 else 6)


def backward(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of fused attention backward: a copy of the result's gradient ``[batch, heads, queries, head]``.

    It is 0 if that lies in memory as a contiguous ``[batch, queries, heads, head]``.
    """
    gradient = tensor_at(call, 0)
    return 0 if gradient.transpose(1, 2).is_contiguous() else gradient.numel() * gradient.itemsize


def backward_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in fused attention backward.

    It is a block of scores and a block of their gradients in float32. In half precision the thread has both in that
    precision too, the gradients of one head's keys and values in float32, and :data:`PACKED`.
    """
    query, key = tensor_at(call, 1), tensor_at(call, 2)
    if query.itemsize == 4:
        return 8 * _block(query, key)
    return 12 * _block(query, key) + 8 * key.shape[-2] * key.shape[-1] + PACKED


def _block(query: torch.Tensor, key: torch.Tensor) -> int:
    """Return the number of scores in a block of ``query [..., queries, head]`` and ``key [..., keys, head]``."""
    return min(query.shape[-2], _together(query.shape[-2])) * min(key.shape[-2], KEYS)


def causal_share(queries: int, keys: int) -> float:
    """Return the part of all scores, 0 to 1, that a CPU computes under a causal mask.

    The kernel computes whole blocks of keys, for each block of queries up to the last key that the mask shows to it:
    everything for 512 queries and keys, 0.75 for 1024. Measured time, forward and backward, is within 0.02 of this
    share from 64 to 2048 keys.
    """
    together, computed = _together(queries), 0
    for first in range(0, queries, together):
        end = min(first + together, queries)
        visible = -(-min(end, keys) // KEYS) * KEYS
        computed += (end - first) * min(visible, keys)
    return computed / max(queries * keys, 1)


def _together(queries: int) -> int:
    return next(count for least, count in QUERIES if queries >= least)

"""Fused attention on a CPU: torch's kernel takes blocks of queries, and for each of them block after block of keys."""

from __future__ import annotations

import torch

from roamc.operators.costs.products import THREADS
from roamc.units import Bytes

QUERIES = ((768, 256), (192, 64), (0, 32))
"""From so many queries on, so many at a time."""

KEYS = 512
"""Keys at a time."""


PACKED: Bytes = 64 << 10
"""Of products in half precision in the backward pass, a thread."""


def forward_bytes(query: torch.Tensor, key: torch.Tensor) -> Bytes:
    """A block of scores and the sums over it in float32, in half precision the block in that too; a set a thread.

    Args:
        query: ``[..., queries, head]``.
        key: ``[..., keys, head]``.
    """
    block = _block(query, key)
    sums = 4 * min(query.shape[-2], _together(query.shape[-2])) * query.shape[-1]
    return THREADS * (sums + block * (4 if query.itemsize == 4 else 6))


def backward_bytes(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Bytes:
    """Two blocks, of scores and of their gradient, and the gradient of the result where heads lie behind each other.

    In half precision also both blocks in that, and the gradients of a head's keys and values in float32.

    Args:
        gradient: ``[batch, heads, queries, head]``; read as it is if it lies as ``[batch, queries, heads, head]``.
        query: ``[batch, heads, queries, head]``.
        key: ``[batch, heads, keys, head]``.
    """
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.numel() * gradient.itemsize
    if query.itemsize == 4:
        return copied + THREADS * 8 * _block(query, key)
    return copied + THREADS * (12 * _block(query, key) + 8 * key.shape[-2] * key.shape[-1] + PACKED)


def _block(query: torch.Tensor, key: torch.Tensor) -> int:
    """Scores computed at a time."""
    return min(query.shape[-2], _together(query.shape[-2])) * min(key.shape[-2], KEYS)


def causal_share(queries: int, keys: int) -> float:
    """The part of all scores that is computed under a causal mask: whole blocks, up to the last that it shows.

    All of 512 keys, 0.75 of 1024; measured, forward and backward: within 0.02 of it from 64 to 2048 keys.
    """
    together, computed = _together(queries), 0
    for first in range(0, queries, together):
        end = min(first + together, queries)
        seen = -(-min(end, keys) // KEYS) * KEYS
        computed += (end - first) * min(seen, keys)
    return computed / max(queries * keys, 1)


def _together(queries: int) -> int:
    return next(count for least, count in QUERIES if queries >= least)

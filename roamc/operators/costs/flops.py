"""FLOPs of products where torch's registry lacks a formula: a multiplication and its addition count as two.

Each formula takes the positional arguments of its ATen operator and ignores those in ``rest``.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Flops = int


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Flops:
    """Return the FLOPs of fused attention forward, without the softmax.

    They are those of two batched products: queries by keys, weights by values (Vaswani et al. 2017, equation 1).
    Arguments are ``[batch, heads, length, head]``; several heads of the query may read one head of keys and values.
    (torch's own formulas refuse that before 2.13.)
    """
    return 2 * _scores(query, key) * (query.shape[-1] + value.shape[-1])


def attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> Flops:
    """Return the FLOPs of fused attention backward, without the softmax.

    They are those of five batched products: the attention weights, computed again, and the gradients of values,
    weights, queries and keys (Dao et al. 2022). Arguments are ``[batch, heads, length, head]``.
    """
    return 2 * _scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: torch.Tensor, key: torch.Tensor) -> int:
    """The number of scores: one for every query, key and head of the query ``[batch, heads, queries, head]``."""
    return math.prod(query.shape[:-1]) * key.shape[-2]


def product(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Flops:
    """Return the FLOPs of ``a @ b``; unless ``a`` is a vector, only the batch dimensions of ``a`` count."""
    columns = b.shape[-1] if b.dim() > 1 else 1
    return 2 * a.numel() * columns if a.dim() > 1 or b.dim() < 2 else 2 * b.numel()


def product_and_sum(addend: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Flops:
    """Return the FLOPs of ``addend + a @ b``: those of the product alone."""
    return product(a, b)


def gathered_products(rows: torch.Tensor, others: list[torch.Tensor], group_size: int, *rest: Any) -> Flops:
    """Return the FLOPs of the products of each of ``others`` and the ``rows`` of all ranks."""
    return group_size * sum(product(rows, other) for other in others)


def reduced_products(inputs: list[torch.Tensor], others: list[torch.Tensor], *rest: Any) -> Flops:
    """Return the FLOPs of the products of each of ``inputs`` with its matrix of ``others``."""
    return sum(product(input, other) for input, other in zip(inputs, others, strict=True))


def linear(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Flops:
    """Return the FLOPs of ``x [..., in] @ weight [out, in].T``; a bias adds none."""
    return 2 * x.numel() * weight.shape[0]


def outer(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Flops:
    """Return the FLOPs of an outer product: one for every pair of an element of ``a`` and one of ``b``."""
    return a.numel() * b.numel()


def outer_and_sum(addend: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Flops:
    """Return the FLOPs of ``addend + outer(a, b)``: two for every element."""
    return 2 * a.numel() * b.numel()

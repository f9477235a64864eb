"""Multiplications and additions of products, two for each pair, where torch's registry lacks a formula."""

from __future__ import annotations

import math
from typing import Any

import torch

Flops = int


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Flops:
    """Two batched products: queries by keys, weights by values (Vaswani et al. 2017, equation 1).

    Several heads of the query may read one head of keys and values. (torch's own formulas refuse that before 2.13.)
    """
    return 2 * _scores(query, key) * (query.shape[-1] + value.shape[-1])


def attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> Flops:
    """Five: the weights again, and the gradients of values, weights, queries and keys (Dao et al. 2022)."""
    return 2 * _scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: torch.Tensor, key: torch.Tensor) -> int:
    """A score for every query, key and head of the query ``[batch, heads, queries, head]``."""
    return math.prod(query.shape[:-1]) * key.shape[-2]


def product(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Flops:
    """``a @ b`` for vectors, matrices and batches of them."""
    columns = b.shape[-1] if b.dim() > 1 else 1
    return 2 * a.numel() * columns if a.dim() > 1 or b.dim() < 2 else 2 * b.numel()


def product_and_sum(addend: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Flops:
    """``addend + a @ b``: the product."""
    return product(a, b)


def linear(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Flops:
    """``x [..., in] @ weight [out, in].T``."""
    return 2 * x.numel() * weight.shape[0]


def outer(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Flops:
    """Every element of ``a`` by every one of ``b``."""
    return a.numel() * b.numel()


def outer_and_sum(addend: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Flops:
    """``addend + outer(a, b)``."""
    return 2 * a.numel() * b.numel()

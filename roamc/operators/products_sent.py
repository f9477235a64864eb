"""Matrix products of what a collective gathers, or whose sum it adds up over the ranks: two of roamc's own operators.

    [y1, y2, w] = all_gather_mm(x, [b1, b2], n, group, True, [None, c])    w = all_gather_into_tensor(x, n, group)
                                                                           y1 = mm(w, b1); y2 = addmm(c, w, b2)
    z = mm_reduce_scatter([a1, a2], [b1, b2], None, "sum", n, group)       y = mm(a1, b1) + mm(a2, b2)
                                                                           z = reduce_scatter_tensor(y, "sum", n, group)

On GPUs of a group with symmetric memory the rows of one rank are multiplied while those of another are sent, and sums
over the ranks are made in another order than by NCCL: by torch's ``symm_mem.fused_all_gather_matmul`` and
``fused_matmul_reduce_scatter``, and with a bias or several products by what these two stand on. Elsewhere collective
and products run one after the other. Pass ``async_tp`` puts the operators in place. Matrices have two dimensions; what
is gathered and scattered lies along the first one. A bias has a number for each column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from roamc.compat import OpOverload
from roamc.compat_groups import has_symmetric_memory, read_as_gathered, sent_as_written
from roamc.operators.collectives import LIBRARY, NAMESPACE

aten = torch.ops.aten
COLLECTIVES: Any = getattr(torch.ops, NAMESPACE)
SYMMETRIC: Any = torch.ops.symm_mem

Bias = Tensor | None
"""What is added to every row of a product; None for nothing."""


def all_gather_mm(
    input: Tensor, others: Sequence[Tensor], group_size: int, group_name: str, whole: bool, biases: Sequence[Bias] = ()
) -> list[Tensor]:
    """Multiply what all ranks gather with each of ``others``.

    Args:
        input: rows of this rank ``[rows, k]``.
        others: matrices ``[k, columns]``.
        group_size: how many ranks the group has.
        group_name: the group.
        whole: whether to return what is gathered as well.
        biases: what is added to every row of each product; empty where all are None.

    Returns:
        A matrix ``[rows * group_size, columns]`` for each of ``others``; behind them what is gathered, if asked for.
    """
    if input.is_cuda and has_symmetric_memory(group_name):
        return all_gather_mm_at_once(input, others, group_size, group_name, whole, biases)
    gathered = COLLECTIVES.all_gather_into_tensor(input, group_size, group_name)
    products = [_product(gathered, *factor) for factor in zip(others, _each(others, biases), strict=True)]
    return [*products, *([gathered] if whole else [])]


def _each(others: Sequence[Tensor], biases: Sequence[Bias]) -> Sequence[Bias]:
    return biases or [None] * len(others)


def _product(input: Tensor, other: Tensor, bias: Bias) -> Tensor:
    product: Tensor = aten.mm.default(input, other) if bias is None else aten.addmm.default(bias, input, other)
    return product


def all_gather_mm_at_once(
    input: Tensor, others: Sequence[Tensor], group_size: int, group_name: str, whole: bool, biases: Sequence[Bias] = ()
) -> list[Tensor]:
    """Do on GPUs with symmetric memory, and only there, what :func:`all_gather_mm` does."""
    if not biases:
        gathered, products = SYMMETRIC.fused_all_gather_matmul(
            input.contiguous(), list(others), 0, group_name, return_A=whole
        )
        return [*products, *([gathered] if whole else [])]
    *products, gathered = _gathered_results(input, others, group_size, group_name, True)
    parts = [product.chunk(group_size) for product in products]

    def multiply(rows: Tensor, rank: int) -> None:
        for part, other, bias in zip(parts, others, _each(others, biases), strict=True):
            _write_product(rows, other, bias, part[rank])

    read_as_gathered(input.contiguous(), multiply, gathered, group_name, whole)
    return [*products, *([gathered] if whole else [])]


def _write_product(input: Tensor, other: Tensor, bias: Bias, out: Tensor) -> None:
    if bias is None:
        torch.mm(input, other, out=out)
    else:
        torch.addmm(bias, input, other, out=out)


def mm_reduce_scatter(
    inputs: Sequence[Tensor], others: Sequence[Tensor], bias: Bias, reduce_op: str, group_size: int, group_name: str
) -> Tensor:
    """Reduce the sum of the products ``input @ other`` over the ranks, and return this rank's rows.

    Args:
        inputs: matrices ``[rows, k]``, with a ``k`` of its own each; ``group_size`` divides the rows.
        others: for each of ``inputs`` a matrix ``[k, columns]``.
        bias: what this rank adds to every row of its first product.
        reduce_op: how the ranks' sums become one, "sum" or "avg".
        group_size: how many ranks the group has.
        group_name: the group.
    """
    if inputs[0].is_cuda and has_symmetric_memory(group_name):
        return mm_reduce_scatter_at_once(inputs, others, bias, reduce_op, group_size, group_name)
    total = _product(inputs[0], others[0], bias)
    for input, other in zip(inputs[1:], others[1:], strict=True):
        total.add_(aten.mm.default(input, other))
    reduced: Tensor = COLLECTIVES.reduce_scatter_tensor(total, reduce_op, group_size, group_name)
    return reduced


def mm_reduce_scatter_at_once(
    inputs: Sequence[Tensor], others: Sequence[Tensor], bias: Bias, reduce_op: str, group_size: int, group_name: str
) -> Tensor:
    """Do on GPUs with symmetric memory, and only there, what :func:`mm_reduce_scatter` does.

    Later products are added to the first by the kernel that multiplies, so that they are not rounded before.
    """
    first = inputs[0].contiguous()
    if bias is None and len(inputs) == 1:
        reduced: Tensor = SYMMETRIC.fused_matmul_reduce_scatter(first, others[0], reduce_op, 0, group_name)
        return reduced
    parts = [input.contiguous().chunk(group_size) for input in inputs]

    def write(rank: int, out: Tensor) -> None:
        _write_product(parts[0][rank], others[0], bias, out)
        for part, other in zip(parts[1:], others[1:], strict=True):
            out.addmm_(part[rank], other)

    received = first.new_empty((first.shape[0], others[0].shape[1]))
    sent_as_written(write, received, group_name)
    by_rank = received.view(group_size, -1, received.shape[1])
    return by_rank.sum(0) if reduce_op == "sum" else by_rank.mean(0)


def _gathered_results(
    input: Tensor, others: Sequence[Tensor], group_size: int, group_name: str, whole: bool, biases: Sequence[Bias] = ()
) -> list[Tensor]:
    rows = input.shape[0] * group_size
    widths = [*(other.shape[1] for other in others), *([input.shape[1]] if whole else [])]
    return [input.new_empty((rows, width)) for width in widths]


def _scattered_result(
    inputs: Sequence[Tensor], others: Sequence[Tensor], bias: Bias, reduce_op: str, group_size: int, group_name: str
) -> Tensor:
    return inputs[0].new_empty((inputs[0].shape[0] // group_size, others[0].shape[1]))


def _operator(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    LIBRARY.define(f"{name}{schema}")
    torch.library.impl(LIBRARY, name, "CompositeExplicitAutograd")(run)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    operator: OpOverload = getattr(COLLECTIVES, name).default
    fx.node.has_side_effect(operator)
    return operator


ALL_GATHER_MM = _operator(
    "all_gather_mm",
    "(Tensor input, Tensor[] others, int group_size, str group_name, bool whole, Tensor?[] biases) -> Tensor[]",
    all_gather_mm,
    _gathered_results,
)
"""``roamc_collective::all_gather_mm``, see :func:`all_gather_mm`."""

MM_REDUCE_SCATTER = _operator(
    "mm_reduce_scatter",
    "(Tensor[] inputs, Tensor[] others, Tensor? bias, str reduce_op, int group_size, str group_name) -> Tensor",
    mm_reduce_scatter,
    _scattered_result,
)
"""``roamc_collective::mm_reduce_scatter``, see :func:`mm_reduce_scatter`."""

PRODUCTS_SENT = frozenset({ALL_GATHER_MM, MM_REDUCE_SCATTER})
"""The operators of this module."""

"""Matrix products of what a collective gathers, or of which it adds up the results: two of roamc's own operators.

    [y1, y2, w] = all_gather_mm(x, [b1, b2], n, group, True)     w = all_gather_into_tensor(x, n, group)
                                                                 y1 = mm(w, b1); y2 = mm(w, b2)
    z = mm_reduce_scatter(a, b, "sum", n, group)                 z = reduce_scatter_tensor(mm(a, b), "sum", n, group)

On GPUs of a group with symmetric memory they are torch's ``symm_mem.fused_all_gather_matmul`` and
``fused_matmul_reduce_scatter``, which multiply the rows of one rank while those of another are sent, and sum over the
ranks in another order than NCCL; elsewhere collective and products run one after the other. Pass ``async_tp`` puts
them in place. Matrices have two dimensions; what is gathered and scattered lies along the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from roamc.compat import OpOverload
from roamc.compat_groups import has_symmetric_memory
from roamc.operators.collectives import LIBRARY, NAMESPACE

aten = torch.ops.aten
COLLECTIVES: Any = getattr(torch.ops, NAMESPACE)
SYMMETRIC: Any = torch.ops.symm_mem


def all_gather_mm(
    input: Tensor, others: Sequence[Tensor], group_size: int, group_name: str, whole: bool
) -> list[Tensor]:
    """Multiply what all ranks gather with each of ``others``.

    Args:
        input: rows of this rank ``[rows, k]``.
        others: matrices ``[k, columns]``.
        group_size: how many ranks the group has.
        group_name: the group.
        whole: whether to return what is gathered as well.

    Returns:
        A matrix ``[rows * group_size, columns]`` for each of ``others``; behind them what is gathered, if asked for.
    """
    if input.is_cuda and has_symmetric_memory(group_name):
        return all_gather_mm_at_once(input, others, group_name, whole)
    gathered = COLLECTIVES.all_gather_into_tensor(input, group_size, group_name)
    return [*(aten.mm.default(gathered, other) for other in others), *([gathered] if whole else [])]


def all_gather_mm_at_once(input: Tensor, others: Sequence[Tensor], group_name: str, whole: bool) -> list[Tensor]:
    """Do by torch's own operator what :func:`all_gather_mm` does; it runs on GPUs with symmetric memory alone."""
    gathered, products = SYMMETRIC.fused_all_gather_matmul(
        input.contiguous(), list(others), 0, group_name, return_A=whole
    )
    return [*products, *([gathered] if whole else [])]


def mm_reduce_scatter(input: Tensor, other: Tensor, reduce_op: str, group_size: int, group_name: str) -> Tensor:
    """Reduce ``input @ other`` over the ranks by ``reduce_op``, "sum" or "avg", and return this rank's rows.

    Args:
        input: a matrix ``[rows, k]``; ``group_size`` divides the rows.
        other: a matrix ``[k, columns]``.
        reduce_op: how the ranks' products become one.
        group_size: how many ranks the group has.
        group_name: the group.
    """
    if input.is_cuda and has_symmetric_memory(group_name):
        return mm_reduce_scatter_at_once(input, other, reduce_op, group_name)
    product = aten.mm.default(input, other)
    reduced: Tensor = COLLECTIVES.reduce_scatter_tensor(product, reduce_op, group_size, group_name)
    return reduced


def mm_reduce_scatter_at_once(input: Tensor, other: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """Do by torch's own operator what :func:`mm_reduce_scatter` does; it runs on GPUs with symmetric memory alone."""
    reduced: Tensor = SYMMETRIC.fused_matmul_reduce_scatter(input.contiguous(), other, reduce_op, 0, group_name)
    return reduced


def _gathered_results(
    input: Tensor, others: Sequence[Tensor], group_size: int, group_name: str, whole: bool
) -> list[Tensor]:
    rows = input.shape[0] * group_size
    widths = [*(other.shape[1] for other in others), *([input.shape[1]] if whole else [])]
    return [input.new_empty((rows, width)) for width in widths]


def _scattered_result(input: Tensor, other: Tensor, reduce_op: str, group_size: int, group_name: str) -> Tensor:
    return input.new_empty((input.shape[0] // group_size, other.shape[1]))


def _operator(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    LIBRARY.define(f"{name}{schema}")
    torch.library.impl(LIBRARY, name, "CompositeExplicitAutograd")(run)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    operator: OpOverload = getattr(COLLECTIVES, name).default
    fx.node.has_side_effect(operator)
    return operator


ALL_GATHER_MM = _operator(
    "all_gather_mm",
    "(Tensor input, Tensor[] others, int group_size, str group_name, bool whole) -> Tensor[]",
    all_gather_mm,
    _gathered_results,
)
"""``roamc_collective::all_gather_mm``, see :func:`all_gather_mm`."""

MM_REDUCE_SCATTER = _operator(
    "mm_reduce_scatter",
    "(Tensor input, Tensor other, str reduce_op, int group_size, str group_name) -> Tensor",
    mm_reduce_scatter,
    _scattered_result,
)
"""``roamc_collective::mm_reduce_scatter``, see :func:`mm_reduce_scatter`."""

PRODUCTS_SENT = frozenset({ALL_GATHER_MM, MM_REDUCE_SCATTER})
"""The operators of this module."""

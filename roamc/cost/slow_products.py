"""Which matrix products on a GPU are slow for how their matrices lie in memory."""

from __future__ import annotations

import torch
from torch import fx

from roamc.compat_operators import tensors_in
from roamc.cost.count import flops
from roamc.operators.aligned import BY_COPIES, is_aligned

HALF = (torch.float16, torch.bfloat16)
"""Dtypes whose products have fast kernels for rows that are aligned alone."""

DEVICES = frozenset({"cuda"})
"""Types of the devices on which they are slow."""

LEAST = 1 << 33
"""FLOPs from which it pays to have the rows of a product's matrices aligned."""


def slow_for_rows(node: fx.Node) -> bool:
    """Whether ``node`` is a product in 16 bits on a GPU, without numbers for factors, that has rows not aligned."""
    tensors = tensors_of_product(node) if node.target in BY_COPIES else []
    return all(map(may_be_slow, tensors)) and not all(map(is_aligned, tensors[-3:]))


def may_be_slow(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the dtype and device of products that are slow for rows that are not aligned."""
    return tensor.dtype in HALF and tensor.device.type in DEVICES


def is_large(node: fx.Node) -> bool:
    """Whether a product has so many FLOPs that other memory for its matrices pays."""
    return flops(node) >= LEAST


def tensors_of_product(node: fx.Node) -> list[torch.Tensor]:
    """Return what a product reads, then what it gives: fake tensors, the two matrices and the product last.

    Empty where numbers are among the arguments, or a tensor has no elements.
    """
    if node.kwargs or not all(isinstance(value, fx.Node) for value in node.args):
        return []
    tensors = [*tensors_in([value.meta["val"] for value in node.args]), node.meta["val"]]  # type: ignore[union-attr]
    return tensors if all(each.numel() for each in tensors) else []

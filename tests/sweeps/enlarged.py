"""Samples of torch's operator database, made larger: large, many small rows, long and thin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

ELEMENTS = (1 << 17, 1 << 13)
"""Elements that the largest tensor of a sample is to have; the second for operators that make far larger ones.

Operators whose time grows with the square of that, or faster, have the second only."""

MOST = 8
"""All tensors of a sample together have less than this many times the elements of the largest."""

RANK = 2
"""Dimensions that a tensor has at most which is no image."""

Chosen = Callable[[Tensor, Tensor, int], bool]
"""Whether a dimension of a tensor grows: from the sample's largest tensor, the tensor and the dimension."""


def _from_front(largest: Tensor, tensor: Tensor, dim: int) -> bool:
    return dim == 0 and tensor.shape[0] == largest.shape[0]


def _from_back(largest: Tensor, tensor: Tensor, dim: int) -> bool:
    return dim == tensor.dim() - 1 and tensor.shape[dim] == largest.shape[-1]


def _alike(last: int) -> Chosen:
    def chosen(largest: Tensor, tensor: Tensor, dim: int) -> bool:
        return tensor.shape[dim] == largest.shape[last]

    return chosen


def _only_largest(which: Callable[[int, int], bool]) -> Chosen:
    def chosen(largest: Tensor, tensor: Tensor, dim: int) -> bool:
        return tensor.shape == largest.shape and which(dim, tensor.dim())

    return chosen


def _batch_and_space(largest: Tensor, tensor: Tensor, dim: int) -> bool:
    return tensor.dim() == largest.dim() > 2 and tensor.shape == largest.shape and dim != 1


def _all(largest: Tensor, tensor: Tensor, dim: int) -> bool:
    return True


FORMS: dict[str, tuple[Chosen, ...]] = {
    "rows": (_from_front, _only_largest(lambda dim, rank: dim == 0), _alike(0)),
    "thin": (_from_back, _only_largest(lambda dim, rank: dim == rank - 1), _alike(-1)),
    "large": (_batch_and_space, _all, _only_largest(lambda dim, rank: True), _only_largest(lambda dim, rank: dim > 1)),
}
"""Form to the ways to get it, of which the first that the operator takes is used."""


def enlarged(arguments: Any, form: str, sizes: Sequence[int] = ELEMENTS) -> Iterator[Any]:
    """Yield ``arguments``, nested, with larger tensors in ``form``, one way after the other.

    Sizes are those of the largest tensor, or of the first if that is an image.

    Data are repeated, so that indices stay in range; the order of dimensions in memory stays. Numbers among the
    arguments that equal a size that grows follow it in a second attempt.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    if not can_be_enlarged(arguments):
        return
    largest = max(tensors, key=Tensor.numel)
    if tensors[0].dim() > RANK:
        largest = tensors[0]  # an image; a weight would have windows that nobody has
    for elements in sizes:
        for chosen in FORMS[form]:
            factor = _factor(largest, chosen, elements)
            together = sum(tensor.numel() * factor ** len(_dims(largest, tensor, chosen)) for tensor in tensors)
            for follow in (False, True) if factor > 1 and together < MOST * elements else ():
                yield _grown(arguments, largest, chosen, factor, follow=follow)


def can_be_enlarged(arguments: Any) -> bool:
    """Whether there are tensors among nested ``arguments``, all dense, and one of more than one element."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    return any(tensor.numel() > 1 for tensor in tensors) and all(tensor.layout is torch.strided for tensor in tensors)


def _dims(largest: Tensor, tensor: Tensor, chosen: Chosen) -> list[int]:
    grows = tensor.shape == largest.shape  # a size of 1 elsewhere is one that is broadcast
    return [dim for dim in range(tensor.dim()) if (grows or tensor.shape[dim] > 1) and chosen(largest, tensor, dim)]


def _factor(largest: Tensor, chosen: Chosen, elements: int) -> int:
    dims = len(_dims(largest, largest, chosen))
    return int((elements / largest.numel()) ** (1 / dims)) if dims else 1


def _grown(arguments: Any, largest: Tensor, chosen: Chosen, factor: int, *, follow: bool) -> Any:
    sizes = {largest.shape[dim] for dim in _dims(largest, largest, chosen)}
    copies: dict[int, Tensor] = {}

    def grow(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) not in copies:
                copies[id(leaf)] = _repeated(leaf, _dims(largest, leaf, chosen), factor)
            return copies[id(leaf)]
        grows = follow and isinstance(leaf, int) and not isinstance(leaf, bool) and leaf in sizes
        return leaf * factor if grows else leaf

    return pytree.tree_map(grow, arguments)


def _repeated(tensor: Tensor, dims: list[int], factor: int) -> Tensor:
    plain = tensor.detach()
    order = sorted(range(plain.dim()), key=lambda dim: -plain.stride(dim))
    times = [factor if dim in dims else 1 for dim in order]
    back = [order.index(dim) for dim in range(plain.dim())]
    return plain.permute(order).repeat(times).permute(back).requires_grad_(tensor.requires_grad)

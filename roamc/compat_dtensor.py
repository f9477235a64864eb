"""What torch keeps private about DTensors: the part of one that this rank holds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch


def is_dtensor(value: object) -> bool:
    """Whether ``value`` is a tensor of which every rank of a device mesh holds a part."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # where it is not imported, nobody has made one
    return module is not None and isinstance(value, module.DTensor)


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor that this rank holds, not followed by autograd; any other tensor as it is.

    The part of a DTensor is the same object at every call, until another is assigned to the DTensor's ``data``.
    """
    dtensor: Any = tensor
    part: torch.Tensor = dtensor._local_tensor if is_dtensor(tensor) else tensor
    return part


def with_part(like: torch.Tensor, part: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """Return a DTensor, a leaf of autograd, of the mesh, placements and geometry of DTensor ``like``.

    Args:
        like: a DTensor.
        part: what this rank holds of the new tensor; it has the shape, strides and dtype of the part of ``like``.
        requires_grad: whether the new tensor requires a gradient.
    """
    from torch.distributed.tensor import DTensor

    build: Any = DTensor
    model: Any = like
    whole: torch.Tensor = build(part, model._spec, requires_grad=requires_grad)
    return whole


def placed_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return DTensor ``tensor`` with the placements of DTensor ``like``; operators of a trace follow it."""
    dtensor: Any = tensor
    model: Any = like
    placed: torch.Tensor = dtensor.redistribute(model.device_mesh, model.placements)
    return placed


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a DTensor as a plain tensor, without gradient; another tensor as it is."""
    dtensor: Any = tensor
    whole: torch.Tensor = dtensor.detach().full_tensor() if is_dtensor(tensor) else tensor
    return whole


def placement_of(tensor: torch.Tensor) -> object:
    """Return a hashable key of (mesh, placements, shape and strides of this rank's part); None for a plain tensor."""
    if not is_dtensor(tensor):
        return None
    dtensor: Any = tensor
    part = part_of(tensor)
    return dtensor.device_mesh, dtensor.placements, tuple(part.shape), part.stride()


def split_groups(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the names of the groups of ranks among which the elements of a tensor are split, one for a mesh dimension.

    Groups whose ranks all hold the same part are left out, and so are those of one rank; empty for a plain tensor.
    """
    if not is_dtensor(tensor):
        return ()
    dtensor: Any = tensor
    mesh, placements = dtensor.device_mesh, dtensor.placements
    split = [dim for dim, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(dim) > 1]
    return tuple(str(mesh.get_group(dim).group_name) for dim in split)


def is_partial(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor that is a sum, or another reduction, of what the ranks of its mesh hold."""
    dtensor: Any = tensor
    return is_dtensor(tensor) and any(placement.is_partial() for placement in dtensor.placements)


def describe(tensor: torch.Tensor) -> str:
    """Return the placements of a DTensor in words, such as ``"(Shard(dim=0),) on a mesh of (2,)"``."""
    dtensor: Any = tensor
    sizes: Sequence[int] = tuple(dtensor.device_mesh.shape)
    return f"{tuple(dtensor.placements)} on a mesh of {sizes}"

"""Copies of tensors together with the whole storage that they are views of.

A reader that goes by offsets into the storage (``as_strided``) may read bytes that are no element of the tensor: in
front of it, between its elements or behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roamc.compat import with_bits
from roamc.runtime.arena import fill
from roamc.units import Bytes


@dataclass(frozen=True)
class Extent:
    """The range of bytes that counts as a tensor's storage, relative to the tensor.

    Attributes:
        before: bytes of the range in front of the tensor's first element.
        nbytes: bytes of the whole range.
    """

    before: Bytes
    nbytes: Bytes


def extent_of(tensor: Tensor) -> Extent:
    """Return the extent of the strided tensor ``tensor``, real or fake: all of its storage."""
    before = int(tensor.storage_offset()) * tensor.itemsize
    return Extent(before, int(tensor.untyped_storage().nbytes()))


def own(tensor: Tensor, extent: Extent | None = None) -> Tensor:
    """Return a copy of ``tensor``, with equal strides, in a new storage that is a copy of the old one.

    Args:
        tensor: a strided tensor.
        extent: the part of the storage to copy, where the tensor lies in a larger one such as an arena; None for all.
    """
    extent = extent or extent_of(tensor)
    return _within(_bytes(tensor, extent).clone().untyped_storage(), extent.before, tensor)


def together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the strided ``tensors``, in the same sequence, in copies of their storages.

    A storage that several tensors share is copied once, and their copies share it again.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in copies:
            copies[storage.data_ptr()] = storage.clone()
    return [_within(copies[t.untyped_storage().data_ptr()], extent_of(t).before, t) for t in tensors]


def fill_around(place: Tensor, tensor: Tensor, extent: Extent) -> None:
    """Copy all bytes of the storage of ``tensor`` to the bytes around ``place``, those of the elements included.

    Nothing is copied where the storage has no more bytes than the tensor's elements, or where ``tensor`` no longer has
    the extent ``extent``: a hook has kept it in another form, without its storage.

    Args:
        place: where the tensor goes; has as many bytes around it as ``extent`` says.
        tensor: a strided tensor.
        extent: the extent that was planned for ``tensor``.
    """
    if extent.nbytes > tensor.numel() * tensor.itemsize and extent_of(tensor) == extent:
        _bytes(place, extent).copy_(_bytes(tensor, extent))


def _within(storage: torch.UntypedStorage, before: Bytes, like: Tensor) -> Tensor:
    """Make a tensor with the shape, strides and dtype of ``like``, ``before`` bytes behind the start of ``storage``."""
    fresh = torch.empty(0, dtype=like.dtype, device=like.device)
    fresh.set_(storage, before // like.itemsize, like.shape, like.stride())
    return with_bits(fresh, conj=like.is_conj(), neg=like.is_neg())


def put(places: Sequence[Tensor], tensors: Sequence[Tensor], extents: Sequence[Extent]) -> None:
    """Copy each tensor into its place, and where the tensor still has its extent, the bytes around it as well.

    Args:
        places: where the tensors go, each of its tensor's shape.
        tensors: strided tensors, one for each place.
        extents: the extent that was planned for each tensor.
    """
    for place, tensor, extent in zip(places, tensors, extents, strict=True):
        fill_around(place, tensor, extent)
    for place, tensor in zip(places, tensors, strict=True):
        fill(place, tensor)


def _bytes(tensor: Tensor, extent: Extent) -> Tensor:
    """Return a uint8 tensor over the bytes that ``extent`` describes around ``tensor``."""
    start = tensor.storage_offset() * tensor.itemsize - extent.before
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (extent.nbytes,), (1,))

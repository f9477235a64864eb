"""Copies of tensors with all of the storage that they are views of.

A reader that goes by offsets into the storage (``as_strided``) may read what is no element of the tensor: what lies in
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
    """A tensor's storage as seen from the tensor.

    Attributes:
        before: bytes of the storage in front of the tensor's first element.
        nbytes: of the whole storage.
    """

    before: Bytes
    nbytes: Bytes


def extent_of(tensor: Tensor) -> Extent:
    """The extent of a strided tensor, real or fake."""
    before = int(tensor.storage_offset()) * tensor.itemsize
    return Extent(before, int(tensor.untyped_storage().nbytes()))


def own(tensor: Tensor, extent: Extent | None = None) -> Tensor:
    """The tensor in memory of its own, with a copy of the rest of its storage.

    Args:
        tensor: strided.
        extent: what counts as its storage, where it lies in a larger one.
    """
    extent = extent or extent_of(tensor)
    return _within(_bytes(tensor, extent).clone().untyped_storage(), extent.before, tensor)


def together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in copies of their storages, one of each storage."""
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in copies:
            copies[storage.data_ptr()] = storage.clone()
    return [_within(copies[t.untyped_storage().data_ptr()], extent_of(t).before, t) for t in tensors]


def fill_around(place: Tensor, tensor: Tensor, extent: Extent) -> None:
    """Copy what lies around ``tensor`` in its storage to around ``place``, elements included.

    Nothing happens where there is nothing around it, or where ``tensor`` is not what it was: somebody has kept it in
    another form, without its storage.
    """
    if extent.nbytes > tensor.numel() * tensor.itemsize and extent_of(tensor) == extent:
        _bytes(place, extent).copy_(_bytes(tensor, extent))


def _within(storage: torch.UntypedStorage, before: Bytes, like: Tensor) -> Tensor:
    fresh = torch.empty(0, dtype=like.dtype, device=like.device)
    fresh.set_(storage, before // like.itemsize, like.shape, like.stride())
    return with_bits(fresh, conj=like.is_conj(), neg=like.is_neg())


def put(places: Sequence[Tensor], tensors: Sequence[Tensor], extents: Sequence[Extent]) -> None:
    """Copy tensors to their places, with what lies around them where they still have it."""
    for place, tensor, extent in zip(places, tensors, extents, strict=True):
        fill_around(place, tensor, extent)
    for place, tensor in zip(places, tensors, strict=True):
        fill(place, tensor)


def _bytes(tensor: Tensor, extent: Extent) -> Tensor:
    """The bytes of the storage that a tensor with this extent lies in."""
    start = tensor.storage_offset() * tensor.itemsize - extent.before
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (extent.nbytes,), (1,))

"""Where live tensors lie in memory: which of them share it, and how many bytes those take together.

A trace gives each tensor of a batch a storage of its own; the caller may have passed one tensor twice, or two views.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch

from roamc.compat import identity
from roamc.compat_dtensor import part_of
from roamc.graph.storage_ids import StorageId, new_id
from roamc.units import Bytes


def sharing(tensors: Iterable[torch.Tensor], alone: Iterable[torch.Tensor] = ()) -> tuple[tuple[int, ...], ...]:
    """Return groups of positions in ``tensors``: those of a group have one storage, or storages that overlap.

    So have two tensors of one array of numpy. A group has at least two members; whether their elements overlap does not
    matter. Of a tensor of ``alone``, whose positions follow, the elements count instead of the storage.
    """
    memories = (*map(_memory, tensors), *map(extent, alone))
    pairs = sorted(filter(None, memories))
    starts, ends = zip(*pairs, strict=True) if pairs else ((), ())
    if not any(map(operator.gt, ends, starts[1:])):  # as in nearly all models, of which some have thousands
        return ()
    places = sorted((*memory, position) for position, memory in enumerate(memories) if memory is not None)
    groups: list[list[int]] = []
    furthest = 0
    for start, end, position in places:
        if groups and start < furthest:
            groups[-1].append(position)
        else:
            groups.append([position])
        furthest = max(furthest, end)
    return tuple(sorted(tuple(sorted(group)) for group in groups if len(group) > 1))


def memories(kept: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]) -> list[StorageId | None]:
    """Return the memory of each tensor of ``kept``, then of ``batch``, that shares it with another of these; else None.

    Args:
        kept: parameters and buffers, of which whole storages count.
        batch: tensors of a batch, of which the elements count: it may be a small part of a data set.

    Returns:
        The same id for tensors that share memory, with the bytes that they take together. Fake tensors, and those of
        classes whose storage is not their own, are taken to share none.
    """
    tensors = [*map(part_of, kept), *map(part_of, batch)]
    plain = [at for at, tensor in enumerate(tensors) if _has_storage(tensor)]
    ids: list[StorageId | None] = [None] * len(tensors)
    for group in sharing(tensors[at] for at in plain):
        members = [plain[position] for position in group]
        together = new_id(_union(_whole(tensors[at]) if at < len(kept) else extent(tensors[at]) for at in members))
        for at in members:
            ids[at] = together
    return ids


def _has_storage(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _union(extents: Iterable[tuple[int, int]]) -> Bytes:
    """The bytes that lie within one of ``extents`` or more."""
    total = furthest = 0
    for start, end in sorted(extents):
        total += max(0, end - max(start, furthest))
        furthest = max(furthest, end)
    return total


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's elements, and that behind its last; of a DTensor, of this rank's part."""
    if type(tensor) is not torch.Tensor:  # asked for each tensor of the optimizer's state at every step
        tensor = part_of(tensor)
    size, start = tensor.nbytes, tensor.data_ptr()
    if not size:
        return 0, 0
    if not tensor.is_contiguous():
        steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        size = (steps + 1) * tensor.element_size()
    return start, start + size


def _whole(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses at which a tensor's storage begins and ends; on the meta device it begins at 0."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _memory(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The addresses at which a tensor's storage begins and ends; None where it is empty.

    On the meta device, where a storage has no address, the number of the storage and the next one.
    """
    tensor = part_of(tensor)
    start, end = _whole(tensor)
    if start == end:
        return None
    return (start, end) if start else (identity(tensor), identity(tensor) + 1)

"""Which storage every value of a graph lies in, as data: numbers that capture gives once, and passes hand on.

``node.meta[STORAGES]`` holds one :class:`StorageId` for each tensor among a node's results. Two values share memory
exactly if their ids are equal; nothing behind capture compares addresses of fake tensors, which are read for shapes,
strides and dtypes alone. So the results of a second run may keep the fake tensors of the first: their ids are new.

The ids lie in the nodes' ``meta``, beside the fake tensors, and not in a table of :class:`~roamc.graph.TrainGraph`: a
copied, moved or renamed node keeps them, an erased node takes them along, and FX graphs without a train graph, such as
those of codecs and groups, have them too. A table of names would have to be carried through every such step.

In-place reuse is no matter of ids: ``TrainGraph.reuse`` has it, and :class:`roamc.graph.memory.SharedStorages` joins
the two. :mod:`roamc.graph.verify` checks that ids, fake tensors and the operator table agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import fx

from roamc.compat import identity
from roamc.errors import VerifyError
from roamc.graph.train_graph import tensors_of
from roamc.operators import ops
from roamc.units import Bytes

STORAGES = "roamc_storages"
"""Key in a node's ``meta``: a tuple with one :class:`StorageId` for each tensor of :func:`roamc.graph.tensors_of`."""

_numbers = itertools.count()


class StorageId(NamedTuple):
    """The identity of a storage: a base tensor and all views of it have the same id.

    Attributes:
        number: its own in the whole process. Only equality means something, and no plan depends on the number.
        nbytes: bytes of the whole storage, not of any view.
    """

    number: int
    nbytes: Bytes


def new_id(nbytes: Bytes) -> StorageId:
    """Return an id that no other storage has, for a storage of ``nbytes`` bytes."""
    return StorageId(next(_numbers), nbytes)


def number(graph: fx.Graph) -> None:
    """Give every value of ``graph`` the id of its storage, read off the addresses of the fake tensors.

    This is for graphs as torch has traced them. Earlier ids are replaced; nodes without tensors get an empty tuple.
    """
    by_address: dict[int, StorageId] = {}
    for node in graph.nodes:
        node.meta[STORAGES] = tuple(_id_at(tensor, by_address) for _, tensor in tensors_of(node))


def number_result(node: fx.Node) -> None:
    """Give the results of the new ``call_function`` node ``node`` their ids, by the operator table.

    A result lies in the storage of an argument that the operator makes views of, or writes, if its fake tensor does.
    Every other result gets a new id. The arguments have ids, and ``node.meta["val"]`` is there.
    """
    rule = ops.rule(node.target)
    bases = [node.args[position] for position in rule.view_of if position < len(node.args)]
    by_address: dict[int, StorageId] = {}
    for base in (*bases, *ops.mutated_arguments(node)):
        if isinstance(base, fx.Node):
            by_address.update((identity(tensor), storage) for _, tensor, storage in placed(base))
    node.meta[STORAGES] = tuple(_id_at(tensor, by_address) for _, tensor in tensors_of(node))


def _id_at(tensor: torch.Tensor, ids: dict[int, StorageId]) -> StorageId:
    """The id of a fake tensor's storage by its address; a new one is added to ``ids``, which maps address to id."""
    address = identity(tensor)
    if address not in ids:
        ids[address] = new_id(int(tensor.untyped_storage().nbytes()))
    return ids[address]


def ids_of(node: fx.Node) -> tuple[StorageId, ...]:
    """Return the ids of the storages of all tensors of ``node``, in the order of :func:`roamc.graph.tensors_of`.

    Raises:
        VerifyError: nobody gave ``node`` ids.
    """
    ids: tuple[StorageId, ...] = node.meta.get(STORAGES, ())
    if not ids and any(tensors_of(node)):
        raise VerifyError(f"{node.name} has no storage id")
    return ids


def id_of(node: fx.Node, position: int = 0) -> StorageId:
    """Return the id of the storage of result ``position`` of ``node``, as :func:`tensors_of` numbers results.

    Raises:
        StopIteration: that result is no tensor.
        VerifyError: nobody gave ``node`` ids.
    """
    return next(storage for at, _, storage in placed(node) if at == position)


def placed(node: fx.Node) -> Sequence[tuple[int, torch.Tensor, StorageId]]:
    """Return (position, fake tensor, id of its storage) for each result of ``node`` that is a tensor.

    Raises:
        VerifyError: nobody gave ``node`` ids.
    """
    value, ids = node.meta.get("val"), ids_of(node)
    if isinstance(value, torch.Tensor):
        return ((0, value, ids[0]),)
    return [(*result, storage) for result, storage in zip(tensors_of(node), ids, strict=True)] if ids else ()


def all_ids(nodes: Iterable[fx.Node | None]) -> set[StorageId]:
    """Return the ids of the storages of all tensors that ``nodes`` stand for; a None is skipped."""
    return {own for node in nodes if node is not None for own in node.meta.get(STORAGES) or ids_of(node)}


def renewed(ids: Sequence[StorageId]) -> tuple[StorageId, ...]:
    """Return new ids for the results of another run: equal to each other, and of as many bytes, where ``ids`` are."""
    again = {storage: new_id(storage.nbytes) for storage in dict.fromkeys(ids)}
    return tuple(again[storage] for storage in ids)


def addresses_of(node: fx.Node) -> set[int]:
    """Return the addresses of the storages of the strided fake tensors that ``node`` stands for.

    This is for capture, which moves values from one storage to another before they have ids.
    """
    return {identity(tensor) for _, tensor in tensors_of(node) if tensor.layout is torch.strided}


def addresses(nodes: Iterable[object]) -> set[int]:
    """Return :func:`addresses_of` all ``nodes`` together; what is no node is skipped."""
    return {address for node in nodes if isinstance(node, fx.Node) for address in addresses_of(node)}


def lie_in(base: torch.Tensor, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all ``tensors``, which an operator has just made of the fake tensor ``base``, are views of it."""
    return all(identity(tensor) == identity(base) for tensor in tensors)

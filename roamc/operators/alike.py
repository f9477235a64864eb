"""Which groups of operators are alike: those of a model's layers differ in names alone, and one is judged for all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import fx

from roamc.graph import tensors_of
from roamc.graph.storage_ids import STORAGES, StorageId
from roamc.operators import ops


class Alike:
    """Makes keys of groups of operators; the keys of two groups are equal only if they work alike.

    A key holds what the operators call, with which arguments, on tensors of which geometry in how many storages, and
    which members are results; no names, and nothing of what stands outside the group.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._calls: dict[fx.Node, tuple[tuple[Any, ...], int]] = {}
        self._lies: dict[fx.Node, tuple[object, int]] = {}

    def key(self, members: Sequence[fx.Node], results: Sequence[fx.Node] = ()) -> Hashable:
        """Return the key of a group.

        Args:
            members: its nodes in graph order, views between members included.
            results: the members whose results are the group's, in graph order.
        """
        place: dict[fx.Node, int] = {}
        calls: list[tuple[int, ...]] = []
        for node in members:
            read = [place.setdefault(argument, len(place)) for argument in node.all_input_nodes]
            calls.append((self.call(node), *read, place.setdefault(node, len(place))))
        storages: dict[StorageId, int] = {}
        seeds = {node.args[0] for node in members if ops.rule(node.target).numbered}
        lies = tuple(self._geometry(node, anywhere=node in seeds) for node in place)
        owned = tuple(storages.setdefault(own, len(storages)) for node in place for own in node.meta.get(STORAGES, ()))
        return tuple(calls), lies, owned, tuple(place[node] for node in results)

    def call(self, node: fx.Node) -> int:
        """Return the number of what ``node`` calls: of operator and arguments, whichever nodes these are."""
        cached = self._calls.get(node)
        if cached is not None and cached[0] == (node.args, node.kwargs):
            return cached[1]
        place = {argument: f"%{at}" for at, argument in enumerate(node.all_input_nodes)}
        arguments = repr(fx.map_arg((node.args, node.kwargs), place.__getitem__))
        number = self._number((node.op, node.target, arguments))
        self._calls[node] = (node.args, node.kwargs), number
        return number

    def _geometry(self, node: fx.Node, *, anywhere: bool = False) -> int:
        """The number of how the tensors of ``node`` lie in memory, or of its value if that is none.

        Where a seed begins in its storage makes no difference: it is read ``anywhere``.
        """
        value = node.meta.get("val")
        cached = self._lies.get(node)
        if cached is not None and cached[0] is value:
            return cached[1]
        lies = tuple(
            (at, str(t.device), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg()) for at, t in tensors_of(node)
        )
        begins = () if anywhere else tuple(t.storage_offset() for _, t in tensors_of(node))
        number = self._number((lies, begins) if lies else repr(value))
        self._lies[node] = value, number
        return number

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

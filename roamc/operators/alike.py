"""Which groups of operators are alike: those of a model's layers differ in names alone, and one is judged for all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import fx

from roamc.graph import tensors_of
from roamc.graph.storage_ids import STORAGES, StorageId
from roamc.operators import ops


@dataclass(frozen=True)
class _Call:
    """What is noted of a node's call.

    Attributes:
        args: its positional arguments; others, if the call was changed since.
        kwargs: its keyword arguments, likewise.
        number: of operator and arguments, whichever nodes these are.
        read: the nodes among its arguments.
        seed: the argument that is a seed, which is read wherever it begins; None if there is none.
    """

    args: object
    kwargs: object
    number: int
    read: tuple[fx.Node, ...]
    seed: object


class Alike:
    """Makes keys of groups of operators; the keys of two groups are equal only if they work alike.

    A key holds what the operators call, with which arguments, on tensors of which geometry in how many storages, and
    which members are results; no names, and nothing of what stands outside the group.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._calls: dict[fx.Node, _Call] = {}
        self._lies: dict[fx.Node, tuple[object, int]] = {}

    def key(self, members: Sequence[fx.Node], results: Sequence[fx.Node] = ()) -> int:
        """Return the key of a group.

        Args:
            members: its nodes in graph order, views between members included.
            results: the members whose results are the group's, in graph order.
        """
        place: dict[fx.Node, int] = {}
        calls: list[tuple[int, ...]] = []
        seeds = set()
        for node in members:
            call = self._call(node)
            read = [place.setdefault(argument, len(place)) for argument in call.read]
            calls.append((call.number, *read, place.setdefault(node, len(place))))
            if call.seed is not None:
                seeds.add(call.seed)
        storages: dict[StorageId, int] = {}
        lies, owned = [], []
        for node in place:
            meta, cached = node.meta, self._lies.get(node)
            valid = cached is not None and cached[0] is meta.get("val")
            lies.append(cached[1] if valid else self._geometry(node, anywhere=node in seeds))  # type: ignore[index]
            owned += [storages.setdefault(own, len(storages)) for own in meta.get(STORAGES, ())]
        return self._number((tuple(calls), tuple(lies), tuple(owned), tuple(place[node] for node in results)))

    def call(self, node: fx.Node) -> int:
        """Return the number of what ``node`` calls: of operator and arguments, whichever nodes these are."""
        return self._call(node).number

    def _call(self, node: fx.Node) -> _Call:
        call, args, kwargs = self._calls.get(node), node.args, node.kwargs
        if call is None or call.args is not args or call.kwargs is not kwargs:
            read = tuple(node.all_input_nodes)
            place = {argument: f"%{at}" for at, argument in enumerate(read)}
            number = self._number((node.op, node.target, repr(fx.map_arg((args, kwargs), place.__getitem__))))
            seed = args[0] if ops.rule(node.target).numbered else None
            call = self._calls[node] = _Call(args, kwargs, number, read, seed)
        return call

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

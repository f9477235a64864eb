"""Value numbering: numbers stand for values, equal numbers for the same bits; :mod:`roamc.graph.value_flow` uses them.

A *key* is a tuple that says how a value comes about: first its kind, such as "call" or "read", then literals and
numbers. The *content* of a storage is the number of all bytes in it; a *geometry* is the number of shape, strides,
offset, dtype and lazy bits.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from roamc.compat import OpOverload, fake_mode_of
from roamc.graph.memory import fills_storage, is_dense
from roamc.graph.storage_ids import STORAGES, StorageId, lie_in, placed
from roamc.graph.train_graph import Encoding
from roamc.graph.update_judge import Updates
from roamc.operators import ops
from roamc.operators.schemas import relative

Number = int
"""Stands for a value, an operator, a geometry or a state of a generator."""

Key = tuple[Any, ...]
"""What a number was given for: its kind, then what it is made of."""

NOWHERE = StorageId(-1, 0)
"""The storage of no value: of a view that was made to see where it lies in its base."""


class Numbers:
    """Gives numbers to keys, the same to equal keys; a key is a tuple that says how a value comes about.

    Graphs can be compared only if one object numbers them all.
    """

    def __init__(self) -> None:
        self._known: dict[Key, Number] = {}
        self._keys: list[Key] = []
        self._tensors: dict[int, tuple[object, object, tuple[Place, ...]]] = {}
        self._targets: dict[int, Target] = {}
        self._views: dict[Key, tuple[Place, ...]] = {}
        self._born: dict[Number, Number] = {}
        self._apart: dict[Number, tuple[Number, Number, int]] = {}

    def of(self, *key: Any) -> Number:
        """Return the number of the tuple ``key``, a new one if the key is new.

        The first part of ``key`` is its kind, such as "call"; all parts are hashable.
        """
        number = self._known.setdefault(key, len(self._keys))
        if number == len(self._keys):
            self._keys.append(key)
        return number

    def key(self, number: Number) -> Key:
        """Return the key that :meth:`of` gave ``number`` to."""
        return self._keys[number]

    def target(self, target: Any) -> Target:
        """Return what is known of the operator ``target``, looked up by identity: hashing an operator is slow."""
        cached = self._targets.get(id(target))
        if cached is None:
            rule = ops.rule(target)
            cached = Target(target, self.of("target", target), rule, ops.is_view(target), _twin(target, rule))
            self._targets[id(target)] = cached
        return cached

    def in_rows(self, shape: Sequence[int], dtype: torch.dtype) -> Number:
        """Return the geometry of a contiguous tensor of ``shape`` and ``dtype`` that begins its storage."""
        strides = [math.prod(map(int, shape[at + 1 :])) for at in range(len(shape))]
        return self.of("place", tuple(map(int, shape)), tuple(strides), 0, dtype, False, False)

    def places(self, node: fx.Node) -> tuple[Place, ...]:
        """Return where each result of ``node`` that is a tensor lies, in the sequence of the results."""
        value, ids = node.meta.get("val"), node.meta.get(STORAGES)
        cached = self._tensors.get(id(ids))
        if cached is None or cached[0] is not ids or cached[1] is not value:
            cached = self._tensors[id(ids)] = ids, value, tuple(self._place(*one) for one in placed(node))
        return cached[2]

    def picked(self, node: fx.Node) -> tuple[Place, ...]:
        """Return the place of the result that ``node``, a ``getitem``, picks; empty if that is no tensor."""
        source, number = node.args
        if not isinstance(source, fx.Node) or not isinstance(number, int):
            return ()
        places = self.places(source)
        at = bisect.bisect_left(places, number, key=lambda place: place.position)
        return places[at : at + 1] if at < len(places) and places[at].position == number else ()

    def lies(self, key: Key, base: torch.Tensor, make: Callable[[], Any]) -> tuple[Place, ...]:
        """Return the places of the views that ``make`` gives.

        Args:
            key: the same for views of the same geometry; ``make`` is called only for the first of them.
            base: the fake tensor that the views are of.
            make: makes the fake views, one or a list; it runs under the fake mode of ``base``.

        Returns:
            The places, with :data:`NOWHERE` for ``storage``. Empty if a result does not share
            the storage of ``base``, so that it is no view.
        """
        places = self._views.get(key)
        if places is None:
            # A codec's operators were traced under a fake mode of their own, which need not be the active one.
            with fake_mode_of(base) or contextlib.nullcontext(), torch.no_grad():
                result = make()
            many = result if isinstance(result, list | tuple) else [result]
            # Fake views of a tensor without elements may have storages of their own.
            views = not base.numel() or lie_in(base, many)
            places = tuple(self._place(at, tensor, NOWHERE) for at, tensor in enumerate(many)) if views else ()
            self._views[key] = places
        return places

    def born(self, content: Number, geometry: Number) -> None:
        """Note that an operator made a tensor in a new storage.

        Args:
            content: number of all bytes of the storage.
            geometry: number of the tensor's shape, strides, offset, dtype and lazy bits.
        """
        self._born.setdefault(content, geometry)

    def padded(self, content: Number, geometry: Number, pitch: int) -> Number:
        """Return the number of the bytes of a storage that has the rows of another one further apart.

        Args:
            content: number of all bytes of the other storage.
            geometry: number of the tensor that fills the other storage, see :meth:`in_rows`.
            pitch: elements from the first of a row to the first of the next.
        """
        number = self.of("padded", content, geometry, pitch)
        self._apart[number] = content, geometry, pitch
        return number

    def has_all_rows(self, content: Number, geometry: Number) -> bool:
        """Whether a tensor has each element of all rows of a storage once; arguments as for :meth:`unpadded`."""
        moved, lies = self.unpadded(content, geometry)
        if moved == content:
            return False
        (_, shape, strides, *_), (_, whole, *_) = self.key(lies), self.key(self._apart[content][1])
        return math.prod(shape) == math.prod(whole) and is_dense(torch.empty_strided(shape, strides, device="meta"))

    def unpadded(self, content: Number, geometry: Number) -> tuple[Number, Number]:
        """Return content and geometry that have the same elements in rows that lie one behind the other.

        Args:
            content: number of all bytes of a storage.
            geometry: number of a tensor's shape, strides, offset, dtype and lazy bits.

        Returns:
            Both as they are where rows do not lie apart, or the tensor reaches from one into what is behind it, or has
            elements of another size than they.
        """
        if content not in self._apart:
            return content, geometry
        inner, rows, pitch = self._apart[content]
        _, (*_, columns), _, _, dtype, *_ = self.key(rows)
        kind, shape, strides, offset, *bits = self.key(geometry)
        if bits[0].itemsize != dtype.itemsize:
            return content, geometry
        within = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True) if stride % pitch]
        if any(stride > pitch for stride in strides if stride % pitch) or offset % pitch + sum(within) >= columns:
            return content, geometry
        moved = tuple(stride // pitch * columns if stride % pitch == 0 else stride for stride in strides)
        return inner, self.of(kind, shape, moved, offset // pitch * columns + offset % pitch, *bits)

    def elements(self, content: Number, geometry: Number) -> Number:
        """Return the number of a tensor's elements, the same wherever they lie.

        For a tensor in the storage that its operator made for it, with the same geometry, it is ``content``.

        Args:
            content: number of all bytes of the tensor's storage.
            geometry: number of the tensor's shape, strides, offset, dtype and lazy bits.
        """
        content, geometry = self.unpadded(content, geometry)
        return content if self._born.get(content) == geometry else self.of("elements", content, geometry)

    def patched(self, content: Number, part: Place, elements: Number) -> Number:
        """Return the number of the content that a storage has after a write to a part of it.

        Args:
            content: number of the storage's content before the write.
            part: the place that is written.
            elements: what is written there: the value number of the elements, not their count; see :meth:`elements`.
        """
        geometry, elements = self._innermost(content, part.geometry, elements)
        if elements == self.elements(content, geometry):
            return content
        if geometry != part.geometry or not part.whole:
            return self.of("patched", content, geometry, elements)
        kind, *fields = self.key(elements)
        if kind == "elements" and fields[1] == geometry:
            return int(fields[0])
        if kind == "elements" or self._born.get(elements, geometry) != geometry:  # the same elements, other bytes
            elements = self.of("filled", geometry, elements)
        self.born(elements, geometry)
        return elements

    def patched_part(self, content: Number, base: Place, part: Place, elements: Number) -> Number:
        """Return the number of the elements of ``base`` with ``elements`` written to a part of them.

        Args:
            content: of the storage that ``base`` lies in.
            base: a part of that storage, which is copied.
            part: what is written, a part of ``base``, as it lies in that storage.
            elements: what is written there, as for :meth:`patched`.
        """
        return self.of("patched part", content, base.geometry, *self._innermost(content, part.geometry, elements))

    def _innermost(self, content: Number, geometry: Number, elements: Number) -> tuple[Number, Number]:
        """Geometry and elements of the innermost write: ``elements`` may be a copy of the part with a part patched."""
        kind, *fields = self.key(elements)
        inside = kind == "patched part" and fields[:2] == [content, geometry]
        return (fields[2], fields[3]) if inside else (geometry, elements)

    def _place(self, position: int, tensor: torch.Tensor, storage: StorageId) -> Place:
        shape = tuple(map(int, tensor.shape))
        lies = (shape, tuple(map(int, tensor.stride())), int(tensor.storage_offset()))
        bits = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        geometry = self.of("place", *lies, *bits)
        return Place(position, storage, geometry, self.of("shape", shape), fills_storage(tensor))


def _twin(target: Any, rule: ops.OpRule) -> OpOverload | None:
    """The operator that returns as a new value what ``target`` writes over its first argument; None without one."""
    return relative(target, lambda name: name.removesuffix("_")) if rule.mutates == (0,) else None


@dataclass(frozen=True)
class Place:
    """Where one tensor lies.

    Attributes:
        position: among the results of its node.
        storage: id of its storage.
        geometry: number of its shape, strides, offset, dtype and lazy bits.
        shape: number of its shape.
        whole: whether every byte of the storage belongs to exactly one element of the tensor.
    """

    position: int
    storage: StorageId
    geometry: Number
    shape: Number
    whole: bool


@dataclass(frozen=True)
class Target:
    """What the numbering of values knows of an operator.

    Attributes:
        target: the operator.
        number: stands for the operator in the numbers of its results; equal for equal operators of one numbering alone.
        rule: what the operator table says of it.
        is_view: whether a call only makes views, or picks one result of several.
        twin: the operator that returns as a new value what this one writes over its first argument; None if there is
            none.
    """

    target: Any
    number: Number
    rule: ops.OpRule
    is_view: bool
    twin: OpOverload | None


@dataclass(frozen=True)
class Flow:
    """The values of one graph, as numbers.

    Attributes:
        numbers: gave the numbers.
        operators: name of an operator to the number of its call.
        effects: (number, name) of each operator with an effect other than results and writes, in graph order.
        finals: what the step leaves behind to its number: outputs, tensors of the caller's that are written, and the
            state of the random generator. The keys are words for a message.
        makers: number to the name of the first node of this graph that has it.
        writers: content of a storage to the name of the first operator of this graph that has written it in place.
        again: group of ranks to the number of its collectives that run again.
        updates: when gradients are there, and when updates begin.
        lossy: reads of what codecs with an error have decoded, see :class:`roamc.graph.value_walk.Walk`.
    """

    numbers: Numbers = field(repr=False)
    operators: Mapping[str, Number]
    effects: tuple[tuple[Number, str], ...]
    finals: Mapping[str, Number]
    makers: Mapping[Number, str]
    writers: Mapping[Number, str]
    again: Counter[object]
    updates: Updates
    lossy: tuple[tuple[fx.Node, fx.Node, Encoding], ...] = ()

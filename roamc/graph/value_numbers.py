"""Numbers in the place of values: equal numbers are the same bits. :mod:`roamc.graph.value_flow` judges with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from roamc.compat import OpOverload, fake_mode_of, identity
from roamc.graph.memory import fills_storage
from roamc.graph.train_graph import tensors_of
from roamc.operators import ops
from roamc.operators.schemas import relative

Number = int
Key = tuple[Any, ...]


class Numbers:
    """Numbers of values: equal for equal keys. One object for all graphs that are to be compared."""

    def __init__(self) -> None:
        self._known: dict[Key, Number] = {}
        self._keys: list[Key] = []
        self._tensors: dict[int, tuple[object, tuple[Place, ...]]] = {}
        self._targets: dict[int, Target] = {}
        self._views: dict[Key, tuple[Place, ...]] = {}
        self._born: dict[Number, Number] = {}

    def of(self, *key: Any) -> Number:
        """The number of ``key``, whose first part says what it is."""
        number = self._known.setdefault(key, len(self._keys))
        if number == len(self._keys):
            self._keys.append(key)
        return number

    def key(self, number: Number) -> Key:
        """What has this number."""
        return self._keys[number]

    def target(self, target: Any) -> Target:
        """What is known of an operator, which is asked for by identity: hashing one is slow."""
        known = self._targets.get(id(target))
        if known is None:
            rule = ops.rule(target)
            known = Target(target, self.of("target", target), rule, ops.is_view(target), _twin(target, rule))
            self._targets[id(target)] = known
        return known

    def places(self, node: fx.Node) -> tuple[Place, ...]:
        """Where the tensors that ``node`` stands for lie."""
        value = node.meta.get("val")
        known = self._tensors.get(id(value))
        if known is None or known[0] is not value:
            known = self._tensors[id(value)] = value, tuple(self._place(at, t) for at, t in tensors_of(node))
        return known[1]

    def lies(self, key: Key, base: torch.Tensor, make: Callable[[], Any]) -> tuple[Place, ...]:
        """Where the views lie that ``make`` gives, called the first time that views with this ``key`` are asked for.

        Their storage means nothing later: it is that of the first. None of them if they share none with ``base``.
        """
        known = self._views.get(key)
        if known is None:
            # A codec's operators were traced under a fake mode of their own, which need not be the active one.
            with fake_mode_of(base) or contextlib.nullcontext(), torch.no_grad():
                made = make()
            many = made if isinstance(made, list | tuple) else [made]
            known = tuple(self._place(at, tensor) for at, tensor in enumerate(many))
            # Fake views of a tensor without elements may have storages of their own.
            if base.numel() and any(place.storage != identity(base) for place in known):
                known = ()
            self._views[key] = known
        return known

    def born(self, content: Number, geometry: Number) -> None:
        """Note that ``content`` is what an operator gives that lies so, and fills its storage."""
        self._born.setdefault(content, geometry)

    def elements(self, content: Number, geometry: Number) -> Number:
        """The elements of a tensor, wherever they may lie: of one that fills its storage, the content of that."""
        return content if self._born.get(content) == geometry else self.of("elements", content, geometry)

    def patched(self, content: Number, part: Place, elements: Number) -> Number:
        """What is in a storage when ``elements`` have been written to a ``part`` of it."""
        geometry, elements = self._innermost(content, part.geometry, elements)
        if elements == self.elements(content, geometry):
            return content
        if geometry != part.geometry or not part.whole:
            return self.of("patched", content, geometry, elements)
        kind, *said = self.key(elements)
        if kind == "elements" and said[1] == geometry:
            return int(said[0])
        if kind == "elements" or self._born.get(elements, geometry) != geometry:  # the same elements, other bytes
            elements = self.of("filled", geometry, elements)
        self.born(elements, geometry)
        return elements

    def patched_part(self, content: Number, base: Place, part: Place, elements: Number) -> Number:
        """A copy of ``base``, a part of a storage, with ``elements`` written to ``part`` of that."""
        return self.of("patched part", content, base.geometry, *self._innermost(content, part.geometry, elements))

    def _innermost(self, content: Number, geometry: Number, elements: Number) -> tuple[Number, Number]:
        """Where what is written differs from what is there: ``elements`` may be a copy of the part, itself patched."""
        kind, *said = self.key(elements)
        inside = kind == "patched part" and said[:2] == [content, geometry]
        return (said[2], said[3]) if inside else (geometry, elements)

    def _place(self, position: int, tensor: torch.Tensor) -> Place:
        shape = tuple(map(int, tensor.shape))
        lies = (shape, tuple(map(int, tensor.stride())), int(tensor.storage_offset()))
        bits = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        geometry = self.of("place", *lies, *bits)
        return Place(position, identity(tensor), geometry, self.of("shape", shape), fills_storage(tensor))


def _twin(target: Any, rule: ops.OpRule) -> OpOverload | None:
    """The operator that makes what ``target`` writes over its first argument; None if there is none."""
    return relative(target, lambda name: name.removesuffix("_")) if rule.mutates == (0,) else None


@dataclass(frozen=True)
class Place:
    """One tensor: position among the results of its node, storage, number of its geometry, number of its shape, whether
    it fills its storage."""

    position: int
    storage: int
    geometry: Number
    shape: Number
    whole: bool


@dataclass(frozen=True)
class Target:
    """An operator, its number, its row of the operator table, whether it makes views alone, and the operator that makes
    what it writes over its first argument, if there is one."""

    target: Any
    number: Number
    rule: ops.OpRule
    is_view: bool
    twin: OpOverload | None


@dataclass(frozen=True)
class Flow:
    """The values of one graph, as numbers.

    Attributes:
        numbers: what they stand for.
        operators: operator to its number.
        effects: numbers of what has an effect beside results and writes, in order.
        finals: what the step leaves behind, under words for a message, to its number: outputs, caller's tensors.
        makers: number to the first operator of this graph that has it.
        writers: number of what lies in a storage to the first operator of this graph that has written it in place.
    """

    numbers: Numbers = field(repr=False)
    operators: Mapping[str, Number]
    effects: tuple[tuple[Number, str], ...]
    finals: Mapping[str, Number]
    makers: Mapping[Number, str]
    writers: Mapping[Number, str]

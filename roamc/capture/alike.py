"""Layers of a model that differ in nothing but the values of their parameters and buffers, and in numbers of theirs.

Only layers are compared whose code is torch's, transformers' or roamc's own: what others read and change besides their
attributes, such as a list of auxiliary losses that all have, no comparison shows.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from roamc.capture import python_keys
from roamc.capture.tensor_parallel import Calls

MIN_LAYERS = 3
"""Smallest group of layers; fewer are not worth a trace of their own."""

PLAIN = (*python_keys.PLAIN, torch.Size, torch.layout)
"""Types of attributes that are alike if they are equal; others are alike if they are the same object."""

TRUSTED = ("torch", "transformers", "roamc")
"""Packages whose modules go by their arguments, attributes and torch's settings alone, and change no others."""

_HELD = ("_parameters", "_buffers", "_modules")


class NumberReadError(Exception):
    """A layer reads a whole number that differs among layers which are alike otherwise, such as its index."""


@dataclass(frozen=True)
class Group:
    """Layers that are alike.

    Attributes:
        layers: the layers.
        numbers: attributes in which they differ, whole numbers such as which layer each is: the place of a module among
            ``layer.modules()``, and the attribute's name. The module's class has no such attribute.
    """

    layers: Sequence[nn.Module]
    numbers: Sequence[tuple[int, str]]

    @contextlib.contextmanager
    def without_numbers(self, layer: nn.Module) -> Iterator[None]:
        """Within this context, inside of the trace, ``layer`` has none of ``numbers``.

        Raises:
            NumberReadError: in the line that reads one, even with a default.
        """
        parts = list(layer.modules())
        hidden = {(id(parts[place]), name) for place, name in self.numbers}
        values = [(vars(parts[place]), name, vars(parts[place]).pop(name)) for place, name in self.numbers]
        get = nn.Module.__getattr__

        def read(module: nn.Module, name: str) -> Any:
            if (id(module), name) in hidden:
                raise NumberReadError(f"{type(module).__name__}.{name} differs")
            return get(module, name)

        try:
            with mock.patch.object(nn.Module, "__getattr__", read):
                yield
        finally:
            for attributes, name, value in values:
                attributes.setdefault(name, value)

    def key_of(self, layer: nn.Module) -> Hashable:
        """Return what tells whether two of ``layers`` are alike at this moment; a step may change settings."""
        numbers = set(self.numbers)
        others = [
            (place, name, value)
            for place, part in enumerate(layer.modules())
            for name, value in vars(part).items()
            if type(value) is int and (place, name) not in numbers
        ]
        return _key_of(layer, besides=("forward",)), tuple(others)


def groups_of(model: nn.Module) -> list[Group]:
    """Return the groups of layers that are alike: children of one module, with children of their own.

    They have the same classes, all of :data:`TRUSTED` packages, the same settings, and geometries of parameters and
    buffers, which no other module has. Layers inside of such a layer are in no group. Attributes count as settings
    unless they are empty containers, or whole numbers.
    """
    groups: list[Group] = []
    holders = _holders(model)
    waiting = [model]
    for parent in waiting:
        by_key: dict[Hashable, list[nn.Module]] = {}
        for child in dict.fromkeys(parent.children()):
            if any(child.children()):
                by_key.setdefault(_key_of(child), []).append(child)
        alike = [layers for layers in by_key.values() if _are_group(layers, holders)]
        groups += [Group(layers, _numbers(layers)) for layers in alike]
        inside = {id(layer) for layers in alike for layer in layers}
        waiting += [child for child in parent.children() if id(child) not in inside]
    return groups


def geometry(tensor: torch.Tensor | None) -> Hashable:
    """Return what tensors have in common that are alike, but for their values; None for none."""
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` begins where its memory does, and is not lazily conjugated or negated."""
    return not (tensor.storage_offset() or tensor.is_conj() or tensor.is_neg())


def _holders(module: nn.Module) -> Counter[int]:
    """How many modules hold each parameter and buffer, by its identity."""
    parts = module.modules()
    return Counter(
        id(x) for part in parts for x in (*part._parameters.values(), *part._buffers.values()) if x is not None
    )


def _are_group(layers: Sequence[nn.Module], holders: Counter[int]) -> bool:
    """Whether layers that are alike are enough, trusted and by themselves, and differ in no number of their class.

    If such a number is taken from a layer, that of the class is read, and nobody notices.
    """
    first = layers[0]
    trusted = all(type(part).__module__.split(".")[0] in TRUSTED for part in first.modules())
    if len(layers) < MIN_LAYERS or not trusted:
        return False
    apart = all(holders[tensor] == count for layer in layers for tensor, count in _holders(layer).items())
    parts = list(first.modules())
    return apart and not any(hasattr(type(parts[place]), name) for place, name in _numbers(layers))


def _numbers(layers: Sequence[nn.Module]) -> list[tuple[int, str]]:
    """The whole numbers that differ among ``layers``, which are alike otherwise."""
    parts = [list(layer.modules()) for layer in layers]
    return [
        (place, name)
        for place, same in enumerate(zip(*parts, strict=True))
        for name, value in vars(same[0]).items()
        if type(value) is int and len({vars(part)[name] for part in same}) > 1
    ]


def _key_of(layer: nn.Module, besides: Sequence[str] = ()) -> Hashable:
    """What layers have in common that are alike; attributes of the layer itself named ``besides`` do not count."""
    names = [name for name in vars(layer) if name not in (*_HELD, *besides)]
    settings = tuple((name, _setting(vars(layer)[name])) for name in names)
    tensors = tuple((name, geometry(x), _hooks(x)) for name, x in (*layer._parameters.items(), *layer._buffers.items()))
    children = tuple((name, child and _key_of(child)) for name, child in layer._modules.items())
    distinct = (
        name for named in (layer.named_modules(), layer.named_parameters(), layer.named_buffers()) for name, _ in named
    )
    return type(layer), settings, tensors, children, tuple(distinct)


def _setting(value: Any) -> Hashable:
    if type(value) is int or isinstance(value, Calls) or (isinstance(value, dict | set | list) and not value):
        return type(value).__qualname__
    if type(value) in PLAIN:
        return python_keys.of_plain(value)
    if isinstance(value, tuple):
        return type(value), tuple(python_keys.of_plain(item) if type(item) is int else _setting(item) for item in value)
    return id(value)


def _hooks(tensor: torch.Tensor | None) -> Hashable:
    """Nothing, or what no other tensor has: its hooks run where backward reaches it, and not where the layer does."""
    return () if tensor is None or not tensor._backward_hooks else id(tensor)

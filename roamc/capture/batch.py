"""The batch of a training step: taken apart into tensors and other values, described, and put together again.

torch's pytree opens lists, tuples, dicts, named tuples and what others have registered with it. These it takes for one
value, and we open them:

    dataclasses; collections.UserDict and its heirs, such as a tokenizer's BatchEncoding; heirs of dict
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from roamc import compat
from roamc.capture import python_keys, python_names
from roamc.compat_dtensor import is_dtensor, placement_of
from roamc.errors import CaptureError


@dataclass(frozen=True)
class Nest:
    """How a batch was taken apart.

    Attributes:
        spec: torch's pytree description of lists, tuples and dicts.
        opened: for each leaf of ``spec``, None where it is a leaf of the batch; where it is a container that torch does
            not open, its class and how its content was taken apart.
    """

    spec: Any
    opened: tuple[tuple[type, Nest] | None, ...]

    def key(self, seen: python_keys.Seen) -> tuple[object, ...]:
        """Return a hashable key, the same for batches of the same containers, keys and fields, whatever the leaves.

        Args:
            seen: what the step's key has met; gets the classes of containers, whose methods the step may call.
        """
        inside = (part and (_of_class(part[0], seen), part[1].key(seen)) for part in self.opened)
        return _of_spec(self.spec, seen), tuple(inside)


def take_apart(tree: Any) -> tuple[list[Any], Nest]:
    """Return the leaves of ``tree``, tensors and other values, and the nest that :func:`put_together` takes.

    Lists, tuples, dicts, other classes that torch's pytree knows, dataclasses, and heirs of dict and UserDict are
    opened, at any depth.
    """
    outer, spec = compat.flatten(tree)
    leaves: list[Any] = []
    opened: list[tuple[type, Nest] | None] = []
    for value in outer:
        container = _container(value)
        if container is None:
            leaves.append(value)
            opened.append(None)
        else:
            inside, nest = take_apart(container.fields(value))
            leaves += inside
            opened.append((type(value), nest))
    return leaves, Nest(spec, tuple(opened))


def _of_spec(spec: Any, seen: python_keys.Seen) -> object:
    """Return a hashable key of torch's description of a nest; None for a leaf."""
    kind, context, children = compat.parts_of(spec)
    if kind is None:
        return None
    return _of_class(kind, seen), _of_context(context, seen), tuple(_of_spec(child, seen) for child in children)


def _of_context(context: Any, seen: python_keys.Seen) -> object:
    """Return a hashable key of what a container has beside its items: the keys of a dict, the class of a named tuple.

    Neither ``repr`` nor ``==`` is asked: those of another key or class may be the same.
    """
    if isinstance(context, type):
        return _of_class(context, seen)
    if type(context) in (list, tuple):
        return type(context), tuple(_of_context(item, seen) for item in context)
    return python_keys.of_argument(context, seen)


def _of_class(kind: type, seen: python_keys.Seen) -> object:
    seen.note(kind)
    return python_keys.Same(kind)


def put_together(leaves: Sequence[Any], nest: Nest) -> Any:
    """Return a tree like the one that :func:`take_apart` gave ``nest`` for, with ``leaves`` in the same order.

    Dataclasses and heirs of dict are made without a call of their ``__init__``.
    """
    return _built(iter(leaves), nest)


def _built(leaves: Iterator[Any], nest: Nest) -> Any:
    outer = []
    for part in nest.opened:
        if part is None:
            outer.append(next(leaves))
        else:
            kind, inside = part
            outer.append(_CONTAINERS[_row(kind)].make(kind, _built(leaves, inside)))
    return compat.unflatten(outer, nest.spec)


def tensors_in(tree: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that :func:`take_apart` finds in ``tree``, each behind what takes it out: ``"['logits']"``."""
    tensors: list[tuple[str, torch.Tensor]] = []
    for path, leaf in compat.leaves_with_paths(tree):
        container = _container(leaf)
        if isinstance(leaf, torch.Tensor):
            tensors.append((path, leaf))
        elif isinstance(leaf, Mapping):
            tensors += [(f"{path}[{key!r}]{rest}", each) for key in leaf for rest, each in tensors_in(leaf[key])]
        elif container is not None:
            fields = container.fields(leaf).items()
            tensors += [(f"{path}.{name}{rest}", each) for name, value in fields for rest, each in tensors_in(value)]
    return tensors


def check_batch(leaves: Sequence[Any]) -> None:
    """Refuse tensors that would hand a gradient on to what is outside the step, beside their ``.grad``.

    Args:
        leaves: tensors and other values of a batch, as :func:`take_apart` returns them.

    Raises:
        CaptureError: a tensor was computed with gradients, has a hook, or wants its gradient in another dtype.
    """
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            continue
        if leaf.grad_fn is not None:
            raise CaptureError(
                f"a batch tensor of shape {tuple(leaf.shape)} comes out of other computation ({leaf.grad_fn.name()}), "
                "and train_step sends no gradient back there; pass its .detach(), or compute it in loss_fn"
            )
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            raise CaptureError(
                f"a batch tensor of shape {tuple(leaf.shape)} has a gradient hook, which train_step would run behind "
                "the update; use roamc.optimize"
            )
        if leaf.grad_dtype != leaf.dtype:
            raise CaptureError(
                f"a batch tensor of shape {tuple(leaf.shape)} and {leaf.dtype} has grad_dtype={leaf.grad_dtype}, and "
                "train_step makes its gradient in its own dtype; leave grad_dtype out, or use roamc.optimize"
            )


def describe(leaf: Any, seen: python_keys.Seen) -> object:
    """Return a hashable key of one leaf of the batch: a plan serves only leaves with an equal key.

    Args:
        leaf: a tensor or another value.
        seen: what the step's key has met; gets what functions among the leaves read.

    Returns:
        For a tensor, its :func:`geometry`; for another value, its class and content, see
        :func:`roamc.capture.python_keys.of_argument`.

    Raises:
        CaptureError: the value cannot be compared with that of the next step, is an iterator, or :func:`geometry`
            refuses the tensor.
    """
    if isinstance(leaf, torch.Tensor):
        return geometry(leaf)
    if python_names.is_iterator(leaf):
        raise CaptureError(
            f"a batch may not hold a {type(leaf).__name__}, an iterator, which advances only while the step is traced: "
            "every later step would compute with the same values; pass the values, such as step(*next(batches))"
        )
    attributes = () if isinstance(leaf, nn.Module) else getattr(leaf, "__dict__", {}).values()
    if type(leaf).__hash__ is None or any(isinstance(value, torch.Tensor) for value in attributes):
        raise CaptureError(
            "a batch may hold tensors, numbers, strings and lists, dicts or dataclasses of them, not "
            f"{type(leaf).__name__}{'; torch.as_tensor makes an array a tensor' if hasattr(leaf, '__array__') else ''}"
        )
    return python_keys.of_argument(leaf, seen)


def check_dense(tensor: torch.Tensor) -> None:
    """Refuse a nested or quantized tensor, or one that is not strided (sparse, mkldnn).

    Raises:
        CaptureError: says what to use instead.
    """
    if tensor.is_nested:
        raise CaptureError(
            "train_step cannot plan a nested (jagged) tensor; pad it, by torch.nested.to_padded_tensor, and pass a mask"
        )
    if tensor.is_quantized:
        raise CaptureError(
            f"train_step cannot plan a quantized tensor ({tensor.dtype}); call its .dequantize() before the step"
        )
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"train_step cannot plan a tensor of layout {tensor.layout}; call its .to_dense() before the step"
        )


def geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return (shape, strides in elements, dtype, device, whether it requires a gradient) of ``tensor``; hashable.

    For a DTensor a sixth item stands for device mesh, placements and this rank's part.

    Raises:
        CaptureError: the tensor has no shape yet (lazy parameter), is nested, quantized or not strided (sparse,
            mkldnn).
    """
    if is_lazy(tensor):
        raise CaptureError(
            "the model has lazy parameters, whose shapes are not known yet; call it once on a batch, under "
            "torch.no_grad(), before the first step"
        )
    check_dense(tensor)
    whole = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    return (*whole, placement_of(tensor)) if is_dtensor(tensor) else whole


@dataclass(frozen=True)
class _Container:
    """One kind of container that torch does not open.

    Attributes:
        belongs: whether a class is of this kind.
        fields: from an instance to its content.
        make: from a class and such content to an instance.
    """

    belongs: Callable[[type], bool]
    fields: Callable[[Any], dict[str, Any]]
    make: Callable[[type, dict[str, Any]], Any]


def _dict_fields(value: dict[Any, Any]) -> dict[str, Any]:
    own = getattr(value, "__dict__", {})
    return {"items": dict(value), "own": {} if own is value else dict(own), "is_own": own is value}


def _make_dict(kind: type, fields: dict[str, Any]) -> Any:
    instance: Any = kind.__new__(kind)  # type: ignore[call-overload]
    (OrderedDict if isinstance(instance, OrderedDict) else dict).update(instance, fields["items"])
    if fields["is_own"]:  # as in ``self.__dict__ = self``
        instance.__dict__ = instance
    for name, value in fields["own"].items():
        object.__setattr__(instance, name, value)
    return instance


def _dataclass_fields(value: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    return {**{name: getattr(value, name) for name in names}, **getattr(value, "__dict__", {})}


def _make_dataclass(kind: type, fields: dict[str, Any]) -> Any:
    instance: Any = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(instance, name, value)
    return instance


def _make_user_dict(kind: type, fields: dict[str, Any]) -> Any:
    instance: Any = kind.__new__(kind)  # type: ignore[call-overload]
    instance.data = fields
    return instance


_CONTAINERS = (
    _Container(lambda kind: issubclass(kind, dict), _dict_fields, _make_dict),
    _Container(lambda kind: issubclass(kind, UserDict), lambda value: dict(value.data), _make_user_dict),
    _Container(dataclasses.is_dataclass, _dataclass_fields, _make_dataclass),
)
"""The first row that a class belongs to holds for it."""


def _row(kind: type) -> int:
    """Number of the row of ``kind``; -1 where there is none."""
    return next((number for number, row in enumerate(_CONTAINERS) if row.belongs(kind)), -1)


def _container(value: Any) -> _Container | None:
    """The row of a value that can be opened."""
    if isinstance(value, type | torch.Tensor | nn.Module) or type(value) in _VALUES:
        return None
    number = _row(type(value))
    return None if number < 0 else _CONTAINERS[number]


_VALUES = (bool, int, float, complex, str, bytes, type(None))
"""Never containers; asked first, because they are most of what is no tensor."""

"""Names, arguments and relatives of operators, as their schemas have them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from roamc.compat import HigherOrderOperator, OpOverload

Target = object


def argument_of(target: Target, args: Sequence[object], kwargs: Mapping[str, object], name: str) -> Any:
    """An argument of a call by its name in the schema, given or its default; None if there is none of that name."""
    for position, argument in enumerate(target._schema.arguments if isinstance(target, OpOverload) else ()):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


def name_of(target: Target) -> str:
    """The qualified name of an operator or a function, the same in every process; of another object that of its type.

    ``aten.mul.Tensor``, ``_operator.getitem``, ``roamc.operators.random.replay``.
    """
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if isinstance(target, functools.partial):
        return f"partial({name_of(target.func)}, {len(target.args)}, {sorted(target.keywords)})"
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def stem(target: Target) -> str:
    """``"gelu"`` for every ATen overload of gelu, those in place included; ``"mine::op"`` for operators of others."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return str(getattr(target, "__name__", target))
    name = str(schema.name)
    return name.removeprefix("aten::").rstrip("_") if name.startswith("aten::") else name


def relative(target: Target, rename: Callable[[str], str]) -> OpOverload | None:
    """The ATen operator of another name, such as that without the underscore, which takes the same arguments.

    Args:
        target: an operator.
        rename: from its name, without namespace and overload, to that of the other one.

    Returns:
        None if there is none, or ``target`` is not of ATen.
    """
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, rename(target._schema.name.removeprefix("aten::")), None)
    if packet is None or packet is target.overloadpacket:
        return None
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return next((other for other in overloads if _arguments(other) == _arguments(target)), None)


def _arguments(target: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]

"""Names, arguments and relatives of operators, as their schemas have them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from roamc.compat import HigherOrderOperator, OpOverload
from roamc.operators.composite import Composite

Target = object


def argument_of(target: Target, args: Sequence[object], kwargs: Mapping[str, object], name: str) -> Any:
    """Return an argument of a call by its name in the schema.

    Args:
        target: what is called.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
        name: of the argument.

    Returns:
        What the call passes, else the schema's default; None if ``target`` has no schema or no argument ``name``.
    """
    for position, argument in enumerate(target._schema.arguments if isinstance(target, OpOverload) else ()):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


def group_of(node: fx.Node) -> Any:
    """Return the argument ``group_name`` of a collective, a process group or its name; None for other operators."""
    return argument_of(node.target, node.args, node.kwargs, "group_name")


def name_of(target: Target) -> str:
    """Return the qualified name of an operator or function, or of another object's type: the same in every process.

    ``aten.mul.Tensor``, ``_operator.getitem``, ``roamc.operators.random.replay``.
    """
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, Composite):
        return target.title
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if isinstance(target, functools.partial):
        return f"partial({name_of(target.func)}, {len(target.args)}, {sorted(target.keywords)})"
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def stem(target: Target) -> str:
    """Return the name under which ``target`` has a row on costs.

    ``"gelu"`` for every ATen overload of gelu, those in place included; ``"mine::op"`` for operators of other
    namespaces; ``__name__`` for what has no schema.
    """
    schema = getattr(target, "_schema", None)
    if schema is None:
        return str(getattr(target, "__name__", target))
    name = str(schema.name)
    return name.removeprefix("aten::").rstrip("_") if name.startswith("aten::") else name


def relative(target: Target, rename: Callable[[str], str]) -> OpOverload | None:
    """Return the ATen operator that has another name, such as one without underscore, and takes the same arguments.

    Args:
        target: an operator.
        rename: from the name of ``target``, without namespace and overload, to the wanted name.

    Returns:
        The overload whose arguments have the same names and types; None if there is none, the wanted name is that of
        ``target``, or ``target`` is not of ATen.
    """
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, rename(target._schema.name.removeprefix("aten::")), None)
    if packet is None or packet is target.overloadpacket:
        return None
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return next((other for other in overloads if _arguments(other) == _arguments(target)), None)


@functools.cache
def value_form(target: Target) -> OpOverload | None:
    """Return the operator that makes what ``target`` writes over its first argument: ``mul`` of ``mul_``.

    None if ``target`` writes nothing, or another argument, or torch has no such operator.
    """
    declared = target._schema.arguments if isinstance(target, OpOverload) else ()
    written = [at for at, argument in enumerate(declared) if argument.alias_info and argument.alias_info.is_write]
    return relative(target, lambda name: name.removesuffix("_")) if written == [0] else None


def _arguments(target: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]

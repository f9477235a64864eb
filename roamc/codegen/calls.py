"""Which functions may stand for an operator, and the arguments of a call by their names in the operator's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from roamc.compat import OpOverload
from roamc.operators.kernels import kernel_of


def outs_of(operator: Any, target: Any) -> tuple[str, ...] | None:
    """Return the keywords under which a call of ``target`` is given places for the results of ``operator``, in order.

    Args:
        operator: an overload, a group or a function that a graph calls.
        target: what a program calls in its place.

    Returns:
        No keywords if ``target`` is ``operator``; None if ``target`` is neither that, nor its kernel, nor its overload
        that is given places for its results.
    """
    if target is operator:
        return ()
    kernel = kernel_of(operator)
    if kernel is not None and target is kernel.function:
        return ("out",)
    if isinstance(target, OpOverload) and isinstance(operator, OpOverload):
        declared = target._schema.arguments
        outs = tuple(a.name for a in declared if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write)
        input_types = [(a.name, str(a.type)) for a in declared if a.name not in outs]
        same = input_types == [(a.name, str(a.type)) for a in operator._schema.arguments]
        if outs and same and target.overloadpacket is operator.overloadpacket:
            return outs
    return None


def by_name(operator: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of ``operator`` by their names, defaults included.

    An argument that is missing, and has no default, is None; that is no error here.

    Raises:
        TypeError: the call has more positional arguments than the schema, an unknown keyword, or an argument twice.
    """
    declared = operator._schema.arguments
    positional = dict(zip((argument.name for argument in declared), args, strict=False))
    wrong = set(keywords) - {argument.name for argument in declared} | set(keywords) & set(positional)
    if wrong or len(args) > len(declared):
        raise TypeError(f"{operator} does not take {sorted(wrong) or f'{len(args)} arguments'}")
    defaults = {argument.name: argument.default_value for argument in declared}
    return {**defaults, **positional, **keywords}


def argument_of(node: fx.Node, name: str) -> fx.Node:
    """Return the node that is the argument ``name``, in the operator's schema, of the call ``node``.

    Raises:
        KeyError: the schema has no such argument.
    """
    called: Any = node.target
    argument: fx.Node = by_name(called, node.args, node.kwargs)[name]
    return argument


def same_literal(one: Any, other: Any) -> bool:
    """Whether two arguments are the same object, or equal in type and in all bits; lists and tuples item by item."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_literal, one, other))
    return one is other or (type(one) is type(other) and repr(one) == repr(other))

"""Operators of a file that roamc does not know: rows with a name, of which the file says what results they have."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from roamc.capture.dump.names import NAMESPACES
from roamc.capture.dump.text import Call, Dotted, Item, Name, Statement

_PATH = re.compile(r"torch\.ops\.(\w+)\.(\w+(?:\.\w+)?)")
HIGHER_ORDER = "torch.ops.higher_order."


class Unknown:
    """Stands in a graph for an operator that the table does not have. It is planned and never runs.

    :func:`roamc.operators.ops.rule` says of it what it says of every function: that it may draw random numbers, keeps
    its place and must not run again. Its results lie in storages of their own. It has a row on costs only where it is
    a higher-order operator of torch's: one of another namespace may be called ``mm`` as well.

    Args:
        namespace: of the operator.
        name: the rest of its name.
    """

    def __init__(self, namespace: str, name: str) -> None:
        self.__module__, self.__qualname__ = namespace, name
        self.__name__ = name if HIGHER_ORDER.endswith(f".{namespace}.") else f"{namespace}::{name}"

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"{self.__module__}.{self.__qualname__} has a name and no code")


@functools.cache
def _of(namespace: str, name: str) -> Unknown:
    return Unknown(namespace, name)


def unknown_of(call: Call) -> Unknown | None:
    """Return what stands for the operator of ``call``; None where a table has all operators of its namespace.

    A higher-order operator has the operator that it runs in its name.
    """
    match = _PATH.fullmatch(call.path)
    if match is None or match[1] in NAMESPACES:
        return None
    inner = call.args[0] if call.args and call.path.startswith(HIGHER_ORDER) else None
    runs = f"({inner.path.removeprefix('torch.ops.')})" if isinstance(inner, Dotted) else ""
    return _of(match[1], match[2] + runs)


def picks(statements: Sequence[Statement]) -> dict[str, dict[int, Statement]]:
    """Return, for each name of which results are picked, number of a result to the statement that picks it."""
    by_name: dict[str, dict[int, Statement]] = {}
    for statement in statements:
        match statement.value:
            case Item(value=Name(name=source), index=index):
                by_name.setdefault(source, {})[index] = statement
    return by_name


def without_operators(value: Any) -> Any:
    """Return an argument in which each path is its text: what an unknown operator is handed is no operator here."""
    match value:
        case Dotted(path=path):
            return path
        case Call(path=path):
            return path
        case list() | tuple():
            return type(value)(map(without_operators, value))
        case dict():
            return {key: without_operators(each) for key, each in value.items()}
    return value

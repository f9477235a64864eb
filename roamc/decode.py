"""Check plain data from outside against the types that a dataclass declares; nothing is executed or imported."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

from roamc.errors import PlanError

T = TypeVar("T")

NOT_DATA = MappingProxyType({"roamc_data": False})
"""``metadata`` of a dataclass's field that :func:`plain` leaves out and :func:`read` refuses; it needs a default."""


LEVELS = 64
"""Most lists and objects of JSON in one another: whoever goes through what was read may recurse."""


def parse(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the data of JSON text.

    Args:
        text: the text; bytes are UTF-8, UTF-16 or UTF-32.
        pairs: makes an object of its keys and values; without it, a dict in which the last of equal keys counts.

    Raises:
        ValueError: the text is no JSON, or has more than :data:`LEVELS` levels; says so in one line.
    """
    deep = f"it has more than {LEVELS} lists and objects in one another"
    try:
        data = json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError(deep) from None
    level = [data]
    for _ in range(LEVELS):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [item for items in inner for item in items]
    if any(isinstance(each, dict | list) for each in level):
        raise ValueError(deep)
    return data


def plain(item: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as :func:`read` takes them, with copies of mappings."""
    values = {field.name: getattr(item, field.name) for field in _fields(item)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def read(kind: type[T], data: object, where: str) -> T:
    """Make an instance of dataclass ``kind`` from a mapping with exactly its fields.

    Lists become tuples where the field is a tuple. Numbers must not be negative, and whole where the field is an int.

    Args:
        kind: the dataclass; its fields have the types that :func:`value` knows.
        data: the mapping.
        where: what ``data`` is, for error messages.

    Raises:
        PlanError: a field is missing, unknown, or of another type; names it.
    """
    fields = {field.name for field in _fields(kind)}
    if not isinstance(data, Mapping) or set(data) != fields:
        actual = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise PlanError(f"{where} must have the fields {sorted(fields)}, not {actual}")
    hints = _hints(cast(Any, kind))
    return kind(**{name: value(hints[name], data[name], f"{where}: {name}") for name in sorted(fields)})


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.metadata != NOT_DATA]


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def value(hint: Any, data: object, where: str) -> Any:
    """Return ``data`` as a value of type ``hint``.

    Args:
        hint: str, int, float, tuple[X, ...], tuple[X, Y], Mapping[str, X], X | None, or Any for whatever is given.
        data: the plain data; numbers must not be negative.
        where: what ``data`` is, for the error message.

    Raises:
        PlanError: ``data`` is of another type.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if data is None else value(inner[0], data, where)
    if origin is tuple and isinstance(data, list | tuple):
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(value(inner[0], item, where) for item in data)
        if len(inner) == len(data):
            return tuple(value(part, item, where) for part, item in zip(inner, data, strict=True))
    elif origin is not None and issubclass(origin, Mapping) and isinstance(data, Mapping):
        return {value(inner[0], key, where): value(inner[1], item, where) for key, item in data.items()}
    elif hint is Any or (hint is str and isinstance(data, str)) or (hint in (int, float) and _is_number(data, hint)):
        return data
    raise PlanError(f"{where} must be {_words(hint)}, not {str(data)[:60]!r}")


def _is_number(data: object, hint: type) -> bool:
    kinds = (int, float) if hint is float else (int,)
    return isinstance(data, kinds) and not isinstance(data, bool) and data >= 0


def _words(hint: Any) -> str:
    if hint in (int, float):
        return f"{hint.__name__} from 0 on"
    return str(hint) if typing.get_origin(hint) is not None or hint is Any else str(hint.__name__)

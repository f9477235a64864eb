"""Which fields of a dataclass of limits a solver reads."""

from __future__ import annotations

import dataclasses
from typing import Any


def recorded(effort: Any) -> tuple[Any, set[str]]:
    """Return a copy of a frozen dataclass, and the set to which every read of one of its fields adds the field's name.

    Comparing and hashing the copy reads no field, so that only a use of a field counts.
    """
    names = {field.name for field in dataclasses.fields(effort)}
    read: set[str] = set()

    class Recorded(type(effort)):  # type: ignore[misc]  # the class is that of the argument
        __slots__ = ()
        __eq__ = object.__eq__
        __hash__ = object.__hash__

        def __getattribute__(self, name: str) -> Any:
            if name in names:
                read.add(name)
            return super().__getattribute__(name)

    return Recorded(**dataclasses.asdict(effort)), read


def unread(effort: Any, read: set[str]) -> list[str]:
    """Return the fields of ``effort`` that are not in ``read``, sorted."""
    return sorted({field.name for field in dataclasses.fields(effort)} - read)

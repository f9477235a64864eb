"""What a trace has changed in Python's values, by their keys, and whether the next step reads it as another value.

A trace runs the user's code once, and so may turn a flag, count, or keep a log. What has only been added to, such as a
list, is read anew only by code that looks into it; anything else that has changed is. Tensors that the trace has made
are never the next step's: where one has come or gone, nothing is read anew, since the next trace would find it there.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from roamc.capture.python_keys import CONTAINERS, KEYS, PLAIN, Place, Same, has_traced
from roamc.capture.python_uses import Use, is_entry_looked_into, is_looked_into

ADDABLE = (*CONTAINERS, Counter, OrderedDict, defaultdict)
"""Types whose methods ``append`` and the like only add; those of other types may read."""


_NOTHING = object()
"""Equal to no item."""


class _Change(enum.Enum):
    ADDED = enum.auto()  # to a container that holds what it held
    OTHER = enum.auto()
    TENSOR = enum.auto()  # a tensor that the trace has made came, or went


def changed(before: Mapping[Place, object], after: Mapping[Place, object], uses: AbstractSet[Use]) -> frozenset[Place]:
    """Return the places at which a trace has left something that the next step does not read as another value.

    Such are a list to which a function only appends and a tensor that it keeps. Functions that it exchanges, a number
    that it counts up and numbers in a list that it reads, too, are not among them: the next step reads other ones, and
    is traced anew.

    Args:
        before: ``Seen.places`` before the trace.
        after: the same after it.
        uses: what the functions look into, see :meth:`roamc.capture.python_keys.Seen.uses`.
    """
    pairs = ((place, before.get(place), after.get(place)) for place in {**before, **after})
    differ = ((place, old, new) for place, old, new in pairs if old != new)
    return frozenset(place for place, old, new in differ if not _is_read_anew(place, old, new, uses))


def _is_read_anew(place: Place, before: object, after: object, uses: AbstractSet[Use]) -> bool:
    """Return the same as :func:`is_read_anew` for a place, where None is the key of nothing.

    An entry of a dict that is new and no plain value has been added. What else is new may have been looked for, as by
    ``hasattr``, unless it is an object, a function or a Python module, as an import leaves one.
    """
    _, kind, name, *keys = place
    variable = isinstance(kind, str)
    looked = is_entry_looked_into(uses, variable, name, *keys) if keys else is_looked_into(uses, variable, name)
    if before is not None:
        return is_read_anew(before, after, looked)
    return _is_plain(after) or ((looked or not keys) and _is_container(after) and not has_traced(after))


def is_read_anew(before: object, after: object, looked: bool) -> bool:
    """Return whether the next step reads another value of what a trace has changed.

    Args:
        before: its key before the trace.
        after: its key after the trace.
        looked: whether code does more with it than to add to it.
    """
    changes = set(_changes(before, after))
    return _Change.TENSOR not in changes and (_Change.OTHER in changes or (looked and _Change.ADDED in changes))


def _changes(before: object, after: object) -> Iterator[_Change]:
    """Return in which ways two keys differ; nothing if they are equal."""
    if before == after:
        return
    if _is_container(before) and _is_container(after) and before[0] == after[0]:  # type: ignore[index]
        yield from _inside(before[0], before[1], after[1])  # type: ignore[index]
    elif _is_dict(before) and _is_dict(after) and before[1] == after[1]:  # type: ignore[index]
        yield from _inside(before[1], before[2], after[2])  # type: ignore[index]
    elif isinstance(before, dict) and isinstance(after, dict):
        for place in {**before, **after}:  # what methods of the user's classes read, and may look into
            for change in _changes(before.get(place), after.get(place)):
                yield _Change.OTHER if change is _Change.ADDED else change
    elif _is_long(before) and _is_long(after) and before[0] == after[0]:  # type: ignore[index]
        yield _Change.ADDED if after[1] > before[1] else _Change.OTHER  # type: ignore[index]
    elif isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        for old, new in zip(before, after, strict=True):
            yield from _changes(old, new)
    else:
        yield _Change.TENSOR if has_traced(before) or has_traced(after) else _Change.OTHER


def _inside(
    kind: object, before: tuple[object, ...] | frozenset[object], after: tuple[object, ...]
) -> Iterator[_Change]:
    """Return in which ways the items of two containers, or the attributes of two objects, of one kind differ."""
    added = _added(before, after)
    if added is not None:
        for item in added:
            plainly = _Change.ADDED if kind in ADDABLE else _Change.OTHER
            yield _Change.TENSOR if has_traced(item) else plainly
    elif isinstance(before, tuple) and len(before) == len(after):
        for old, new in zip(before, after, strict=True):
            yield from _changes(old, new)
    else:
        yield _Change.OTHER
        if has_traced(before) or has_traced(after):
            yield _Change.TENSOR


def _added(
    before: tuple[object, ...] | frozenset[object], after: tuple[object, ...] | frozenset[object]
) -> list[object] | None:
    """Return the items that have been added; None if others have gone or been moved."""
    if isinstance(before, frozenset) or isinstance(after, frozenset):
        return list(frozenset(after) - frozenset(before)) if frozenset(before) <= frozenset(after) else None
    added, old = list[object](), iter((*before, _NOTHING))
    awaited = next(old)
    for item in after:
        if item == awaited:
            awaited = next(old)
        else:
            added.append(item)
    return added if awaited is _NOTHING else None


def _is_plain(described: object) -> bool:
    """Whether a key is one of :func:`roamc.capture.python_keys.of_plain`, or the bytes of an array."""
    return isinstance(described, bytes) or (
        isinstance(described, tuple) and described[:1] != () and described[0] in PLAIN
    )


def _is_container(described: object) -> bool:
    """Whether a key is that of a container with its items, or of an object with its attributes."""
    pair = isinstance(described, tuple) and len(described) == 2
    return pair and isinstance(described[0], type | Same) and isinstance(described[1], tuple | frozenset)  # type: ignore[index]


def _is_dict(described: object) -> bool:
    """Whether a key is that of a dict whose entries have places of their own."""
    return isinstance(described, tuple) and described[:1] == (KEYS,)


def _is_long(described: object) -> bool:
    """Whether a key is that of a container with its length."""
    pair = isinstance(described, tuple) and len(described) == 2
    return pair and isinstance(described[0], Same) and isinstance(described[1], int)  # type: ignore[index]

"""Keys of Python's values and functions: hashable, and equal while nothing has changed that a captured step may read.

A value is described by its content, as far as :data:`DEEP` and :data:`LONG` allow, and by identity beyond. A function
is described by which one it is; the variables that it names, those of the functions among them, and what all of these
read of objects are collected in :class:`Seen`, each at a place of its own, so that a value that the step itself changes
hides no other. :mod:`roamc.capture.python_state` says what counts.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import logging
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from roamc import compat
from roamc.capture.python_names import (
    ABSENT,
    BUILTIN,
    CACHED,
    FUNCTIONS,
    GETTERS,
    READERS,
    WHOLE,
    attributes_in,
    is_installed,
    is_torch,
    libraries_in,
    parameters_in,
    variables_of,
)
from roamc.capture.python_uses import ADDING, ANY, Use, looked_into, of_attribute

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)
"""Types whose values never change: a key holds the value itself, see :func:`of_plain`."""

DEEP = 4
"""Levels to which lists of lists and objects with objects are followed; what lies deeper is known by identity alone."""

LONG = 1_000
"""Elements up to which a container is looked into; a longer one is known by identity and length alone."""

MANY = 10_000
"""Elements of containers within containers that are looked into, all together, for one variable or attribute."""

OBJECTS = 1_000
"""Objects that functions name and whose attributes are watched; those named later are known by identity alone."""

CONTAINERS = (list, tuple, set, frozenset, dict, deque)

WHICH = (nn.Module, logging.Filterer)
"""Types of which only which object it is counts here: attributes of modules are looked at elsewhere, and what loggers
and their handlers write is no part of a step."""

NAMED = (*PLAIN, *FUNCTIONS, *CONTAINERS, torch.Tensor, *WHICH)
"""Types of values that are described themselves, not by what functions read of them."""

COMPUTED = ("__getattr__", "__getattribute__", "__getitem__")
"""Methods of a class that find values of its objects by keys and names that are written nowhere else."""


class Same:
    """An object as a part of a key, compared by identity: its content is not looked at. Keeps the object alive."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Unknown(Same):
    """An object that is known by identity alone because its content lies too deep or is too long."""

    __slots__ = ()


TRACED = "traced"
"""The key of a tensor of a trace."""

KEYS = "keys"
"""What the key of a dict begins with whose entries have places of their own; those with tensors of a trace left out."""

Place = tuple[object, ...]
"""Where functions read a value: the owner's identity, a kind, a name, and for an entry of a dict the key in it.

A variable's kind is a word, see :func:`variables_of`, or "held" for what a partial or bound method holds. An
attribute's is the number of the class that has it, in the order in which Python looks there; ITSELF for the object.
"""

ITSELF = -1
"""The kind of an attribute that an object has itself."""


def has_traced(described: object) -> bool:
    """Whether a key has that of a tensor of a trace in it."""
    inside = described if isinstance(described, tuple | frozenset) else ()
    return described == TRACED or any(map(has_traced, inside))


class Seen:
    """What the description of one key has met so far.

    Attributes:
        places: what functions read, each variable, attribute and entry of a dict with a key of its value.
        functions: identities of the functions described: each comes once.
        around: identities of the containers and objects that are being described: one may hold itself.
        left: elements that may still be looked into, see ``MANY``.
        names: attributes that the functions read, of whatever object, in the order in which they came.
        users: the functions that are not torch's.
        looked: what is looked into beside what the functions' code says.
        objects: objects, classes and Python modules that the functions name, by identity.
        owners: identities of the objects that are called, or whose methods are.
        holders: numbers for what has no identity that counts, such as a functools.partial.
        shared: what classes have for their objects, for objects that are alike: looked up once.
        classes: whether all that the user's classes have counts, as where it is not known what functions read of it.
    """

    def __init__(self, *, classes: bool = False) -> None:
        self.places: dict[Place, object] = {}
        self.functions: set[object] = set()
        self.around: set[int] = set()
        self.left = MANY
        self.names: dict[str, None] = {}
        self.users: list[types.FunctionType] = []
        self.looked: set[Use] = set()
        self.objects: dict[int, object] = {}
        self.owners: set[int] = set()
        self.holders = itertools.count()
        self.classes = classes
        self.shared: dict[object, list[tuple[tuple[int, str], object]]] = {}

    def uses(self) -> frozenset[Use]:
        """Return what the functions look into, see :func:`roamc.capture.python_uses.looked_into`."""
        each = (
            looked_into(function.__code__, libraries_in(function.__code__, function.__globals__))
            for function in self.users
        )
        return frozenset(self.looked).union(*each)

    def note(self, value: object) -> bool:
        """Return whether functions may read attributes of ``value``; if so, add it to ``objects``.

        ``objects`` takes :data:`OBJECTS` of them at most.
        """
        if isinstance(value, NAMED) or not _is_watched(value):
            return False
        if len(self.objects) < OBJECTS:
            self.objects.setdefault(id(value), value)
        return True

    def own(self, value: object) -> None:
        """Add an object that is called, or whose method is, to ``objects``."""
        self.owners.add(id(value))
        self.objects.setdefault(id(value), value)


def of_plain(value: object) -> tuple[object, ...]:
    """Return a hashable key of ``value``, whose type is in ``PLAIN``.

    All nan have one key; True and 1, or 0.0 and -0.0, have different ones.
    """
    kind = type(value)
    if kind is complex or (kind is float and not (value and value == value)):
        return kind, repr(value)
    return kind, value


def of_called(value: Any, seen: Seen) -> object:
    """Return a key of a function, such as the loss function or a hook: which one it is. Add what it reads to ``seen``.

    That is: global variables, closure contents and defaults, and likewise those of the functions among them; and, once
    :func:`complete` has been called, what all of them read of objects.

    Args:
        value: a function, a method, a functools.partial of one, or an object that is called.
        seen: what the key's description has met.
    """
    if isinstance(value, FUNCTIONS):
        return _function(value, seen)
    if seen.note(value) and not isinstance(value, type):
        seen.own(value)
    return Same(value)


def of_argument(value: Any, seen: Seen) -> object:
    """Return a key of what a step is called with: equal for another object of the same class and the same attributes.

    Its own ``__eq__`` is asked only where it has no attributes, as a range has none. What its class computes is put
    into ``seen``.
    """
    kind = type(value)
    if kind in FUNCTIONS:
        return of_called(value, seen)
    own = {} if isinstance(value, NAMED) else _attributes_in(value)
    if not own:
        return kind, of_value(value, 0, seen) if isinstance(value, (*NAMED, np.generic, type)) else value
    seen.note(kind)
    kinds: tuple[Any, ...] = (int, float, complex, str, bytes)
    base = next((of_plain(plain(value)) for plain in kinds if isinstance(value, plain)), None)
    return kind, base, tuple((name, of_value(item, 1, seen)) for name, item in own.items())


def complete(seen: Seen) -> dict[Place, object]:
    """Add what functions read of the objects that they name, and of the objects found in these; return all places.

    A method that is named of an object counts, with what it names in turn; so do methods that Python calls by itself,
    such as ``__call__``.
    """
    looked: set[tuple[int, int]] = set()
    while True:
        extent = len(seen.names), len(seen.objects)
        for owner in list(seen.objects.values()):
            if (id(owner), extent[0]) in looked:
                continue
            looked.add((id(owner), extent[0]))
            for name, value in list(_attributes_of(owner, seen)):
                if (id(owner), *name) not in seen.places:
                    _put((id(owner), *name), value, seen)
        if extent == (len(seen.names), len(seen.objects)):
            return seen.places


def of_identity(value: object) -> object:
    """Return a key of which object ``value`` is; all tensors of a trace count as one, as each trace makes new ones."""
    return TRACED if isinstance(value, compat.FakeTensor) else Same(value)


def of_content(value: object) -> object:
    """Return a key of ``value``; of a function, with what it reads of the objects that it names."""
    seen = Seen(classes=True)
    described = of_value(value, 0, seen)
    return (described, complete(seen)) if seen.places or seen.objects else described


def of_value(value: Any, depth: int, seen: Seen) -> object:
    """Return a hashable key of ``value``: equal while its content is the same, within ``DEEP`` levels and ``LONG``.

    What a function reads is not part of it: it is put into ``seen``.

    Args:
        value: anything.
        depth: how many containers and objects it lies in; 0 for none.
        seen: what the key's description has met; a new one for a new key.
    """
    kind = type(value)
    if kind in PLAIN:
        return of_plain(value)
    if kind in FUNCTIONS:
        return _function(value, seen)
    if isinstance(value, compat.FakeTensor):
        return TRACED
    if isinstance(value, torch.Tensor):
        return Same(value), value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, np.ndarray | np.generic):
        return _array(value)
    if isinstance(value, (*WHICH, type, types.ModuleType)) or id(value) in seen.around:
        if seen.classes and isinstance(value, type):
            _note_whole(value, value, seen)
        return Same(value)
    seen.around.add(id(value))
    holds = isinstance(value, (*CONTAINERS, Mapping))
    described = _container(value, depth, seen) if holds else _record(value, depth, seen)
    seen.around.discard(id(value))
    return described


def _array(value: np.ndarray[Any, Any] | np.generic) -> object:
    """Describe an array or number of numpy's by its elements."""
    if value.size > LONG or value.dtype.hasobject:
        return Same(value), value.shape, value.dtype.str
    return type(value), value.shape, value.dtype.str, value.tobytes()


def _container(value: Any, depth: int, seen: Seen) -> object:
    seen.left -= len(value)
    if len(value) > LONG or depth == DEEP or seen.left < 0:
        return Same(value), len(value)
    if isinstance(value, Mapping):
        pairs = tuple((of_value(key, depth + 1, seen), of_value(item, depth + 1, seen)) for key, item in value.items())
        return type(value), pairs
    items = tuple(of_value(item, depth + 1, seen) for item in value)
    return type(value), frozenset(items) if isinstance(value, set | frozenset) else items


def _record(value: Any, depth: int, seen: Seen) -> object:
    """Describe an object, such as a configuration, by identity and attributes; without those if one lies too deep."""
    kind = type(value)
    if seen.classes and not is_installed(sys.modules.get(kind.__module__)):
        _note_whole(value, kind, seen)
    elif depth:  # the functions read it by way of what it lies in
        seen.note(value)
    if (content := _bytes_of(value)) is not None:
        return Same(value), content
    own = _attributes_in(value)
    seen.left -= len(own)
    if own and (depth == DEEP or len(own) > LONG or seen.left < 0):
        return Unknown(value)
    inside = {name: of_value(item, depth + 1, seen) for name, item in own.items()}
    if any(isinstance(item, Unknown) for item in inside.values()):
        return Unknown(value)
    return Same(value), tuple(inside.items())


def _bytes_of(value: Any) -> bytes | None:
    """What is in memory that Python code may change in place, such as a bytearray, an array or a number of ctypes."""
    try:
        memory = memoryview(value)
    except TypeError:
        return None
    return memory.tobytes() if memory.nbytes <= 8 * LONG else b""


def _attributes_in(value: object) -> dict[str, Any]:
    """Attributes that an object itself holds, in its ``__dict__`` and in its ``__slots__``, by name."""
    try:
        of_thread = isinstance(value, threading.local)
        attributes = dict(vars(value) if of_thread else object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        attributes = {}
    return attributes | slots_of(value)


def slots_of(value: object) -> dict[str, Any]:
    """Attributes that an object holds in its ``__slots__``, by name."""
    values = {}
    kind: Any = type(value)
    for name, member in _slots(kind):
        with contextlib.suppress(AttributeError):  # nothing has been put there yet
            values[name] = member.__get__(value)
    return values


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[tuple[str, types.MemberDescriptorType], ...]:
    slotted = (base.__dict__ for base in kind.__mro__ if "__slots__" in base.__dict__)
    pairs = (pair for own in slotted for pair in own.items())
    return tuple((name, member) for name, member in pairs if isinstance(member, types.MemberDescriptorType))


def _function(value: Any, seen: Seen) -> object:
    """Describe a function, and put what it names into ``seen``; of one of torch's, only functions in its closure."""
    if isinstance(value, types.MethodType):
        return _method(value.__self__, value.__func__, seen)
    if isinstance(value, functools.partial):
        return "partial", of_called(value.func, seen), _held(_by_parameter(value, seen), seen)
    if isinstance(value, CACHED):
        return Same(value), of_called(value.__wrapped__, seen)
    if isinstance(value, GETTERS):
        words = (word for word in value.__reduce__()[1] if isinstance(word, str))
        parts = [part for word in words for part in word.split(".")]
        seen.names.update(dict.fromkeys(parts))
        seen.looked.update(map(of_attribute, parts))
        return Same(value)
    if isinstance(value, BUILTIN):
        return _builtin(value, seen)
    if id(value) not in seen.functions:
        seen.functions.add(id(value))
        if not is_torch(value.__module__):
            seen.names.update(dict.fromkeys(attributes_in(value.__code__)))
            seen.users.append(value)
        if value.__dict__:
            seen.own(value)
        for name, item in variables_of(value):
            _put((id(value), *name), item, seen)
    return Same(value), value.__code__


def _builtin(value: types.BuiltinFunctionType | types.MethodWrapperType, seen: Seen) -> object:
    """Describe a built-in function, with its object if it is a method."""
    if value in READERS:
        seen.names.update(dict.fromkeys(WHOLE))
        seen.looked.add(of_attribute(ANY))
    owner = value.__self__
    if owner is None or isinstance(owner, types.ModuleType | type):
        return Same(value)
    if value.__name__ not in ADDING:
        seen.looked.add(Use(True, value.__name__, False))
    return value.__name__, _held([(value.__name__, owner)], seen)


def _by_parameter(value: functools.partial[Any], seen: Seen) -> list[tuple[object, object]]:
    """Return what a partial holds by the names of its function's parameters; by numbers where these are not known.

    What is held for no parameter that is known counts as looked into.
    """
    code = getattr(value.func, "__code__", None)
    parameters = () if code is None else parameters_in(code)
    first = () if code is None else parameters[isinstance(value.func, types.MethodType) : code.co_argcount]
    names = (*first[: len(value.args)], *range(len(first), len(value.args)), *value.keywords)
    seen.looked.update(Use(True, name, False) for name in names if name not in parameters)
    return list(zip(names, (*value.args, *value.keywords.values()), strict=True))


def _held(items: Sequence[tuple[object, object]], seen: Seen) -> tuple[object, ...]:
    """Put what a partial or bound method holds into ``seen``; return a key that one that holds the same has too."""
    number = next(seen.holders)
    for name, item in items:
        _put((number, "held", name), item, seen)
    return number, *(name for name, _ in items)


def _method(owner: Any, function: Any, seen: Seen) -> object:
    """Describe a method and its object, unless only which object it is counts, or the method is torch's."""
    if isinstance(owner, type):
        seen.note(owner)
    elif not isinstance(owner, WHICH) and not is_torch(getattr(function, "__module__", None)):
        seen.own(owner)
    return Same(owner), of_called(function, seen)


def _put(place: Place, value: Any, seen: Seen) -> None:
    """Describe a variable or an attribute that functions read; each entry of a dict has a place of its own."""
    seen.left = MANY
    if isinstance(value, weakref.ref):
        value = value()
    if isinstance(value, contextvars.ContextVar):
        value = value.get(ABSENT)
    if type(value).__module__ == "multiprocessing.sharedctypes":
        value = value.get_obj()
    if not isinstance(value, dict) or len(value) > LONG or id(value) in seen.around:
        seen.places[place] = Same(value) if seen.note(value) else of_value(value, 0, seen)
        return
    seen.around.add(id(value))
    keys = []
    for key, item in value.items():
        described = seen.places[*place, key] = of_value(item, 1, seen)
        keys += [] if has_traced(described) else [of_value(key, 1, seen)]
    seen.places[place] = KEYS, type(value), tuple(keys)
    seen.around.discard(id(value))


def _attributes_of(owner: Any, seen: Seen) -> Iterator[tuple[tuple[int, str], object]]:
    """Return the attributes of an object or class that functions in ``seen`` read, each by kind and name.

    These are its own, and what its classes have for all, of every class that has it, as ``super()`` finds them too; of
    a property, its function.
    """
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    own = {} if isinstance(owner, type) else _attributes_in(owner)
    whole = any(map(_computes, kinds)) or any(name in seen.names for name in WHOLE)
    yield from (((ITSELF, name), value) for name, value in own.items() if whole or name in seen.names)
    if isinstance(owner, types.ModuleType):
        return
    alike = kinds[0], isinstance(owner, type), id(owner) in seen.owners, len(seen.names)
    if alike not in seen.shared:
        seen.shared[alike] = list(_shared_by(owner, kinds, seen))
    yield from seen.shared[alike]


def _shared_by(owner: object, kinds: Iterable[type], seen: Seen) -> Iterator[tuple[tuple[int, str], object]]:
    """Return the attributes that classes have for an object, or for themselves, and that functions in ``seen`` read."""
    for number, kind in enumerate(kinds):
        module = kind.__module__
        if is_torch(module) or (id(owner) not in seen.owners and is_installed(sys.modules.get(module))):
            continue
        for name, value in kind.__dict__.items():
            if name in seen.names or _is_implied(name, value, owner):
                yield (number, name), unwrapped(value)


def _note_whole(value: object, kind: Any, seen: Seen) -> None:
    """Note an object, or a class, of which functions may read all that class ``kind`` has."""
    seen.note(value)
    seen.names.update(dict.fromkeys(_names_in(kind)))


@functools.lru_cache(maxsize=4096)
def _names_in(kind: type) -> tuple[str, ...]:
    """Names of what a class has for its objects, but for what Python does and for installed classes."""
    users = (base for base in kind.__mro__ if not is_installed(sys.modules.get(base.__module__)))
    return tuple(name for base in users for name in base.__dict__ if not name.startswith("__"))


def implied_by(kind: type) -> Iterator[object]:
    """Return the methods of a class of modules that Python calls without that a function names them."""
    for base in kind.__mro__:
        if not is_torch(base.__module__):
            yield from (value for name, value in base.__dict__.items() if _is_implied(name, value, None))


_OF_LIFE = ("__init__", "__new__", "__post_init__", "__repr__", "__del__", "__getstate__", "__setstate__")
"""Methods that Python calls when an object is made, shown, copied or gone."""


def _is_implied(name: str, value: object, owner: object) -> bool:
    """Whether Python or torch calls an attribute of a class without that a function names it."""
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return isinstance(value, staticmethod | classmethod)
    called = isinstance(owner, type) or name not in _OF_LIFE
    return called and name.startswith("__") and isinstance(value, types.FunctionType)


def unwrapped(value: object) -> object:
    """Return the function of a method of a class, or of a property; other values as they are."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, functools.cached_property | functools.partialmethod | functools.singledispatchmethod):
        return value.func
    return value.fget if isinstance(value, property) else value


@functools.lru_cache(maxsize=4096)
def _computes(kind: type) -> bool:
    """Whether a class finds values of its objects by keys and names, see ``COMPUTED``."""
    return any(isinstance(kind.__dict__.get(name), types.FunctionType) for name in COMPUTED)


def _is_watched(value: object) -> bool:
    """Whether attributes of an object may be what a step reads: it is neither torch's nor a library, or holds some."""
    if isinstance(value, types.ModuleType):
        return not is_installed(value)
    kind = value if isinstance(value, type) else type(value)
    if is_torch(kind.__module__):
        return False
    is_users = not is_installed(sys.modules.get(kind.__module__))
    return is_users or (kind is not value and bool(_attributes_in(value)) and _bytes_of(value) is None)

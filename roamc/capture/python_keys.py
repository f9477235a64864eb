"""Keys of Python's values and functions: hashable, and equal while nothing has changed that a captured step may read.

A value is described by its content, as far as :data:`DEEP` and :data:`LONG` allow, and by identity beyond. A function
is described with the variables that it names, and so on through the functions among them; what functions read of other
objects is collected in :class:`Seen` and described with them. :mod:`roamc.capture.python_state` says what counts.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import io
import itertools
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from roamc import compat

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)
"""Types whose values never change: a key holds the value itself, see :func:`of_plain`."""

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)

DEEP = 4
"""Levels to which lists of lists and objects with objects are followed; what lies deeper is known by identity alone."""

LONG = 1_000
"""Elements up to which a container is looked into; a longer one is known by identity and length alone."""

MANY = 10_000
"""Elements of containers within containers that are looked into, all together, for one variable or attribute."""

OBJECTS = 100
"""Objects that functions name and whose attributes are watched; those named later are known by identity alone."""

CONTAINERS = (list, tuple, set, frozenset, dict, deque)

NAMED = (*PLAIN, *FUNCTIONS, *CONTAINERS, torch.Tensor, nn.Module)
"""Types that are looked at among the global variables, defaults and closure contents of a function."""

ABSENT = object()
"""In the place of the value of a variable or attribute that is missing."""


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


Place = tuple[int, str]
"""An attribute of an object: the object's identity, and the attribute's name."""


class Seen:
    """What the description of one key has met so far.

    Attributes:
        functions: identities of the functions described, and pairs of an object and its method: each comes once.
        around: identities of the containers and objects that are being described: one may hold itself.
        left: elements that may still be looked into, see ``MANY``.
        names: attributes that the functions read, of whatever object, in the order in which they came.
        objects: objects and Python modules that the functions name, by identity.
    """

    def __init__(self) -> None:
        self.functions: set[object] = set()
        self.around: set[int] = set()
        self.left = MANY
        self.names: dict[str, None] = {}
        self.objects: dict[int, object] = {}

    def note(self, value: object) -> bool:
        """Return whether functions may read attributes of ``value``; if so, add it to ``objects``.

        ``objects`` takes :data:`OBJECTS` of them at most.
        """
        if isinstance(value, (*NAMED, type)) or not _is_watched(value):
            return False
        if len(self.objects) < OBJECTS:
            self.objects.setdefault(id(value), value)
        return True


def of_plain(value: object) -> tuple[object, ...]:
    """Return a hashable key of ``value``, whose type is in ``PLAIN``.

    All nan have one key; True and 1, or 0.0 and -0.0, have different ones.
    """
    kind = type(value)
    if kind is complex or (kind is float and not (value and value == value)):
        return kind, repr(value)
    return kind, value


def of_function(function: object, *, inside: bool = True) -> tuple[object, dict[Place, object]]:
    """Return a hashable key of a function, such as the loss function, and of the variables that it names.

    These are global variables, closure contents and defaults of the types in ``NAMED``, and likewise those of the
    functions among them. A method's key also has, unless its object is a module, the object's plain attributes, and the
    variables and methods of the object and of its class that the method names.

    Args:
        function: a function, a method, a functools.partial of one, or an object that is called. An object is known by
            identity, its ``__call__`` and, if they are plain, its attributes.
        inside: whether the content of lists, dicts and sets that are named counts; if not, their identity alone.

    Returns:
        The key; and for the attributes that the functions read of objects, (identity of object, name) to its key.
    """
    seen = Seen()
    return _called(function, seen, inside=inside), _read_of_objects(seen)


def iterators_of(function: object) -> Iterator[object]:
    """Return the iterators that a function names, such as that of a data loader, or that a functools.partial holds.

    Files and ``itertools.count`` do not count: what a function writes or numbers is no part of a step.
    """
    values: list[object] = []
    if isinstance(function, types.MethodType):
        function = function.__func__
    if isinstance(function, functools.partial):
        yield from iterators_of(function.func)
        values = [*function.args, *function.keywords.values()]
    if isinstance(function, types.FunctionType):
        values = [value for _, value in _variables(function)]
    yield from (value for value in values if is_iterator(value))


def is_iterator(value: object) -> bool:
    """Whether ``value`` gives other values at every use; files and ``itertools.count`` do not count."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase | itertools.count)


def of_identity(value: object) -> object:
    """Return a key of which object ``value`` is; all tensors of a trace count as one, as each trace makes new ones."""
    return "traced" if isinstance(value, compat.FakeTensor) else Same(value)


def of_content(value: object) -> object:
    """Return a hashable key of ``value``; of a function, with what it reads of the objects that it names."""
    seen = Seen()
    described = of_value(value, 0, seen)
    return (described, frozenset(_read_of_objects(seen).items())) if seen.objects else described


def of_value(value: Any, depth: int, seen: Seen) -> object:
    """Return a hashable key of ``value``: equal while its content is the same, within ``DEEP`` levels and ``LONG``.

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
        return "traced"
    if isinstance(value, torch.Tensor):
        return Same(value), value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, np.ndarray | np.generic):
        return _array(value)
    if isinstance(value, nn.Module | type | types.ModuleType) or id(value) in seen.around:
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
    own = _attributes_in(value)
    seen.left -= len(own)
    if own and (depth == DEEP or len(own) > LONG or seen.left < 0):
        return Unknown(value)
    inside = {name: of_value(item, depth + 1, seen) for name, item in own.items()}
    if any(isinstance(item, Unknown) for item in inside.values()):
        return Unknown(value)
    return Same(value), tuple(inside.items())


def _attributes_in(value: object) -> dict[str, Any]:
    """Attributes that an object itself holds, in its ``__dict__`` and in its ``__slots__``, by name."""
    try:
        attributes = dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        attributes = {}
    slotted = (kind.__dict__ for kind in type(value).__mro__ if "__slots__" in kind.__dict__)
    for name, member in (pair for own in slotted for pair in own.items()):
        if isinstance(member, types.MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # nothing has been put there yet
                attributes[name] = member.__get__(value)
    return attributes


def _called(value: Any, seen: Seen, *, inside: bool) -> object:
    """Describe what is called: a function, or an object by its attributes and its ``__call__``."""
    if isinstance(value, FUNCTIONS):
        return _function(value, seen, inside=inside)
    content = of_value(value, 0, seen) if inside else Same(value)
    call = next(_attribute(type(value), "__call__"), None)
    if isinstance(value, nn.Module | type) or not isinstance(call, types.FunctionType):
        return content
    return content, _method(value, call, seen, inside=inside)


def _function(value: Any, seen: Seen, *, inside: bool = True) -> object:
    """Describe a function and what it names; one in ``seen`` or of torch, which does not change, by identity."""
    if isinstance(value, types.MethodType):
        return _method(value.__self__, value.__func__, seen, inside=inside)
    if isinstance(value, functools.partial):
        return _partial(value, seen, inside=inside)
    if not isinstance(value, types.FunctionType) or id(value) in seen.functions or is_torch(value.__module__):
        return Same(value)
    seen.functions.add(id(value))
    seen.names.update(dict.fromkeys(_attributes(value.__code__)))
    variables = [(name, item) for name, item in _variables(value) if isinstance(item, NAMED) or seen.note(item)]
    return Same(value), tuple((name, _named(item, seen, inside=inside)) for name, item in variables)


def _variables(function: types.FunctionType) -> list[tuple[str, object]]:
    """Return the global variables and closure contents that a function names, and its defaults, whose name is ""."""
    named = [(name, function.__globals__.get(name, ABSENT)) for name in _names(function.__code__)]
    named += zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True)
    named += [("", default) for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())]
    return named


def _partial(value: functools.partial[Any], seen: Seen, *, inside: bool) -> object:
    """Describe a functools.partial: what it calls, and the arguments that it holds; another one with them is equal."""
    if id(value) in seen.functions:
        return Same(value)
    seen.functions.add(id(value))
    bound = [*enumerate(value.args), *value.keywords.items()]
    arguments = tuple(
        (place, _named(item, seen, inside=inside), of_value(item, DEEP - 1, seen) if seen.note(item) else None)
        for place, item in bound
    )
    return "partial", _called(value.func, seen, inside=inside), arguments


def _method(owner: Any, function: Any, seen: Seen, *, inside: bool) -> object:
    """Describe a method and its object; the attributes of a module are looked at elsewhere."""
    if (id(owner), id(function)) in seen.functions:
        return Same(owner)
    seen.note(owner)
    described = Same(owner), _called(function, seen, inside=inside)
    if isinstance(owner, nn.Module):
        return described
    return *described, _plain_values(owner), tuple(_members(owner, function, seen, inside=inside))


def _members(owner: Any, function: Any, seen: Seen, *, inside: bool) -> Iterator[object]:
    """Describe what a method names of its object and of the class, and what the methods among that name of them."""
    seen.functions.add((id(owner), id(function)))
    for name in _attributes(function.__code__) if isinstance(function, types.FunctionType) else ():
        for value in _attribute(owner, name):
            if isinstance(value, NAMED):
                yield name, _named(value, seen, inside=inside)
            if isinstance(value, types.FunctionType) and (id(owner), id(value)) not in seen.functions:
                yield from _members(owner, value, seen, inside=inside)


def _attribute(owner: Any, name: str) -> Iterator[object]:
    """Find an attribute in an object and in all its classes, as ``super()`` may; of a property, its function."""
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    for own in (_attributes_in(owner), *(kind.__dict__ for kind in kinds)):
        if name in own:
            value = own[name]
            if isinstance(value, staticmethod | classmethod):
                yield value.__func__
            else:
                yield value.fget if isinstance(value, property) else value


def _named(value: Any, seen: Seen, *, inside: bool) -> object:
    """Describe one variable that a function names: a container by identity if not ``inside``, as is any object."""
    if isinstance(value, FUNCTIONS):
        return _function(value, seen, inside=inside)
    if seen.note(value) or (isinstance(value, CONTAINERS) and not inside):
        return Same(value)
    seen.left = MANY
    return of_value(value, 0, seen)


def _plain_values(owner: object) -> object:
    """Numbers, strings and flags of the object that a method belongs to."""
    own = _attributes_in(owner)
    return tuple((name, of_plain(value)) for name, value in own.items() if type(value) in PLAIN)


def _read_of_objects(seen: Seen) -> dict[Place, object]:
    """Return keys of the attributes that functions name of the objects they name, and of the objects found in these.

    A method that is named of an object counts, with what it names in turn; so does ``__call__``.
    """
    keys: dict[Place, object] = {}
    looked: set[tuple[int, int]] = set()
    while True:
        extent = len(seen.names), len(seen.objects)
        for owner in list(seen.objects.values()):
            if (id(owner), extent[0]) in looked:
                continue
            looked.add((id(owner), extent[0]))
            for name, value in _attributes_of(owner, seen.names):
                if (id(owner), name) not in keys:
                    keys[id(owner), name] = _named(value, seen, inside=True)
        if extent == (len(seen.names), len(seen.objects)):
            return keys


def _attributes_of(owner: object, names: Mapping[str, None]) -> list[tuple[str, object]]:
    """Return the attributes of an object that have one of ``names``: its own, and what its classes have for all."""
    own = _attributes_in(owner)
    attributes = [(name, value) for name, value in own.items() if name in names]
    if isinstance(owner, types.ModuleType):
        return attributes
    for kind in type(owner).__mro__:
        if not _is_installed(sys.modules.get(kind.__module__)):
            shared = (name for name in kind.__dict__ if (name in names or name == "__call__") and name not in own)
            attributes += [(name, value) for name in shared for value in _attribute(kind, name)]
    return attributes


def _is_watched(value: object) -> bool:
    """Whether attributes of an object may be what a step reads: it has some, and is neither torch's nor a library."""
    if isinstance(value, types.ModuleType):
        return not _is_installed(value)
    return not is_torch(type(value).__module__) and bool(_attributes_in(value))


def _is_installed(module: types.ModuleType | None) -> bool:
    """Whether a Python module comes with Python or was installed, so that it is not the user's to change."""
    file = getattr(module, "__file__", None)
    if module is None or module.__name__.partition(".")[0] in sys.stdlib_module_names:
        return module is None or module.__name__ != "__main__"
    return file is not None and ("site-packages" in file or "dist-packages" in file)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been put there yet
        return ABSENT


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names of the global variables that a function and those inside it read."""
    return _read_by(code, ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))


@functools.lru_cache(maxsize=4096)
def _attributes(code: types.CodeType) -> tuple[str, ...]:
    """Names of the attributes that a function and those inside it read, of whatever object, by ``getattr`` as well."""
    return tuple(dict.fromkeys((*_read_by(code, ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")), *_words(code))))


def _words(code: types.CodeType) -> Iterator[str]:
    """Strings in a function and in those inside it that may be names of attributes."""
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _words(part)
        elif isinstance(part, str) and part.isidentifier():
            yield part


def _read_by(code: types.CodeType, instructions: tuple[str, ...]) -> tuple[str, ...]:
    """Names that the given instructions of a function and of those inside it have, each once."""
    mine = [instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in instructions]
    inside = [
        name for part in code.co_consts if isinstance(part, types.CodeType) for name in _read_by(part, instructions)
    ]
    return tuple(dict.fromkeys((*mine, *inside)))


def is_torch(module: str | None) -> bool:
    """Whether a Python module, by its name, is one of torch's; None, for no module, is none."""
    return (module or "").partition(".")[0] == "torch"

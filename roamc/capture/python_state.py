"""What of Python a captured step depends on: tracing reads it and fixes it, so a change needs another capture.

    modules      which they are, where they hang, their numbers, flags, strings and functions
    attributes   everything else that tracing reads of modules: lists, dicts, configurations, tensors that are neither
                 parameter nor buffer, functions and numbers of a class
    functions    loss function and methods: numbers, strings, tensors, functions, and lists and dicts of these, which
                 they name as global variables, have in their closures or as defaults; and so on through the functions
                 that they name; numbers and strings of the object that a method belongs to
    torch        what is set for all: default dtype and device, kernels of attention, modes

Attributes of other objects, such as those of a global configuration, are not watched.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roamc import compat, compat_hooks

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)
"""Types of which a value is all that there is to know."""

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)

OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has; parameters, buffers, hooks and submodules are looked at elsewhere."""

DEEP = 4
"""Lists of lists and objects with objects are followed so far; what lies deeper is only known by identity."""

LONG = 1_000
"""Containers with more in them are only known by identity and length."""


CONTAINERS = (list, tuple, set, frozenset, dict)

NAMED = (*PLAIN, *FUNCTIONS, *CONTAINERS, torch.Tensor, nn.Module)
"""Types of global variables, defaults and of what is in closures that are looked at."""


class Same:
    """Equal to itself alone: in a key, an object whose content is not looked at. Keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def of_modules(modules: Sequence[nn.Module]) -> tuple[object, ...]:
    """Which modules there are, what hangs in each, and its numbers, flags, strings and functions."""
    return tuple((weakref.ref(module), *_children(module), *_own_values(module)) for module in modules)


def _children(module: nn.Module) -> Iterator[int]:
    """Identities of the submodules, by place: those of one key are alive as long as it is compared with another."""
    return map(id, module._modules.values())


def _own_values(module: nn.Module) -> Iterator[object]:
    for name, value in vars(module).items():
        if name not in OWN and type(value) in PLAIN:
            yield name, type(value), value
        elif name not in OWN and type(value) in FUNCTIONS:
            yield name, _described(value, 0)


def of_function(function: object, *, inside: bool = True) -> object:
    """A function, and what it names: a loss function. ``inside``: what lists and dicts hold, too."""
    if isinstance(function, FUNCTIONS):
        return _function(function, set(), inside=inside)
    return _described(function, 0)


def of_torch() -> tuple[object, ...]:
    """What is set for the whole process or thread, and decides which operators are traced."""
    casts = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    settings = torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled()
    cached = torch.is_autocast_cache_enabled()
    return casts, cached, settings, compat_hooks.kernels_of_attention(), tuple(map(Same, compat_hooks.function_modes()))


@dataclass(frozen=True)
class Slot:
    """One attribute that tracing has read: of a module, or of a class.

    Attributes:
        owner: whose it is.
        name: its name.
        inside: whether its content counts, and not only which object it is.
    """

    owner: weakref.ref[Any]
    name: str
    inside: bool = True

    def now(self, known: dict[int, object] | None = None) -> object:
        """What it is now, as part of a key; ``known`` has what has been looked at just now, by identity."""
        owner = self.owner()
        value = owner.__dict__.get(self.name, _ABSENT) if owner is not None else _ABSENT
        if not self.inside:
            return _identity(value)
        if known is None:
            return _described(value, 0)
        if id(value) not in known:
            known[id(value)] = _described(value, 0)
        return known[id(value)]


_ABSENT = object()


class Reads:
    """The attributes that one trace has read, and what they were when it read them first."""

    def __init__(self, known: Sequence[nn.Module]) -> None:
        """``known``: modules whose numbers and functions :func:`of_modules` tells."""
        self._known = {id(module) for module in known}
        self._found: dict[tuple[int, str], tuple[Slot, object]] = {}
        self._read: set[tuple[int, str]] = set()
        self._written: set[tuple[int, str]] = set()

    def hold(self) -> bool:
        """Whether all of them are what they were; what is gone cannot be read again."""
        known: dict[int, object] = {}
        return all(slot.owner() is None or slot.now(known) == before for slot, before in self._found.values())

    def read(self, module: nn.Module, name: str) -> None:
        """The trace reads an attribute; that of a module's own number or function is in :func:`of_modules`."""
        if name in OWN or name.startswith("__"):
            return
        if (id(module), name) not in self._written:
            self._read.add((id(module), name))
        mine = name in module.__dict__
        owner = module if mine else _class_with(type(module), name)
        if owner is None or (id(owner) in self._known and type(owner.__dict__[name]) in (*PLAIN, *FUNCTIONS)):
            return
        key = id(owner), name
        if key not in self._found and key not in self._written:
            slot = Slot(weakref.ref(owner), name)
            self._found[key] = slot, slot.now()

    def write(self, module: nn.Module, name: str) -> None:
        """The trace sets an attribute: what it reads of it from now on is its own."""
        self._written.add((id(module), name))

    def has_read(self, module: nn.Module, name: str) -> bool:
        """Whether the trace has read this attribute before it set it."""
        return (id(module), name) in self._read

    def end(self) -> None:
        """What the trace has changed in place, such as a list that it has appended to, counts by identity alone."""
        for key, (slot, before) in self._found.items():
            if key not in self._written and slot.now() != before:
                known = Slot(slot.owner, slot.name, inside=False)
                self._found[key] = known, known.now()


@contextlib.contextmanager
def followed(known: Sequence[nn.Module]) -> Iterator[Reads]:
    """While inside, the attributes that this thread reads of modules are noted; ``known`` as for :class:`Reads`."""
    reads = Reads(known)
    with _watched(reads.read, reads.write):
        yield reads
    reads.end()


def _class_with(kind: type, name: str) -> type | None:
    """The class that gives its instances an attribute, as a value or a method; none for torch's own and computed ones.

    Classes of torch do not change.
    """
    for base in kind.__mro__:
        if name in base.__dict__:
            computed = hasattr(type(base.__dict__[name]), "__set__")
            return None if computed or _is_torch(base.__module__) or base is object else base
    return None


@contextlib.contextmanager
def _watched(read: Any, write: Any) -> Iterator[None]:
    """While inside, tell ``read`` and ``write`` of attributes of modules that this thread reads and sets."""
    thread = threading.get_ident()
    set_plainly = nn.Module.__setattr__

    def get(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if threading.get_ident() == thread:
            read(module, name)
        return value

    def put(module: nn.Module, name: str, value: Any) -> None:
        set_plainly(module, name, value)
        if threading.get_ident() == thread:
            write(module, name)

    nn.Module.__getattribute__ = get  # type: ignore[method-assign, assignment]
    nn.Module.__setattr__ = put  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = set_plainly  # type: ignore[method-assign]


# -- values as parts of a key ---------------------------------------------------------------------------


def _identity(value: object) -> object:
    """Which object it is; of tensors that a trace has left behind there is a new one every time."""
    return "traced" if isinstance(value, compat.FakeTensor) else Same(value)


def _described(value: Any, depth: int) -> object:
    """Hashable; equal as long as the content is the same, as far as it is looked at."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind in FUNCTIONS:
        return _function(value, set())
    if isinstance(value, compat.FakeTensor):
        return "traced"
    if isinstance(value, torch.Tensor):
        return Same(value), value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        return _container(value, depth)
    if isinstance(value, nn.Module | type):
        return Same(value)
    return _record(value, depth)


def _container(value: Any, depth: int) -> object:
    if len(value) > LONG or depth == DEEP:
        return Same(value), len(value)
    if isinstance(value, Mapping):
        inside = tuple((_described(key, depth + 1), _described(item, depth + 1)) for key, item in value.items())
        return type(value), inside
    items = tuple(_described(item, depth + 1) for item in value)
    return type(value), frozenset(items) if isinstance(value, set | frozenset) else items


def _record(value: Any, depth: int) -> object:
    """An object of numbers, strings and the like, such as a configuration; any other by identity."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return Same(value)
    if depth == DEEP or len(own) > LONG:
        return Same(value)
    inside = {name: _described(item, depth + 1) for name, item in own.items()}
    if any(isinstance(item, Same) for item in inside.values()):
        return Same(value)
    return Same(value), tuple(inside.items())


def _function(value: Any, seen: set[int], *, inside: bool = True) -> object:
    """A function and what it names; those of torch do not change."""
    if isinstance(value, types.MethodType):
        return Same(value.__self__), _plain_values(value.__self__), _function(value.__func__, seen, inside=inside)
    if not isinstance(value, types.FunctionType) or id(value) in seen or _is_torch(value.__module__):
        return Same(value)
    seen.add(id(value))
    named = [(name, value.__globals__.get(name, _ABSENT)) for name in _names(value.__code__)]
    named += zip(value.__code__.co_freevars, map(_content, value.__closure__ or ()), strict=True)
    named += [("", default) for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())]
    found = [(name, item) for name, item in named if isinstance(item, NAMED)]
    return Same(value), tuple((name, _named(item, seen, inside=inside)) for name, item in found)


def _named(value: Any, seen: set[int], *, inside: bool) -> object:
    """What a function names."""
    if isinstance(value, FUNCTIONS):
        return _function(value, seen, inside=inside)
    return Same(value) if isinstance(value, CONTAINERS) and not inside else _described(value, DEEP - 1)


def _plain_values(owner: object) -> object:
    """Numbers, strings and flags of the object that a method belongs to; those of modules are looked at elsewhere."""
    own = {} if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {})
    return tuple((name, type(value), value) for name, value in own.items() if type(value) in PLAIN)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been put there yet
        return _ABSENT


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names that may be global variables, of a function and of those inside it."""
    inside = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part)]
    return tuple(dict.fromkeys((*code.co_names, *inside)))


def _is_torch(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "torch"

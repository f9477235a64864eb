"""What of Python a captured step depends on: tracing reads it and fixes it, so a change needs another capture.

    modules      which they are, which submodules each has, their numbers, flags, strings and functions
    attributes   everything else that tracing reads of modules: lists, dicts, configurations, tensors that are neither
                 parameter nor buffer, functions and numbers of a class
    functions    loss function, hooks, functions that modules hold, methods: what they name as global variables, have in
                 their closures, as defaults or by functools.partial, and so on through the functions that they name;
                 an object that is called counts as its method __call__
    objects      of objects, classes and Python modules that functions name or are methods of: the attributes whose
                 names occur in any of these functions, and so on through the objects among them
    torch        what is set for all: default dtype and device, kernels of attention, modes

An object's attributes are those in its ``__dict__`` and in its ``__slots__``.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roamc import compat_hooks
from roamc.capture.python_changes import is_read_anew
from roamc.capture.python_keys import (
    PLAIN,
    Seen,
    implied_by,
    of_called,
    of_content,
    of_identity,
    of_plain,
    of_value,
    slots_of,
    unwrapped,
)
from roamc.capture.python_names import ABSENT, FUNCTIONS, attributes_in, is_installed, is_torch
from roamc.capture.python_uses import is_looked_into, looked_into, looks_into
from roamc.compat_eager import is_of_tracer

OWN = frozenset(vars(nn.Module())) - {"training"}
"""Names of the attributes that every module has; parameters, buffers, hooks and submodules are looked at elsewhere."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of ``nn.Module`` that hold the hooks of its forward and backward, by their numbers."""


def of_modules(modules: Sequence[nn.Module], seen: Seen) -> tuple[object, ...]:
    """Return a hashable key of modules: which they are, their submodules, and their plain attributes.

    Plain attributes are numbers, flags, strings and other types of ``PLAIN``, and functions; what these read is put
    into ``seen``, and so is what methods such as ``__call__`` read, which Python finds without a name. Parameters,
    buffers, hooks and other attributes are not part of it.

    Args:
        modules: all modules of the model, as ``model.modules()`` gives them: submodules count by identity alone.
        seen: what the step's key has met.

    Returns:
        One tuple for each module. It holds a weak reference to the module: once one is gone, no later key is equal.
    """
    called = tuple(of_called(method, seen) for kind in dict.fromkeys(map(type, modules)) for method in implied_by(kind))
    own = tuple((weakref.ref(module), *_children(module), *_own_values(module, seen)) for module in modules)
    return called, own


def _children(module: nn.Module) -> Iterator[int]:
    """Return the identities of the submodules in their order; :func:`of_modules` has a weak reference to each."""
    return map(id, module._modules.values())


def _own_values(module: nn.Module, seen: Seen) -> Iterator[object]:
    for name, value in vars(module).items():
        if name not in OWN and type(value) in PLAIN:
            yield name, of_plain(value)
        elif name not in OWN and type(value) in FUNCTIONS:
            yield name, of_called(value, seen)
    yield from ((name, of_value(value, 0, seen)) for name, value in slots_of(module).items())


def of_torch(seen: Seen) -> tuple[object, ...]:
    """Return a hashable key of torch's settings that decide which operators are traced.

    These are autocast with its dtypes and cache, the default dtype and device, deterministic algorithms, the kernels of
    attention, and the function modes around the call; what these read is put into ``seen``.
    """
    casts = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    settings = torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled()
    cached = torch.is_autocast_cache_enabled()
    modes = tuple(of_called(mode.__torch_function__, seen) for mode in compat_hooks.function_modes())
    return casts, cached, settings, compat_hooks.kernels_of_attention(), modes


@dataclass(frozen=True)
class Slot:
    """One attribute that tracing has read: of a module, or of a class.

    Attributes:
        owner: weak reference to the module or the class in whose ``__dict__`` it is.
        name: its name.
        inside: whether the content of its value counts; if not, only which object the value is.
    """

    owner: weakref.ref[Any]
    name: str
    inside: bool = True

    def now(self, cache: dict[int, object] | None = None) -> object:
        """Return a hashable key of its present value; an attribute that is missing has a key as well.

        Args:
            cache: shared by several slots: identity of a value to its key. The call adds a new value. None for
                no cache.
        """
        owner = self.owner()
        value = owner.__dict__.get(self.name, ABSENT) if owner is not None else ABSENT
        if not self.inside:
            return of_identity(value)
        value = unwrapped(value) if isinstance(owner, type) else value
        if cache is None:
            return of_content(value)
        if id(value) not in cache:
            cache[id(value)] = of_content(value)
        return cache[id(value)]


class Reads:
    """The attributes of modules that one trace has read, and the values that they had when the trace read them first.

    Args:
        described: modules that :func:`of_modules` describes: their plain attributes are not noted again here.
    """

    def __init__(self, described: Sequence[nn.Module]) -> None:
        self._described = {id(module) for module in described}
        self._slots: dict[tuple[int, str], tuple[Slot, object]] = {}
        self._read: set[tuple[int, str]] = set()
        self._written: set[tuple[int, str]] = set()
        self._looked: set[tuple[int, str]] = set()
        self._followed: set[tuple[type, types.CodeType]] = set()
        self._first = _contents_of(described)

    def hold(self) -> bool:
        """Whether every attribute has the value that the trace read; those of modules that are gone do not count."""
        cache: dict[int, object] = {}
        return all(slot.owner() is None or slot.now(cache) == before for slot, before in self._slots.values())

    def read(self, module: nn.Module, name: str, frame: types.FrameType) -> None:
        """Note that ``frame`` reads attribute ``name`` of ``module``, and which value it finds at the first read.

        If the attribute is found on a class, the value is noted for that class. No value is noted for an attribute

        - that the trace has set itself, or that every module has, but for hooks of other modules;
        - that comes from a class of torch;
        - that is a plain value or a function and belongs to one of the modules that are ``described``.
        """
        if name.startswith("__") or (name in OWN and (name not in HOOKS or id(module) in self._described)):
            return
        if (id(module), name) not in self._written:
            self._read.add((id(module), name))
        mine = name in module.__dict__
        owner = module if mine else _class_with(type(module), name)
        if owner is None or (id(owner) in self._described and type(owner.__dict__[name]) in (*PLAIN, *FUNCTIONS)):
            return
        self._note(owner, name)
        if _may_change(owner.__dict__[name]) and looks_into(frame, name):
            self._looked.add((id(owner), name))
        function = unwrapped(owner.__dict__[name])
        if isinstance(function, types.FunctionType):
            self._read_by_class(type(module), function.__code__)

    def _read_by_class(self, kind: type, code: types.CodeType) -> None:
        """Note what a method may read of its class ``kind`` by another name than the object's, such as ``cls.log``."""
        if (kind, code) in self._followed:
            return
        self._followed.add((kind, code))
        for name in attributes_in(code):
            owner = None if name.startswith("__") else _class_with(kind, name)
            if owner is not None:
                self._note(owner, name)
                if is_looked_into(looked_into(code), False, name):
                    self._looked.add((id(owner), name))

    def _note(self, owner: nn.Module | type, name: str) -> None:
        """Note the value of an attribute, unless that has been done, or the trace has set it."""
        key = id(owner), name
        if key not in self._slots and key not in self._written:
            slot = Slot(weakref.ref(owner), name)
            self._slots[key] = slot, self._first[key] if key in self._first else slot.now()

    def miss(self, module: nn.Module, name: str) -> None:
        """Note that the trace asks one of the ``described`` modules in vain for an attribute, which it may set then."""
        own = object.__getattribute__(module, "__dict__")  # in which a module of torch.jit.trace lacks some of these
        held = [own.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules")]
        if id(module) in self._described and not name.startswith("__") and not any(name in names for names in held):
            self._note(module, name)

    def read_whole(self, module: nn.Module, attributes: Mapping[str, object], frame: types.FrameType) -> None:
        """Note that ``frame`` reads ``module.__dict__``, and so may read any of ``attributes`` past :meth:`read`."""
        for name in attributes:
            if name not in OWN:
                self._note(module, name)
                if not is_torch(frame.f_globals.get("__name__")) and looks_into(frame, name):
                    self._looked.add((id(module), name))

    def write(self, module: nn.Module, name: str) -> None:
        """Note that the trace sets attribute ``name`` of ``module``; later reads of it get the trace's own value."""
        self._written.add((id(module), name))

    def has_read(self, module: nn.Module, name: str) -> bool:
        """Whether the trace has read attribute ``name`` of ``module`` before it set the attribute."""
        return (id(module), name) in self._read

    def end(self) -> None:
        """Let values that the trace has changed in place count by identity alone; call it once the trace is over.

        One such value is a list to which forward only appends; none is a dict in which it counts up a number.
        """
        for key, (slot, before) in self._slots.items():
            value = slot.now()
            if key not in self._written and before != value and not is_read_anew(before, value, key in self._looked):
                by_identity = Slot(slot.owner, slot.name, inside=False)
                self._slots[key] = by_identity, by_identity.now()


@contextlib.contextmanager
def followed(described: Sequence[nn.Module]) -> Iterator[Reads]:
    """Context manager: note the attributes of modules that this thread reads and sets inside.

    For that time, access to attributes is replaced in :class:`torch.nn.Module` itself. ``described`` is as for
    :class:`Reads`.

    Yields:
        The notes, complete once the context is left without an error.
    """
    reads = Reads(described)
    with _watched(reads):
        yield reads
    reads.end()


def _contents_of(modules: Sequence[nn.Module]) -> dict[tuple[int, str], object]:
    """Return the keys of what attributes hold that a trace may change in place, by module and name.

    It may do so by another name of the same list or object, before it reads the attribute.
    """
    cache: dict[int, object] = {}
    names = ((module, name) for module in modules for name in vars(module).keys() - OWN)
    may_change = ((module, name) for module, name in names if _may_change(vars(module)[name]))
    return {(id(module), name): Slot(weakref.ref(module), name).now(cache) for module, name in may_change}


def _may_change(value: object) -> bool:
    """Whether a value may be another one afterwards without that the attribute is set."""
    return type(value) not in (*PLAIN, *FUNCTIONS) and not isinstance(value, nn.Module | torch.Tensor)


def _class_with(kind: type, name: str) -> type | None:
    """Return the class that gives its instances an attribute, as a value, a method or a property.

    None for what comes from a class of torch, which does not change, for the slot of an object, and for a property of
    an installed class.
    """
    for base in kind.__mro__:
        if name in base.__dict__:
            value, installed = base.__dict__[name], is_installed(sys.modules.get(base.__module__))
            slot = isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)
            computed = slot or (installed and hasattr(type(value), "__set__"))
            return None if computed or is_torch(base.__module__) or base is object else base
    return None


@contextlib.contextmanager
def _watched(reads: Reads) -> Iterator[None]:
    """While inside, tell ``reads`` of attributes of modules that this thread reads and sets."""
    thread = threading.get_ident()
    set_plainly = nn.Module.__setattr__

    def get(module: nn.Module, name: str) -> Any:
        try:
            value = object.__getattribute__(module, name)
        except AttributeError:
            if threading.get_ident() == thread:
                reads.miss(module, name)
            raise
        if threading.get_ident() == thread:
            frame = sys._getframe(1)
            if name != "__dict__":
                reads.read(module, name, frame)
            elif not is_of_tracer(frame.f_globals):
                reads.read_whole(module, value, frame)
        return value

    def put(module: nn.Module, name: str, value: Any) -> None:
        set_plainly(module, name, value)
        if threading.get_ident() == thread:
            reads.write(module, name)

    nn.Module.__getattribute__ = get  # type: ignore[method-assign, assignment]
    nn.Module.__setattr__ = put  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = set_plainly  # type: ignore[method-assign]

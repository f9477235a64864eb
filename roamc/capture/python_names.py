"""What Python functions name, read off their code and closures: variables, attributes, iterators."""

from __future__ import annotations

import builtins
import dis
import functools
import io
import itertools
import operator
import sys
import types
from collections.abc import Iterator, Mapping, Sequence

CACHED = type(functools.cache(len))
"""Class of what ``functools.lru_cache`` makes of a function."""

GETTERS = (operator.attrgetter, operator.methodcaller)
"""Functions that hold the names of the attributes that they read."""

BUILTIN = (types.BuiltinFunctionType, types.MethodWrapperType)
"""Functions of Python's own, and methods such as ``[].append`` and ``[].__len__``."""

FUNCTIONS = (types.FunctionType, *BUILTIN, types.MethodType, functools.partial, CACHED, *GETTERS)

WHOLE = ("vars", "asdict", "astuple", "__dict__", "__getattribute__", "attrgetter")
"""Names by which a function reads all attributes of an object, or any of them."""

READERS = (getattr, vars)
"""Built-in functions that do so, under whatever name."""

ABSENT = object()
"""In the place of the value of a variable or attribute that is missing."""

VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
"""Instructions that read a global variable."""

OUTER = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
"""Instructions that read a variable of a function around the one that has them."""

ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
"""Instructions that read an attribute."""

_BUILTINS = dict(vars(builtins))
"""Python's built-in names and their values when roamc was imported."""


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
        values = [value for _, value in variables_of(function)]
    yield from (value for value in values if is_iterator(value))


def is_iterator(value: object) -> bool:
    """Whether ``value`` gives other values at every use; files and ``itertools.count`` do not count."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase | itertools.count)


def variables_of(function: types.FunctionType) -> list[tuple[tuple[str, str], object]]:
    """Return the global variables that a function names, its closure contents and its defaults, by kind and name.

    Of built-in names, such as ``max``, those that somebody has given another value since roamc was imported. Of a
    function of torch, whose variables nobody changes, only functions in its closure, which a user may have put
    there.
    """
    cells = zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True)
    named: list[tuple[tuple[str, str], object]] = [(("nonlocal", name), item) for name, item in cells]
    if is_torch(function.__module__):
        return [(name, item) for name, item in named if isinstance(item, FUNCTIONS)]
    named += [(("global", name), _variable(function, name)) for name in globals_in(function.__code__)]
    named += [(("import", name), module) for name, module in _imported(function)]
    defaults = function.__defaults__ or ()
    positional = parameters_in(function.__code__)[: function.__code__.co_argcount]
    last = zip(reversed(positional), reversed(defaults), strict=False)
    named += [(("default", name), default) for name, default in (*last, *(function.__kwdefaults__ or {}).items())]
    return [(name, item) for name, item in named if item is not ABSENT]


def libraries_in(code: types.CodeType, variables: Mapping[str, object]) -> frozenset[str]:
    """Return the names of those global ``variables`` that a function reads and that are installed Python modules."""
    named = ((name, variables.get(name)) for name in globals_in(code))
    return frozenset(name for name, value in named if isinstance(value, types.ModuleType) and is_installed(value))


def parameters_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of a function's parameters: those of positional arguments, then those of named ones only."""
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _variable(function: types.FunctionType, name: str) -> object:
    """The value of a global variable, or of a built-in name that has another one than at first."""
    value = function.__globals__.get(name, ABSENT)
    if value is not ABSENT:
        return value
    value = vars(builtins).get(name, ABSENT)
    return ABSENT if value is _BUILTINS.get(name, ABSENT) else value


def _imported(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """The Python modules that a function imports while it runs, as far as they have been imported, by name."""
    names = _imports_in(function.__code__)
    if not names:
        return
    package = str(function.__globals__.get("__package__") or "")
    parents = list(itertools.accumulate(package.split("."), "{}.{}".format))  # one of them is meant by leading dots
    for name in names:
        within = (f"{parent}.{name}".strip(".") for parent in parents)
        for full in dict.fromkeys((name, name.partition(".")[0], *within)):
            if full in sys.modules:
                yield full, sys.modules[full]


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been put there yet
        return ABSENT


@functools.lru_cache(maxsize=4096)
def attributes_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of attributes that a function and those inside it read, of whatever object, or may by strings.

    Strings are there for ``getattr``. A name in :data:`WHOLE` that they read as a variable counts as well, and a
    ``getattr`` with a computed name as ``__dict__``.
    """
    read = _read_by(code, ATTRIBUTES)
    strings = (word for part in codes_in(code) for word in _words(part.co_consts))
    computed = any(map(_computes_a_name, codes_in(code)))
    whole = ["__dict__"] if computed else [name for name in globals_in(code) if name in WHOLE]
    return tuple(dict.fromkeys((*read, *strings, *whole)))


@functools.lru_cache(maxsize=4096)
def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of the global variables that a function and those inside it read."""
    return _read_by(code, VARIABLES)


@functools.lru_cache(maxsize=4096)
def _imports_in(code: types.CodeType) -> tuple[str, ...]:
    """Names of the Python modules that a function and those inside it import."""
    return _read_by(code, ("IMPORT_NAME",))


def _computes_a_name(code: types.CodeType) -> bool:
    """Whether a function, those inside it left out, calls ``getattr`` with a name that is not written there."""
    steps = steps_of(code)
    names = (*VARIABLES, *ATTRIBUTES)
    reads = (place for place, step in enumerate(steps) if step.opname in names and step.argval == "getattr")
    return any(not _is_written(steps[place + 1 :]) for place in reads)


def _is_written(steps: Sequence[dis.Instruction]) -> bool:
    """Whether the second argument of a call is a constant; ``steps`` follow the one that reads what is called.

    ``depth`` counts the values on Python's stack above what is called: the second argument begins with the last step
    that finds one there, and is that step alone if only one step, of the third argument or the call, finds two.
    """
    depth, second, behind = 0, None, 0
    for step in steps:
        if depth == 1:
            second, behind = step, 0
        behind += depth == 2
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
        if depth < 0:
            break
    return second is not None and second.opname == "LOAD_CONST" and behind == 1


def _read_by(code: types.CodeType, instructions: tuple[str, ...]) -> tuple[str, ...]:
    """Names that the given instructions of a function and of those inside it have, each once."""
    steps = (step for part in codes_in(code) for step in steps_of(part))
    return tuple(dict.fromkeys(step.argval for step in steps if step.opname in instructions))


def steps_of(code: types.CodeType) -> list[dis.Instruction]:
    """Return the instructions of a function, each with its whole argument."""
    return [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Return the code of a function and of those inside it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from codes_in(part)


def _words(constants: tuple[object, ...] | frozenset[object]) -> Iterator[str]:
    """Strings among constants, nested in whatever way, that may be names."""
    for part in constants:
        if isinstance(part, tuple | frozenset):
            yield from _words(part)
        elif isinstance(part, str) and part.isidentifier():
            yield part


def is_torch(module: str | None) -> bool:
    """Whether a Python module, by its name, is one of torch's; None, for no module, is none."""
    return (module or "").partition(".")[0] == "torch"


def is_installed(module: types.ModuleType | None) -> bool:
    """Whether a Python module comes with Python or was installed, so that it is not the user's to change; None is."""
    if module is None or module.__name__.partition(".")[0] in sys.stdlib_module_names:
        return True
    file = getattr(module, "__file__", None)
    return file is not None and ("site-packages" in file or "dist-packages" in file)

"""Compiled loops: numba, with its results kept on disk, behind one decorator that keeps a function's type.

An installation brings machine code along, see `machine_code`. Where that does not fit, the first process finds nothing
on disk and compiles; small problems take a fraction of a second in plain Python, so they do not wait: see
`interpreted_first`.
"""

import contextlib
import hashlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from numba.core import cpu, sigutils, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache
from numba.core.compiler import CompileResult
from numba.core.registry import CPUDispatcher

from roamc.solvers import machine_code
from roamc.solvers.machine_code import UNREADABLE

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = 1.5
"""Seconds that one process spends on interpreting before it compiles what it needs."""

SMALL = 2_000
"""Operators or storages of the largest problem that is interpreted: one loop over all pairs still ends in a second."""

_UNCOUNTED = {"_nrt": False} if hasattr(cpu.CPUTargetOptions, "_nrt") else {}
"""The option that has numba count no references. numba does not document it: without it functions compile as usual."""


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` to machine code on its first call; later processes read it from numba's cache.

    A decorator. Arguments are numbers, NumPy arrays and tuples of them; overflow wraps around and indices are not
    checked, as in C. Without a place to write (neither the package's folder nor the user's cache folder), every process
    compiles anew. With NUMBA_DISABLE_JIT=1 in the environment, `function` itself is returned.
    """
    return _compile(function, {})


def compiled_uncounted(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` as `compiled` does, but without numba's counting of references to arrays.

    The function must neither make nor return arrays. For a function that passes tuples of many arrays to others,
    counting takes a microsecond per call, which is most of a short loop.
    """
    return _compile(function, _UNCOUNTED)


def interpreted_first(size: int, solve: Callable[[], R]) -> R:
    """Return `solve()`; `compiled` functions that are not compiled yet run in it as plain Python while that is quick.

    Interpreting may take 1.5 seconds (`PATIENCE`) of a process in all; then functions are compiled. Both give the same
    result. A function that is compiled already, in this process or on disk, runs compiled.

    Args:
        size: number of operators or storages of the problem; above 2,000 (`SMALL`) every function is compiled.
        solve: called once, or again from the beginning if interpreting takes too long; `solve` must therefore keep
            nothing between two calls.
    """
    left = _process.patience
    if size > SMALL or left <= 0 or _thread.deadline is not None:
        return solve()
    began = time.perf_counter()
    _thread.deadline = began + left
    try:
        with contextlib.suppress(_TooSlow):
            return solve()
    finally:
        _thread.deadline = None
        if _thread.has_interpreted:
            _process.patience = left - (time.perf_counter() - began)
        _thread.has_interpreted = False
    return solve()


def codes_of(values: Iterable[object]) -> tuple[dict[str, machine_code.Code], tuple[str, ...]]:
    """Return what those among `values` have been compiled to, by name, and numba's tuple of the machine.

    Without annotations, which name the files of the machine that compiles.
    """
    codes: dict[str, machine_code.Code] = {}
    for function in values:
        if not isinstance(function, _Function):
            continue
        overloads: dict[Any, Any] = function.overloads
        for arguments, result in overloads.items():
            code = result._replace(type_annotation="")._reduce()
            codes[machine_code.name_of(function.py_func, arguments)] = code
    return codes, _Function.targetdescr.target_context.codegen().magic_tuple()


def always_compile() -> None:
    """Have `interpreted_first` compile from now on in this process, however small the problem."""
    _process.patience = 0.0


class _TooSlow(Exception):
    """The process has spent its patience."""


class _MustCompile(Exception):
    """A function is neither in memory nor on disk."""


class _Process:
    """Seconds of interpreting that this process has left."""

    patience = PATIENCE


class _Thread(threading.local):
    """Until when this thread interprets, None if it compiles; and whether it has interpreted anything by now."""

    deadline: float | None = None
    has_interpreted = False


class _Compiling:
    """Says what this process spends on compiling; a context manager around it, entered again for what a loop calls.

    seconds: of what has ended.  since: when what goes on began, by `time.monotonic()`; None while nothing does.
    reason: why the machine code of the installation was not used, for the function that was looked for last; "" where
    it was.
    """

    reason = ""
    seconds = 0.0
    since: float | None = None

    def __init__(self) -> None:
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        self.since = time.monotonic() if self.since is None else self.since

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth and self.since is not None:
            self.seconds, self.since = self.seconds + time.monotonic() - self.since, None


_process, _thread, compiling = _Process(), _Thread(), _Compiling()


class _Sealed(CompileResultCacheImpl):
    """Keeps compiled functions with a hash: LLVM ends the process, or runs on, where a byte of one is another."""

    def reduce(self, cres: Any) -> tuple[str, bytes]:
        """Return the hash of a compiled function, and the function as bytes."""
        content = pickle.dumps(super().reduce(cres))  # type: ignore[no-untyped-call]
        return hashlib.sha256(content).hexdigest(), content

    def rebuild(self, target_context: Any, payload: tuple[str, bytes]) -> Any:
        """Return the compiled function; ValueError where it is not the one that was kept."""
        digest, content = payload
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError("a compiled function was changed after it was kept")
        return super().rebuild(target_context, pickle.loads(content))  # type: ignore[no-untyped-call]


class _Cache(FunctionCache):
    """numba's cache of one function; counts as empty where its files cannot be read, whatever is wrong with them.

    They may be cut short or changed, name modules or classes that another version had, or belong to another user. Where
    they cannot be written, as on a full disk, later processes compile anew.
    """

    _impl_class = _Sealed

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what was compiled for `sig`, None if the cache has nothing that can be read."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except (OSError, *UNREADABLE):
            self._empty()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled for `sig`, if it can be written."""
        with contextlib.suppress(OSError):
            try:
                super().save_overload(sig, data)  # type: ignore[no-untyped-call]
            except UNREADABLE:  # it reads its index first
                self._empty()
                super().save_overload(sig, data)  # type: ignore[no-untyped-call]

    def _empty(self) -> None:
        with contextlib.suppress(OSError):
            self.flush()  # type: ignore[no-untyped-call]


class _Shipped(NullCache):
    """Reads the machine code that the installation brings along, and what it lacks from numba's cache on disk."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._own: Any = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what was compiled for `sig`, None if neither has it."""
        target_context.refresh()
        triple, _, features = target_context.codegen().magic_tuple()
        codes, reason = machine_code.shipped(machine_code.FILE, triple, features)
        arguments, _ = sigutils.normalize_signature(sig)  # type: ignore[no-untyped-call]
        name = machine_code.name_of(self._function, arguments)
        if name in codes:
            try:
                return CompileResult._rebuild(target_context, *pickle.loads(codes[name]))  # type: ignore[no-untyped-call]
            except UNREADABLE as error:
                reason = f"{self._function.__qualname__} cannot be read: {error}"
        compiling.reason = reason or f"it lacks {self._function.__qualname__} for these arguments"
        return self._on_disk().load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled for `sig` in numba's cache."""
        self._on_disk().save_overload(sig, data)

    def _on_disk(self) -> Any:
        """numba's cache, made at its first use: it looks for a folder to write to."""
        if self._own is None:
            try:
                self._own = _Cache(self._function)  # type: ignore[no-untyped-call]
            except RuntimeError:  # numba finds none
                self._own = NullCache()
        return self._own


class _Function(CPUDispatcher):
    """A compiled function that can also run as the Python that it was compiled from."""

    must_compile = False

    def enable_caching(self) -> None:
        """Read what the installation brings along or is on disk, and keep on disk what is compiled, if that can be."""
        self._cache = _Shipped(self.py_func)

    def __call__(self, *args: Any) -> Any:
        if _thread.deadline is None:
            return super().__call__(*args)
        if not self.must_compile:
            try:
                return super().__call__(*args)
            except _MustCompile:
                self.must_compile = True
        _thread.has_interpreted = True
        if time.perf_counter() > _thread.deadline:
            raise _TooSlow
        return self.py_func(*args)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Type a call from a compiled function; a constant counts as a plain number, so nothing is compiled for it."""
        return super().get_call_template(tuple(map(types.unliteral, args)), kws)


class _Compiler:
    """numba's compiler of one function, which refuses while its thread interprets."""

    def __init__(self, compiler: Any) -> None:
        self._compiler = compiler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler, name)

    def compile(self, *signature: Any) -> Any:
        """Compile for one signature, or raise `_MustCompile`."""
        if _thread.deadline is not None:
            raise _MustCompile
        with compiling:
            return self._compiler.compile(*signature)


def _compile(function: Callable[P, R], options: dict[str, Any]) -> Callable[P, R]:
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return function
    dispatcher: Any = _Function(py_func=function, locals={}, targetoptions={"nopython": True, **options})
    dispatcher._compiler = _Compiler(dispatcher._compiler)
    dispatcher.enable_caching()
    typed: Callable[P, R] = dispatcher
    return typed

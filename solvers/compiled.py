"""Compiled loops: numba, with its results kept on disk, behind one decorator that keeps a function's type."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
from numba.core import cpu

P = ParamSpec("P")
R = TypeVar("R")

_UNCOUNTED = {"_nrt": False} if hasattr(cpu.CPUTargetOptions, "_nrt") else {}
"""What tells numba to count no references. Not promised by numba, so where it is unknown functions compile as usual."""


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` to machine code on its first call; later processes read it from numba's cache.

    Arguments are numbers, NumPy arrays and tuples of them; overflow wraps around and indices are not checked, as
    in C. Without a place to write (neither the package's folder nor the user's cache folder), every process
    compiles anew.
    """
    return _compile(function, {})


def compiled_uncounted(function: Callable[P, R]) -> Callable[P, R]:
    """As `compiled`, for a function that makes and returns no arrays: no references to arrays are counted in it.

    Where tuples of many arrays are handed on, counting takes a microsecond per call, which is most of a short loop.
    """
    return _compile(function, _UNCOUNTED)


def _compile(function: Callable[P, R], options: dict[str, Any]) -> Callable[P, R]:
    dispatcher: Callable[P, R]
    try:
        dispatcher = numba.jit(nopython=True, cache=True, **options)(function)
    except RuntimeError:  # numba finds no folder that it may write to
        dispatcher = numba.jit(nopython=True, **options)(function)
    return dispatcher

"""Compiled loops: numba, with its results kept on disk, behind one decorator that keeps a function's type."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` to machine code on its first call; later processes read it from numba's cache.

    Arguments are numbers, NumPy arrays and tuples of them; overflow wraps around and indices are not checked, as
    in C. Without a place to write (neither the package's folder nor the user's cache folder), every process
    compiles anew.
    """
    dispatcher: Callable[P, R]
    try:
        dispatcher = numba.jit(nopython=True, cache=True)(function)
    except RuntimeError:  # numba finds no folder that it may write to
        dispatcher = numba.jit(nopython=True)(function)
    return dispatcher

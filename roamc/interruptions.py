"""Exceptions that say nothing about the code that they came in: raised by a signal's handler, or from another thread.

A time limit or a scheduler's notice raises in the middle of whatever runs. Such an error is the user's, so nothing may
fall back on it; and an operator of the program may have ended just before it, so nothing may run it again.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import signal
import threading
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any


def interruption(error: BaseException) -> BaseException | None:
    """Return ``error``, or one that it was raised from, if a handler of a signal raised it; else None.

    Python calls handlers of signals, and trace functions, with the frame that they interrupt: an error is recognised
    by a function in its traceback that holds a frame among its arguments, or that is an installed handler.
    """
    handlers = _handlers()
    step: BaseException | None = error
    while step is not None:
        trace = step.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in handlers or _takes_a_frame(trace.tb_frame):
                return step
            trace = trace.tb_next
        step = step.__cause__
    return None


def came_from_elsewhere(error: BaseException, program: str, kernels: str) -> bool:
    """Whether an error that ended a program was raised by something else than the program's operators.

    It was if it is an :func:`interruption`, or was raised right in the program or in its kernels with a type that is
    neither torch's nor built in: another thread can raise an error of any type in this one
    (``PyThreadState_SetAsyncExc``), and leaves no frame.

    Args:
        error: the error, with its traceback.
        program: file name of the program.
        kernels: file name of the kernels that the program calls and that run nothing but torch's.
    """
    if interruption(error) is not None:
        return True
    last = _last(error.__traceback__)
    if last is None or last.tb_frame.f_code.co_filename not in (program, kernels):
        return False
    home = type(error).__module__.partition(".")[0]
    return home != "torch" and getattr(builtins, type(error).__name__, None) is not type(error)


@contextlib.contextmanager
def uninterrupted(waits: int | None = None) -> Iterator[None]:
    """Let what runs inside end before Ctrl-C takes effect.

    A step cut short would leave some parameters updated, and torch may end the process where an exception comes out
    of Python code that it calls while it traces.

    Args:
        waits: how often Ctrl-C has to wait; one more takes effect at once, as what runs inside may hang. None: always.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    handler: Any = before
    pending: list[Any] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if waits is not None and len(pending) == waits:
            pending.clear()
            handler(number, frame)
        else:
            pending.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pending:
        handler(*pending[0])


def _takes_a_frame(frame: FrameType) -> bool:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    names = code.co_varnames[:count]
    if not names or code.co_filename == __file__:
        return False
    variables = frame.f_locals
    values = [variables[name] for name in names if name in variables]
    inner = values[-1] if values and code.co_flags & inspect.CO_VARARGS and isinstance(values[-1], tuple) else ()
    return any(isinstance(value, FrameType) for value in (*values, *inner))


def _handlers() -> set[CodeType]:
    """The code of the handlers of signals that are installed and written in Python."""
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler) and not isinstance(handler, FunctionType | MethodType):
            handler = type(handler).__call__
        code = getattr(handler, "__code__", None)
        if isinstance(code, CodeType):
            codes.add(code)
    return codes


def _last(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace

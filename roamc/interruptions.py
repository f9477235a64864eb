"""Exceptions that say nothing about the code that they came in: raised by a signal's handler, or from another thread.

A time limit or a scheduler's notice raises in the middle of whatever runs. Such an error is the user's, so nothing may
fall back on it; and an operator of the program may have ended just before it, so nothing may run it again.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.getsignal is 30 times as slow: each step asks for all
import builtins
import contextlib
import functools
import inspect
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any

_NUMBERS = tuple(sorted(signal.valid_signals()))

TIMERS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
"""Signals that a timer sends, perhaps every few milliseconds."""

TRACED = "roamc held this signal back until tracing had ended: no operator has run, and no tensor has changed"
"""Note to what a handler of a signal raises that came while roamc traced."""


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
def uninterrupted(done: str, traces: bool = False) -> Iterator[HeldSignals]:
    """Let what runs inside end before handlers of signals run, Ctrl-C's among them.

    A step cut short would leave some parameters updated. While torch traces, a handler would compute with what stands
    for tensors there, and the process may end where an exception comes out of Python code that torch calls. However
    often a signal came meanwhile, its handler runs once.

    Args:
        done: what has happened if what runs inside has ended; a note to the error of a handler that raises then.
        traces: whether torch traces inside, which may hang: Python's own handler of Ctrl-C, which only raises, then
            waits once and takes effect the next time.

    Yields:
        The signals that wait, which code inside may let through.
    """
    own = threading.current_thread() is threading.main_thread()  # Python calls handlers in that thread only
    signals = HeldSignals(traces, _NUMBERS if own else ())
    ended = False
    try:
        signals.hold_back()
        yield signals
        ended = True
    finally:
        try:
            signals.let_go()
        except BaseException as error:
            if ended:
                error.add_note(done)
            raise


class HeldSignals:
    """The signals that have a handler written in Python, and those of them that wait.

    Args:
        traces: as for :func:`uninterrupted`.
        numbers: the signals that may have one.
    """

    def __init__(self, traces: bool, numbers: Sequence[int]) -> None:
        self._traces = traces
        self._waits_once = False
        every = ((number, _signal.getsignal(number)) for number in numbers)
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {n: h for n, h in every if callable(h)}
        self._holds = False
        self._came: Counter[int] = Counter()
        self._pending: dict[int, FrameType | None] = {}

    def hold_back(self) -> None:
        """Put other handlers in the place of those of the signals, which note that one came."""
        self._holds = True
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == handler:  # else what was let through has set another
                signal.signal(number, self._hold)

    def wait_once(self) -> None:
        """Let each signal wait once more only, but those of :data:`TIMERS`: for code of the user's that may hang."""
        self._came.clear()
        self._waits_once = True

    @contextlib.contextmanager
    def let_through(self) -> Iterator[None]:
        """Within this context handlers run at once, those first whose signals came before."""
        try:
            self.let_go()
            yield
        finally:
            self.hold_back()

    def let_go(self) -> None:
        """Put the handlers back and run those whose signals came; each runs, whether or not one before it raises."""
        self._holds = False  # a handler that raises amid these lines leaves no signal unheard
        try:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) == self._hold:  # else what ran inside has set another
                    signal.signal(number, handler)
        finally:
            pending, self._pending = list(self._pending.items()), {}
            self._run(pending)

    def _run(self, pending: list[tuple[int, FrameType | None]]) -> None:
        if pending:
            number, frame = pending[0]
            try:
                self._handlers[number](number, frame)
            finally:
                self._run(pending[1:])

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._came[number] += 1
        if self._holds and (self._came[number] == 1 or not self._takes_effect(number)):
            self._pending.setdefault(number, frame)
        else:
            self._came[number] = 0
            self._pending.pop(number, None)
            self._handlers[number](number, frame)

    def _takes_effect(self, number: int) -> bool:
        """Whether a signal that waits already takes effect if it comes again."""
        only_raises = self._traces and self._handlers[number] is signal.default_int_handler
        return only_raises or (self._waits_once and number not in TIMERS)


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
    for number in _NUMBERS:
        handler: Any = _signal.getsignal(number)
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

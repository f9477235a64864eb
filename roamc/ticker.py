"""Say what takes long, to whoever waits: messages of planning, and lines on stderr while something goes on.

Nobody is told unless a listener is installed or :func:`planning` takes longer than :data:`FIRST`; no result depends on
it. Lines come from a thread: the loops of the solvers say nothing for seconds.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import TracebackType

from roamc.locks import Lock
from roamc.units import Bytes, Seconds, format_bytes

Listener = Callable[[str], None]

_LISTENER: ContextVar[Listener | None] = ContextVar("roamc_news", default=None)

FIRST: Seconds = 2.0
"""What takes no longer is done in silence."""

EVERY: Seconds = 5.0
"""Between two lines."""

SWITCH = "ROAMC_PROGRESS"
"""The environment variable that silences all lines where it is 0; from Python, ``roamc.progress = False`` does."""


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within this context, call ``listener`` with the text of each :func:`say`."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def say(text: str) -> None:
    """Call the listener of this context with ``text``; do nothing if there is none."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(text)


@contextlib.contextmanager
def part(of: str) -> Iterator[None]:
    """Say ``of``, and within this context put it in front of the text of each :func:`say`."""
    listener = _LISTENER.get()
    if listener is None:
        yield
        return
    listener(of)
    with listening(lambda text: listener(f"{of}, {text}")):
        yield


class Ticker:
    """A context manager that calls a function from time to time, from a thread of its own, until the context ends.

    Attributes:
        shown: whether that has happened.
    """

    def __init__(self, text: str, show: Callable[[str], None], every: Seconds | None = None) -> None:
        """Begin to count the time.

        Args:
            text: what is being done at first.
            show: called with what is being done; first :data:`FIRST` seconds after the context was entered.
            every: seconds between two calls; None for :data:`EVERY`.
        """
        self.shown = False
        self._text, self._show, self._every = text, show, EVERY if every is None else every
        self._begun, self._process = time.monotonic(), os.getpid()
        self._ended, self._lock = threading.Event(), Lock()

    def __enter__(self) -> Ticker:
        thread = threading.Thread(target=_tick, args=(weakref.ref(self), self._ended), name="roamc ticker", daemon=True)
        with contextlib.suppress(RuntimeError):  # at its end, Python starts no thread: what goes on does so in silence
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if os.getpid() == self._process:  # a forked child has no such thread, and maybe a lock that nobody opens
            self._ended.set()
            with self._lock.now:  # no line comes behind what the caller prints next
                pass

    @property
    def seconds(self) -> Seconds:
        """The time since the ticker was made."""
        return time.monotonic() - self._begun

    def now(self, text: str) -> None:
        """Let ``text`` be what is being done from now on."""
        self._text = text

    def tick(self) -> Seconds:
        """Call the function once, if the context has not ended; return the seconds until the next time."""
        with self._lock.now:
            if not self._ended.is_set():
                self._show(_compiling() or self._text)
                self.shown = True
        return self._every


def _tick(of: weakref.ref[Ticker], ended: threading.Event) -> None:
    """Run the thread of a ticker; it also ends where the ticker was dropped, as an interrupt may have it."""
    wait = FIRST
    while not ended.wait(wait):
        ticker = of()
        if ticker is None:
            return
        wait = ticker.tick()
        del ticker


def _compiling() -> str:
    """What to say while the solvers are compiled, in whatever stage; empty where they are not."""
    # A ticker runs before they are imported, and while they are.
    compiling = getattr(sys.modules.get("roamc.solvers.compiled"), "compiling", None)
    since = None if compiling is None else compiling.since
    if compiling is None or since is None:
        return ""
    spent = compiling.seconds + time.monotonic() - since
    why = f" ({compiling.reason})" if compiling.reason else ""
    unused = f"the machine code that came with roamc is not used{why}"
    return f"compiling the solvers, as {unused}; `roamc warm-up` does it beforehand ({spent:.0f} s so far)"


@contextlib.contextmanager
def planning(name: str, budget: Bytes | str | None) -> Iterator[None]:
    """Within this context, say on stderr that a program is planned if that takes longer than :data:`FIRST`.

    Where there is a listener, that one gets the messages and shows what it likes.

    Args:
        name: name of the model.
        budget: its memory budget, as the user sets it; None for the default.
    """
    asked = "" if budget is None else f" for {budget if isinstance(budget, str) else format_bytes(budget)}"
    with working(f"planning {name}{asked}", ": once per shape", f"planned {name}{asked}"):
        yield


@contextlib.contextmanager
def working(doing: str, why: str, done: str) -> Iterator[None]:
    """Within this context, say on stderr what is being done if that takes longer than :data:`FIRST`.

    Args:
        doing: what is done.
        why: continues that in the first line.
        done: begins the last line, which says how long it took.
    """
    if _LISTENER.get() is not None or not is_on():
        yield
        return

    def show(text: str) -> None:
        at = f": {text} ({lines.seconds:.0f} s)" if lines.shown else f"{why}; roamc.progress=False silences it"
        write_line(f"roamc: {doing}{at}")

    lines = Ticker("capture", show)
    with lines, listening(lines.now):
        yield
    if lines.shown:
        write_line(f"roamc: {done} in {lines.seconds:.1f} s")


def is_on() -> bool:
    """Whether lines are wanted: by the user, and from this rank, as one of several speaks for all."""
    roamc, torch = sys.modules.get("roamc"), sys.modules.get("torch")
    if os.environ.get(SWITCH) == "0" or not getattr(roamc, "progress", True):
        return False
    groups = getattr(torch, "distributed", None)
    if groups is not None and groups.is_available() and groups.is_initialized():
        return bool(groups.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def write_line(text: str) -> None:
    """Write a line to stderr in one piece, if it can be written."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed: nothing ends for want of a line
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

"""What planning is at, for whoever waits for it. Nobody listens unless asked to, and nothing depends on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Listener = Callable[[str], None]

_LISTENER: ContextVar[Listener | None] = ContextVar("roamc_news", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within this context ``listener`` is told a few words whenever there is news."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def say(text: str) -> None:
    """Tell the listener, if there is one."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(text)

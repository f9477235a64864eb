"""Tell a listener what planning is at. By default there is none, and no result depends on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Listener = Callable[[str], None]

_LISTENER: ContextVar[Listener | None] = ContextVar("roamc_news", default=None)


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

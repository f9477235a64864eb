"""Locks that a forked child gets anew: one that another thread held at the fork would never be released there."""

from __future__ import annotations

import os
import threading
import weakref


class Lock:
    """Holds a reentrant lock, and a new one after a fork, in the child; use it as ``with lock.now:``.

    Attributes:
        now: the lock, which the thread that holds it may take again.
    """

    def __init__(self) -> None:
        self.renew()
        _ALL.add(self)

    def renew(self) -> None:
        """Replace the lock by one that nobody holds; a ``with`` block that was entered before leaves the old one."""
        self.now = threading.RLock()


_ALL: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_ALL):
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)

CAPTURE = Lock()
"""Held while a step is traced: torch's tracers exchange functions of the process, and put them back."""

"""Locks that a forked child gets anew: one that another thread held at the fork would never be released there."""

from __future__ import annotations

import os
import threading
import weakref


class Lock:
    """Where a lock is found; use it as ``with lock.now:``.

    Attributes:
        now: the lock, which the thread that holds it may take again.
    """

    def __init__(self) -> None:
        self.renew()
        _ALL.add(self)

    def renew(self) -> None:
        """Have another lock, which nobody holds. Who is inside of ``with`` leaves the old one."""
        self.now = threading.RLock()


_ALL: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_ALL):
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)

"""Arenas: one block of memory per step in flight, and the pool that hands them out."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roamc.compat import with_bits
from roamc.units import Bytes

Bound = dict[str, Callable[..., Any]]
Binder = Callable[["Arena"], Bound]


class Arena:
    """One block of ``nbytes`` on ``device``; every planned tensor is a view of it, made once.

    Attributes:
        base: the block as bytes.
        entry: the functions of the program, bound to this block.
    """

    def __init__(self, nbytes: Bytes, device: torch.device, bind: Binder) -> None:
        self.base = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._nbytes = nbytes
        self._storage = self.base.untyped_storage()
        self._views: list[tuple[str, torch.Tensor, int, torch.Size]] = []
        self.entry = bind(self)

    def free(self) -> None:
        """Give the memory back to the device's allocator; the planned tensors stay and must not be read."""
        self._storage.resize_(0)

    def fill(self) -> None:
        """Take memory again after :meth:`free`. Nothing happens if the block has its memory."""
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def view(
        self,
        name: str,
        offset: Bytes,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        *,
        conj: bool = False,
        neg: bool = False,
    ) -> torch.Tensor:
        """A tensor at ``offset`` bytes with its own version counter (not an autograd view).

        ``conj`` and ``neg`` are the lazy bits of complex views.
        """
        tensor = torch.empty(0, dtype=dtype, device=self.base.device)
        tensor.set_(self._storage, offset // dtype.itemsize, tuple(size), tuple(stride))
        tensor = with_bits(tensor, conj=conj, neg=neg)
        self._views.append((name, tensor, offset, tensor.shape))
        return tensor

    def moved_views(self) -> list[str]:
        """Planned tensors that an operator has resized or moved; empty unless torch and the plan disagree."""
        start = self._storage.data_ptr()
        return [
            name
            for name, tensor, offset, shape in self._views
            if tensor.shape != shape or (tensor.numel() and tensor.data_ptr() != start + offset)
        ]

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in this block."""
        return tensor.untyped_storage().data_ptr() == self._storage.data_ptr()


@dataclass
class ArenaPool:
    """Arenas of one program. A forward takes one; it comes back when its backward has run or can no longer run.

    Arenas are never shared between steps in flight. A free arena waits for the next step: with its memory if
    ``keep`` is set, else as planned tensors over a block of no bytes.
    """

    nbytes: Bytes
    device: torch.device
    bind: Binder
    keep: bool = True
    free: list[Arena] = field(default_factory=list)
    waiting: dict[int, Arena] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._tickets = itertools.count()
        _POOLS.add(self)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def acquire(self) -> Arena:
        """A free arena, or a new one."""
        with self._lock:
            arena = self.free.pop() if self.free else None
        if arena is None:
            return Arena(self.nbytes, self.device, self.bind)
        arena.fill()
        return arena

    def release(self, arena: Arena) -> None:
        """Give an arena back for the next step."""
        if not self.keep:
            arena.free()
        with self._lock:
            self.free.append(arena)

    def park(self, arena: Arena, token: torch.Tensor) -> None:
        """Keep ``arena`` for a backward; it is freed when ``token``, one of the saved tensors, is gone."""
        with self._lock:
            ticket = next(self._tickets)
            self.waiting[ticket] = arena
        weakref.finalize(token, self._forget, ticket).atexit = False

    def take(self, tensor: torch.Tensor) -> tuple[int, Arena] | None:
        """The parked arena that ``tensor`` lies in, and its ticket; no longer parked. None if there is none."""
        pointer = tensor.untyped_storage().data_ptr()
        with self._lock:
            for ticket, arena in self.waiting.items():
                if arena.base.data_ptr() == pointer:
                    return ticket, self.waiting.pop(ticket)
        return None

    def put_back(self, ticket: int, arena: Arena) -> None:
        """Park a taken arena again under its ticket: its graph was kept for another backward."""
        with self._lock:
            self.waiting[ticket] = arena

    def _forget(self, ticket: int) -> None:
        # A ticket, not the arena, is forgotten: the arena may be in flight again for a later step.
        with self._lock:
            arena = self.waiting.pop(ticket, None)
            if arena is not None:
                self.release(arena)

    def renew_lock(self) -> None:
        """In a forked child: a lock that another thread held at the fork would never be released."""
        self._lock = threading.RLock()


_POOLS: weakref.WeakSet[ArenaPool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_POOLS):
        pool.renew_lock()


os.register_at_fork(after_in_child=_after_fork)

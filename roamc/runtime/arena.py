"""Arenas: the planned tensors of a step over one block of memory, and the pool that hands them out."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roamc.compat import move_to, with_bits
from roamc.locks import Lock
from roamc.runtime import blocks
from roamc.units import Bytes

Bound = dict[str, Callable[..., Any]]
Binder = Callable[["Arena"], Bound]


class Arena:
    """The planned tensors of one step, made once, over a block of memory that is theirs while the step is in flight.

    Busy when made, as after :meth:`enter`.

    Attributes:
        nbytes: what the planned tensors need.
        entry: the functions of the program, bound to these tensors.
    """

    def __init__(self, nbytes: Bytes, device: torch.device, bind: Binder, trimmed: Sequence[blocks.Range] = ()) -> None:
        self.nbytes = nbytes
        self._device = device
        self._trimmed = tuple(trimmed)
        self._block = blocks.take(nbytes, device, None, parts=bool(self._trimmed)) if nbytes else None
        self.have_closed(self._trimmed)
        self._views: list[_View] = []
        self.entry = bind(self)

    @property
    def storage(self) -> torch.UntypedStorage:
        """The block's memory."""
        return self._block.storage if self._block else torch.UntypedStorage(0, device=self._device)

    @property
    def base(self) -> torch.Tensor:
        """The memory of the planned tensors as bytes."""
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(
            self.storage, self._start, (self.nbytes,), (1,)
        )

    @property
    def _start(self) -> Bytes:
        """Where in :attr:`storage` the arena begins."""
        return self._block.start if self._block else 0

    def enter(self) -> None:
        """Take a block for a step; the planned tensors move if it is another than before, or has taken new memory."""
        if not self._block:
            return
        before = self._block, self._start
        self._block = blocks.take(self.nbytes, self._device, self._block, parts=bool(self._trimmed))
        self.have_closed(self._trimmed)
        if (self._block, self._start) != before:
            for view in self._views:
                view.move_to(self.storage, self._start)

    def close(self, low: Bytes, high: Bytes) -> None:
        """Give the memory of ``[low, high)`` back to the system: nothing lies there for a while."""
        if self._block:
            self._block.give_back(low, high)

    def open(self, low: Bytes, high: Bytes) -> None:
        """``[low, high)``, closed before as one range, is needed again."""
        if self._block:
            self._block.take_again(low, high)

    def have_closed(self, trimmed: Iterable[blocks.Range]) -> None:
        """Have exactly these ranges closed, as they are in the middle of a step, say."""
        if self._block:
            self._block.reset(trimmed)

    def copy_from(self, other: Arena) -> None:
        """Have the same bytes as ``other``, an arena of the same program, and the same ranges closed."""
        if not self._block or not other._block:
            return
        self._block.reset(other._block.trimmed)
        mine, its, end = self.base, other.base, 0
        for low, high in (*sorted(other._block.trimmed), (self.nbytes, self.nbytes)):
            mine[end:low].copy_(its[end:low])
            end = high

    def leave(self, *, keep: bool) -> None:
        """Give the block up; the planned tensors stay, and must not be read until :meth:`enter`."""
        if self._block:
            blocks.give(self._block, keep=keep)

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
        tensor = with_bits(torch.empty(0, dtype=dtype, device=self._device), conj=conj, neg=neg)
        view = _View(name, tensor, offset, tuple(size), tuple(stride))
        view.move_to(self.storage, self._start)
        self._views.append(view)
        return tensor

    def planned(self, name: str) -> torch.Tensor:
        """The planned tensor that the program calls ``name``.

        Raises:
            KeyError: there is none.
        """
        return {view.name: view.tensor for view in self._views}[name]

    def moved_views(self) -> list[str]:
        """Planned tensors that an operator has resized or moved; empty unless torch and the plan disagree."""
        start = self.storage.data_ptr() + self._start
        return [view.name for view in self._views if not view.is_in_place(start)]


@dataclass(frozen=True)
class _View:
    """A planned tensor and where it belongs: ``offset`` in bytes from the arena's beginning."""

    name: str
    tensor: torch.Tensor
    offset: Bytes
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def move_to(self, storage: torch.UntypedStorage, start: Bytes) -> None:
        move_to(self.tensor, storage, (start + self.offset) // self.tensor.itemsize, self.size, self.stride)

    def is_in_place(self, start: int) -> bool:
        if self.tensor.shape != self.size:
            return False
        return not self.tensor.numel() or self.tensor.data_ptr() == start + self.offset


@dataclass(eq=False)
class ArenaPool:
    """Arenas of one program. A forward takes one; it comes back when its backward has run or can no longer run.

    Arenas are never shared between steps in flight. A free arena waits for the next step; its memory is there for
    other programs meanwhile, or, unless ``keep`` is set, for all. The ranges ``trimmed`` are given back when a step
    starts.
    """

    nbytes: Bytes
    device: torch.device
    bind: Binder
    keep: bool = True
    trimmed: Sequence[blocks.Range] = ()
    free: list[Arena] = field(default_factory=list)
    waiting: dict[int, Arena] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._tickets = itertools.count()

    def acquire(self) -> Arena:
        """A free arena, or a new one."""
        with self._lock.now:
            arena = self.free.pop() if self.free else None
        if arena is None:
            return Arena(self.nbytes, self.device, self.bind, self.trimmed)
        arena.enter()
        return arena

    def release(self, arena: Arena) -> None:
        """Give an arena back for the next step."""
        arena.leave(keep=self.keep)
        with self._lock.now:
            self.free.append(arena)

    def park(self, arena: Arena, token: torch.Tensor) -> None:
        """Keep ``arena`` for a backward; it is freed when ``token``, one of the saved tensors, is gone."""
        with self._lock.now:
            ticket = next(self._tickets)
            self.waiting[ticket] = arena
        weakref.finalize(token, self._forget, ticket).atexit = False

    def take(self, tensor: torch.Tensor) -> tuple[int, Arena] | None:
        """The parked arena that ``tensor`` lies in, and its ticket; no longer parked. None if there is none."""
        pointer = tensor.untyped_storage().data_ptr()
        with self._lock.now:
            for ticket, arena in self.waiting.items():
                if arena.storage.data_ptr() == pointer:
                    return ticket, self.waiting.pop(ticket)
        return None

    def put_back(self, ticket: int, arena: Arena) -> None:
        """Park a taken arena again under its ticket: its graph was kept for another backward."""
        with self._lock.now:
            self.waiting[ticket] = arena

    def _forget(self, ticket: int) -> None:
        # A ticket, not the arena, is forgotten: the arena may be in flight again for a later step.
        with self._lock.now:
            arena = self.waiting.pop(ticket, None)
            if arena is not None:
                self.release(arena)


def fill(place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy; of what is expanded, only what has bytes of its own: torch does not write the same element twice."""
    for dim, (size, step) in enumerate(zip(place.shape, place.stride(), strict=True)):
        if size > 1 and not step:
            place, tensor = place.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    place.copy_(tensor)

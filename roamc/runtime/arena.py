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
"""The functions of a program, bound to one arena, by name; see :class:`roamc.codegen.source.Program`."""
Binder = Callable[["Arena"], Bound]
"""The ``bind`` of a program: makes every planned tensor by :meth:`Arena.view` and returns the functions over them."""


class Arena:
    """The planned tensors of one step, made once, over a block of memory that is theirs while the step is in flight.

    A new arena has its block, as after :meth:`enter`; :meth:`leave` gives it up. Offsets and ranges are in bytes from
    the arena's beginning. An arena of 0 bytes has no block.

    Args:
        nbytes: size of the arena; 0 if nothing is planned.
        device: the device of the arena.
        bind: function of the arena that makes the planned tensors by :meth:`view`, and returns ``entry``.
        trimmed: the ranges ``(low, high)`` that are closed (trimmed, see :meth:`close`) when a step starts.

    Attributes:
        nbytes: size of the arena in bytes; the block may be larger.
        entry: the functions of the program by name, bound to the planned tensors.
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
        """The storage of the block, in which the planned tensors lie; of no bytes if nothing is planned."""
        return self._block.storage if self._block else torch.UntypedStorage(0, device=self._device)

    @property
    def base(self) -> torch.Tensor:
        """A new tensor over the whole arena, uint8[nbytes]."""
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(
            self.storage, self._start, (self.nbytes,), (1,)
        )

    @property
    def _start(self) -> Bytes:
        """Bytes of :attr:`storage` in front of the arena."""
        return self._block.start if self._block else 0

    def enter(self) -> None:
        """Take a block for a step and close the ranges ``trimmed`` that the constructor was given, and no others.

        The planned tensors stay the same objects, but are moved if the block is another than before or begins elsewhere
        in its storage. Their contents are undefined.
        """
        if not self._block:
            return
        before = self._block, self._start
        self._block = blocks.take(self.nbytes, self._device, self._block, parts=bool(self._trimmed))
        self.have_closed(self._trimmed)
        if (self._block, self._start) != before:
            for view in self._views:
                view.move_to(self.storage, self._start)

    def close(self, low: Bytes, high: Bytes) -> None:
        """Trim the range ``[low, high)``: its memory goes back to the system, and what was in it is lost.

        ``low`` and ``high`` count bytes from the arena's beginning. Nothing happens where memory has no pages to give
        back, such as on a GPU.
        """
        if self._block:
            self._block.give_back(low, high)

    def open(self, low: Bytes, high: Bytes) -> None:
        """Make the bytes ``[low, high)``, which :meth:`close` has closed as one range, usable again.

        ``low`` and ``high`` count bytes from the arena's beginning; the contents of the range are undefined.
        """
        if self._block:
            self._block.take_again(low, high)

    def have_closed(self, trimmed: Iterable[blocks.Range]) -> None:
        """Close the ranges in ``trimmed`` that are open, and open all others; for a step that begins in its middle."""
        if self._block:
            self._block.reset(trimmed)

    def copy_from(self, other: Arena) -> None:
        """Copy the bytes of ``other``, an arena of the same program, and have the same ranges closed."""
        if not self._block or not other._block:
            return
        self._block.reset(other._block.trimmed)
        mine, its, end = self.base, other.base, 0
        for low, high in (*sorted(other._block.trimmed), (self.nbytes, self.nbytes)):
            mine[end:low].copy_(its[end:low])
            end = high

    def leave(self, *, keep: bool) -> None:
        """Give the block up; the planned tensors stay, and must not be read until :meth:`enter`.

        Args:
            keep: whether the block keeps its memory for the next arena that takes it. Otherwise torch's allocator gets
                the memory back.
        """
        if self._block:
            blocks.give(self._block, keep=keep)

    def drop(self) -> None:
        """Give the memory of the block back, unless another arena uses the block; nobody enters this arena again.

        The arena itself may live on for a while: what is bound to it refers to it.
        """
        if self._block:
            blocks.drop(self._block)

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
        """Make and return a planned tensor; it has a version counter of its own and is no autograd view.

        Args:
            name: what the program calls it, see :meth:`planned`.
            offset: of its first element, in bytes from the arena's beginning; a multiple of the element's size.
            size: its shape.
            stride: its strides, in elements.
            dtype: its dtype.
            conj: whether its lazy conjugate bit is set.
            neg: whether its lazy negative bit is set.
        """
        tensor = with_bits(torch.empty(0, dtype=dtype, device=self._device), conj=conj, neg=neg)
        view = _View(name, tensor, offset, tuple(size), tuple(stride))
        view.move_to(self.storage, self._start)
        self._views.append(view)
        return tensor

    def planned(self, name: str) -> torch.Tensor:
        """Return the planned tensor that the program calls ``name``.

        Raises:
            KeyError: there is none.
        """
        return {view.name: view.tensor for view in self._views}[name]

    def moved_views(self) -> list[str]:
        """Return the names of planned tensors that are no longer at their place or have another shape than planned.

        The list is empty unless an operator of torch's resized a result that it was given, against the plan.
        """
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
        """Make the tensor show the bytes of ``storage`` at ``start`` plus its offset; no bytes are copied.

        Args:
            storage: the memory of an arena.
            start: the byte of it at which the arena begins.
        """
        move_to(self.tensor, storage, (start + self.offset) // self.tensor.itemsize, self.size, self.stride)

    def is_in_place(self, start: int) -> bool:
        """Whether the tensor has its shape and its offset behind the address ``start``."""
        if self.tensor.shape != self.size:
            return False
        return not self.tensor.numel() or self.tensor.data_ptr() == start + self.offset


@dataclass(eq=False)
class ArenaPool:
    """The arenas of one program; an arena is never shared between steps in flight.

    A forward takes an arena, which comes back when the backward has run or can no longer run.

    Attributes:
        nbytes: size of each arena in bytes.
        device: the device of the arenas.
        bind: makes the planned tensors of a new arena and the functions over them.
        keep: whether the memory of a free arena stays allocated, for all programs of the process. Otherwise torch's
            allocator gets it back.
        trimmed: the ranges of an arena that are closed when a step starts.
        free: arenas that wait for a step.
        waiting: ticket to an arena that is parked for a backward.
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
        """Return a free arena that has taken a block, or a new one; it belongs to the caller until :meth:`release`."""
        with self._lock.now:
            arena = self.free.pop() if self.free else None
        if arena is None:
            return Arena(self.nbytes, self.device, self.bind, self.trimmed)
        arena.enter()
        return arena

    def release(self, arena: Arena) -> None:
        """Give ``arena`` back for another step; its planned tensors must not be read any more."""
        arena.leave(keep=self.keep)
        with self._lock.now:
            self.free.append(arena)

    def clear(self) -> None:
        """Drop the arenas that wait for a step, and give their memory back, unless another program's arena uses it."""
        with self._lock.now:
            dropped, self.free = self.free, []
        for arena in dropped:
            arena.drop()

    def park(self, arena: Arena, token: torch.Tensor) -> None:
        """Keep ``arena`` for a backward, until :meth:`take` takes it.

        If ``token``, one of the saved tensors, is freed while the arena is parked, no backward can come any more and
        the arena is released.
        """
        with self._lock.now:
            ticket = next(self._tickets)
            self.waiting[ticket] = arena
        weakref.finalize(token, self._forget, ticket).atexit = False

    def take(self, tensor: torch.Tensor) -> tuple[int, Arena] | None:
        """Take the parked arena in whose storage ``tensor`` lies; it is no longer parked.

        Returns:
            (ticket, arena), the ticket for :meth:`put_back`; None if ``tensor`` lies in no parked arena.
        """
        pointer = tensor.untyped_storage().data_ptr()
        with self._lock.now:
            for ticket, arena in self.waiting.items():
                if arena.storage.data_ptr() == pointer:
                    return ticket, self.waiting.pop(ticket)
        return None

    def put_back(self, ticket: int, arena: Arena) -> None:
        """Park ``arena`` again under the ``ticket`` from :meth:`take`, for another backward of the same forward."""
        with self._lock.now:
            self.waiting[ticket] = arena

    def _forget(self, ticket: int) -> None:
        # A ticket, not the arena, is forgotten: the arena may be in flight again for a later step.
        with self._lock.now:
            arena = self.waiting.pop(ticket, None)
            if arena is not None:
                self.release(arena)


def fill(place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy ``tensor`` into ``place``, which has the same shape and may have expanded dimensions.

    torch refuses to write to an expanded tensor, so of each expanded dimension of ``place`` one element is copied.
    """
    for dim, (size, step) in enumerate(zip(place.shape, place.stride(), strict=True)):
        if size > 1 and not step:
            place, tensor = place.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    place.copy_(tensor)

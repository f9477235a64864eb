"""Blocks of memory, shared by the arenas of all programs of a process.

Programs that take turns, such as those for batches of different lengths, use the same memory where their needs
are within a factor of two: what they hold together is at most about twice what the largest needs, not the sum. A
program keeps no more than twice its own need from going back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from roamc.locks import Lock
from roamc.runtime import huge_pages
from roamc.units import Bytes

Range = tuple[Bytes, Bytes]


class Block:
    """One piece of a device's memory; lives as long as an arena refers to it.

    Attributes:
        storage: the memory; of no bytes while it is given back.
        start: where in the storage the block begins: at a large page if parts of it are to be given back.
        nbytes: from there on.
        busy: an arena is using it.
        stream: the stream whose work it holds; on another one that work may not have finished. 0 on a CPU.
    """

    def __init__(self, device: torch.device, stream: int) -> None:
        self.storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self.start = self.nbytes = 0
        self.busy = True
        self.stream = stream
        self._trimmed: set[Range] = set()
        self._gone = 0
        _BLOCKS.append(weakref.ref(self))

    def fill(self, nbytes: Bytes, *, parts: bool) -> None:
        """Take memory; the block has none. With ``parts`` it is to be given back in parts."""
        paged = parts and nbytes >= huge_pages.LEAST and huge_pages.usable(self.storage.device)
        self.storage.resize_(nbytes + huge_pages.SIZE if paged else nbytes)
        self.start = -self.storage.data_ptr() % huge_pages.SIZE if paged else 0
        self.nbytes = nbytes
        huge_pages.advise(self.storage)
        if paged:
            address = self.storage.data_ptr()
            huge_pages.give_back(address, self.start)
            huge_pages.give_back(address + self.start + nbytes, huge_pages.SIZE - self.start)

    def empty(self) -> None:
        """Give all memory back."""
        self.storage.resize_(0)
        self.start = self.nbytes = self._gone = 0
        self._trimmed.clear()

    @property
    def trimmed(self) -> frozenset[Range]:
        """The ranges that are trimmed, their memory given back, in bytes from the block's beginning."""
        return frozenset(self._trimmed)

    @property
    def held(self) -> Bytes:
        """Bytes without those ranges."""
        return self.nbytes - self._gone

    def give_back(self, low: Bytes, high: Bytes) -> None:
        """Give the memory of ``[low, high)`` back, where the device's memory has pages."""
        if huge_pages.usable(self.storage.device) and (low, high) not in self._trimmed:
            huge_pages.give_back(self.storage.data_ptr() + self.start + low, high - low)
            self._trimmed.add((low, high))
            self._gone += high - low

    def take_again(self, low: Bytes, high: Bytes) -> None:
        """Say that ``[low, high)``, given back before as one range, is in use again."""
        if (low, high) in self._trimmed:
            self._trimmed.remove((low, high))
            self._gone -= high - low
            huge_pages.take_again(self.storage.data_ptr() + self.start + low, high - low)

    def reset(self, trimmed: Iterable[Range]) -> None:
        """Have exactly the ranges ``trimmed`` given back, whatever was before."""
        wanted = set(trimmed)
        for low, high in sorted(self._trimmed - wanted):
            self.take_again(low, high)
        for low, high in sorted(wanted - self._trimmed):
            self.give_back(low, high)


_BLOCKS: list[weakref.ref[Block]] = []
_LOCK = Lock()

MOST = 2
"""A block of at most so many times the bytes that are needed is taken."""


def take(nbytes: Bytes, device: torch.device, mine: Block | None, *, parts: bool = False) -> Block:
    """A block of at least ``nbytes``, busy from now on; with ``parts`` it is to be given back in parts.

    ``mine``, the one used last, if it is idle and of a fitting size; else the smallest idle one of a fitting size;
    else ``mine`` if it has given its memory back, or a new one. The largest idle one that is too small gives its
    memory back then.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    with _LOCK.now:
        idle = [block for block in _blocks() if _is_idle(block, device, stream)]
        idle.sort(key=lambda block: block.nbytes)
        fitting = [block for block in idle if nbytes <= block.nbytes <= MOST * nbytes]
        small = [block for block in idle if 0 < block.nbytes < nbytes]
        if mine is not None and mine in fitting:
            chosen = mine
        elif fitting:
            chosen = fitting[0]
        else:
            empty = [block for block in idle if block is mine and not block.nbytes]
            chosen = empty[0] if empty else Block(device, stream)
            if small:
                small[-1].empty()
        chosen.busy = True
    if not chosen.nbytes:
        chosen.fill(nbytes, parts=parts)
    return chosen


def _is_idle(block: Block, device: torch.device, stream: int) -> bool:
    return not block.busy and block.storage.device == device and block.stream == stream


def give(block: Block, *, keep: bool) -> None:
    """The block is idle from now on; without ``keep`` its memory goes back to the device's allocator."""
    if not keep:
        block.empty()
    with _LOCK.now:
        block.busy = False


def holds(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in a block, or lay in one that has given its memory back."""
    storage = tensor.untyped_storage()
    if tensor.numel() and not storage.nbytes():
        return True
    with _LOCK.now:
        return any(block.storage.data_ptr() == storage.data_ptr() for block in _blocks())


def held() -> Bytes:
    """Bytes of all blocks of this process, idle ones included; trimmed ranges are not."""
    with _LOCK.now:
        return sum(block.held for block in _blocks())


def _blocks() -> list[Block]:
    """All that are alive, oldest first."""
    found = [(ref, block) for ref in _BLOCKS if (block := ref()) is not None]
    _BLOCKS[:] = [ref for ref, _ in found]
    return [block for _, block in found]

"""Blocks of memory, shared by the arenas of all programs of a process.

Programs that take turns, such as those for batches of different lengths, use the same memory where their needs
are within a factor of two: together they hold at most about twice what the largest of them needs, not the sum. No
program holds a block of more than twice its own need.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from roamc.locks import Lock
from roamc.runtime import huge_pages
from roamc.units import Bytes

Range = tuple[Bytes, Bytes]
"""First byte and end of a half-open range ``[low, high)``, from the block's beginning."""


class Block:
    """One piece of a device's memory; lives as long as an arena refers to it.

    A new block is busy and has no memory, see :meth:`fill`. It is entered in the list of blocks of the process.

    Args:
        device: the device of the memory.
        stream: handle of the CUDA stream on which the block is used; 0 on a CPU.

    Attributes:
        storage: the memory; of no bytes while the block has none.
        start: bytes of the storage in front of the block, which begins at a large page if it is trimmed in parts.
        nbytes: size of the block; 0 while it has no memory.
        busy: whether an arena uses it.
        stream: handle of the CUDA stream on which the block is used. On other streams it is not taken, because its work
            may not have finished.
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
        """Allocate memory for the block, which must have none.

        Args:
            nbytes: size of the block.
            parts: whether ranges of the block will be given back by :meth:`give_back`. Where the device's memory has
                pages, the block then begins at a large page.
        """
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
        """Give all memory back to torch's allocator.

        Tensors over the block lose their memory with it: nobody may read them any more. The block has 0 bytes then,
        and no trims.
        """
        self.storage.resize_(0)
        self.start = self.nbytes = self._gone = 0
        self._trimmed.clear()

    @property
    def trimmed(self) -> frozenset[Range]:
        """The ranges that are trimmed now: their memory is given back to the system."""
        return frozenset(self._trimmed)

    @property
    def held(self) -> Bytes:
        """Bytes of the block without the ranges that are trimmed now."""
        return self.nbytes - self._gone

    def give_back(self, low: Bytes, high: Bytes) -> None:
        """Give the bytes ``[low, high)`` of the block back to the system; what was in them is lost.

        This does nothing where the range is trimmed already, or on devices whose memory has no pages to give back.
        """
        if huge_pages.usable(self.storage.device) and (low, high) not in self._trimmed:
            huge_pages.give_back(self.storage.data_ptr() + self.start + low, high - low)
            self._trimmed.add((low, high))
            self._gone += high - low

    def take_again(self, low: Bytes, high: Bytes) -> None:
        """Use the bytes ``[low, high)``, which :meth:`give_back` gave back, again; any other range stays as it is."""
        if (low, high) in self._trimmed:
            self._trimmed.remove((low, high))
            self._gone -= high - low
            huge_pages.take_again(self.storage.data_ptr() + self.start + low, high - low)

    def reset(self, trimmed: Iterable[Range]) -> None:
        """Trim the ranges in ``trimmed`` that are not trimmed yet, and use all others again."""
        ranges = set(trimmed)
        for low, high in sorted(self._trimmed - ranges):
            self.take_again(low, high)
        for low, high in sorted(ranges - self._trimmed):
            self.give_back(low, high)


_BLOCKS: list[weakref.ref[Block]] = []
_LOCK = Lock()

MOST = 2
"""An idle block is taken if its size is at most this multiple of the bytes that are needed."""


def take(nbytes: Bytes, device: torch.device, mine: Block | None, *, parts: bool = False) -> Block:
    """Return an idle block of ``nbytes`` to :data:`MOST` times as many bytes, or a new one; the block is busy then.

    The order of preference is: ``mine`` if it is idle and fits, the smallest idle block that fits, ``mine`` if it is
    idle and has no memory, a new block. In the last two cases memory is allocated, and the largest idle block that is
    too small gives its memory back first.

    Args:
        nbytes: bytes that are needed, above 0.
        device: the device; on CUDA only blocks of its current stream are taken.
        mine: the block that the caller used last; None if there is none.
        parts: whether ranges of the block will be given back to the system while it is in use; counts where memory is
            allocated.
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
    """Mark ``block`` as idle; without ``keep``, give its memory back to torch's allocator before."""
    if not keep:
        block.empty()
    with _LOCK.now:
        block.busy = False


def drop(block: Block) -> None:
    """Give the memory of ``block`` back to torch's allocator, unless an arena uses it."""
    with _LOCK.now:
        if not block.busy:
            block.empty()


def empty_idle(device: torch.device) -> None:
    """Give the memory of all idle blocks of ``device`` back to torch's allocator; the next use allocates again."""
    with _LOCK.now:
        for block in _blocks():
            if not block.busy and block.storage.device == device:
                block.empty()


def holds(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in a block of this process, or in the emptied storage of a block without memory."""
    storage = tensor.untyped_storage()
    if tensor.numel() and not storage.nbytes():
        return True
    with _LOCK.now:
        return any(block.storage.data_ptr() == storage.data_ptr() for block in _blocks())


def held() -> Bytes:
    """Return the bytes of all blocks of this process, idle ones included, without ranges that are trimmed now."""
    with _LOCK.now:
        return sum(block.held for block in _blocks())


def _blocks() -> list[Block]:
    """Return the blocks that are alive, oldest first, and forget the others; the caller holds the lock."""
    alive = [(ref, block) for ref in _BLOCKS if (block := ref()) is not None]
    _BLOCKS[:] = [ref for ref, _ in alive]
    return [block for _, block in alive]

"""Blocks of memory, shared by the arenas of all programs of a process.

Programs that take turns, such as those for batches of different lengths, use the same memory: what they
hold together is what the largest of them needs, not the sum.
"""

from __future__ import annotations

import os
import threading
import weakref

import torch

from roamc.runtime import huge_pages
from roamc.units import Bytes


class Block:
    """One piece of a device's memory; lives as long as an arena refers to it.

    Attributes:
        storage: the memory. It may grow or be given back while the block is idle.
        busy: an arena is using it.
        stream: the stream whose work it holds; on another one that work may not have finished. 0 on a CPU.
    """

    def __init__(self, device: torch.device, stream: int) -> None:
        self.storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self.busy = True
        self.stream = stream
        _BLOCKS.append(weakref.ref(self))

    def resize(self, nbytes: Bytes) -> None:
        """Change the size; the contents are lost."""
        self.storage.resize_(0)  # first, so that old and new never exist together
        self.storage.resize_(nbytes)
        huge_pages.advise(self.storage)


_BLOCKS: list[weakref.ref[Block]] = []
_LOCK = threading.RLock()


def take(nbytes: Bytes, device: torch.device, mine: Block | None) -> Block:
    """A block of at least ``nbytes``, busy from now on.

    ``mine``, the one used last, if it is idle and large enough; else the smallest idle one that is; else an idle
    one that grows; else a new one.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    with _LOCK:
        idle = [block for block in _blocks() if _fits(block, device, stream)]
        chosen = _choose(nbytes, idle, mine if mine in idle else None)
        if chosen is None:
            chosen = Block(device, stream)
        chosen.busy = True
    if chosen.storage.nbytes() < nbytes:
        chosen.resize(nbytes)
    return chosen


def _choose(nbytes: Bytes, idle: list[Block], mine: Block | None) -> Block | None:
    if mine is not None and mine.storage.nbytes() >= nbytes:
        return mine
    by_size = sorted(idle, key=lambda block: block.storage.nbytes())
    large = [block for block in by_size if block.storage.nbytes() >= nbytes]
    if large:
        return large[0]
    return mine or (by_size[-1] if by_size else None)


def _fits(block: Block, device: torch.device, stream: int) -> bool:
    return not block.busy and block.storage.device == device and block.stream == stream


def give(block: Block, *, keep: bool) -> None:
    """The block is idle from now on; without ``keep`` its memory goes back to the device's allocator."""
    if not keep:
        block.storage.resize_(0)
    with _LOCK:
        block.busy = False


def holds(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in a block, or lay in one that has given its memory back."""
    storage = tensor.untyped_storage()
    if tensor.numel() and not storage.nbytes():
        return True
    with _LOCK:
        return any(block.storage.data_ptr() == storage.data_ptr() for block in _blocks())


def held() -> Bytes:
    """Bytes of all blocks of this process, idle ones included."""
    with _LOCK:
        return sum(block.storage.nbytes() for block in _blocks())


def _blocks() -> list[Block]:
    """All that are alive, oldest first."""
    found = [(ref, block) for ref in _BLOCKS if (block := ref()) is not None]
    _BLOCKS[:] = [ref for ref, _ in found]
    return [block for _, block in found]


def _renew_lock() -> None:
    """In a forked child: a lock that another thread held at the fork would never be released."""
    global _LOCK
    _LOCK = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)

"""Blocks of memory, shared by the arenas of all programs of a process.

Programs that take turns, such as those for batches of different lengths, use the same memory where their needs
are within a factor of two: what they hold together is at most about twice what the largest needs, not the sum. A
program keeps no more than twice its own need from going back.
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
        storage: the memory; of no bytes while it is given back.
        busy: an arena is using it.
        stream: the stream whose work it holds; on another one that work may not have finished. 0 on a CPU.
    """

    def __init__(self, device: torch.device, stream: int) -> None:
        self.storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self.busy = True
        self.stream = stream
        _BLOCKS.append(weakref.ref(self))

    def fill(self, nbytes: Bytes) -> None:
        """Take memory; the block has none."""
        self.storage.resize_(nbytes)
        huge_pages.advise(self.storage)


_BLOCKS: list[weakref.ref[Block]] = []
_LOCK = threading.RLock()

MOST = 2
"""A block of at most so many times the bytes that are needed is taken."""


def take(nbytes: Bytes, device: torch.device, mine: Block | None) -> Block:
    """A block of at least ``nbytes``, busy from now on.

    ``mine``, the one used last, if it is idle and of a fitting size; else the smallest idle one of a fitting size;
    else ``mine`` if it has given its memory back, or a new one. The largest idle one that is too small gives its
    memory back then.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    with _LOCK:
        idle = [block for block in _blocks() if _is_idle(block, device, stream)]
        idle.sort(key=lambda block: block.storage.nbytes())
        fitting = [block for block in idle if nbytes <= block.storage.nbytes() <= MOST * nbytes]
        small = [block for block in idle if 0 < block.storage.nbytes() < nbytes]
        if mine is not None and mine in fitting:
            chosen = mine
        elif fitting:
            chosen = fitting[0]
        else:
            empty = [block for block in idle if block is mine and not block.storage.nbytes()]
            chosen = empty[0] if empty else Block(device, stream)
            if small:
                small[-1].storage.resize_(0)
        chosen.busy = True
    if not chosen.storage.nbytes():
        chosen.fill(nbytes)
    return chosen


def _is_idle(block: Block, device: torch.device, stream: int) -> bool:
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

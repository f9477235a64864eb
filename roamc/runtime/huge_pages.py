"""Pages of an arena on a CPU: large ones, and such as go back to the system while nothing lies in them.

Fresh memory in large pages costs hundreds of page faults instead of hundred thousands, about a tenth of the time.
The system may only back by a large page what begins at a multiple of its size.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import sys
from typing import Any

import torch

from roamc.units import Bytes

log = logging.getLogger(__name__)

SIZE: Bytes = 2 << 20
"""Of a large page."""

LEAST: Bytes = 2 * SIZE
"""Blocks below two large pages are left alone."""


def usable(device: torch.device) -> bool:
    """Whether memory on ``device`` has pages that we may give back one by one."""
    return sys.platform == "linux" and device.type == "cpu"


def advise(storage: torch.UntypedStorage) -> None:
    """Ask Linux to back a block of CPU memory with large pages; does nothing elsewhere, or to small blocks."""
    if usable(storage.device) and storage.nbytes() >= LEAST:
        _tell(storage.data_ptr(), storage.nbytes(), mmap.MADV_HUGEPAGE)


def give_back(address: int, nbytes: Bytes) -> None:
    """Give the whole pages of a range back; what was in them is lost, and they are zero when touched again."""
    _tell(address, nbytes, mmap.MADV_DONTNEED)


def take_again(address: int, nbytes: Bytes) -> None:
    """Say that a range that was given back is in use again. The pages themselves come when they are touched."""
    _tell(address, nbytes, mmap.MADV_WILLNEED)


def _tell(address: int, nbytes: Bytes, advice: int) -> None:
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start and _madvise()(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice):
        log.debug("advice %d of %d bytes: %s", advice, end - start, os.strerror(ctypes.get_errno()))


@functools.cache
def _madvise() -> Any:
    return ctypes.CDLL(None, use_errno=True).madvise

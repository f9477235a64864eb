"""Pages of an arena on a CPU: large pages are asked for, and pages go back to the system while nothing lies in them.

The first use of memory in large pages costs hundreds of page faults and not hundreds of thousands, which takes about a
tenth of the time. A large page begins at a multiple of its size.
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
"""Bytes of a large page."""

LEAST: Bytes = 2 * SIZE
"""Large pages are asked for in blocks of at least this many bytes."""


def usable(device: torch.device) -> bool:
    """Whether memory on ``device`` has pages that can be given back one by one: on a CPU under Linux."""
    return sys.platform == "linux" and device.type == "cpu"


def advise(storage: torch.UntypedStorage) -> None:
    """Ask Linux to back ``storage``, on a CPU, with huge pages.

    Does nothing on other systems and devices, and for a storage of fewer than :data:`LEAST` bytes.
    """
    if usable(storage.device) and storage.nbytes() >= LEAST:
        _tell(storage.data_ptr(), storage.nbytes(), mmap.MADV_HUGEPAGE)


def give_back(address: int, nbytes: Bytes) -> None:
    """Give the pages that lie wholly in ``nbytes`` from ``address`` on back to the system; Linux only.

    What was in them is lost, and they are zero when they are touched again. A refusal of the system is only logged.
    """
    _tell(address, nbytes, mmap.MADV_DONTNEED)


def take_again(address: int, nbytes: Bytes) -> None:
    """Tell the system that ``nbytes`` from ``address`` on, which were given back, are used again; Linux only.

    The pages themselves come when they are touched.
    """
    _tell(address, nbytes, mmap.MADV_WILLNEED)


def _tell(address: int, nbytes: Bytes, advice: int) -> None:
    """Call ``madvise`` for the pages that lie wholly in ``nbytes`` from ``address`` on; log it if that fails."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start and _madvise()(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice):
        log.debug("advice %d of %d bytes: %s", advice, end - start, os.strerror(ctypes.get_errno()))


@functools.cache
def _madvise() -> Any:
    return ctypes.CDLL(None, use_errno=True).madvise

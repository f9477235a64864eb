"""Large pages for an arena on a CPU: fresh memory then costs hundreds of page faults instead of hundred thousands."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys

import torch

from roamc.units import Bytes

log = logging.getLogger(__name__)

LEAST: Bytes = 4 << 20
"""Blocks below two large pages are left alone."""


def advise(storage: torch.UntypedStorage) -> None:
    """Ask Linux to back a block of CPU memory with large pages; does nothing elsewhere, or to small blocks."""
    if sys.platform != "linux" or storage.device.type != "cpu" or storage.nbytes() < LEAST:
        return
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE):
        log.debug("no large pages for an arena of %d bytes: %s", storage.nbytes(), os.strerror(ctypes.get_errno()))

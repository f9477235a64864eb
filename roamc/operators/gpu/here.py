"""The GPU of this machine, as far as kernels are timed on it: what it is, and how long functions take."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from roamc.operators.gpu.launch import triton_version
from roamc.units import Bytes, Seconds
from roamc.version import __version__

ROUNDS = 8
"""How often each function is timed, in turn with the others; the shortest time counts."""

FLUSHED: Bytes = 1 << 28
"""Bytes that are written before each run, so that nothing that it reads lies in a cache; while the GPU is at it, the
function is launched, so that the time of its launch does not count."""


def machine(device: torch.device) -> dict[str, Any] | None:
    """Return what times and results depend on: GPU and versions. None where no kernel of Triton runs on ``device``."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _machine(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _machine(index: int) -> dict[str, Any] | None:
    triton = triton_version()
    if triton is None:
        return None
    return {
        "device": torch.cuda.get_device_name(index),
        "capability": list(torch.cuda.get_device_capability(index)),
        "torch": torch.__version__,
        "triton": triton,
        "roamc": __version__,
    }


def seconds_of(runs: Sequence[Callable[[], None]], device: torch.device) -> list[Seconds]:
    """Return the seconds of each function on a GPU, its launches apart.

    Args:
        runs: functions that launch kernels on the current stream of ``device``; each has run before.
        device: the GPU.
    """
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=device)
    least = [math.inf] * len(runs)
    for _ in range(ROUNDS):
        for at, run in enumerate(runs):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flushed.zero_()
            begin.record()
            run()
            end.record()
            end.synchronize()
            least[at] = min(least[at], begin.elapsed_time(end) / 1e3)
    return least


@contextlib.contextmanager
def borrowed(device: torch.device) -> Iterator[None]:
    """Context manager: make the GPU ``device`` the current one, and give back what torch's allocator caches at the end.

    Memory of tensors that are still there is not given back.
    """
    with torch.cuda.device(device):
        try:
            yield
        finally:
            torch.cuda.empty_cache()

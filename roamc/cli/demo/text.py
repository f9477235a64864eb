"""Read bytes to train on: the source of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from roamc.errors import RoamcError

LIMIT = 4_000_000
"""Number of bytes to read at most."""


def read(limit: int = LIMIT) -> bytes:
    """Return the source of the standard library's top-level modules, sorted by name, up to ``limit`` bytes.

    Raises:
        RoamcError: the modules have less than 100 kB of source, as where Python comes without source files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        if size >= limit:
            break
        parts.append(path.read_bytes())
        size += len(parts[-1])
    if size < 100_000:
        raise RoamcError(f"the demo trains on Python's own source, and {folder} has next to none")
    return b"".join(parts)[:limit]


def batches(text: bytes, steps: int, batch: int, seq: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return random windows of ``text``: for each of ``steps`` steps (inputs, targets), int64 of shape (batch, seq).

    ``targets`` has the byte behind each byte of ``inputs``. The same ``seed`` gives the same windows. ``text`` must
    have more than ``seq + 1`` bytes.
    """
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for starts in torch.randint(len(data) - seq, (steps, batch), generator=generator):
        windows = torch.stack([data[int(start) : int(start) + seq + 1] for start in starts])
        pairs.append((windows[:, :-1].contiguous(), windows[:, 1:].contiguous()))
    return pairs

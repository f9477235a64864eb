"""Workspace of collectives on a CPU, where gloo runs them: read off the heap with torch 2.13, 2 and 4 ranks.

Each formula takes a call and its first result ``made`` and returns bytes. gloo sends in pieces, of which two are under
way at a time.

    all-reduce          two pieces; up to half of the tensor
    all-gather          all parts, which are copied to the result
    reduce-scatter      a copy of what is reduced, and pieces
    several at once     all of them side by side, and pieces
"""

from __future__ import annotations

import torch

from roamc.operators.call import Call, fakes, tensors_in
from roamc.units import Bytes

PIECES: Bytes = 2 << 20
"""The most bytes of the pieces of one collective that are under way at a time."""


def reduced(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace in bytes of an all-reduce; for more than two ranks it is at the upper end."""
    return _pieces(_bytes_of(made))


def reduced_together(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace in bytes of an all-reduce of several tensors; ``made`` is not read."""
    nbytes = sum(map(_bytes_of, tensors_in(fakes(call.args[0]))))
    return nbytes + _pieces(nbytes)


def gathered(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace in bytes of an all-gather, whose result is ``made``."""
    return _bytes_of(made)


def scattered(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace in bytes of a reduce-scatter; its result ``made`` is one of equal parts."""
    (read,) = tensors_in(fakes(call.args[0]))
    return _bytes_of(read) + min(_bytes_of(made), PIECES)


def _pieces(nbytes: Bytes) -> Bytes:
    return min(nbytes // 2, PIECES)


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    return tensor.numel() * tensor.itemsize

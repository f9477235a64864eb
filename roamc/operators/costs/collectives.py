"""Workspace of collectives on a CPU, where gloo runs them: read off the heap with torch 2.13, 2 and 4 ranks.

Each formula takes a call and its first ``result`` and returns bytes. gloo sends in pieces, of which two are under
way at a time.

    all-reduce          two pieces; up to half of the tensor
    all-gather          all parts, which are copied to the result
    reduce-scatter      a copy of what is reduced, and pieces
    several at once     all of them side by side, and pieces
    products sent       what is gathered, unless it is a result, or the product, two where several are added up; and
                        what the collective takes
"""

from __future__ import annotations

import torch

from roamc.compat_operators import tensors_in
from roamc.operators.call import Call, fakes
from roamc.units import Bytes

PIECES: Bytes = 2 << 20
"""The most bytes of the pieces of one collective that are under way at a time."""


def reduced(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of an all-reduce; for more than two ranks it is at the upper end."""
    return _pieces(_bytes_of(result))


def reduced_together(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of an all-reduce of several tensors."""
    nbytes = sum(map(_bytes_of, tensors_in(fakes(call.args[0]))))
    return nbytes + _pieces(nbytes)


def gathered(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of an all-gather."""
    return _bytes_of(result)


def scattered(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of a reduce-scatter, whose ``result`` is one of equal parts."""
    (read,) = tensors_in(fakes(call.args[0]))
    return _bytes_of(read) + min(_bytes_of(result), PIECES)


def rows_of_all(call: Call, result: torch.Tensor) -> Bytes:
    """Bytes that ``all_gather_mm`` gathers; 0 where they are a result of it."""
    rows, _, group_size, _, whole, *_ = fakes(call.args)
    return 0 if whole else _bytes_of(rows) * int(group_size)


def gathered_for_products(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``all_gather_mm``."""
    rows, _, group_size, *_ = fakes(call.args)
    return rows_of_all(call, result) + _bytes_of(rows) * int(group_size)


def whole_products(call: Call, result: torch.Tensor) -> Bytes:
    """Bytes of the products that ``mm_reduce_scatter`` holds at once."""
    inputs, _, _, _, group_size, *_ = fakes(call.args)
    return _bytes_of(result) * int(group_size) * min(len(inputs), 2)


def scattered_product(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``mm_reduce_scatter``."""
    return 2 * _bytes_of(result) * int(fakes(call.args)[4]) + min(_bytes_of(result), PIECES)


def _pieces(nbytes: Bytes) -> Bytes:
    return min(nbytes // 2, PIECES)


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    return tensor.numel() * tensor.itemsize

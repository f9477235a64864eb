"""What the judges of groups say, what they are told of memory, and when numbers count as equal."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from roamc.units import Bytes

ERROR = 1e-7
"""Difference that constants in 32 bits make, as a share of the largest element."""

SMALLEST = 1e-9
"""The largest element counts as no smaller: where all are sums that cancel, they are what rounding leaves of zero."""


class Verdict(Enum):
    """What is wrong with the program of a group; the value begins the message."""

    UNKNOWN = "the source is none that the judge knows"
    CALL = "another operator is called"
    ARGUMENT = "another argument is given"
    DIMENSION = "another dimension is gone along"
    VALUE = "another value is read"
    ELEMENTS = "other elements are read"
    OUTSIDE = "elements outside of a tensor are touched"
    MASK = "a mask lets in other elements"
    DTYPE = "the dtype is another one"
    SHAPE = "shapes do not fit"
    PLACE = "the result is written elsewhere"
    TWICE = "elements of the result are written twice"
    MISSING = "elements of the result are not written"
    OVERWRITTEN = "what is still read is overwritten"
    BYTES = "memory of values inside is miscounted"
    LONE_ROW = "a block has one row"
    NUMBERS = "other numbers are computed"
    ORDER = "elements are joined in another order"


class GroupFault(Exception):
    """The program of a group is wrong.

    Attributes:
        verdict: what is wrong.
        member: name of the operator at which it was found; "" if it is none.
    """

    def __init__(self, verdict: Verdict, detail: str, member: str = "") -> None:
        super().__init__(f"{member}: {verdict.value}: {detail}" if member else f"{verdict.value}: {detail}")
        self.verdict, self.member = verdict, member


@dataclass(frozen=True)
class Place:
    """Where a tensor that a group reads or writes lies.

    Attributes:
        memory: equal for tensors that may share bytes, such as all in the arena.
        start: offset in that memory of the tensor's first element, in bytes.
    """

    memory: Hashable
    start: Bytes = 0


def each_close(have: Tensor, want: Tensor) -> Tensor:
    """Return which elements of ``have`` are those of ``want`` but for constants in 32 bits; bool, of their shape."""
    scale = torch.where(want.isfinite(), want, 0).abs().amax().clamp_min(SMALLEST)
    same = (have == want) | (have.isnan() & want.isnan())
    return same | ((have - want).abs() <= ERROR * (scale + want.abs()))


def close(have: Tensor, want: Tensor) -> bool:
    """Return whether both have one shape, and all elements are close in the sense of :func:`each_close`."""
    return have.shape == want.shape and bool(each_close(have, want).all())

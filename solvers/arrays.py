"""The few array types and helpers that the problems and algorithms share. Judges do not use this file."""

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]

_Scalar = TypeVar("_Scalar", bound=np.generic)


def read_only(array: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """Return a contiguous copy of `array` that refuses to be written to."""
    copy = np.array(array, order="C", copy=True)
    copy.setflags(write=False)
    return copy


@dataclass(frozen=True, eq=False)
class Csr:
    """Rows of numbers (compressed sparse rows): row r is `index[start[r]:start[r + 1]]`.

    start: int64[rows + 1], non-decreasing, from 0 to len(index).
    index: int32, the numbers of all rows, one row after another.
    """

    start: LongArray
    index: IntArray

    def lists(self) -> list[list[int]]:
        """Return the rows as Python lists, for loops that touch single numbers."""
        bounds = self.start.tolist()
        flat = self.index.tolist()
        return [flat[lo:hi] for lo, hi in pairwise(bounds)]


def group_by(owner: IntArray, item: IntArray, rows: int) -> Csr:
    """Return a table whose row r holds `item[k]` for every k with `owner[k] == r`, in the sequence of k.

    owner, item: int32[m]; every owner lies in [0, rows).
    rows: number of rows of the table; a row that owns nothing is empty.
    """
    by_owner = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=rows)
    start = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(counts, out=start[1:])
    return Csr(start=start, index=item[by_owner].astype(np.int32))

"""Best fit on a skyline over time.

Sekiyama, Imai, Negishi and Kawachiya 2018, "Profile-guided memory optimization for deep neural networks",
arXiv 1804.10001; best fit for strip packing, with time as the width.

The skyline says, for every step, up to which byte the arena is filled. Take the lowest stretch of it, and put
the longest-lived storage on it that lives within the stretch; if there is none, raise the stretch to its
lower neighbour.

    bytes |        ______
          |  _____|      |            lowest stretch: [t1, t2); storages within it may sit on it
          |_|            |___________
          0 t0            t1        t2  steps
"""

import heapq

import numpy as np

from roamc.solvers.arrays import LongArray
from roamc.solvers.layout.problem import Bytes, LayoutProblem, Step, StorageIndex, padded


def best_fit(problem: LayoutProblem) -> LongArray:
    """Return offsets in bytes, int64[n], by best fit on a skyline; 0 for storages without bytes.

    The problem must have no gaps and no fixed offsets, and every `own_alignment` must equal `alignment`; none of this
    is checked. O(n log n), plus, for each look at the lowest stretch of the skyline, the number of storages born in it.
    """
    size = padded(problem)
    offset = np.zeros(problem.num_storages, dtype=np.int64)
    waiting = _Waiting(problem, size)
    skyline = _Skyline(int(problem.dead.max(initial=0)))
    while waiting.count:
        start, end, height = skyline.lowest()
        storage = waiting.longest_within(start, end)
        if storage is None:
            skyline.lift(start)
        else:
            offset[storage] = height
            lo, hi = int(problem.born[storage]), int(problem.dead[storage])
            skyline.fill(start, lo, hi, height + int(size[storage]))
    return offset


class _Waiting:
    """The storages that are not placed yet, sorted by birth."""

    def __init__(self, problem: LayoutProblem, size: LongArray) -> None:
        has_bytes = np.flatnonzero(size > 0)
        self._storage = has_bytes[np.argsort(problem.born[has_bytes], kind="stable")]
        self._born = problem.born[self._storage]
        self._dead = problem.dead[self._storage]
        by_preference = np.lexsort((-size[self._storage], self._born - self._dead))
        self._rank = np.empty(len(self._storage), dtype=np.int64)
        self._rank[by_preference] = np.arange(len(self._storage))
        self._never = len(self._storage)
        self.count = len(self._storage)

    def longest_within(self, start: Step, end: Step) -> StorageIndex | None:
        """Remove and return the longest-lived storage that lives within steps [start, end), of equals the largest.

        None if no waiting storage lives within these steps.
        """
        lo, hi = np.searchsorted(self._born, (start, end)).tolist()
        if lo == hi:
            return None
        rank = np.where(self._dead[lo:hi] <= end, self._rank[lo:hi], self._never)
        place = lo + int(rank.argmin())
        if rank[place - lo] == self._never:
            return None
        self._rank[place] = self._never
        self.count -= 1
        return int(self._storage[place])


class _Skyline:
    """Stretches of equal height, by their first step; a heap finds the lowest, the earliest if equal."""

    def __init__(self, num_steps: Step) -> None:
        self._end: dict[Step, Step] = {0: num_steps}
        self._start_of: dict[Step, Step] = {num_steps: 0}
        self._height: dict[Step, Bytes] = {0: 0}
        self._heap: list[tuple[Bytes, Step, Step]] = [(0, 0, num_steps)]

    def lowest(self) -> tuple[Step, Step, Bytes]:
        """Return (first step, end, height in bytes) of the lowest stretch, the earliest of equals."""
        while True:
            height, start, end = self._heap[0]
            if self._height.get(start) == height and self._end[start] == end:
                return start, end, height
            heapq.heappop(self._heap)

    def lift(self, start: Step) -> None:
        """Raise the stretch that begins at step `start` to the height of its lower neighbour, and join the two."""
        end = self._end[start]
        left = self._start_of.get(start)
        heights = [self._height[side] for side in (left, end) if side is not None and side in self._height]
        self._remove(start)
        self._add(start, end, min(heights))

    def fill(self, start: Step, lo: Step, hi: Step, height: Bytes) -> None:
        """Raise the steps [lo, hi) of the stretch that begins at step `start` to `height` bytes."""
        end, below = self._end[start], self._height[start]
        self._remove(start)
        for first, last, level in ((start, lo, below), (lo, hi, height), (hi, end, below)):
            if first < last:
                self._add(first, last, level)

    def _remove(self, start: Step) -> None:
        del self._start_of[self._end.pop(start)]
        del self._height[start]

    def _add(self, start: Step, end: Step, height: Bytes) -> None:
        """Add a stretch where there is none, joined with neighbours of the same height."""
        left = self._start_of.get(start)
        if left is not None and self._height[left] == height:
            self._remove(left)
            start = left
        if self._height.get(end) == height:
            right_end = self._end[end]
            self._remove(end)
            end = right_end
        self._end[start] = end
        self._start_of[end] = start
        self._height[start] = height
        heapq.heappush(self._heap, (height, start, end))

"""Branch and bound over canonical layouts, with a limit on nodes.

In a layout whose sum of offsets is smallest nothing can be pushed down, so every storage lies at 0 or on top
of another. Taking its storages by rising offset, each lies exactly on the skyline left by those before it:

    height(step) = highest end of a placed storage live at that step
    floor(i)     = max of height over the life of i           where i would lie if it came next

so a layout is a sequence, and a node of the tree is a placed prefix. A storage i may come next unless

- floor(i) lies below the last offset (or equals it, and i ranks below the last one): the sequence rises;
- floor(j) + size(j) <= floor(i) for some waiting j: j could still be pushed down under i;
- an equal storage (same size, same life) of lower rank waits: they are interchangeable;
- at some step max(height, floor(i)) + waiting bytes exceeds the capacity: what waits cannot fit above.

The canonical form and the first two rules follow Moffitt, "MiniMalloc: a lightweight memory allocator for
hardware-accelerated machine learning", ASPLOS 2023. Only steps at which something is born are looked at:
between births the set of live storages only shrinks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.layout.greedy_by_size import by_area, by_lifetime, by_size
from roamc.solvers.layout.problem import Bytes, LayoutProblem, arena_bytes, padded

LARGEST_PIECE = 4096
_RANKINGS: tuple[Callable[[LayoutProblem], LongArray], ...] = (by_lifetime, by_size, by_area)


@dataclass(frozen=True, eq=False)
class SearchResult:
    """offset: int64[n] bytes, the best layout known.  nodes: storages placed.

    proved: no layout has a smaller arena than this one (or than the target, if it meets that).
    """

    offset: LongArray
    nodes: int
    proved: bool


def tree_search(problem: LayoutProblem, incumbent: LongArray, target_bytes: Bytes, node_limit: int) -> SearchResult:
    """Lower the arena of a layout (int64[n] bytes) down to target_bytes, placing at most node_limit storages.

    target_bytes: a lower bound on the arena. The problem is cut where nothing is live; pieces that are
    already within the target are left alone, and pieces of more than LARGEST_PIECE storages are not searched.
    """
    offset = incumbent.copy()
    size = padded(problem)
    pieces = [piece for piece in time_pieces(problem) if _top(piece, offset, size) > target_bytes]
    nodes = 0
    proved_height = target_bytes
    for number, piece in enumerate(pieces):
        share = (node_limit - nodes) // (len(pieces) - number)
        part = LayoutProblem(
            size=problem.size[piece],
            born=problem.born[piece],
            dead=problem.dead[piece],
            alignment=problem.alignment,
        )
        found = _search_piece(part, offset[piece], target_bytes, share)
        offset[piece] = found.offset
        nodes += found.nodes
        if found.proved:
            proved_height = max(proved_height, _top(piece, offset, size))
    return SearchResult(offset, nodes, proved=arena_bytes(problem, offset) <= proved_height)


def time_pieces(problem: LayoutProblem) -> list[LongArray]:
    """The storages that have bytes, cut into groups that no step connects, in time order."""
    storages = np.flatnonzero(problem.size > 0)
    storages = storages[np.argsort(problem.born[storages], kind="stable")]
    if len(storages) == 0:
        return []
    alive_until = np.maximum.accumulate(problem.dead[storages])
    cuts = np.flatnonzero(problem.born[storages][1:] >= alive_until[:-1]) + 1
    return np.split(storages, cuts)


def _top(piece: LongArray, offset: LongArray, size: LongArray) -> Bytes:
    return int((offset[piece] + size[piece]).max())


def _search_piece(part: LayoutProblem, offset: LongArray, target: Bytes, node_limit: int) -> SearchResult:
    """Ask for a layout within the target, ranking by ranking; then improve on what is known."""
    if part.num_storages > LARGEST_PIECE:
        return SearchResult(offset, 0, proved=False)
    nodes = 0
    for ranking in _RANKINGS:
        search = _Search(part, ranking(part), capacity=target, target=target)
        complete = search.run(node_limit // (len(_RANKINGS) + 1))
        nodes += search.nodes
        if search.best is not None:
            return SearchResult(search.best, nodes, proved=True)
        if complete:
            target += part.alignment
            break
    height = arena_bytes(part, offset)
    if height <= target:
        return SearchResult(offset, nodes, proved=complete)
    search = _Search(part, by_lifetime(part), capacity=height - part.alignment, target=target)
    complete = search.run(node_limit - nodes)
    best = offset if search.best is None else search.best
    return SearchResult(best, nodes + search.nodes, proved=complete)


@dataclass(frozen=True, eq=False)
class _Frame:
    """One node on the current path: what it placed, what to put back, and what else could have come next."""

    placed: int
    offset: Bytes
    height: LongArray
    floor: LongArray
    untried: list[int]


class _Search:
    """The state of one depth-first search. Storages are renamed by rank, steps by distinct births."""

    def __init__(self, part: LayoutProblem, sequence: LongArray, capacity: Bytes, target: Bytes) -> None:
        self._sequence = sequence
        self._alignment = part.alignment
        self._capacity = capacity
        self._target = target
        self._size = padded(part)[sequence]
        births = np.unique(part.born)
        self._first = np.searchsorted(births, part.born[sequence]).astype(np.int32)
        self._end = np.searchsorted(births, part.dead[sequence]).astype(np.int32)
        self._spans = list(zip(self._first.tolist(), self._end.tolist(), strict=True))
        change = np.zeros(len(births) + 1, dtype=np.int64)
        np.add.at(change, self._first, self._size)
        np.subtract.at(change, self._end, self._size)
        self._waiting_bytes: LongArray = np.cumsum(change[:-1])
        self._waiting = np.ones(len(sequence), dtype=np.bool_)
        self._twin = _lower_twins(self._size, self._first, self._end)
        self._has_twin = self._twin >= 0
        self._height = np.zeros(len(births), dtype=np.int64)
        self._floor = np.zeros(len(sequence), dtype=np.int64)
        self._offset = np.zeros(len(sequence), dtype=np.int64)
        self.nodes = 0
        self.best: LongArray | None = None

    def run(self, node_limit: int) -> bool:
        """Search; True if nothing is left to find (all nodes seen, or the target met), False at the limit."""
        path: list[_Frame] = []
        untried = self._candidates(0, -1)
        while True:
            while untried and self.nodes < node_limit:
                frame = self._place(untried.pop(), untried)
                path.append(frame)
                if len(path) < len(self._size):
                    untried = self._candidates(frame.offset, frame.placed)
                elif self._record():
                    return True
                else:
                    untried = []
            if untried:
                return False
            if not path:
                return True
            frame = path.pop()
            self._take_back(frame)
            untried = frame.untried

    def _candidates(self, last_offset: Bytes, last: int) -> list[int]:
        """Who may come next, the best choice (lowest floor, then lowest rank) at the end."""
        floor = self._floor
        waiting = self._waiting
        lowest_top = int((floor + self._size)[waiting].min())
        may = waiting & (floor >= last_offset) & (floor < lowest_top)
        may &= ~(self._has_twin & waiting[self._twin])
        ranks = np.flatnonzero(may)
        floors = floor[ranks]
        by_choice = np.lexsort((ranks, floors))[::-1]
        chosen = zip(ranks[by_choice].tolist(), floors[by_choice].tolist(), strict=True)
        roof = self._highest_floor()
        return [rank for rank, at in chosen if at <= roof and (at > last_offset or rank > last)]

    def _highest_floor(self) -> Bytes:
        """The largest f with max(height, f) + waiting bytes within the capacity; -1 if there is none."""
        busy = self._waiting_bytes > 0
        if int((self._height + self._waiting_bytes)[busy].max()) > self._capacity:
            return -1
        return self._capacity - int(self._waiting_bytes.max())

    def _place(self, rank: int, untried: list[int]) -> _Frame:
        first, end = self._spans[rank]
        at = int(self._floor[rank])
        size = int(self._size[rank])
        frame = _Frame(rank, at, self._height[first:end].copy(), self._floor, untried)
        self._height[first:end] = at + size
        self._waiting_bytes[first:end] -= size
        self._waiting[rank] = False
        self._offset[rank] = at
        touched = (self._first < end) & (self._end > first)
        self._floor = np.where(touched, np.maximum(self._floor, at + size), self._floor)
        self.nodes += 1
        return frame

    def _take_back(self, frame: _Frame) -> None:
        first, end = self._spans[frame.placed]
        self._height[first:end] = frame.height
        self._waiting_bytes[first:end] += self._size[frame.placed]
        self._waiting[frame.placed] = True
        self._floor = frame.floor

    def _record(self) -> bool:
        """Everything is placed: remember the layout and ask for a lower one. True if the target is met."""
        arena = int((self._offset + self._size).max())
        if arena <= self._capacity:
            self.best = np.empty(len(self._sequence), dtype=np.int64)
            self.best[self._sequence] = self._offset
            self._capacity = arena - self._alignment
        return arena <= self._target


def _lower_twins(size: LongArray, first: IntArray, end: IntArray) -> LongArray:
    """For each rank the next lower rank with the same size and life, or -1."""
    twins = np.full(len(size), -1, dtype=np.int64)
    last_seen: dict[tuple[int, int, int], int] = {}
    for rank, key in enumerate(zip(size.tolist(), first.tolist(), end.tolist(), strict=True)):
        twins[rank] = last_seen.get(key, -1)
        last_seen[key] = rank
    return twins

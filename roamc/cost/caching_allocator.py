"""A simulation of PyTorch's CUDA caching allocator: how much it reserves for a given sequence of tensors.

After c10/cuda/CUDACachingAllocator.cpp at its default settings, one stream. Sizes are rounded up to 512 bytes.
Requests up to 1 MiB are served from a pool of 2 MiB segments; larger ones from a pool whose segments have
20 MiB, or from 10 MiB on the request rounded up to 2 MiB. The smallest free block that is large enough is
taken and, if enough is left over, split; free neighbours within a segment join. Segments stay, until the device has no
more: then all that are free go back to it.

With ``expandable`` a pool is a single segment, of which pages (2 MiB, or 20 MiB in the large pool) are mapped
at its end when nothing free is large enough:

    | used |  free  | used | free .. mapped|  not mapped yet ...
                             the last free block counts as endless: it is taken only if nothing else fits

Real segments have addresses from the driver; here they follow one another, which decides between free blocks
of equal size only.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from roamc.graph.memory import Int64s
from roamc.units import Bytes

KIB, MIB = 1 << 10, 1 << 20
ROUND = 512
SMALL_REQUEST, SMALL_SEGMENT = MIB, 2 * MIB
LARGE_SEGMENT, LARGE_REQUEST, ROUND_LARGE = 20 * MIB, 10 * MIB, 2 * MIB


@dataclass(eq=False)
class Block:
    """A piece of a segment, linked with its neighbours there."""

    address: Bytes
    size: Bytes
    pool: Pool
    free: bool = True
    before: Block | None = None
    after: Block | None = None


@dataclass(eq=False)
class Pool:
    """The free blocks of small or of large requests, by size, then address."""

    small: bool
    ordered: list[tuple[Bytes, Bytes]]
    at: dict[Bytes, Block]
    last: Block | None = None

    def add(self, block: Block) -> None:
        """List a free block."""
        bisect.insort(self.ordered, (block.size, block.address))
        self.at[block.address] = block

    def remove(self, block: Block) -> None:
        """Take a free block off the list."""
        del self.ordered[bisect.bisect_left(self.ordered, (block.size, block.address))]
        del self.at[block.address]


class CachingAllocator:
    """Allocates and frees; :attr:`reserved` is what it has taken from the device.

    Args:
        expandable: as with ``expandable_segments:True``.
        full: whether free segments go back before each new one, as on a device that has no more.

    Raises:
        ValueError: both: expandable segments have no part that goes back.
    """

    def __init__(self, *, expandable: bool = False, full: bool = False) -> None:
        if expandable and full:
            raise ValueError("expandable segments do not go back: leave one of expandable and full out")
        self.expandable, self.full = expandable, full
        self.reserved: Bytes = 0
        self.allocated: Bytes = 0
        self._end: Bytes = 0
        self._small, self._large = Pool(True, [], {}), Pool(False, [], {})

    def allocate(self, size: Bytes) -> Block:
        """A block for ``size`` > 0 bytes."""
        size = _round_up(size, ROUND)
        pool = self._small if size <= SMALL_REQUEST else self._large
        block = self._best_fit(pool, size)
        if block is not None:
            pool.remove(block)
        elif self.expandable:
            block = self._expand(pool, size)
        else:
            block = self._segment(pool, size)
        if self._splits(pool, block.size - size):
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Give a block back; it joins free neighbours."""
        self.allocated -= block.size
        block.free = True
        pool, before, after = block.pool, block.before, block.after
        if before is not None and before.free:
            pool.remove(before)
            block = _join(before, block)
        if after is not None and after.free:
            pool.remove(after)
            block = _join(block, after)
        pool.add(block)

    def _best_fit(self, pool: Pool, size: Bytes) -> Block | None:
        place = bisect.bisect_left(pool.ordered, (size, -1))
        fitting = [pool.at[address] for _, address in pool.ordered[place : place + 2]]
        if self.expandable and len(fitting) == 2 and fitting[0] is pool.last:
            return fitting[1]
        return fitting[0] if fitting else None

    def _segment(self, pool: Pool, size: Bytes) -> Block:
        if self.full:
            self._give_back()
        block = Block(self._end, segment_bytes(size), pool)
        self._end += block.size
        self.reserved += block.size
        return block

    def _give_back(self) -> None:
        """Return segments of which nothing is in use."""
        for pool in (self._small, self._large):
            whole = [block for block in pool.at.values() if block.before is None and block.after is None]
            for block in whole:
                pool.remove(block)
                self.reserved -= block.size

    def _expand(self, pool: Pool, size: Bytes) -> Block:
        """Map pages behind the end of the pool's segment, which the last free block joins."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        last = pool.last
        if last is not None and last.free:
            pool.remove(last)
            more = _round_up(size - last.size, page)
            last.size += more
            self.reserved += more
            return last
        block = Block(last.address + last.size if last else 0, _round_up(size, page), pool, before=last)
        if last is not None:
            last.after = block
        pool.last = block
        self.reserved += block.size
        return block

    def _splits(self, pool: Pool, rest: Bytes) -> bool:
        return rest >= ROUND if pool.small or self.expandable else rest > SMALL_REQUEST

    def _split(self, block: Block, size: Bytes) -> None:
        pool = block.pool
        rest = Block(block.address + size, block.size - size, pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if pool.last is block:
            pool.last = rest
        pool.add(rest)


def segment_bytes(size: Bytes) -> Bytes:
    """The segment that a request of ``size`` rounded bytes asks the driver for."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_REQUEST else _round_up(size, ROUND_LARGE)


def peak_reserved(
    size: Int64s,
    born: Int64s,
    dead: Int64s,
    held: Iterable[Bytes] = (),
    *,
    expandable: bool = False,
    full: bool = False,
    iterations: int = 2,
) -> Bytes:
    """Return the most bytes that the allocator has reserved in some training steps.

    Args:
        size: int64[k], bytes of every storage; none has a block if 0.
        born: int64[k], the step of the schedule that allocates it, before it frees anything.
        dead: int64[k], the step after its last; freed when step ``dead - 1`` has run, never made if ``dead == born``.
        held: sizes above 0 of what is there before, and stays.
        expandable: as for :class:`CachingAllocator`.
        full: as for :class:`CachingAllocator`: about the least with which the steps run at all.
        iterations: how often the whole schedule runs; the first may leave the pools in another state.
    """
    allocator = CachingAllocator(expandable=expandable, full=full)
    for nbytes in held:
        allocator.allocate(nbytes)
    rows = [row for row in range(len(size)) if size[row] and dead[row] > born[row]]
    events = sorted([(int(born[row]), 0, row) for row in rows] + [(int(dead[row]) - 1, 1, row) for row in rows])
    most = allocator.reserved
    for _ in range(iterations):
        blocks: dict[int, Block] = {}
        for _, frees, row in events:
            if frees:
                allocator.free(blocks.pop(row))
            else:
                blocks[row] = allocator.allocate(int(size[row]))
                most = max(most, allocator.reserved)
    return most


def _join(first: Block, second: Block) -> Block:
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    if first.pool.last is second:
        first.pool.last = first
    return first


def _round_up(number: Bytes, unit: Bytes) -> Bytes:
    return -(-number // unit) * unit

"""The simulated allocator against cases worked out by hand from the allocator's rules."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from roamc.cost.caching_allocator import KIB, MIB, Block, CachingAllocator, peak_reserved, segment_bytes


@pytest.mark.parametrize(
    ("size", "segment"),
    [(512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
     (10 * MIB + 512, 12 * MIB), (33 * MIB, 34 * MIB)],
)  # fmt: skip
def test_segment_of_a_request(size: int, segment: int) -> None:
    assert segment_bytes(size) == segment


def test_small_requests_share_a_segment() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size) for size in (1, 512, 513, MIB)]
    assert [block.size for block in blocks] == [512, 512, 1024, MIB]
    assert (allocator.reserved, allocator.allocated) == (2 * MIB, MIB + 2048)


def test_the_smallest_free_block_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(30 * MIB), allocator.allocate(12 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(11 * MIB) is small


def test_a_rest_of_up_to_one_mib_stays_with_a_large_block() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    assert allocator.allocate(11 * MIB).size == 12 * MIB
    other = CachingAllocator()
    other.free(other.allocate(12 * MIB))
    assert other.allocate(11 * MIB - 512).size == 11 * MIB - 512


def test_a_large_block_that_is_free_serves_no_small_request() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(512)
    assert allocator.reserved == 22 * MIB


@pytest.mark.parametrize("sequence", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_join(sequence: tuple[int, ...]) -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for index in sequence:
        allocator.free(blocks[index])
    assert allocator.allocate(15 * MIB).address == 0
    assert allocator.reserved == 20 * MIB


def test_free_blocks_of_two_segments_do_not_join() -> None:
    allocator = CachingAllocator()
    for block in [allocator.allocate(10 * MIB), allocator.allocate(10 * MIB)]:
        allocator.free(block)
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 40 * MIB


def test_an_expandable_segment_grows_by_what_is_missing_at_its_end() -> None:
    allocator = CachingAllocator(expandable=True)
    for block in [allocator.allocate(15 * MIB), allocator.allocate(5 * MIB)]:
        allocator.free(block)
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 40 * MIB


def test_an_expandable_segment_takes_its_end_last() -> None:
    allocator = CachingAllocator(expandable=True)
    blocks = [allocator.allocate(size * MIB) for size in (30, 4, 20)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])  # joins 6 MiB that are mapped behind it
    assert allocator.allocate(25 * MIB).address == 0
    assert allocator.reserved == 60 * MIB


def test_fragmentation_of_a_default_segment_shows_in_the_reserved_bytes() -> None:
    mebibytes = np.array([12, 16, 20], dtype=np.int64) * MIB
    born, dead = np.array([0, 0, 1]), np.array([1, 2, 2])
    assert peak_reserved(mebibytes, born, dead) == 48 * MIB
    assert peak_reserved(mebibytes, born, dead, expandable=True) == 60 * MIB


def test_a_full_device_gets_free_segments_back_before_a_new_one_is_taken() -> None:
    mebibytes = np.array([12, 16, 20, 3], dtype=np.int64) * MIB
    born, dead = np.array([0, 0, 1, 1]), np.array([1, 2, 2, 1])  # the last one is never made
    assert peak_reserved(mebibytes, born, dead, [11 * MIB, 1]) == (12 + 2 + 48) * MIB
    assert peak_reserved(mebibytes, born, dead, [11 * MIB, 1], full=True, iterations=1) == (12 + 2 + 36) * MIB


def test_a_second_iteration_meets_the_pools_of_the_first() -> None:
    sizes, born, dead = np.array([12 * MIB, 11 * MIB]), np.array([0, 1]), np.array([1, 2])
    assert peak_reserved(sizes, born, dead, iterations=1) == peak_reserved(sizes, born, dead) == 12 * MIB


@pytest.mark.parametrize(("expandable", "full"), [(False, False), (True, False), (False, True)])
def test_blocks_never_overlap_and_everything_joins_again(expandable: bool, full: bool) -> None:
    rng = random.Random(5)
    allocator = CachingAllocator(expandable=expandable, full=full)
    live: list[Block] = []
    for _ in range(2000):
        if live and rng.random() < 0.5:
            allocator.free(live.pop(rng.randrange(len(live))))
        else:
            live.append(allocator.allocate(int(2 ** rng.uniform(0, 26))))
        assert allocator.allocated == sum(block.size for block in live) <= allocator.reserved
        for pool in {id(block.pool): block.pool for block in live}.values():
            spans = sorted((block.address, block.address + block.size) for block in live if block.pool is pool)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for block in live:
        allocator.free(block)
    free = sum(size for pool in (allocator._small, allocator._large) for size, _ in pool.ordered)
    assert free == allocator.reserved
    assert allocator.allocate(512).size == 512 * (KIB // 1024)


def test_expandable_segments_do_not_go_back() -> None:
    with pytest.raises(ValueError, match="leave one of expandable and full out"):
        CachingAllocator(expandable=True, full=True)

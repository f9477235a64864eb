"""Trims of the arena: nothing lies in them, and they lower the peak."""

from __future__ import annotations

import random

import numpy as np
import pytest

from roamc.solvers.layout.effort import LARGE_PAGE as LARGE
from roamc.solvers.layout.effort import TrimEffort
from roamc.solvers.layout.trim import IdleRange, Room, trimmed, trimmings, untrimmed


def room(rows: list[tuple[int, int, int, int]], outside: list[int]) -> Room:
    """Storages as (offset, size, born, dead) in large pages and steps, and large pages outside per moment."""
    offset, size, born, dead = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    top = int((offset + size).max(initial=0)) * LARGE
    return Room(top, offset * LARGE, size * LARGE, born, dead, (np.array(outside, dtype=np.int64) * LARGE,))


def test_the_top_goes_while_the_outside_is_large() -> None:
    # step      0     1     2    between
    # arena    4+4    4   4+4         the upper half is empty at step 1
    # outside   0     3     0
    *_, lowest = trimmings(room([(0, 4, 0, 3), (4, 4, 0, 1), (4, 4, 2, 3)], [0, 3, 0, 0]), TrimEffort())
    assert lowest.total == 8 * LARGE
    assert lowest.ranges == (IdleRange(5 * LARGE, 8 * LARGE, 1, 1),), "the highest pages, and no more than needed"
    assert lowest.trimmed_bytes == lowest.large == 3 * LARGE


def test_a_trim_lasts_into_the_next_step() -> None:
    *_, lowest = trimmings(room([(0, 8, 1, 2)], [2, 0, 0, 8]), TrimEffort())
    assert lowest.ranges == (IdleRange(0, 8 * LARGE, 2, 3),)
    assert trimmed(lowest.ranges, 3).tolist() == [8 * LARGE, 0, 8 * LARGE, 8 * LARGE]


def test_a_full_arena_and_a_small_one_have_no_trims() -> None:
    assert all(not choice.ranges for choice in trimmings(room([(0, 8, 0, 2)], [0, 5, 0]), TrimEffort()))
    assert len(list(trimmings(room([(0, 3, 0, 1)], [0, 3, 0]), TrimEffort()))) == 1


@pytest.mark.parametrize("seed", range(40))
def test_random_choices_are_legal_and_what_they_say(seed: int) -> None:
    draw = random.Random(seed)
    steps = draw.randrange(1, 12)
    rows = []
    for _ in range(draw.randrange(1, 12)):
        born = draw.randrange(steps)
        rows.append((draw.randrange(12), draw.randrange(1, 6), born, draw.randrange(born + 1, steps + 1)))
    arena = room(rows, [draw.randrange(20) for _ in range(steps + 1)])
    choices = list(trimmings(arena, TrimEffort()))
    for choice in choices:
        top = arena.arena_bytes - trimmed(choice.ranges, steps)
        assert choice.total == int((top + arena.outsides[0]).max()), seed
        for gap in choice.ranges:
            moments = {(gap.first + i) % (steps + 1) for i in range(gap.length)}
            for offset, size, born, dead in rows:
                apart = gap.high <= offset * LARGE or (offset + size) * LARGE <= gap.low
                assert apart or moments.isdisjoint(range(born, dead)), f"seed {seed}: {gap}"
    assert choices[0] == untrimmed(arena)
    assert min(choices, key=lambda choice: choice.total).total <= choices[0].total

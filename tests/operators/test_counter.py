"""Masks from a counter: Philox, the share of elements that is kept, and that nothing but the seed counts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from roamc.operators import counter
from roamc.operators.counter import (
    WORDS,
    counter_mask,
    draw_seeds,
    kept,
    limit_of,
    own_seeds,
    philox,
    write_counter_mask,
    write_seeds,
)

LOW = (1 << 32) - 1


def words(key: int, number: int) -> list[int]:
    """Philox-4x32-10 by Python's integers, which have no width."""
    c, k = [number & LOW, number >> 32 & LOW, 0, 0], [key & LOW, key >> 32 & LOW]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ k[0], second & LOW, first >> 32 ^ c[3] ^ k[1], first & LOW]
        k = [k[0] + 0x9E3779B9 & LOW, k[1] + 0xBB67AE85 & LOW]
    return c


def seed_of(number: int) -> Tensor:
    torch.manual_seed(number)
    return draw_seeds(1)[0]


def mask(seed: Tensor, size: tuple[int, ...], keep: float) -> Tensor:
    kept_elements: Tensor = counter_mask(seed, size, torch.empty(size, device="meta").stride(), keep)
    return kept_elements


def test_philox_gives_the_published_words() -> None:
    """Of Random123's ``kat_vectors``, for key and counter 0."""
    philox_words = [int(word) for word in philox(torch.tensor(0), torch.tensor(0))]
    assert philox_words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("key", [0, 1, (1 << 63) - 1, -1, 0x299F31D0A4093822])
@pytest.mark.parametrize("number", [0, LOW, 1 << 32, (1 << 34) + 5, (1 << 63) - 1, -1])
def test_philox_has_64_bits_of_key_and_counter(key: int, number: int) -> None:
    philox_words = [int(word) for word in philox(torch.tensor(key), torch.tensor(number))]
    assert philox_words == words(key % (1 << 64), number % (1 << 64))


@pytest.mark.parametrize("size", [(), (1,), (3,), (4, 5), (2, 3, 7), (64, 129)])
def test_an_element_follows_from_its_number(size: tuple[int, ...]) -> None:
    seed = seed_of(1)
    numbers = torch.arange(math.prod(size)).view(size)
    assert torch.equal(mask(seed, size, 0.7), kept(seed, numbers, 0.7))
    assert torch.equal(mask(seed, (math.prod(size),), 0.7).view(size), mask(seed, size, 0.7))


@pytest.mark.parametrize("size", [(3, 8), (5, 7), (64,)])
def test_pieces_make_no_difference(size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    seed = seed_of(2)
    whole = mask(seed, size, 0.5)
    monkeypatch.setattr(counter, "PIECE", 8)
    assert torch.equal(mask(seed, size, 0.5), whole)


def test_strides_make_no_difference() -> None:
    seed = seed_of(2)
    turned = counter_mask(seed, (6, 10), (1, 6), 0.5)
    assert turned.stride() == (1, 6)
    assert torch.equal(turned, mask(seed, (6, 10), 0.5))


@pytest.mark.parametrize("number", [LOW, 1 << 32, (1 << 34) - 1, (1 << 34) + 2, (1 << 40) + 3])
def test_numbers_of_more_than_32_bits_count(number: int) -> None:
    seed = torch.tensor([12345678901234567, (1 << 32) - 3])
    word = words(int(seed[0]), int(seed[1]) + number // 4)[number % 4]
    below = (word ^ 1 << 31) < round(0.5 * (1 << 32))  # in the order of signed numbers
    assert bool(kept(seed, torch.tensor(number), 0.5)) is below


@pytest.mark.parametrize(("keep", "share"), [(0.0, 0), (1.0, 1)])
def test_nothing_or_all_is_kept_at_the_ends(keep: float, share: int) -> None:
    assert mask(seed_of(3), (1000,), keep).sum() == 1000 * share


@pytest.mark.parametrize("keep", [0.9, 0.5, 2**-20, 1 - 2**-20, 1 / 3])
def test_the_limit_is_the_share_of_words_below_it(keep: float) -> None:
    assert abs((limit_of(keep) + (1 << 31)) / (1 << 32) - keep) <= 2**-33


def test_a_mask_without_elements() -> None:
    assert mask(seed_of(4), (0, 3), 0.5).shape == (0, 3)


# -- the distribution ------------------------------------------------------------------------------------------------

COUNT = 1 << 18


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.1])
def test_the_share_that_is_kept_has_mean_and_variance_of_independent_draws(keep: float) -> None:
    torch.manual_seed(5)
    shares = torch.stack([mask(seed, (COUNT,), keep).double().mean() for seed in draw_seeds(32)])
    deviation = math.sqrt(keep * (1 - keep) / COUNT)
    assert abs(shares.mean() - keep) < 5 * deviation / math.sqrt(32)
    assert 0.4 < shares.std() / deviation < 1.8


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 768])
def test_neighbours_in_a_mask_do_not_depend_on_each_other(distance: int) -> None:
    centred = mask(seed_of(6), (COUNT,), 0.5).double() - 0.5
    product = (centred[distance:] * centred[:-distance]).mean() / 0.25
    assert abs(product) < 5 / math.sqrt(COUNT)


def test_masks_of_two_seeds_do_not_depend_on_each_other() -> None:
    torch.manual_seed(7)
    first, second = (mask(seed, (COUNT,), 0.5).double() - 0.5 for seed in draw_seeds(2))
    assert abs((first * second).mean() / 0.25) < 5 / math.sqrt(COUNT)


# -- seeds -----------------------------------------------------------------------------------------------------------


def test_seeds_follow_from_the_generator() -> None:
    torch.manual_seed(8)
    first, second = draw_seeds(3), draw_seeds(3)
    torch.manual_seed(8)
    assert torch.equal(draw_seeds(3), first)
    assert not torch.equal(first, second)
    assert len({int(number) for number in (*first.flatten(), *second.flatten())}) == 12


def test_kernels_write_what_the_operators_return() -> None:
    seeds = torch.zeros(2, 2, dtype=torch.int64)
    torch.manual_seed(9)
    write_seeds(2, out=seeds)
    torch.manual_seed(9)
    assert torch.equal(seeds, draw_seeds(2))
    out = torch.empty(5, 8, dtype=torch.bool)
    write_counter_mask(seeds[1], (5, 8), (8, 1), 0.5, out=out)
    assert torch.equal(out, mask(seeds[1], (5, 8), 0.5))


@pytest.mark.parametrize(("ranks", "rows", "width"), [(2, 6, 8), (3, 9, 4), (8, 16, 2), (1, 5, 4)])
def test_ranks_have_the_bits_of_one_mask(ranks: int, rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(10)
    seeds = draw_seeds(3)
    seeds[0, 1] = (1 << 63) - 2  # the counter wraps around
    own = rows // ranks * width
    parts = []
    for rank in range(ranks):
        monkeypatch.setattr(counter, "rank_in", lambda group, rank=rank: rank)
        moved = own_seeds(seeds, own // WORDS, "ranks")
        parts.append([mask(seed, (rows // ranks, width), 0.5) for seed in moved])
    for seed, *rows_of in zip(seeds, *parts, strict=True):
        assert torch.equal(torch.cat(rows_of), mask(seed, (rows, width), 0.5))

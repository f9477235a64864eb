"""Matrix products by aligned copies: those of torch, in any geometry and in pieces, and the copies that are counted."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from roamc.operators import aligned
from roamc.operators.aligned import BY_COPIES, copied_bytes, is_aligned, piece_of
from tests.operators.test_onednn import factors

aten = torch.ops.aten


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned, "PIECE", 1 << 12)
    monkeypatch.setattr(aligned, "ROWS", 16)


@pytest.fixture
def most_alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of copies that are alive at each copy."""
    alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
    seen: list[int] = [0]
    make = aligned._like

    def watched(matrix: Tensor) -> Tensor:
        copy = make(matrix)
        alive.add(copy.untyped_storage())
        seen.append(sum(storage.nbytes() for storage in alive))
        return copy

    monkeypatch.setattr(aligned, "_like", watched)
    return seen


def halves(seed: int) -> tuple[Tensor, Tensor]:
    first, second = factors(seed)
    return tuple(torch.empty_strided(x.shape, x.stride()).copy_(x).bfloat16() for x in (first, second))  # type: ignore[return-value]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", range(40))
def test_products_of_any_geometry(seed: int) -> None:
    first, second = halves(seed)
    wanted = first.double() @ second.double()
    tolerance = {"rtol": 2e-2, "atol": 2e-2 * float(wanted.abs().max())}
    torch.testing.assert_close(BY_COPIES[aten.mm.default](first, second).double(), wanted, **tolerance)
    for added in (torch.randn(wanted.shape[1]), torch.randn(wanted.shape), torch.randn(wanted.shape[0], 1)):
        product = BY_COPIES[aten.addmm.default](added.bfloat16(), first, second)
        torch.testing.assert_close(product.double(), wanted + added.bfloat16().double(), **tolerance)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", range(40))
def test_copies_that_are_alive_together_are_those_that_are_counted(seed: int, most_alive: list[int]) -> None:
    first, second = halves(seed)
    out = torch.empty(first.shape[0], second.shape[1], dtype=torch.bfloat16)
    aligned.aligned_mm(first, second, out=out)
    assert max(most_alive) <= copied_bytes(first, second, out)
    assert max(most_alive) > 0 or all(is_aligned(x) for x in (first, second, out))


def test_nothing_is_copied_where_all_rows_are_aligned(most_alive: list[int]) -> None:
    first, second = torch.randn(24, 64).bfloat16(), torch.randn(16, 64).bfloat16().t()
    assert torch.equal(BY_COPIES[aten.mm.default](first, second), first @ second)
    assert most_alive == [0]


def test_pieces_of_the_head_of_a_language_model() -> None:
    """The copies are 256 MiB, of logits that take 1.6 GB."""
    hidden = torch.empty(16384, 768, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(50257, 768, dtype=torch.bfloat16, device="meta")
    logits = torch.empty(16384, 50257, dtype=torch.bfloat16, device="meta")
    assert piece_of(hidden, weight.t(), logits) == (0, 2560)
    assert copied_bytes(hidden, weight.t(), logits) == 2560 * 50264 * 2
    assert piece_of(logits, weight, hidden) == (0, 2560)
    assert piece_of(logits.t(), hidden, weight) == (0, 8192)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", range(8))
def test_a_result_may_lie_over_the_addend(seed: int) -> None:
    first, second = halves(seed)
    added = torch.randn(first.shape[0], second.shape[1]).bfloat16()
    wanted = BY_COPIES[aten.addmm.default](added, first, second)
    aligned.aligned_addmm(added, first, second, out=added)
    assert torch.equal(added, wanted)

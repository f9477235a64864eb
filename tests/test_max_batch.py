"""max_batch: the largest size fits, the next one does not, and nothing was allocated to find out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.errors import BudgetError, OptionError

WIDTH = 64


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def make(size: int) -> tuple[nn.Module, tuple[Tensor], object]:
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    return model, (torch.empty(size, WIDTH),), loss


def fits(size: int, budget: int) -> bool:
    with torch.device("meta"):
        model, batch, _ = make(size)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        return roamc.plan(model, *batch, loss_fn=loss, optimizer=optimizer, memory_budget=budget).needed_bytes <= budget
    except BudgetError:
        return False


def test_largest_size_fits_and_the_next_does_not() -> None:
    budget = 600_000
    found = roamc.max_batch(make, budget)
    assert found.plan.needed_bytes <= budget
    assert found.too_large == found.size + 1
    assert fits(found.size, budget)
    assert not fits(found.size + 1, budget)
    assert found.plan.added_seconds > 0, "recomputation makes room for a larger batch"


def test_no_size_above_the_largest_is_tried() -> None:
    found = roamc.max_batch(make, "1GB", largest=5)
    assert (found.size, found.too_large) == (5, None)


def test_budget_below_any_size_is_an_error() -> None:
    with pytest.raises(BudgetError, match="above memory_budget=1 kB"):
        roamc.max_batch(make, "1kB")


@pytest.mark.parametrize("budget", ["80%", "min"])
def test_budget_must_not_grow_with_the_size(budget: str) -> None:
    with pytest.raises(OptionError, match="needs a memory_budget in bytes"):
        roamc.max_batch(make, budget)

"""Tensors of an odd number of bytes side by side with wider ones: each lies where its elements can."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.end_to_end.helpers import assert_backward_equal, assert_steps_equal, noise, optimized, sgd, square


class Masked(nn.Module):
    """Has masks of 15 bytes between floats and doubles; no products, as bits of MKL's depend on where arguments lie."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first * x + self.second
        mask = x > 0.1
        y = torch.where(mask, x.sin(), x.cos()).double().exp()
        return (self.second * torch.where(mask & (y > 1), y, y * y).float()).tanh()


@pytest.mark.parametrize("alignment", [1, 2, 8])
def test_small_alignments(alignment: int) -> None:
    batches = [(noise(3, 5, seed=seed),) for seed in range(2)]
    assert_steps_equal(Masked(), square, sgd, batches, alignment=alignment)
    assert_backward_equal(Masked(), square, batches, way=lambda model: optimized(model, alignment=alignment))

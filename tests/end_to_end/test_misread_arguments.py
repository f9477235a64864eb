"""A norm behind a recurrent layer with the batch first: its gradient comes back with dimensions in another order."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import eager_step
from tests.graphs import assert_same


class Normed(nn.Module):
    """Rows of one channel, normed and dropped, through an RNN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(1, 1), nn.GroupNorm(1, 1), nn.Dropout(0.3)
        self.rows = nn.RNN(1, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        output: Tensor = self.rows(self.drop(y))[0]
        return output


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


@pytest.mark.parametrize("route", ["optimize", "step"])
def test_group_norm_reads_a_contiguous_gradient(route: str) -> None:
    """The kernel of the norm's backward takes elements one after the other, whatever the strides."""
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(2, 33, 1)
    other = copy.deepcopy(model)
    for each, planned in ((model, False), (other, True)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
        if planned and route == "step":
            roamc.train_step(each, loss_of, optimizer, strict=True)(x)
        else:
            eager_step(roamc.optimize(each, strict=True) if planned else each, loss_of, optimizer, x)
    assert_same([p.detach() for p in other.parameters()], [p.detach() for p in model.parameters()], route)

"""Small models as users have them: the allocator holds what other tests lay out in arenas of any size."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from tests.end_to_end.cases import SMALL
from tests.end_to_end.helpers import assert_backward_equal, assert_same, assert_steps_equal, noise, sgd
from tests.graphs import WithLoss


@pytest.mark.parametrize("name", [name for name, case in SMALL.items() if not case.eager])
def test_optimize_equals_aot_eager(name: str) -> None:
    case = SMALL[name]
    assert_backward_equal(case.build(), case.loss, [(case.batch(),)])


@pytest.mark.parametrize("name", SMALL)
def test_train_step_equals_eager(name: str) -> None:
    case = SMALL[name]
    assert_steps_equal(case.build(), case.loss, sgd, [(case.batch(),)])


class Turned(nn.Module):
    """A forecast that is transposed at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).transpose(1, 2)


LOSSES = (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses_of_transposed_results_have_the_bits_of_eager(loss: Callable[..., Tensor]) -> None:
    """Their kernels lay gradients out in rows; a view of a gradient then is one of a copy."""

    def of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss(model(x), y)

    batches = [(noise(3, 5, 7, seed=seed), noise(3, 4, 5, seed=seed + 9)) for seed in range(2)]
    assert_steps_equal(Turned(), of, sgd, batches)
    twin = WithLoss(Turned(), of)
    planned = roamc.optimize(copy.deepcopy(twin), strict=True)
    for batch in batches:
        for model in (planned, twin):
            model(*batch).backward()
        assert_same([p.grad for p in planned.parameters()], [p.grad for p in twin.parameters()])
    assert not torch.equal(planned.model.head.bias.grad, torch.zeros(4))

"""Batch norm of tensors that lie neither in rows nor channels last: torch's kernels have their own layout for it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.end_to_end.helpers import aot_eager, assert_backward_equal, assert_steps_equal, noise, sgd, square


class Transposed(nn.Module):
    """Batch norm over the last dimension, as a transposition has it."""

    def __init__(self, dims: int, viewed: bool = False) -> None:
        super().__init__()
        self.first, self.viewed = nn.Linear(7, 7), viewed
        self.norm = (nn.BatchNorm1d if dims == 3 else nn.BatchNorm2d)(7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x).transpose(1, -1)).tanh()
        return y.transpose(1, -1).reshape(-1, 7) if self.viewed else y


class Scaled(Transposed):
    """Without products: aot_eager, which notes the wrong strides, cannot view what batch norm hands to them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm((x * self.first.bias).transpose(1, -1)).tanh() + self.first.weight.sum()


SHAPES = {3: (3, 5, 7), 4: (3, 5, 4, 7)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("viewed", [False, True], ids=["as it is", "viewed"])
@pytest.mark.parametrize("dims", [3, 4])
def test_train_step_equals_eager(dims: int, viewed: bool, dtype: torch.dtype) -> None:
    batches = [(noise(*SHAPES[dims], seed=seed).to(dtype),) for seed in range(2)]
    assert_steps_equal(Transposed(dims, viewed).to(dtype), square, sgd, batches)


@pytest.mark.parametrize("training", [True, False], ids=["training", "not training"])
@pytest.mark.parametrize("dims", [3, 4])
def test_optimize_equals_aot_eager(dims: int, training: bool) -> None:
    model = Scaled(dims).train(training)

    def summed(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sin().sum()

    assert_backward_equal(model, summed, [(noise(*SHAPES[dims], seed=seed),) for seed in range(2)])


@pytest.mark.parametrize("dims", [3, 4])
def test_a_reshape_that_torch_traces_as_a_view_copies_as_in_eager(dims: int) -> None:
    model, batch = Transposed(dims, viewed=True), (noise(*SHAPES[dims]),)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        aot_eager(model)(*batch)
    assert_backward_equal(model, square, [batch], reference=copy.deepcopy)

"""Operators that torch takes apart in a trace: a step runs eager's kernels, and has eager's bits."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from tests.end_to_end.helpers import assert_same, eager_step, noise, sgd, square, tensors_of


def assert_eagers(model: nn.Module, loss_fn: Callable[..., Tensor], batch: Any, **options: Any) -> None:
    """Two steps give what plain eager gives, without any decomposition."""
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, loss_fn, sgd(model), strict=True, **options), sgd(twin)
    for _ in range(2):
        wanted = eager_step(twin, loss_fn, reference, *batch, around=contextlib.nullcontext)
        assert_same(step(*batch), wanted, "loss")
    assert_same(tensors_of(model), tensors_of(twin), "parameters")


class Between(nn.Module):
    """A function of an activation, between two convolutions."""

    def __init__(self, function: Callable[[Tensor], Tensor], dimensions: int = 2) -> None:
        super().__init__()
        kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
        self.first, self.second = kind(3, 8, 3, padding=1), kind(8, 4, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


def larger(mode: str, **settings: bool) -> Callable[[Tensor], Tensor]:
    return functools.partial(F.interpolate, scale_factor=1.7, mode=mode, **settings)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "linear": (larger("linear"), 1),
    "bilinear": (larger("bilinear"), 2),
    "bilinear, corners": (larger("bilinear", align_corners=True), 2),
    "bilinear, smoothed": (larger("bilinear", antialias=True), 2),
    "bicubic": (larger("bicubic"), 2),
    "bicubic, corners": (larger("bicubic", align_corners=True), 2),
    "trilinear": (larger("trilinear"), 3),
    "softshrink": (F.softshrink, 2),
    "hardshrink": (F.hardshrink, 2),
}


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_has_eagers_bits(name: str, budget: str | None) -> None:
    function, dimensions = CASES[name]
    torch.manual_seed(0)
    batch = (noise(2, 3, *(9,) * dimensions),)
    assert_eagers(Between(function, dimensions), square, batch, memory_budget=budget)


def test_a_step_interpolates_by_one_operator() -> None:
    model = Between(larger("bilinear"))
    step = roamc.train_step(model, square, sgd(model), strict=True)
    step(noise(2, 3, 9, 9))
    assert "upsample_bilinear2d" in step.source


def margin(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.multi_margin_loss(model(x), y, margin=0.3)


def many_margins(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.multilabel_margin_loss(model(x), F.one_hot(y, 6))


@pytest.mark.parametrize("loss_fn", [margin, many_margins])
def test_margin_losses_have_eagers_bits(loss_fn: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    batch = noise(5, 8), torch.tensor([0, 5, 2, 2, 1])
    assert_eagers(nn.Linear(8, 6), loss_fn, batch)

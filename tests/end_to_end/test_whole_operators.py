"""Operators that torch takes apart in a trace: a step runs eager's kernels, and has eager's bits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from tests.end_to_end.helpers import assert_steps_equal, noise, sgd, square


class Between(nn.Module):
    """A function of an activation, between two convolutions, of one element and of three."""

    def __init__(self, function: Callable[[Tensor], Tensor], dimensions: int = 2) -> None:
        super().__init__()
        kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
        self.first, self.second = kind(3, 8, 1), kind(8, 4, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


def in_channels_last(mode: str) -> Callable[[Tensor], Tensor]:
    """The gradient lies in channels last as well, and the bias of a convolution with one element sums it up so."""
    return lambda h: F.interpolate(h.to(memory_format=torch.channels_last), scale_factor=2, mode=mode)


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
    "nearest": (larger("nearest"), 2),
    "nearest, channels last": (in_channels_last("nearest"), 2),
    "nearest exact, channels last": (in_channels_last("nearest-exact"), 2),
    "nearest, 3d": (larger("nearest"), 3),
    "softshrink": (F.softshrink, 2),
    "hardshrink": (F.hardshrink, 2),
}


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_has_eagers_bits(name: str, budget: str | None) -> None:
    function, dimensions = CASES[name]
    torch.manual_seed(0)
    batch = (noise(2, 3, *(9,) * dimensions),)
    assert_steps_equal(Between(function, dimensions), square, sgd, [batch] * 2, memory_budget=budget)


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
    assert_steps_equal(nn.Linear(8, 6), loss_fn, sgd, [batch] * 2)


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "last": lambda h: h.prod(-1),
    "kept": lambda h: h.prod(1, keepdim=True),
    "exchanged": lambda h: h.mT.prod(1),
    "all": lambda h: h[:1, :3, :2].prod() * 9,
    "wider": lambda h: h.prod(-1, dtype=torch.float64),
    "zeros": lambda h: h.relu().prod(-1),
    "one zero": lambda h: (h - h.detach()[0, 0, 0])[:1, :3, :2].prod() * 9,
}


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_elements_have_eagers_gradients(name: str, budget: str | None) -> None:
    """A trace of autograd multiplies all other elements; eager divides by each, unless one is 0."""
    torch.manual_seed(0)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return PRODUCTS[name](model(x)).float().square().sum()

    assert_steps_equal(nn.Linear(4, 4), loss, sgd, [(noise(3, 5, 4),)] * 2, memory_budget=budget)

"""Activations behind a channels-last convolution whose gradient lies in rows: the bits are those of eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.graphs import assert_same

ACTIVATIONS = {
    kind.__name__: kind
    for kind in (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Softplus, nn.Hardsigmoid, nn.ELU, nn.LeakyReLU, nn.Hardswish)
}


class Flattened(nn.Module):
    """Flattening copies the channels-last activation into rows, and so its gradient comes back in rows."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Linear(16 * 64, 10)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.norm(self.conv(x))).flatten(1))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def stepped(model: nn.Module, x: Tensor, route: str) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if route == "train_step":
        roamc.train_step(model, loss_of, optimizer, strict=True)(x)
    else:
        loss_of(roamc.optimize(model, strict=True) if route == "optimize" else model, x).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


TAKEN_APART = {kind.__name__: kind for kind in (nn.Softshrink, nn.Hardshrink)}
"""Activations that torch.compile takes apart for every backend, so that ``optimize`` gives aot_eager's bits."""


def assert_eagers(activation: nn.Module, route: str) -> None:
    """A step in channels last gives eager's parameters, bit for bit."""
    torch.manual_seed(0)
    model = Flattened(activation).to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 8, 8).to(memory_format=torch.channels_last)
    expected = stepped(copy.deepcopy(model), x, "eager")
    assert_same(stepped(model, x, route), expected, route)


@pytest.mark.parametrize("name", TAKEN_APART)
def test_a_step_keeps_whole_what_eager_runs_as_one(name: str) -> None:
    assert_eagers(TAKEN_APART[name](), "train_step")


@pytest.mark.parametrize("route", ["train_step", "optimize"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_bits_are_those_of_eager(name: str, route: str) -> None:
    assert_eagers(ACTIVATIONS[name](), route)

"""Convolutions of whole steps have eager's bits, whatever the order of memory of inputs, weights and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.end_to_end.helpers import assert_steps_equal, noise, sgd

KINDS: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "1d": (nn.Conv1d, 1),
    "2d": (nn.Conv2d, 2),
    "3d": (nn.Conv3d, 3),
    "transposed 1d": (nn.ConvTranspose1d, 1),
    "transposed 2d": (nn.ConvTranspose2d, 2),
    "transposed 3d": (nn.ConvTranspose3d, 3),
}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"kernel_size": 1},
    {"kernel_size": 1, "bias": False},
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
    {"kernel_size": 3, "groups": 4, "padding": 1},
    {"kernel_size": 1, "groups": 8},
    {"kernel_size": 2, "dilation": 2, "padding": 1},
)
WIDTH, SIDE, ROWS = 8, 6, 3


def plain(x: Tensor) -> Tensor:
    return x


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def exchanged(x: Tensor) -> Tensor:
    """The last two dimensions in the other order of memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def sliced(x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)[:, 1::2]


LAYOUTS = {f.__name__: f for f in (plain, channels_last, exchanged, sliced)}


def weighed(y: Tensor) -> Tensor:
    """A gradient of different elements, in the order of memory of a contiguous tensor."""
    return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum()


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": weighed,
    "channels last": lambda y: weighed(channels_last(y).sin()),
    "expanded": torch.sum,
    "part of a larger one": lambda y: weighed(torch.cat([y, y.sin()], 1)),
    "sum of two orders": lambda y: weighed(y) + weighed(channels_last(y).sin()),
}


class Convolutions(nn.Module):
    """Every setting by itself, on one activation in an order of memory."""

    def __init__(self, kind: str, layout: Callable[[Tensor], Tensor], loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        make, dims = KINDS[kind]
        torch.manual_seed(0)
        self.scale = nn.Parameter(noise(ROWS, WIDTH, *(SIDE,) * dims))
        self.layers = nn.ModuleList(make(WIDTH, WIDTH, **settings) for settings in SETTINGS)
        self.layout, self.loss = layout, loss

    def forward(self, x: Tensor) -> Tensor:
        h = self.layout(self.scale * x)
        return torch.stack([self.loss(layer(h)).float() for layer in self.layers]).sum()


def in_order(model: nn.Module, last: bool) -> nn.Module:
    """The weights contiguous or in channels last."""
    for parameter in model.parameters():
        if last and parameter.dim() > 2:
            parameter.data = channels_last(parameter.data)
    return model


CASES = list(itertools.product((torch.float32, torch.bfloat16), (False, True), KINDS, LAYOUTS, GRADIENTS))


@pytest.mark.parametrize(
    ("dtype", "last", "kind", "layout", "gradient"),
    CASES,
    ids=[
        f"{kind}-{layout}-{gradient}-{'weights last-' * last}{dtype}" for dtype, last, kind, layout, gradient in CASES
    ],
)
def test_steps_have_eagers_bits(dtype: torch.dtype, last: bool, kind: str, layout: str, gradient: str) -> None:
    model = in_order(Convolutions(kind, LAYOUTS[layout], GRADIENTS[gradient]).to(dtype), last)
    x = noise(*model.scale.shape, seed=1).to(dtype)
    assert_steps_equal(model, lambda m, x: m(x), sgd, [(x,)])

"""No gradient that eager has as a tensor of its own shares memory with another: clipping in place scales each once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import assert_same, noise

pytestmark = pytest.mark.usefixtures("arenas_of_any_size")

SUMS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "a view first": (lambda y, p, q: y + p.view_as(y) + q, ((32,), (4, 8))),
    "a view last": (lambda y, p, q, r: y + p + q + r.view_as(y), ((4, 8), (4, 8), (32,))),
    "a view of a view": (lambda y, p, q, r: y + p[0] + q + r.view(1, 32).view_as(y), ((1, 4, 8), (4, 8), (32,))),
    "a gradient inside the graph": (lambda y, p, q: (y + p.view_as(y) + q).sin(), ((32,), (4, 8))),
    "two views, which eager shares": (lambda y, p, q: y + p.view_as(y) + q.view_as(y), ((32,), (2, 16))),
}
"""Sums of a layer's result and parameters, and the shapes of these."""


class Sum(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.function, shapes = SUMS[name]
        self.layer = nn.Linear(16, 8)
        self.terms = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), *[self.terms[i] for i in range(len(self.terms))])  # torch 2.11 needs it


def scaled_gradients(model: nn.Module) -> list[Tensor]:
    torch.sin(model(noise(4, 16))).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for gradient in gradients:
        gradient.mul_(0.5)
    return gradients


@pytest.mark.parametrize("name", SUMS)
def test_gradients_scaled_in_place_are_those_of_eager(name: str) -> None:
    torch._dynamo.reset()
    model = Sum(name)
    planned = roamc.optimize(copy.deepcopy(model), strict=True)
    assert_same(scaled_gradients(planned), scaled_gradients(model))

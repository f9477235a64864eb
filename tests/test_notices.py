"""Warnings point at the user's line, whichever of roamc's and torch's functions lie in between."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import noise, sgd, square


class Split(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x.tanh()


def gradients_before_a_step() -> None:
    model = nn.Linear(8, 8)
    model(noise(4, 8)).sum().backward()
    roamc.train_step(model, square, sgd(model))(noise(4, 8))


def more_sizes_than_plans() -> None:
    model = nn.Linear(8, 8)
    step = roamc.train_step(model, square, sgd(model), max_plans=1)
    for rows in (4, 5):
        step(noise(rows, 8))


def a_budget_of_pieces() -> None:
    torch._dynamo.reset()
    torch.compile(Split(8, 8), backend="roamc", options={"memory_budget": "1MB"})(noise(4, 8))


def a_tensor_that_gets_no_gradient() -> None:
    model, other = nn.Linear(8, 8), torch.ones(8, requires_grad=True)
    roamc.train_step(model, lambda model, x: (model(x) * other).mean(), sgd(model))(noise(4, 8))


WARNING = {
    gradients_before_a_step: "parameters have a .grad",
    more_sizes_than_plans: "max_plans=1",
    a_budget_of_pieces: "for each piece of 'Split' by itself",
    a_tensor_that_gets_no_gradient: "computes no gradient for it",
}


@pytest.mark.parametrize("cause", WARNING, ids=lambda cause: cause.__name__)
def test_a_warning_points_at_the_line_that_runs_the_step(cause: Callable[[], None]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cause()
    (warning,) = (each for each in caught if WARNING[cause] in str(each.message))
    assert warning.filename == __file__
    first = cause.__code__.co_firstlineno
    assert first < warning.lineno <= first + 5

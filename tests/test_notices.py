"""Warnings point at the user's line, whichever of roamc's and torch's functions lie in between."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

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
    torch.compile(Split(8, 8), backend="roamc", options={"memory_budget": "1MB"})(noise(4, 8))


def a_tensor_that_gets_no_gradient() -> None:
    model, other = nn.Linear(8, 8), torch.ones(8, requires_grad=True)
    roamc.train_step(model, lambda model, x: (model(x) * other).mean(), sgd(model))(noise(4, 8))


class Looped(nn.Module):
    """torch.compile runs it in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.norm(self.linear(x))
        return x


def a_model_in_eager() -> None:
    model = roamc.optimize(Looped())
    model(noise(4, 8))


def more_sizes_than_plans_of_a_module() -> None:
    model = roamc.optimize(nn.Linear(8, 8), max_plans=1)
    for x in (noise(4, 8), noise(5, 8)):
        torch._dynamo.mark_dynamic(x, 0)
        model(x)


def a_model_that_is_compiled_again() -> None:
    model = roamc.optimize(nn.Linear(8, 8))
    torch.compile(model, backend="eager")(noise(4, 8))


def a_mistake_in_a_pass() -> None:
    with mock.patch("roamc.capture.joint.stitch", side_effect=RuntimeError("a mistake")):
        roamc.optimize(nn.Linear(8, 8))(noise(4, 8))


def calls_that_exceed_a_budget_together() -> None:
    model = roamc.optimize(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)), memory_budget="12kB")
    for _ in range(2):
        sum(model(noise(8, 8)).sum() for _ in range(4)).backward()


def an_update_without_gradients() -> None:
    model, optimizer = nn.Linear(8, 8), torch.optim.SGD([torch.ones(8, requires_grad=True)])
    step = roamc.train_step(model, square, optimizer)
    optimizer.step()
    del step


WARNING = {
    a_model_in_eager: "torch.compile runs all of 'Looped' in eager",
    more_sizes_than_plans_of_a_module: "has been called with more than max_plans=1",
    a_model_that_is_compiled_again: "was compiled by roamc.optimize",
    a_mistake_in_a_pass: "falls back to",
    calls_that_exceed_a_budget_together: "memory_budget",
    an_update_without_gradients: "finds no gradients",
    gradients_before_a_step: "parameters have a .grad",
    more_sizes_than_plans: "max_plans=1",
    a_budget_of_pieces: "for each piece of 'Split' by itself",
    a_tensor_that_gets_no_gradient: "computes no gradient for it",
}


@pytest.mark.parametrize("cause", WARNING, ids=lambda cause: cause.__name__)
def test_a_warning_points_at_the_line_that_runs_the_step(cause: Callable[[], None]) -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cause()
    (warning,) = (each for each in caught if WARNING[cause] in str(each.message))
    assert warning.filename == __file__
    first = cause.__code__.co_firstlineno
    assert first < warning.lineno <= first + 5


def test_every_warning_asks_for_the_users_line() -> None:
    for path in Path(roamc.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warnings.warn_explicit"):
                levels = [ast.unparse(each.value) for each in node.keywords if each.arg == "stacklevel"]
                assert levels == ["users_level()"], f"{path}:{node.lineno}"

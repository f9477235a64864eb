"""Calls of an optimized module that torch.compile runs in eager are not silent: a warning, with strict an error."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import noise, square


class Looped(nn.Module):
    """Reads a tensor's value within a loop, where torch.compile cannot split it: it runs the module in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for _ in range(2):
            x = self.norm(x).relu()
        return x


class Counting(nn.Linear):
    """Is compiled again in every call: its number is a constant of the graph."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return super().forward(x) * self.number


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def run(model: nn.Module, steps: int = 2) -> None:
    for _ in range(steps):
        square(model, noise(4, 8)).backward()


@pytest.mark.parametrize("budget", ["60%", None])
def test_a_model_that_runs_in_eager_is_named_once(budget: str | None) -> None:
    model = roamc.optimize(Looped(), memory_budget=budget)
    with pytest.warns(UserWarning, match="torch.compile runs all of 'Looped' in eager") as caught:
        run(model)
    assert len(caught) == 1
    assert ("memory_budget='60%' IS NOT KEPT" in str(caught[0].message)) == (budget is not None)
    assert caught[0].filename.endswith("helpers.py")  # that calls the model
    assert roamc.plans(model) == []


def test_a_model_that_runs_in_eager_is_an_error_if_strict() -> None:
    model = roamc.optimize(Looped(), memory_budget="60%", strict=True)
    with pytest.raises(roamc.CaptureError, match=r"'Looped' in eager.*IS NOT KEPT"):
        run(model)


def test_calls_beyond_the_limit_of_recompilations() -> None:
    model = roamc.optimize(Counting(8, 8), memory_budget="1GiB")
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        pytest.warns(UserWarning, match="a call of the compiled") as got,
    ):
        run(model, steps=5)
    assert len([each for each in got if "recompile_limit" in str(each.message) and "roamc" in str(each.message)]) == 1
    assert roamc.plans(model)


@pytest.mark.parametrize("make", [nn.Identity, nn.Sequential])
def test_a_module_that_computes_nothing_is_no_call_in_eager(make: Any) -> None:
    model = roamc.optimize(make(), memory_budget="60%", strict=True)
    x = noise(4, 8)
    assert model(x) is x


def test_eager_that_the_user_asks_for_is_not_warned_of() -> None:
    model = roamc.optimize(nn.Linear(8, 8), memory_budget="1GiB", strict=True)
    with torch.compiler.set_stance("force_eager"):
        run(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model)
    assert len(roamc.plans(model)) == 1


def test_an_optimized_part_of_a_compiled_model() -> None:
    part = roamc.optimize(nn.Linear(8, 8), strict=True)
    whole = torch.compile(nn.Sequential(part, nn.Tanh()), backend="aot_eager")
    with pytest.raises(roamc.CaptureError, match="the other graph breaks there"):
        run(whole)


class Part(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Around(nn.Module):
    """Runs in eager, as it splits within a loop; its parts are compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            torch._dynamo.graph_break()
            x = part(x)
        return x


@pytest.mark.parametrize("way", ["torch.compile", "optimize"])
def test_parts_of_a_model_that_runs_in_eager_itself_are_pieces(way: str) -> None:
    model: Any = Around()
    if way == "optimize":
        model = roamc.optimize(model, memory_budget="1%")
    else:
        model = torch.compile(model, backend="roamc", options={"memory_budget": "1%"}, dynamic=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model)
    assert len([each for each in caught if "each part of Around.forward by itself" in str(each.message)]) == 1
    assert any("not kept by this small piece" in str(each.message) for each in caught)


class Scale(torch.autograd.Function):
    """A product with two slots; dynamo breaks the graph where one tensor stands in both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradients[0] * scale, gradients[0] * x


class Squares(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return Scale.apply(y, y)


@pytest.mark.parametrize("way", ["torch.compile", "optimize"])
def test_a_function_that_is_called_at_a_break_is_a_piece(way: str) -> None:
    model: Any = Squares(8, 8)
    if way == "optimize":
        model = roamc.optimize(model, memory_budget="50%")
    else:
        model = torch.compile(model, backend="roamc", options={"memory_budget": "50%"}, dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(model)
    plans = roamc.plans()[-2:]
    assert all(any("not kept by this small piece" in note for note in plan.notes) for plan in plans)

"""Sizes that torch leaves open: a plan for each, in torch.compile and in roamc.optimize, and one notice."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import roamc
from roamc.frontends.backend import LATEST
from tests.end_to_end.cases import Layers
from tests.end_to_end.helpers import aot_eager, assert_same, noise, run_backward, square, warnings_of_roamc


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(backend="roamc", options=options)
    return model


def images(*sizes: int) -> list[tuple[Tensor]]:
    return [(noise(size, 3, 8, 8, seed=size),) for size in sizes]


def convolutions() -> nn.Module:
    return Layers(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())


def marked(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    for tensor in batch:
        torch._dynamo.mark_dynamic(tensor, 0)
    return batch


@pytest.fixture
def planned() -> Iterator[list[roamc.Plan]]:
    """The plans that the test makes."""
    LATEST.clear()
    yield LATEST  # type: ignore[misc]
    LATEST.clear()


class Sizes(nn.Module):
    """Reads sizes in Python, returns some, and has a float that changes, in and out of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, factor: float) -> tuple[Tensor, int, torch.Size]:
        def halved(y: Tensor) -> Tensor:
            return y.tanh().view(y.shape[0] // 2, -1) + x.shape[0]

        y = self.linear(x).reshape(x.shape[0] * 2, -1)
        z = torch.cat([y, y])[: x.shape[0]]
        w = checkpoint(halved, z.repeat(2, 1), use_reentrant=False)
        counts = torch.arange(x.shape[0]).float().sum() * x.numel()
        return w * factor + counts, z.shape[0] + 3, z.shape


@pytest.mark.parametrize("budget", [None, "min"])
def test_convolution_and_pooling_have_a_plan_at_every_batch_size(planned: list[roamc.Plan], budget: str | None) -> None:
    model = convolutions()
    twin = aot_eager(model)
    model = compiled(model, strict=True, memory_budget=budget)
    for batch in images(6, 4, 3):
        assert_same(run_backward(model, square, batch), run_backward(twin, square, batch))
    assert len(planned) == 3


@pytest.mark.parametrize("way", [compiled, roamc.optimize])
def test_a_size_that_the_user_marks_dynamic_has_a_plan_for_each_value(
    planned: list[roamc.Plan], way: Callable[..., nn.Module]
) -> None:
    model = convolutions()
    twin = aot_eager(model)
    model = way(model, strict=True)
    for batch in images(6, 4, 6):
        assert_same(
            run_backward(model, lambda m, x: square(m, *marked((x,))), batch), run_backward(twin, square, batch)
        )
    assert len(planned) == 2


def test_sizes_in_python_sizes_returned_and_a_float_that_changes() -> None:
    model = Sizes()
    twin = aot_eager(model)
    model = compiled(model, strict=True)
    for rows, factor in ((4, 1.5), (6, 2.5), (8, 3.5), (6, 0.5)):
        outputs, wanted = model(noise(rows, 8), factor), twin(noise(rows, 8), factor)
        assert_same(outputs, wanted)
        outputs[0].sum().backward()
        wanted[0].sum().backward()
    assert_same(model.linear.weight.grad, twin.linear.weight.grad)


def test_inference_at_several_sizes(planned: list[roamc.Plan]) -> None:
    model = convolutions().eval()
    twin = copy.deepcopy(model)
    model = compiled(model, strict=True)
    with torch.no_grad():
        for (batch,) in images(6, 4, 3):
            assert_same(model(batch), twin(batch))
    assert len(planned) == 3


class Writes(nn.Module):
    """Writes to one input before it reads the other."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y


def test_inputs_that_share_memory_in_some_calls_only() -> None:
    model = compiled(Writes(), strict=True)
    for rows, shared in ((4, False), (6, False), (6, True), (8, True), (6, False)):
        written, wanted = noise(rows, 8), noise(rows, 8)
        other = noise(rows, 8, seed=1)
        assert_same(model(written, written[:] if shared else other), Writes()(wanted, wanted[:] if shared else other))
        assert_same(written, wanted)


def test_more_sizes_than_plans_are_kept_warn_once() -> None:
    model = nn.Linear(8, 8)
    twin = copy.deepcopy(model)
    roamc.optimize(model, strict=True, max_plans=2)
    with warnings_of_roamc() as said:
        for rows in (4, 6, 8, 5, 4):
            assert_same(model(*marked((noise(rows, 8),))), twin(noise(rows, 8)))
    (message,) = said
    assert "more than max_plans=2 combinations of input sizes" in message
    assert "raise max_plans" in message
    assert len(roamc.plans(model)) == 2


def test_a_budget_that_a_later_size_cannot_keep_is_an_error() -> None:
    model = roamc.optimize(Layers(nn.Linear(8, 8), nn.Tanh()), memory_budget="20 kB")
    model(*marked((noise(4, 8),))).sum().backward()
    with pytest.raises(roamc.BudgetError, match=r"needs .* at its peak, above memory_budget=20 kB"):
        model(*marked((noise(4000, 8),)))


def test_one_warning_for_all_sizes_of_a_model_and_it_says_that_the_budget_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"size {len(fallbacks)} is not mine")

    fallbacks: list[int] = []
    monkeypatch.setattr("roamc.capture.joint.stitch", lambda *a, **k: (fallbacks.append(1), fail())[1])
    model = convolutions()
    twin = aot_eager(model)
    model = compiled(model, memory_budget="min")
    with warnings_of_roamc() as said:
        for batch in images(6, 4, 3, 2):
            assert_same(run_backward(model, square, batch), run_backward(twin, square, batch))
    (message,) = said
    assert len(fallbacks) == 4
    assert "memory_budget='min' IS NOT KEPT" in message


def test_sizes_that_cannot_be_compiled_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a mistake")

    model = Layers(nn.Linear(8, 8), nn.Tanh())
    twin = copy.deepcopy(model)
    model = roamc.optimize(model)
    monkeypatch.setattr("roamc.compat_dynamo.compilation", fail)
    with warnings_of_roamc() as said:
        for rows in (4, 6, 4):
            assert_same(square(model, *marked((noise(rows, 8),))), square(twin, noise(rows, 8)))
    (message,) = said
    assert "falls back to eager PyTorch: RuntimeError: a mistake" in message


def test_the_notice_about_sizes_comes_once_and_in_words(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled(Layers(nn.Linear(8, 8)), strict=True)
    with caplog.at_level(logging.INFO, "roamc.frontends.backend"):
        for rows, columns in ((4, 1), (6, 2), (5, 3)):
            model(noise(columns, rows, 8))
    assert [record.getMessage() for record in caplog.records if "separately" in record.getMessage()] == [
        "roamc plans each input size of Layers separately, when it first comes"
    ]


class Picks(nn.Module):
    """Its result's size depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y[y > 0] * 2


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_data_fall_back_with_a_warning_that_says_so() -> None:
    model = Picks()
    twin = copy.deepcopy(model)
    model = compiled(model)
    with warnings_of_roamc() as said:
        for rows in (4, 6, 8):
            assert_same(run_backward(model, square, (noise(rows, 8),)), run_backward(twin, square, (noise(rows, 8),)))
    (message,) = said
    assert re.search(r"the size of \w+ \(test_sizes.py:\d+\) depends on data", message)


class Scaled(nn.Module):
    """Scales its result by a number of the caller's, in front of products whose transposes backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        result: Tensor = self.down(torch.relu(self.up(x))) * factor
        return result


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("route", ["compile", "optimize"])
def test_a_float_that_changes_is_planned(route: str, budget: str | None) -> None:
    """torch makes the number a tensor when it changes, and leaves the views behind the product as they were noted."""
    gradients: dict[str, list[Tensor]] = {}
    for side in ("aot_eager", "roamc"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Scaled()
        if side == "aot_eager":
            called: nn.Module = torch.compile(model, backend="aot_eager")
        elif route == "compile":
            called = compiled(model, memory_budget=budget)
        else:
            called = roamc.optimize(model, memory_budget=budget)
        with warnings_of_roamc() as said:
            for factor in (1.5, 2.0, 2.5):
                called(noise(128, 8), factor).square().mean().backward()
        assert not said
        gradients[side] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert_same(gradients["roamc"], gradients["aot_eager"], route)

"""Norms where autocast, or a model in half precision around them, mixes dtypes: the bits of ``aot_eager``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.operators import corrections
from roamc.planning import search
from tests.end_to_end.helpers import assert_same

NORMS: dict[str, Callable[[bool], nn.Module]] = {
    "batch": lambda images: nn.BatchNorm2d(8) if images else nn.BatchNorm1d(8),
    "layer": lambda images: nn.LayerNorm([8, 6, 6]) if images else nn.LayerNorm(8),
    "group": lambda images: nn.GroupNorm(2, 8),
    "instance": lambda images: (
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True) if images else nn.InstanceNorm1d(8, affine=True)
    ),
}
WAYS = ("torch.compile", "optimize", "train_step")


def model_of(norm: str, images: bool) -> nn.Module:
    torch.manual_seed(0)
    first, last = (nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)) if images else (nn.Linear(8, 8), nn.Linear(8, 4))
    return nn.Sequential(first, NORMS[norm](images), nn.ReLU(), last)


def batch_of(norm: str, images: bool) -> Tensor:
    torch.manual_seed(1)
    if images:
        return torch.randn(4, 3, 8, 8)
    return torch.randn(4, 8, 8) if norm == "instance" else torch.randn(4, 8)


def two_steps(model: nn.Module, x: Tensor, dtype: torch.dtype, way: str, **options: Any) -> list[Tensor]:
    """Losses of two steps under autocast, then parameters and buffers."""
    torch._dynamo.reset()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return m(x).float().square().mean()

    losses = []
    if way == "train_step":
        step = roamc.train_step(model, loss_of, optimizer, **options)
        losses = [step(x).detach().clone() for _ in range(2)]
    else:
        if way == "optimize":
            called = roamc.optimize(model, strict=True, **options)
        else:
            chosen = {"strict": True, **options} if way == "torch.compile" else None
            called = torch.compile(model, backend="roamc" if chosen else "aot_eager", options=chosen, dynamic=False)
        for _ in range(2):
            optimizer.zero_grad()
            loss = loss_of(called, x)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
    return [*losses, *(tensor.detach().clone() for tensor in model.state_dict().values())]


def check(norm: str, images: bool, dtype: torch.dtype, train: bool, way: str, **options: Any) -> None:
    x = batch_of(norm, images)
    wanted = two_steps(model_of(norm, images).train(train), x, dtype, "aot_eager")
    assert_same(two_steps(model_of(norm, images).train(train), x, dtype, way, **options), wanted)


@pytest.mark.parametrize(
    ("norm", "images", "dtype", "train", "way"),
    [
        ("batch", True, torch.bfloat16, True, "train_step"),
        ("batch", False, torch.float16, False, "torch.compile"),
        ("layer", False, torch.bfloat16, True, "torch.compile"),
        ("group", True, torch.float16, True, "torch.compile"),
        ("instance", False, torch.bfloat16, True, "optimize"),
    ],
    ids=str,
)
def test_norm_under_autocast(norm: str, images: bool, dtype: torch.dtype, train: bool, way: str) -> None:
    check(norm, images, dtype, train, way)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"memory_budget": "min"}], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("norm", "images", "dtype", "train"),
    [*itertools.product(NORMS, (True, False), (torch.bfloat16, torch.float16), (True, False))],
    ids=str,
)
def test_every_norm_under_autocast(
    norm: str, images: bool, dtype: torch.dtype, train: bool, way: str, options: dict[str, Any]
) -> None:
    check(norm, images, dtype, train, way, **options)


def test_float32_norms_in_a_bfloat16_model() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Conv2d(3, 8, 3).bfloat16(), nn.Linear(36, 4).bfloat16()
            self.batch, self.group, self.layer = nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.LayerNorm(36)

        def forward(self, x: Tensor) -> Tensor:
            image = self.group(self.batch(self.into(x)).relu())
            out: Tensor = self.out(self.layer(image.flatten(2)))
            return out

    by_backend = []
    for backend in ("aot_eager", "roamc"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Mixed(), torch.randn(2, 3, 8, 8).bfloat16()
        loss = torch.compile(model, backend=backend, dynamic=False)(x).float().square().mean()
        loss.backward()
        by_backend.append([loss.detach(), *(parameter.grad for parameter in model.parameters()), *model.buffers()])
    assert_same(by_backend[1], by_backend[0])


def test_the_judge_derives_the_dtypes_that_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    run = search.run
    monkeypatch.setattr(search, "run", lambda graph, options: run(graph, options, deep=True))
    two_steps(model_of("layer", False), batch_of("layer", False), torch.bfloat16, "torch.compile")


def test_a_saved_tensor_of_another_dtype_than_planned_is_no_change_of_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if a correction of what torch notes were missing: the step ends without the plan; ``strict`` says why."""
    x = batch_of("layer", False)
    wanted = two_steps(model_of("layer", False), x, torch.bfloat16, "aot_eager")
    monkeypatch.delitem(corrections.FIXES, torch.ops.aten.native_layer_norm.default)
    with pytest.raises(roamc.VerifyError, match=r"torch gave \w+ as torch.float32, where roamc planned torch.bfloat16"):
        two_steps(model_of("layer", False), x, torch.bfloat16, "torch.compile")
    with pytest.warns(UserWarning, match="where roamc planned"):
        tensors = two_steps(model_of("layer", False), x, torch.bfloat16, "torch.compile", strict=False)
    assert_same(tensors, wanted)

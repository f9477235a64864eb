"""On the meta device nothing is computed: what is there can be planned, and is refused by name where it would run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import assert_same, eager_step, sgd, square, tensors_of
from tests.end_to_end.test_bad_input import X, net, raised, refused


def test_model_on_the_meta_device_is_planned_but_not_run() -> None:
    with torch.device("meta"):
        model = net()
    step = roamc.train_step(model, square, sgd(model))
    assert step.plan(X.to("meta")).peak_bytes > 0
    refused(lambda: step(X.to("meta")), roamc.CaptureError, "meta", ".plan()", "to_empty")
    refused(lambda: step(X), roamc.CaptureError, "meta")


class _Places(nn.Module):
    """Makes tensors on torch's default device, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.dropout(self.up(x), 0.1, True) + torch.arange(16) / 16
        return self.down(hidden) * torch.rand(8)


@pytest.mark.parametrize("gpu", [None, "h100"])
@pytest.mark.parametrize("whole", [True, False], ids=["step", "joint"])
def test_a_default_device_of_meta_is_that_of_no_traced_tensor(whole: bool, gpu: str | None) -> None:
    def planned(device: str) -> roamc.Plan:
        with torch.device(device):
            model = _Places()
            way: dict[str, Any] = {"loss_fn": square, "optimizer": sgd(model)} if whole else {"forward_backward": True}
            return roamc.plan(model, torch.empty(4, 8), gpu=gpu, **way)

    on_meta, on_cpu = planned("meta"), planned("cpu")
    assert (on_meta.peak_bytes, on_meta.fixed_bytes) == (on_cpu.peak_bytes, on_cpu.fixed_bytes)
    assert torch.get_default_device().type == "cpu"


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("way", ["torch.compile", "optimize"])
def test_compiled_model_on_the_meta_device_is_named_with_the_way_that_plans_it(way: str, trained: bool) -> None:
    with torch.device("meta"):
        model, x = net().requires_grad_(trained), torch.empty(4, 8)

    def compiled(**options: Any) -> nn.Module:
        if way == "optimize":
            return roamc.optimize(copy.deepcopy(model), **options)
        return torch.compile(copy.deepcopy(model), backend="roamc", options=options, dynamic=False)

    with pytest.raises(Exception, match="meta device") as caught:
        compiled(strict=True)(x)
    parts = ("Sequential", "roamc.plan(", "to_empty(device=")
    refused(lambda: raised(caught.value.inner_exception), roamc.CaptureError, *parts)
    with pytest.warns(UserWarning, match=r"aot_eager: 'Sequential' is called on the meta device"):
        assert compiled()(x).device.type == "meta"
    assert roamc.plan(model, x).peak_bytes > 0


def test_model_that_is_on_the_meta_device_in_part() -> None:
    model = net()
    model.register_buffer("scale", torch.ones(8, device="meta"))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * model.scale).sum()

    step = roamc.train_step(model, loss, sgd(model))
    assert step.plan(X).peak_bytes > 0
    refused(lambda: step(X), roamc.CaptureError, "scale", "meta", "roamc.plan", "to_empty(device=")


class _Shape(nn.Module):
    """Makes a tensor on the meta device, for its shape; returns it if ``kept``."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.kept = kept

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        like = torch.empty_like(y, device="meta") + 1
        return (y, like) if self.kept else y * like.shape[0]


def test_tensors_on_the_meta_device_that_are_asked_for_their_shape() -> None:
    model = _Shape(kept=False)
    twin = copy.deepcopy(model)
    assert_same(roamc.train_step(model, square, sgd(model), strict=True)(X), eager_step(twin, square, sgd(twin), X))
    assert_same(tensors_of(model), tensors_of(twin))
    assert_same(roamc.optimize(copy.deepcopy(twin), strict=True)(X), twin(X))


def test_result_on_the_meta_device_is_named_with_its_line() -> None:
    line = f"test_meta_device.py:{_Shape.forward.__code__.co_firstlineno + 2}"
    with pytest.raises(Exception, match="meta device") as caught:
        roamc.optimize(_Shape(kept=True), strict=True)(X)
    refused(lambda: raised(caught.value.inner_exception), roamc.CaptureError, "_Shape", line, "device of the model")

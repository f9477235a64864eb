"""Operators that write over a value of the step's own make a value in a captured step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from roamc.capture.in_place_values import makes_value
from roamc.graph import Phase
from roamc.operators import ops
from tests.end_to_end.cases import Apply
from tests.end_to_end.helpers import assert_steps_equal, noise, sgd, square

aten = torch.ops.aten

ACTIVATIONS = {  # those whose backward reads the same in place and beside
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "hardswish": nn.Hardswish,
}


def chained(_: nn.Module, x: Tensor) -> Tensor:
    """One storage written over several times, by views of it as well, which are read behind."""
    y = (x * 2).add_(1).mul_(x)
    flat = y.view(-1)
    left, right = flat.mul_(3).clamp_(-0.5, 0.9).split(flat.numel() // 2)
    return (left * right).masked_fill_(left > 0.5, 0.25).sum() * x


def old_name(_: nn.Module, x: Tensor) -> Tensor:
    """Read behind by a view that is older than the write."""
    y = x * 2
    first = y[0]
    y.add_(1)
    return y * first


def part(_: nn.Module, x: Tensor) -> Tensor:
    """A part of a storage is written."""
    y = x * 2
    y[:, 1:].mul_(3)
    y.t().add_(x.t())
    return y


def widened(_: nn.Module, x: Tensor) -> Tensor:
    """In place the result keeps a dtype and strides that it would not have by itself."""
    y = (x * 2).bfloat16().add_(x)
    z = (x * 3).t().contiguous().t().add_(y)
    return y * z + (x[:1].expand(4, -1) * 1.0).mul_(x)


def given(m: Any, x: Tensor) -> Tensor:
    """A buffer is written."""
    m.seen.add_(1)
    return F.relu(x.mul_(2), inplace=True) * m.seen


def written(step: roamc.TrainStep) -> list[Any]:
    """In-place operators of the forward part that have a twin."""
    graph = step.latest.executable.planned.graph
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    return [n.target for n in nodes if makes_value(n.target) and graph.phase[n.name] is Phase.FORWARD]


def test_nothing_is_written_over_in_a_chain() -> None:
    assert written(assert_steps_equal(Apply(chained), square, sgd, [(noise(4, 8),)] * 2)) == []


@pytest.mark.parametrize(
    ("apply", "kept"),
    [(old_name, [aten.add_.Tensor]), (part, [aten.mul_.Tensor]), (widened, [aten.add_.Tensor])],
    ids=["old name", "part", "widened"],
)
def test_what_another_name_or_geometry_needs_stays(apply: Any, kept: list[Any]) -> None:
    step = assert_steps_equal(Apply(apply), square, sgd, [(noise(4, 8),)] * 2)
    assert set(kept) <= set(written(step))


def test_a_buffer_is_still_written() -> None:
    model = Apply(given)
    model.register_buffer("seen", torch.zeros(()))
    assert written(assert_steps_equal(model, square, sgd, [(noise(4, 8),)] * 2)) == [aten.add_.Tensor]


def test_eagers_peak_has_what_is_written_over_once() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            many = model(x).repeat(1, 32)
            many.add_(1)
            scale = many.mul_(0.5).sum()
        return model(x).mean() * scale

    model, x = nn.Linear(8, 8), noise(64, 8)
    plan = roamc.plan(model, x, loss_fn=loss, optimizer=sgd(model))
    assert plan.baseline_bytes == (1 + 32) * x.nbytes, "the layer's result, and what is made of it"
    assert plan.peak_bytes <= plan.baseline_bytes


class Meter(nn.Module):
    """Counts its calls in buffers, one of them by way of a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.rows.view(-1).add_(len(x))
        return x * self.calls + self.rows.sum()


def test_a_buffer_of_what_the_loss_names_is_still_written() -> None:
    meter, model = Meter(), nn.Linear(8, 8)
    step = roamc.train_step(model, lambda m, x: square(meter, m(x)), sgd(model), strict=True)
    for _ in range(3):
        step(noise(4, 8))
    assert (meter.calls.item(), meter.rows.tolist()) == (3, [[12.0, 12.0], [12.0, 12.0]])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_budget_drops_what_an_activation_wrote_over(name: str) -> None:
    def needed(inplace: bool) -> int:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 16), ACTIVATIONS[name](inplace=inplace)) for _ in range(6)]
        model = nn.Sequential(*layers, nn.Linear(16, 1))
        step = assert_steps_equal(model, square, sgd, [(noise(256, 16),)], memory_budget="min")
        return roamc.plans(step)[0].peak_bytes

    assert needed(True) <= 1.02 * needed(False)


def test_the_twin_takes_the_same_arguments_and_may_be_written_over_its_first() -> None:
    assert makes_value(aten.relu_.default) is aten.relu.default
    assert makes_value(aten.masked_fill_.Tensor) is aten.masked_fill.Tensor
    assert makes_value(aten.bernoulli_.float) is None
    assert makes_value(aten.index_add_.default) is None
    assert makes_value(aten.squeeze_.dim) is None
    assert ops.rule(aten.relu.default).recomputable

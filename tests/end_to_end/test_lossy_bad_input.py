"""CompAct and codecs with an error: where they run as something else, and input that has no good values."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import roamc
from roamc.graph import TrainGraph
from roamc.optim import CompAct
from roamc.options import Options
from roamc.passes.retain.codecs.bits import bits_of
from roamc.passes.retain.codecs.compact import Compact
from roamc.passes.retain.codecs.tempo import Tempo
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.graphs import captured_step
from tests.passes.retain.test_compact import chain
from tests.passes.retain.test_tempo import mlps, squares, tokens

Net = Callable[[nn.Module], Any]

COMPILED: dict[str, Net] = {
    "torch.compile": lambda model: torch.compile(model, backend="roamc", options={"strict": True}),
    "optimize": lambda model: roamc.optimize(model, strict=True),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))


def compact(model: nn.Module, **settings: Any) -> CompAct:
    return CompAct(model.named_parameters(), rank=1 / 4, dense=(), **settings)


def trained(model: nn.Module, called: Any) -> list[Tensor]:
    optimizer = compact(model)
    for seed in range(3):
        squares(called, torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("way", COMPILED)
def test_with_a_compiled_module_it_works_as_an_optimizer_and_says_so_once(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, eager = net(), net()
    with caplog.at_level(logging.INFO, logger="roamc.optim"):
        got = trained(model, COMPILED[way](model))
    assert [record.message for record in caplog.records if "dense here" in record.message] != []
    assert len([record for record in caplog.records if record.name == "roamc.optim"]) == 1
    assert all(torch.equal(a, b) for a, b in zip(got, trained(eager, eager), strict=True))


def test_a_planned_step_says_nothing_of_dense_gradients(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    with caplog.at_level(logging.INFO, logger="roamc.optim"):
        roamc.train_step(model, squares, compact(model), strict=True)(torch.randn(8, 16))
    assert not [record for record in caplog.records if record.name == "roamc.optim"]


def test_a_plan_with_projections_is_refused_by_another_optimizer() -> None:
    def graph(optimizer: Callable[..., torch.optim.Optimizer]) -> TrainGraph:
        return captured_step(net(), (torch.ones(8, 16),), squares, optimizer).graph

    def projecting(parameters: Any, lr: float) -> CompAct:
        return CompAct(parameters, lr=lr, rank=1 / 4, dense=())

    plan = Plan.from_json(search.run(graph(projecting), Options()).plan.to_json())
    assert plan.decisions["project"]["gradients"]
    assert search.run(graph(projecting), Options(), plan).plan.decisions == plan.decisions
    with pytest.raises(roamc.PlanError, match="another graph"):
        search.run(graph(torch.optim.AdamW), Options(), plan)


LOSSY: dict[str, Callable[[], nn.Module]] = {"tempo": lambda: mlps(layers=2), "compact:rank=0.25": lambda: chain()[0]}
"""Codec to a model in which it keeps values."""


def total(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def stepped(model: nn.Module, x: Tensor, **options: Any) -> tuple[float, nn.Module, set[str]]:
    """Loss, model and codecs of a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = roamc.train_step(model, total, optimizer, memory_budget="light", strict=True, **options)
    return float(step(x)), model, {code[1] for code in step.plans[0].decisions["retain"]["codes"]}


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_arrives_in_loss_and_gradients(odd: float, codec: str) -> None:
    x = tokens()
    x[1, 2, 3] = odd
    exact_loss, exact, _ = stepped(LOSSY[codec](), x)
    loss, model, used = stepped(LOSSY[codec](), x, codecs=codec)
    assert codec in used
    assert math.isnan(loss) == math.isnan(exact_loss)
    assert not math.isfinite(loss)
    pairs = zip(model.named_parameters(), exact.parameters(), strict=True)
    lost = [name for (name, got), expected in pairs if expected.isfinite().all() != got.isfinite().all()]
    assert lost == []


def test_of_nothing_codecs_make_nothing() -> None:
    """A step of an empty batch has nothing to keep, and takes no codec."""
    x = torch.empty(0, 64)
    tempo = Tempo(bits_of(x), "gelu", x.dtype)
    compact = Compact((0, 64), 16, x.dtype, x.device, "gaussian")
    counter = torch.tensor(0)
    assert tempo.decode(tempo.encode(x), functional.gelu(x)).shape == x.shape
    assert compact.decode(compact.encode(x, counter), counter).shape == x.shape


def test_an_empty_batch_is_a_step_of_compact() -> None:
    model = net()
    twin = copy.deepcopy(model)
    roamc.train_step(model, total, compact(model), strict=True)(torch.empty(0, 16))
    optimizer = compact(twin)
    total(twin, torch.empty(0, 16)).backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_convolutions_and_biases_of_a_planned_step_get_adamw() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 8))
    optimizer = compact(model, lr=1e-3)
    step = roamc.train_step(model, squares, optimizer, strict=True)
    step(torch.randn(4, 1, 4, 4))
    shapes = {name: tuple(optimizer.state[p]["exp_avg"].shape) for name, p in model.named_parameters()}
    assert shapes == {"0.weight": (4, 1, 3, 3), "0.bias": (4,), "2.weight": (8, 4), "2.bias": (8,)}
    assert len(step.plans[0].decisions["project"]["gradients"]) == 1

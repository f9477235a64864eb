"""No plan without a budget has a peak above eager's, however small the model. Only planned, nothing runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import roamc
from roamc.planning.plan import Plan
from tests.graphs import WithLoss
from tests.small_models import Built, small_model, square


def compiled_with_its_loss(built: Built) -> Plan:
    model, batch, loss = built
    return roamc.plan(WithLoss(model, loss), *batch)


def compiled(built: Built) -> Plan:
    model, batch, _ = built
    return roamc.plan(model, *batch)


def stepped(built: Built) -> Plan:
    model, batch, loss = built
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return roamc.plan(model, *batch, loss_fn=loss, optimizer=torch.optim.AdamW(parameters, lr=0.01))


ROUTES: dict[str, Callable[[Built], Plan]] = {
    "loss in the model": compiled_with_its_loss,
    "loss outside": compiled,
    "train_step": stepped,
}


def routes_of(built: Built) -> list[str]:
    """All; but no whole step where there is nothing to train."""
    trained = any(parameter.requires_grad for parameter in built[0].parameters())
    return [route for route in ROUTES if trained or route != "train_step"]


def plans_above_eager(seed: int) -> list[str]:
    """What is wrong with the plans of one random model."""
    faults = []
    for route in routes_of(small_model(seed)):
        plan = ROUTES[route](small_model(seed))
        assert plan.baseline_bytes, f"seed {seed}, {route}"
        if plan.peak_bytes > plan.baseline_bytes:
            faults.append(f"seed {seed}, {route}: {plan.peak_bytes} bytes, eager {plan.baseline_bytes}")
    return faults


@pytest.mark.parametrize("route", ROUTES)
def test_three_layers_of_64_take_no_more_than_eager(route: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    plan = ROUTES[route]((model, (torch.randn(32, 64),), square))
    assert plan.peak_bytes <= plan.baseline_bytes


@pytest.mark.parametrize("seed", range(20))
def test_small_model_takes_no_more_than_eager(seed: int) -> None:
    assert not plans_above_eager(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(20, 520, 5))
def test_500_small_models_take_no_more_than_eager(first: int) -> None:
    assert not [said for seed in range(first, first + 5) for said in plans_above_eager(seed)]

"""A checkpoint region draws the same numbers twice in a train step too, and the generator ends where eager's does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import roamc
from roamc.errors import CaptureError
from roamc.graph import Phase, operators
from roamc.operators.random import replay, save_rng_state
from tests.end_to_end.helpers import noise, square
from tests.graphs import captured_step

WIDTH = 16
Region = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def once(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    kept: Tensor = checkpoint(function, x, use_reentrant=False)
    return kept


def nested(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return once(lambda x: F.dropout(once(function, F.dropout(x, 0.1)), 0.2), x)


def anew(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The user wants other numbers the second time."""
    kept: Tensor = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    return kept


class Drawing(nn.Module):
    """Layers with three draws each in a region, and one outside."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(self.region(partial(self.inner, layer), x), 0.1)
        return x

    @staticmethod
    def inner(layer: nn.Module, x: Tensor) -> Tensor:
        x = F.gelu(F.dropout(layer(x), 0.2)) * torch.rand_like(x)
        return torch.sin(x + torch.bernoulli(torch.full_like(x, 0.5)))


def trained(model: nn.Module, step: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Losses, parameters and the state of the generator after three steps that draw one after the other."""
    torch.manual_seed(11)
    losses = [step(noise(8, WIDTH, seed=number)).detach().clone() for number in range(3)]
    return [*losses, *(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]


def eager(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = square(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trained(model, step)


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("region", [once, nested, anew])
def test_train_step_draws_what_eager_draws(region: Region, budget: str | None) -> None:
    torch.manual_seed(0)
    model = Drawing(region)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = roamc.train_step(model, square, optimizer, strict=True, memory_budget=budget)
    for ours, theirs in zip(trained(model, step), eager(twin), strict=True):
        assert torch.equal(ours, theirs)


def test_second_run_is_a_replay_of_the_first() -> None:
    nodes = operators(captured_step(Drawing(once), (noise(8, WIDTH),), square).graph.graph)
    again = [node for node in nodes if node.target is replay]
    assert [str(node.args[1]) for node in again[:3]] == [
        "aten.native_dropout.default", "aten.rand_like.default", "aten.bernoulli.default",
    ]  # fmt: skip
    assert len(again) == len([node for node in nodes if node.target is save_rng_state]) == 9
    graph = captured_step(Drawing(anew), (noise(8, WIDTH),), square).graph
    assert not [node for node in operators(graph.graph) if node.target is replay]
    assert sum(phase is Phase.BACKWARD for phase in graph.phase.values())


def test_draw_in_place_in_a_region_is_refused() -> None:
    model = Drawing(lambda function, x: once(lambda x: function(x) * torch.empty_like(x).uniform_(), x))
    with pytest.raises(CaptureError, match="draws in place inside a"):
        captured_step(model, (noise(8, WIDTH),), square)


def test_other_draws_at_a_place_that_was_drawn_at_are_refused() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        y = model(x) * torch.rand_like(x)
        torch.set_rng_state(state)
        return (y * torch.randn_like(x)).sum()

    with pytest.raises(CaptureError, match="leave set_rng_state out of the step"):
        captured_step(nn.Linear(WIDTH, WIDTH), (noise(8, WIDTH),), loss)

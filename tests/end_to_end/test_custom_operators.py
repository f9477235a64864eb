"""Operators of which nobody says whether they draw or repeat: the numbers, and the number of calls, are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import roamc
from tests.end_to_end.helpers import seeded

CALLS: list[str] = []


@torch.library.custom_op("roamc_test_custom::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draws, without the tag that says so."""
    CALLS.append("noisy")
    return x * torch.rand_like(x)


@torch.library.custom_op("roamc_test_custom::shake_", mutates_args=("x",))
def shake_(x: Tensor) -> None:
    """Draws, and writes over its argument."""
    CALLS.append("shake_")
    x.mul_(torch.rand_like(x))


noisy.register_fake(torch.empty_like)
noisy.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].sign(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Noisy(nn.Module):
    """Dropouts in front of and behind the operators."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.checkpointed = nn.Linear(64, 64), nn.Linear(64, 64), checkpointed

    def block(self, x: Tensor) -> Tensor:
        return F.dropout(noisy(F.dropout(self.a(x).sin(), 0.2)).exp(), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        y = self.b(h).sigmoid()
        if not self.checkpointed:
            shake_(z := x.clone())
            y = y * z
        return F.dropout(y, 0.1)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


Step = Callable[[nn.Module, torch.optim.Optimizer], Callable[[Tensor], Tensor]]


def plainly(wrap: Callable[[nn.Module], nn.Module]) -> Step:
    """Steps of a model that ``wrap`` compiles."""

    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
        compiled = wrap(model)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(compiled, x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    return make


def trained(make: Step, *, checkpointed: bool = False) -> tuple[list[Tensor], list[str]]:
    """Losses, weights and state of the generator behind three steps, and which operators were called."""
    torch._dynamo.reset()
    model = seeded(lambda: Noisy(checkpointed=checkpointed))
    step = make(model, torch.optim.SGD(model.parameters(), 0.1))
    CALLS.clear()
    losses = seeded(lambda: [step(torch.randn(32, 64)) for _ in range(3)])
    return [*losses, *(p.detach().clone() for p in model.parameters()), torch.get_rng_state()], list(CALLS)


def ways(budget: str | None) -> dict[str, Step]:
    """Every way in, under a budget."""
    options: dict[str, Any] = {"memory_budget": budget, "strict": True}
    return {
        "compile": plainly(lambda model: torch.compile(model, backend="roamc", options=options)),
        "optimize": plainly(lambda model: roamc.optimize(model, **options)),
        "step": lambda model, optimizer: roamc.train_step(model, loss_of, optimizer, **options),
    }


@pytest.mark.usefixtures("arenas_of_any_size")
@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("way", ["compile", "optimize", "step"])
def test_an_operator_that_may_draw_keeps_its_place_and_runs_once(way: str, budget: str | None) -> None:
    wanted, calls = trained(plainly(lambda model: model))
    tensors, ours = trained(ways(budget)[way])
    assert all(map(torch.equal, tensors, wanted))
    assert ours == calls


def test_a_checkpoint_draws_again_what_it_drew() -> None:
    wanted, calls = trained(plainly(lambda model: model), checkpointed=True)
    tensors, ours = trained(ways(None)["step"], checkpointed=True)
    assert all(map(torch.equal, tensors, wanted))
    assert ours == calls

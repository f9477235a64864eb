"""What PyTorch means by a program is what roamc runs: small modules, each compared bit for bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import roamc
from tests.end_to_end.cases import SMALL, loss_of_outputs
from tests.end_to_end.helpers import (
    aot_eager,
    assert_backward_equal,
    assert_same,
    assert_steps_equal,
    eager_step,
    noise,
    optimized,
    run_backward,
    seeded,
    sgd,
    square,
    tensors_of,
)

each_case = pytest.mark.parametrize("name", SMALL)


@each_case
def test_train_step_equals_eager(name: str) -> None:
    case = SMALL[name]
    model = seeded(case.build)
    batches = [(case.batch(),) for _ in range(3)]
    assert_steps_equal(model, case.loss, sgd, batches)


@each_case
def test_optimize_equals_aot_eager(name: str) -> None:
    case = SMALL[name]
    model = seeded(case.build)
    reference = copy.deepcopy if case.eager else aot_eager
    assert_backward_equal(model, case.loss, [(case.batch(),) for _ in range(3)], reference=reference)


def test_dropout_draws_what_the_seed_says() -> None:
    model = SMALL["dropout"].build()
    twin = copy.deepcopy(model)
    step = roamc.train_step(model, square, torch.optim.SGD(model.parameters(), lr=0.0), strict=True)
    by_step = [seeded(step, noise(4, 8), seed=seed).item() for seed in (1, 2, 1)]
    twin = optimized(twin)
    by_optimize = [seeded(square, twin, noise(4, 8), seed=seed).item() for seed in (1, 2, 1)]
    assert by_step == by_optimize
    assert by_step[0] == by_step[2] != by_step[1]


def test_random_state_after_a_step_is_that_of_eager() -> None:
    model = SMALL["dropout"].build()
    twin = copy.deepcopy(model)
    seeded(roamc.train_step(model, square, sgd(model), strict=True), noise(4, 8))
    drawn = torch.rand(3)
    seeded(lambda: square(twin, noise(4, 8)).backward())
    assert_same(drawn, torch.rand(3))


def test_dropout_is_off_in_eval_mode_and_on_again_after_it() -> None:
    model = SMALL["dropout"].build()
    twin = copy.deepcopy(model)
    step = roamc.train_step(model, square, sgd(model), strict=True)
    reference = sgd(twin)
    for mode in (True, False, True, False):
        model.train(mode)
        twin.train(mode)
        loss = seeded(step, noise(4, 8))
        assert_same(loss, seeded(eager_step, twin, square, reference, noise(4, 8)))
    assert len(step.plans) == 2


def test_no_output_of_an_optimized_module_changes_afterwards() -> None:
    model = optimized(SMALL["several outputs"].build())
    first = model(noise(4, 8))
    kept = first["y"].detach().clone(), first["nest"][1][1].detach().clone()
    for seed in range(3):
        loss_of_outputs(model, noise(4, 8, seed=seed)).backward()
    assert_same((first["y"].detach(), first["nest"][1][1].detach()), kept)


def test_no_loss_of_a_train_step_changes_afterwards() -> None:
    model = nn.Linear(8, 8)
    step = roamc.train_step(model, square, sgd(model), strict=True)
    losses = [step(noise(4, 8, seed=seed)) for seed in range(3)]
    kept = [loss.clone() for loss in losses]
    step(noise(4, 8, seed=9))
    assert_same(losses, kept)
    assert not any(loss.requires_grad for loss in losses)


def test_no_gradient_changes_afterwards() -> None:
    model = optimized(SMALL["batch norm"].build())
    run_backward(model, square, (noise(2, 3, 8, 8),))
    gradients = [p.grad for p in model.parameters()]
    kept = [g.clone() for g in gradients]
    model.zero_grad(set_to_none=True)
    run_backward(model, square, (noise(2, 3, 8, 8, seed=8),))
    assert_same(gradients, kept)


def test_train_step_leaves_existing_gradients_alone() -> None:
    model = nn.Linear(8, 8)
    model.weight.grad = torch.ones(8, 8)
    with pytest.warns(UserWarning, match=r"neither adds to \.grad nor uses it"):
        roamc.train_step(model, square, sgd(model), strict=True)(noise(4, 8))
    assert_same(model.weight.grad, torch.ones(8, 8))
    assert model.bias.grad is None


def test_train_step_takes_nested_batches_keywords_and_numbers() -> None:
    model = nn.Linear(8, 8)
    twin = copy.deepcopy(model)

    def loss_fn(m: nn.Module, batch: dict[str, Any], power: int, kind: str) -> Tensor:
        assert kind == "sum"
        return sum(((m(x) - y) ** power).mean() for x, y in zip(batch["x"], batch["y"], strict=True))

    step, reference = roamc.train_step(model, loss_fn, sgd(model), strict=True), sgd(twin)
    batch = {"x": [noise(4, 8), noise(2, 8)], "y": (noise(4, 8, seed=1), noise(2, 8, seed=2))}
    for power in (2, 4, 2):
        assert_same(step(batch, power, "sum"), eager_step(twin, loss_fn, reference, batch, power, "sum"))
    assert_same(tensors_of(model), tensors_of(twin))
    assert len(step.plans) == 2


def test_loss_function_with_a_module_of_its_own_and_a_gradient_penalty() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return m(x).mean() + (gradient.norm(dim=1) - 1).square().mean()

    assert_steps_equal(model, loss_fn, sgd, [(noise(4, 8, seed=seed),) for seed in range(3)])


def test_loss_function_that_adds_up_micro_batches() -> None:
    model = SMALL["batch norm"].build()

    def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
        return sum(square(m, part) for part in x.chunk(2)) / 2

    assert_steps_equal(model, loss_fn, sgd, [(noise(4, 3, 8, 8, seed=seed),) for seed in range(3)])


def test_a_parameter_frozen_later_gets_a_plan_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, square, sgd(model), strict=True), sgd(twin)
    for frozen in (False, True, False):
        model[0].weight.requires_grad_(not frozen)
        twin[0].weight.requires_grad_(not frozen)
        twin.zero_grad()
        assert_same(step(noise(4, 8)), eager_step(twin, square, reference, noise(4, 8)))
        assert_same(tensors_of(model), tensors_of(twin))


UNREAD: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": functools.partial(F.dropout, p=0.5),
    "dropout1d": functools.partial(F.dropout1d, p=0.5),
    "rrelu": functools.partial(F.rrelu, training=True),
    "rand": torch.rand_like,
    "bernoulli": lambda h: torch.bernoulli(h.detach().sigmoid()),
    "in place": lambda h: h.detach().clone().uniform_(),
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.5),
    "permutation": lambda h: torch.randperm(5),
}


class Unread(nn.Module):
    """Draws numbers that nobody reads in front of those of a dropout, outside and inside a checkpoint."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(8, 8), nn.Linear(8, 4), draw

    def part(self, h: Tensor) -> Tensor:
        self.draw(h)
        return F.dropout(h.sin(), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.draw(h)
        y: Tensor = self.second(F.dropout(checkpoint(self.part, h, use_reentrant=False), 0.5))
        return y


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("name", UNREAD)
def test_numbers_that_nobody_reads_are_drawn(name: str, budget: str | None) -> None:
    """aot_eager drops such operators, and gives all later ones other numbers than eager."""
    model, twin = (seeded(Unread, UNREAD[name]) for _ in range(2))
    model, batch = optimized(model, memory_budget=budget), (noise(2, 6, 8),)
    for number in range(2):
        results = run_backward(model, square, batch, seed=number), torch.rand(3)
        assert_same(results, (run_backward(twin, square, batch, seed=number), torch.rand(3)))
    with torch.no_grad():
        assert_same(seeded(model, *batch), seeded(twin, *batch))


class Dithered(torch.autograd.Function):
    """The identity. Backward draws twice and adds the second draw to the gradient: nobody reads the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        torch.rand(3)
        return gradient + torch.rand(gradient.shape)


class DrawsInBackward(nn.Module):
    """Draws in forward, in backward of a dropout's result, and in backward of what is in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(Dithered.apply(F.dropout(Dithered.apply(self.first(x)).sin(), 0.5)))
        return y


@pytest.mark.parametrize("budget", [None, "min"])
def test_numbers_that_backward_draws_without_a_gradient(budget: str | None) -> None:
    model, twin = (seeded(DrawsInBackward) for _ in range(2))
    model, batch = optimized(model, memory_budget=budget), (noise(2, 6, 8),)
    for number in range(2):
        results = run_backward(model, square, batch, seed=number), torch.rand(3)
        assert_same(results, (run_backward(twin, square, batch, seed=number), torch.rand(3)))

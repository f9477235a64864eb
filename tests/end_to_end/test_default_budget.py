"""Without a memory budget a step is planned for "+1%": fewer bytes and eager's bits, where the bytes are worth it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.budget import DEFAULT, NO_TIME
from roamc.cli.zoo import make
from roamc.errors import VerifyError
from roamc.frontends.mesh import Mesh, on_mesh
from roamc.frontends.workload import Workload, capture
from roamc.graph import copied
from roamc.options import parse_options
from roamc.planning import search
from roamc.planning.effort import EFFORT
from roamc.planning.plan import Plan
from tests.end_to_end.helpers import assert_same, gradients_of, noise, warnings_of_roamc

WIDTH = 64


def network(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(3)
    parts = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH), nn.Dropout(0.1))
    return nn.Sequential(*(copy.deepcopy(part) for _ in range(layers) for part in parts))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def plan_of_step(rows: int, budget: str | None) -> Plan:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    step = roamc.train_step(model, loss_of, optimizer, memory_budget=budget, profile="cpu", strict=True)
    return step.plan(noise(rows, WIDTH))


def plan_of_module(rows: int, budget: str | None) -> Plan:
    return roamc.plan(network(), noise(rows, WIDTH), memory_budget=budget, profile="cpu")


WAYS = pytest.mark.parametrize("plan_of", [plan_of_step, plan_of_module])


@WAYS
def test_default_is_the_plan_of_one_percent(plan_of: Callable[[int, str | None], Plan]) -> None:
    default, asked, free = (plan_of(2048, budget) for budget in (None, DEFAULT, NO_TIME))
    assert (default.needed_bytes, default.added_seconds) == (asked.needed_bytes, asked.added_seconds)
    assert (default.asked_for, free.asked_for) == (DEFAULT, NO_TIME)
    assert default.needed_bytes < free.needed_bytes
    assert default.adds_at_most(0.01)
    assert free.added_seconds == 0


@WAYS
def test_step_of_few_bytes_is_planned_for_no_added_time(plan_of: Callable[[int, str | None], Plan]) -> None:
    default, free = plan_of(64, None), plan_of(64, NO_TIME)
    assert default.baseline_bytes < EFFORT.default_from
    assert default.decisions == free.decisions
    assert default.asked_for == free.asked_for == NO_TIME


@pytest.mark.parametrize(("budget", "warned"), [(None, 0), (NO_TIME, 0), (DEFAULT, 1)])
def test_split_model_warns_of_a_budget_that_was_asked_for(budget: str | None, warned: int) -> None:
    def broken(x: Tensor) -> Tensor:
        h = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(h).sum()

    compiled = torch.compile(broken, backend="roamc", options={"memory_budget": budget}, dynamic=False)
    with warnings_of_roamc() as said:
        compiled(noise(2048, 1024).requires_grad_()).backward()
    assert sum("for each piece" in text for text in said) == warned


def test_without_pass_retain_the_default_is_no_added_time() -> None:
    plans = [roamc.plan(network(), noise(2048, WIDTH), memory_budget=one, disable="retain") for one in (None, NO_TIME)]
    assert plans[0].decisions == plans[1].decisions
    assert plans[0].asked_for == NO_TIME


def test_default_has_the_bits_of_eager() -> None:
    model, x = network(), noise(2048, WIDTH)
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(one.parameters()) for one in (model, eager)]
    step = roamc.train_step(model, loss_of, optimizers[0], profile="cpu", strict=True)
    for seed in range(3):
        torch.manual_seed(seed)
        loss = step(x)
        torch.manual_seed(seed)
        expected = loss_of(eager, x)
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert_same(loss, expected.detach(), f"loss {seed}")
    assert step.plans[0].decisions["retain"]["reruns"]
    assert_same([*model.parameters()], [*eager.parameters()])


class Queue(nn.Module):
    """Compares rows with a copy of a queue, whose rows the caller replaces before backward, as MoCo does."""

    queue: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 256)
        self.table = nn.Embedding(16, 256)
        self.register_buffer("queue", noise(4096, 256, seed=1))
        self.register_buffer("mean", noise(256, seed=2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(torch.cos(x * 2))
        rows = torch.sin(torch.relu(h * 2 - 1) + self.table(torch.arange(len(x)) % 16) - self.mean * 2)
        return (rows @ self.queue.clone().t()).logsumexp(1).mean(), h


def trained_with_writes(model: nn.Module, *, inputs: bool = True) -> dict[str, Tensor | None]:
    """The gradients of two steps; results, and all ``inputs`` that eager lets one write, are written before backward.

    Raises:
        RuntimeError: autograd says that something was written that backward reads.
    """
    for _ in range(2):
        x = noise(2048, WIDTH).requires_grad_()
        loss, h = model(x)
        h.detach().numpy()[:] += 1  # of which no version counter hears
        if inputs:
            with torch.no_grad():
                model.queue.add_(1)
                model.mean.mul_(3)
                model.table.weight[0].zero_()
                x.add_(1)
        loss.backward()
    return {**gradients_of(model), "x": x.grad}


def test_caller_may_write_before_backward_what_eager_lets_it_write() -> None:
    torch.manual_seed(0)
    eager = Queue()
    model, asked = copy.deepcopy(eager), copy.deepcopy(eager)
    roamc.optimize(model, profile="cpu", strict=True)
    roamc.optimize(asked, memory_budget=DEFAULT, profile="cpu", strict=True)
    assert_same(trained_with_writes(model), trained_with_writes(eager))
    plan = roamc.plans(model)[0]
    assert plan.decisions["retain"]["reruns"]
    assert plan.decisions["retain"]["allowed"] == "safe"
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained_with_writes(asked)


@pytest.mark.parametrize("budget", [DEFAULT, "light", "min"])
def test_caller_may_write_results_before_backward_under_any_budget(budget: str) -> None:
    torch.manual_seed(0)
    eager = Queue()
    model = copy.deepcopy(eager)
    roamc.optimize(model, memory_budget=budget, profile="cpu", strict=True)
    assert_same(trained_with_writes(model, inputs=False), trained_with_writes(eager, inputs=False))
    assert roamc.plans(model)[0].decisions["retain"]["reruns"]


class Kept(torch.autograd.Function):
    """Gives back in backward, as the gradient, what forward gave."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0]


@pytest.mark.parametrize("budget", [None, NO_TIME, "min"])
def test_a_result_may_be_a_gradient(budget: str | None) -> None:
    def function(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return Kept.apply(x), torch.sin(torch.cos(z) * 2)

    x, z = noise(2048, WIDTH).requires_grad_(), noise(2048, WIDTH, seed=1).requires_grad_()
    compiled = torch.compile(function, backend="roamc", options={"memory_budget": budget, "strict": True})
    y, w = compiled(x, z)
    (y.sum() + w.sum()).backward()
    assert_same(x.grad, y.detach())


def test_buffers_that_forward_writes_are_no_fault_of_a_default() -> None:
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32), nn.GELU())
    eager = nn.Sequential(*parts)
    model = copy.deepcopy(eager)
    roamc.optimize(model, profile="cpu", strict=True)
    for one in (eager, model):
        for _ in range(2):
            one(noise(16, 3, 32, 32)).square().mean().backward()
    assert_same(gradients_of(model), gradients_of(eager))
    assert_same([*model.buffers()], [*eager.buffers()])
    assert roamc.plans(model)[0].asked_for == DEFAULT


def test_plan_whose_reruns_read_what_the_caller_may_write_is_refused_as_a_default() -> None:
    graph = capture(Workload("queue", Queue(), (noise(2048, WIDTH),)), forward_backward=True)
    asked = search.run(copied(graph), parse_options({"memory_budget": DEFAULT, "profile": "cpu"})).plan
    decisions = {**asked.decisions, "retain": {**asked.decisions["retain"], "allowed": "safe"}}
    with pytest.raises(VerifyError, match="would read what the caller has written"):
        search.run(graph, parse_options({"profile": "cpu"}), dataclasses.replace(asked, decisions=decisions))


def test_sequence_parallelism_gathers_again_by_default() -> None:
    def planned(budget: str | None) -> Plan:
        mesh = Mesh(tp=2)
        options = parse_options({"memory_budget": budget, "profile": "a100", "shard": "sequence"})
        with mesh.planned_for():
            workload = on_mesh(make("gpt", {"layers": 2, "batch": 4}), mesh)
            return search.run(capture(workload, device=torch.device("cuda")), options).plan

    default, free, asked = planned(None), planned(NO_TIME), planned(DEFAULT)
    assert default.baseline_bytes > EFFORT.default_from
    assert default.decisions == free.decisions
    assert len(asked.decisions["retain"]["once"]) > len(default.decisions["retain"]["once"]) == 0

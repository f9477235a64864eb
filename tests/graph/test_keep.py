"""What the user decides by hand is kept to: ``roamc.keep`` and regions of ``torch.utils.checkpoint``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import roamc
from roamc.errors import PlanError, VerifyError
from roamc.graph import TrainGraph, copied, operators, value_flow
from roamc.graph.fingerprint import fingerprint
from roamc.graph.value_numbers import Numbers
from roamc.options import Options
from roamc.passes import checkpoint as checkpoint_pass
from roamc.passes.retain import Code, compress, fits
from roamc.planning import search
from roamc.planning.plan import Plan
from roamc.rewriting import reruns
from tests.end_to_end.helpers import assert_backward_equal, assert_steps_equal, noise, optimized, sgd, square
from tests.graphs import graph_and_inputs, traced

WIDTH = 32


class Blocks(nn.Module):
    """Blocks whose large inner activation is made by a function of the test's."""

    def __init__(self, around: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(3))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + self.around(lambda x, up=up, down=down: down(torch.nn.functional.gelu(up(x))), x)
        return x


def plain(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return block(x)


def kept(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with roamc.keep():
        return block(x)


def again(block: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    wanted = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


def selective(block: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))


def plan_of(around: Callable[..., Any], route: str, budget: str | None) -> roamc.Plan:
    graph, _ = graph_and_inputs(Blocks(around), (noise(64, WIDTH),), square, route)
    return search.run(graph, Options(memory_budget=budget)).plan


@pytest.mark.parametrize("route", ["step", "joint"])
def test_nothing_made_inside_keep_is_made_again(route: str) -> None:
    dropped = plan_of(plain, route, "min").decisions["retain"]["reruns"]
    assert {"addmm", "gelu"} <= {operator.split("_")[0] for _, operator, *_ in dropped}
    reruns = plan_of(kept, route, "min").decisions["retain"]["reruns"]
    assert not [operator for _, operator, *_ in reruns if operator.startswith(("addmm", "gelu"))]


def plan_that_drops(route: str) -> tuple[TrainGraph, Plan]:
    """The graph of blocks that are kept, and the plan of the same blocks if they were not, said to be of that graph."""
    graph, _ = graph_and_inputs(Blocks(kept), (noise(64, WIDTH),), square, route)
    plan = plan_of(plain, route, "min")
    return graph, dataclasses.replace(plan, fingerprint=fingerprint(graph))


@pytest.mark.parametrize("route", ["step", "joint"])
def test_plan_that_makes_again_what_is_kept_is_refused(route: str) -> None:
    graph, plan = plan_that_drops(route)
    with pytest.raises(PlanError, match=r"retain: \w+ is kept by roamc.keep, and would run again as \w+: plan again"):
        search.run(graph, Options(), plan)


@pytest.mark.parametrize("route", ["step", "joint"])
def test_judge_of_values_names_what_is_kept_and_made_again(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, plan = plan_that_drops(route)
    monkeypatch.setattr(reruns, "must_stay", lambda operator: False)
    with pytest.raises(VerifyError, match=r"after pass 'retain': \w+ runs \w+ again, which roamc.keep keeps"):
        search.run(graph, Options(), plan)


class Twins(nn.Module):
    """Two layers that make one value of one input, of which one keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        with roamc.keep():
            kept = torch.sin(h)
        return self.layer(kept * kept) * torch.exp(torch.sin(h))


@pytest.mark.parametrize("route", ["step", "joint"])
def test_what_has_the_value_of_what_is_kept_may_be_made_again(route: str) -> None:
    graph, _ = graph_and_inputs(Twins(), (noise(512, WIDTH),), square, route)
    first, second = (node.name for node in operators(graph.graph) if node.target is torch.ops.aten.sin.default)
    again = {name for _, name, *_ in search.run(graph, Options(memory_budget="min")).plan.decisions["retain"]["reruns"]}
    assert second in again
    assert first not in again


def test_judge_of_values_names_what_is_kept_and_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(x: Tensor) -> Tensor:
        with roamc.keep():
            mask = x > 0
        return (x * mask).sum() + torch.where(mask, x, 2 * x).sum()

    graph = traced(model, noise(64, 64), phases="FBBBBBB")
    node = next(node for node in operators(graph.graph) if node.name == "gt")
    node.meta["custom"] = {"roamc": "keep"}
    with pytest.raises(PlanError, match="no storage 'gt' that could be kept smaller"):
        compress(copied(graph), [Code("gt", "bits")])
    before = value_flow.read(graph, Numbers())
    monkeypatch.setattr(fits, "must_stay", lambda operator: False)
    encoded = compress(graph, [Code("gt", "bits")])
    with pytest.raises(VerifyError, match=r"after pass 'retain': gt is encoded, which roamc.keep keeps"):
        value_flow.check(encoded, before, "retain")


def test_plan_with_keep_is_not_taken_for_one_without() -> None:
    assert plan_of(kept, "step", None).fingerprint != plan_of(plain, "step", None).fingerprint


def test_largest_batch_with_policies_fits() -> None:
    def make(size: int) -> tuple[nn.Module, tuple[Tensor], object]:
        return Blocks(selective), (torch.empty(size, WIDTH),), square

    fit = roamc.max_batch(make, 150_000, largest=40, forward_backward=True)
    assert fit.plan.needed_bytes <= 150_000


@pytest.mark.parametrize("around", [again, selective])
def test_checkpoint_by_hand_lowers_the_peak_without_a_budget(around: Callable[..., Any]) -> None:
    assert plan_of(around, "step", None).peak_bytes < plan_of(plain, "step", None).peak_bytes
    peaks = []
    for one in (around, plain):
        torch.compiler.reset()
        model = optimized(Blocks(one))
        square(model, noise(64, WIDTH)).backward()
        peaks.append(roamc.plans(model)[0].peak_bytes)
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("around", [again, selective])
def test_plan_of_a_module_with_regions_is_that_of_torch_compile(around: Callable[..., Any]) -> None:
    torch.compiler.reset()
    model, x = optimized(Blocks(around)), noise(64, WIDTH)
    square(model, x).backward()
    assert roamc.plan(model, x).needed_bytes == roamc.plans(model)[0].needed_bytes


def test_saved_by_policy_is_not_made_again() -> None:
    reruns = plan_of(selective, "step", None).decisions["checkpoint"]["reruns"]
    assert {operator.split("_")[0] for _, operator, *_ in reruns} == {"gelu"}


@pytest.mark.parametrize("route", ["step", "joint"])
def test_no_budget_drops_what_a_policy_must_save(route: str) -> None:
    reruns = plan_of(selective, route, "min").decisions["retain"]["reruns"]
    assert not [operator for _, operator, *_ in reruns if operator.startswith("addmm")]


@pytest.mark.parametrize("written", [False, True])
def test_mark_is_passed_over_where_what_it_reads_was_written_since(written: bool) -> None:
    def model(x: Tensor, buffer: Tensor) -> Tensor:
        y = (x * buffer).sin()
        if written:
            buffer.add_(1)
        return (y + y.sum()).exp()

    graph = traced(model, noise(8, 8), noise(8, 8, seed=4), phases="FFFFBB" if written else "FFFBB")
    for node in operators(graph.graph):
        if node.name in ("mul", "sin"):
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    reruns = checkpoint_pass.decide(graph, Options()).reruns
    assert [operator for _, operator, *_ in reruns] == (["sin"] if written else ["mul", "sin"])


@pytest.mark.parametrize("around", [kept, again, selective])
def test_regions_leave_every_bit_under_a_budget(around: Callable[..., Any]) -> None:
    torch.compiler.reset()
    batches = [(noise(64, WIDTH, seed=seed),) for seed in range(2)]
    assert_backward_equal(Blocks(around), square, batches, way=lambda m: optimized(m, memory_budget="min"))
    assert_steps_equal(Blocks(around), square, sgd, batches, memory_budget="min")

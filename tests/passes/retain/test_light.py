"""Budget "light": the lowest peak without running anything heavy again, and the bytes it saves in known blocks."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.cost import flops, kind_of
from roamc.errors import PlanError
from roamc.graph import TrainGraph, operators
from roamc.graph.memory import build_memory
from roamc.operators.costs.kinds import LIGHT
from roamc.options import Options
from roamc.planning import search
from roamc.planning.plan import Plan
from roamc.planning.planned import Planned
from tests.graphs import assert_same, clones, joint_graph, model_graph, traced
from tests.passes.retain.blocks import GPTBlock, LlamaBlock
from tests.planning.test_pipeline import run_program

BATCH, LENGTH, WIDTH, HEADS = 2, 256, 256, 4
BLOCKS: dict[str, tuple[Callable[[], nn.Module], float, float]] = {
    "gpt": (lambda: GPTBlock(WIDTH, HEADS, fused=False), 54.03, 28.8),
    "gpt, fused attention": (lambda: GPTBlock(WIDTH, HEADS, fused=True), 34.09, 20.4),
    "llama": (lambda: LlamaBlock(WIDTH, HEADS, 688), 49.59, 22.9),
}
"""Name to block, and bytes saved a layer by eager and at most under "light", in units of batch · length · width."""


def products(graph: TrainGraph) -> int:
    """FLOPs of all operators: products, convolutions and attention have some."""
    return sum(flops(node) for node in operators(graph.graph))


def again(planned: Planned) -> list[str]:
    return [operator for _, operator, *_ in planned.plan.decisions["retain"]["reruns"]]


def blocks_planned(name: str, layers: int, budget: str) -> Planned:
    return search.run(blocks_graph(name, layers), Options(memory_budget=budget, profile="cpu"))


def blocks_graph(name: str, layers: int) -> TrainGraph:
    """Under torch.compile's capture, in bfloat16."""
    model = nn.Sequential(*(BLOCKS[name][0]() for _ in range(layers))).to(torch.bfloat16)
    return joint_graph(model, (torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16),))


def saved_a_layer(planned: list[Planned]) -> float:
    """What one layer more saves, storages counted once, parameters not."""
    one, more = (sum(storage.nbytes for storage in build_memory(each.graph).saved) for each in planned)
    return (more - one) / (BATCH * LENGTH * WIDTH)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_save_what_exact_recomputation_leaves(name: str) -> None:
    _, eager, most = BLOCKS[name]
    plain = [blocks_planned(name, layers, "+0%") for layers in (2, 3)]  # one alone is at its peak elsewhere
    light = [blocks_planned(name, layers, "light") for layers in (2, 3)]
    assert saved_a_layer(plain) == pytest.approx(eager, abs=0.01)
    assert saved_a_layer(light) <= most
    assert [products(each.graph) for each in light] == [products(each.graph) for each in plain]
    assert all(again(each) for each in light)


def test_a_hundredth_of_the_time_leaves_little_more() -> None:
    planned = [blocks_planned("gpt, fused attention", layers, "+1%") for layers in (2, 3)]
    assert saved_a_layer(planned) <= 21.6


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("name", ["nanogpt-dropout", "mobilenetv2"])
def test_nothing_heavy_runs_again_and_no_bit_changes(name: str, route: str) -> None:
    graph, inputs = model_graph(name, route)
    whole = search.run(model_graph(name, route)[0], Options())
    light = search.run(graph, Options(memory_budget="light", profile="cpu"))
    assert light.plan.peak_bytes < whole.plan.peak_bytes
    assert products(light.graph) == products(whole.graph)
    kinds = {kind_of(node) for node in operators(light.graph.graph) if "again" in node.meta}
    assert kinds
    assert kinds <= LIGHT, kinds
    results = []
    for planned in (whole, light):
        used = clones(inputs)
        torch.manual_seed(4)
        results.append([*run_program(planned, used), *used, torch.get_rng_state()])
    assert_same(*results, f"{name}, {route}")


def test_min_goes_lower_and_runs_products_again() -> None:
    light, least = (
        search.run(model_graph("nanogpt-dropout", "step")[0], Options(memory_budget=budget, profile="cpu"))
        for budget in ("light", "min")
    )
    assert least.plan.peak_bytes < light.plan.peak_bytes
    assert products(least.graph) > products(light.graph)
    assert ("budget", "light", "") in light.plan.rows()
    assert ("budget", "min", "") in least.plan.rows()


def test_plan_is_data_and_runs_again() -> None:
    planned = search.run(model_graph("nanogpt-dropout", "joint")[0], Options(memory_budget="light", profile="cpu"))
    read = Plan.from_json(planned.plan.to_json())
    followed = search.run(model_graph("nanogpt-dropout", "joint")[0], Options(), read)
    assert followed.plan.decisions == planned.plan.decisions
    assert followed.plan.decisions["retain"]["allowed"] == "light"


def test_what_is_made_of_bits_runs_from_a_plan_with_the_bits_of_eager() -> None:
    """Attention's mask waits in bits, and the weights that it dropped are made again from what is decoded."""

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    torch.manual_seed(0)
    eager = nn.Sequential(*(GPTBlock(64, HEADS, fused=False) for _ in range(2))).to(torch.bfloat16)
    model, x = copy.deepcopy(eager), torch.randn(BATCH, 64, 64, dtype=torch.bfloat16)
    one, two = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (eager, model))
    step = roamc.train_step(model, loss_of, two, memory_budget="light", strict=True)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = loss_of(eager, x)
        one.zero_grad()
        expected.backward()
        one.step()
        torch.manual_seed(seed)
        assert torch.equal(step(x), expected)
    for got, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(got, wanted)
    (plan,) = roamc.plans(step)
    assert sum(len(code[5]) for code in plan.decisions["retain"]["codes"]) == 2
    assert Plan.from_json(plan.to_json()).decisions == plan.decisions


def test_a_plan_that_makes_again_what_is_not_made_of_a_code_is_refused() -> None:
    planned = blocks_planned("gpt", 2, "light")
    decision = planned.plan.decisions["retain"]
    (*code, again), *codes = decision["codes"]
    assert again
    wrong = {**planned.plan.decisions, "retain": {**decision, "codes": ((*code, ("gelu",)), *codes)}}
    with pytest.raises(PlanError, match="'gelu' cannot be made again from what codec 'bits' keeps"):
        search.run(blocks_graph("gpt", 2), Options(), dataclasses.replace(planned.plan, decisions=wrong))


@pytest.mark.parametrize(
    "function",
    [lambda x: x, lambda x: (x @ x) @ x, lambda x: (x @ x).relu().sum()],
    ids=["no operator", "only products", "nothing to gain"],
)
def test_where_nothing_can_be_dropped_nothing_is(function: Callable[[Tensor], Tensor]) -> None:
    planned = search.run(traced(function, torch.randn(8, 8)), Options(memory_budget="light", profile="cpu"))
    assert again(planned) == []
    assert planned.plan.added_seconds == planned.plan.added_bound_seconds == 0
    assert planned.plan.decisions["retain"]["allowed"] == "light"

"""What backward only projects is projected in forward, and waits in its place as the product: the same values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc import cost
from roamc.errors import PlanError
from roamc.graph import TrainGraph
from roamc.graph.memory import build_memory
from roamc.operators.projection import projection
from roamc.optim import CompAct
from roamc.options import Options, parse_options
from roamc.passes import normalize, project
from roamc.passes.retain import Choice, Code, compress, search
from roamc.passes.retain.codecs import projections
from roamc.passes.retain.compress import values
from roamc.planning import search as planning
from roamc.planning.plan import Plan
from tests.graphs import aten, graph_and_inputs
from tests.passes.retain.test_compress import check, squares
from tests.passes.retain.test_offers import difference, some_sets, without_clashes
from tests.passes.retain.test_search import PROFILE

WIDTH, ROWS = 32, 256


class Layer(nn.Module):
    """Two weights that read one input, one of them by halves: two products with two projections, through views."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.halves = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x) + self.halves(x.unflatten(-1, (2, -1))).flatten(-2)


def chain(layers: int = 4) -> tuple[nn.Module, Tensor]:
    """Layers without an activation: nothing but gradients of weights reads their inputs behind forward."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(layers))), torch.randn(4, ROWS // 4, WIDTH)


def compact(parameters: Any, lr: float = 0.01, rank: float = 1 / 4) -> CompAct:
    return CompAct(parameters, lr=lr, rank=rank, dense=())


def step_graph(optimizer: Callable[..., torch.optim.Optimizer] = compact) -> tuple[TrainGraph, list[Any]]:
    """The graph in front of pass retain, and inputs."""
    model, x = chain()
    graph, inputs = graph_and_inputs(model, (x,), squares, "step", optimizer)
    for each in (normalize, project):
        graph = each.apply(graph, each.decide(graph, Options()))
    return graph, inputs


def choice_of(graph: TrainGraph, allowed: str = "all", **options: Any) -> Choice:
    order = [op.node.name for op in build_memory(graph).operators]
    settings = Options(memory_budget="min", **options)
    return Choice(graph, settings, order, PROFILE, cost.prices(graph, PROFILE), allowed)


def moved(choice: Choice) -> list[Code]:
    return [code for code in choice.codes if code.codec == projections.NAME]


@pytest.mark.parametrize("disable", [(), ("reuse",)])
@pytest.mark.parametrize("allowed", ["all", "light"])
def test_offers_are_what_is_written(allowed: str, disable: tuple[str, ...]) -> None:
    choice = choice_of(step_graph()[0], allowed, disable=disable)
    assert len(moved(choice)) == 3, "of the first layer the input is the batch"
    offers = choice.search.problem.offers
    for places in some_sets(len(offers), random.Random(0)):
        taken = without_clashes(offers, places)
        assert difference(choice.search.encoded(taken).problem, choice.written(taken).problem) == [], taken


def test_offers_cost_the_projections_that_are_made_once_more() -> None:
    choice = choice_of(step_graph()[0])
    all_projections = [node for node in choice.graph.graph.nodes if node.target is projection]
    seconds = {node.meta["val"].shape[0]: choice.prices[node.name] for node in all_projections}
    assert seconds.keys() == {WIDTH, WIDTH // 2}
    for offer in choice.search.problem.offers:
        assert offer.seconds == pytest.approx(sum(seconds.values())), "products run once, with or without the offer"
        assert offer.nbytes == 4 * (ROWS * WIDTH // 4 + 2 * ROWS * WIDTH // 8)


def test_products_move_and_every_bit_stays() -> None:
    graph, inputs = step_graph()
    codes = moved(choice_of(graph))
    before = build_memory(graph)
    after = build_memory(check(graph, inputs, lambda graph: compress(graph, codes)))
    left = {storage.name for storage in after.saved}
    assert not left.intersection(code.storage for code in codes)
    saved = [sum(storage.nbytes for storage in memory.saved) for memory in (before, after)]
    assert saved[0] - saved[1] == 3 * 4 * ROWS * (WIDTH - 2 * WIDTH // 4)
    assert sum(op.node.target is projection for op in after.operators) == 8 + 6
    assert sum(op.node.target is aten.mm.default for op in after.operators) == sum(
        op.node.target is aten.mm.default for op in before.operators
    )


def run(offers: bool, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[Tensor], Plan]:
    """Losses of three steps, and all parameters and states behind them; with the plan."""
    model, x = chain()
    optimizer = compact(model.named_parameters())
    with monkeypatch.context() as patched:
        if not offers:
            patched.setattr(search, "offered", lambda *_: [])
        step = roamc.train_step(model, squares, optimizer, strict=True, profile="cpu", **options)
        values = [step(x * number).detach().clone() for number in range(1, 4)]
    states = [value for p in model.parameters() for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    return [*values, *model.parameters(), *states], step.plans[0]


def codes_of(plan: Plan) -> Sequence[Any]:
    codes: Sequence[Any] = plan.decisions["retain"]["codes"]
    return codes


def seconds_of(plan: Plan) -> float:
    return float(plan.decisions["retain"]["added_seconds"])


@pytest.mark.parametrize("budget", ["light", "+1%", "80%", "60%", "50%", "min"])
def test_no_plan_is_worse_and_training_has_the_same_bits(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (without, plain), (values, plan) = (run(offers, monkeypatch, memory_budget=budget) for offers in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(values, without, strict=True))
    assert plan.needed_bytes <= plain.needed_bytes or seconds_of(plan) <= seconds_of(plain) * (1 + 1e-9)
    if budget == "light":
        assert len(codes_of(plan)) == 3
        assert plan.needed_bytes < plain.needed_bytes, "the inputs are products' sums, and no product may run again"


def test_a_plan_from_a_file_holds_it() -> None:
    options = parse_options({"memory_budget": "light"})
    model, x = chain()
    graphs = [graph_and_inputs(model, (x,), squares, "step", optimizer)[0] for optimizer in (compact, compact)]
    first = planning.run(graphs[0], options)
    plan = Plan.from_json(first.plan.to_json())
    assert codes_of(plan)
    assert planning.run(graphs[1], options, plan).plan.decisions == plan.decisions


def test_what_is_not_only_projected_is_refused_by_name() -> None:
    graph, _ = step_graph(torch.optim.AdamW)
    assert not moved(choice_of(graph))
    name = next(value.storage.name for value in values(build_memory(graph)) if value.saved.late)
    with pytest.raises(PlanError, match=f"what reads {name} behind forward does more than to project it"):
        compress(graph, [Code(name, projections.NAME)])

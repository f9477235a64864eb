"""The choice between reruns and codecs: the budget is kept, the bound holds for all choices, the order is legal."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roamc import cost
from roamc.graph import Phase, TrainGraph, copied
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from roamc.options import Options
from roamc.passes import retain, reuse
from roamc.passes.retain import Choice
from roamc.passes.retain.decision import Decision
from roamc.planning import search
from roamc.planning.pipeline import PIPELINE, same_for_all_budgets
from roamc.planning.plan import Plan
from roamc.planning.plan_maker import prepared
from roamc.rewriting.arrange import arrange
from roamc.solvers.retain import EFFORT, RetainSolution, solve
from tests.graphs import assert_same, clones, graph_and_inputs, peak, traced
from tests.passes.retain.test_codecs import late_graph
from tests.passes.retain.test_compress import MODELS, ROUTES, all_codes, cleaned, squares
from tests.planning.test_pipeline import run_program

PROFILE = cost.load_profile(torch.device("cpu"))


class Tower(nn.Module):
    """Layers with much dropout between them: masks weigh as much as anything."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.dropout(layer(x).tanh(), 0.2), 0.3)
        return x


Model = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]


def tower(layers: int = 4) -> Model:
    torch.manual_seed(0)
    return Tower(layers), (torch.randn(512, 256),), squares


def choice_of(graph: TrainGraph) -> Choice:
    memory = build_memory(graph)
    order, prices = [op.node.name for op in memory.operators], cost.prices(graph, PROFILE)
    return Choice(graph, Options(memory_budget="min"), order, PROFILE, prices)


def reruns_alone(choice: Choice, target: int) -> RetainSolution:
    """The solver's answer without codecs."""
    return solve(dataclasses.replace(choice.asked.problem, offers=()), target)


@pytest.mark.parametrize("route", ROUTES)
def test_decision_is_what_it_says_and_never_dearer_than_reruns_alone(route: str) -> None:
    graph, _ = cleaned(*tower(), route)
    choice = choice_of(graph)
    used = 0
    for share in (0.9, 0.75, 0.6):
        target = int(peak(graph) * share)
        decision, plain = choice.decide(target), reruns_alone(choice, target)
        assert decision.peak_bytes <= target
        assert decision.added_seconds <= plain.seconds
        spent = math.fsum([*(again[-1] for again in decision.reruns), *(code[4] for code in decision.codes)])
        assert decision.added_seconds == pytest.approx(spent)
        assert decision.bound_seconds <= decision.added_seconds * (1 + 1e-9)
        names = {op.node.name for op in build_memory(retain.apply(copied(graph), decision)).operators}
        assert {again[0] for again in decision.reruns} <= names
        used += decision.added_seconds < plain.seconds
    assert used


@pytest.mark.parametrize("route", ROUTES)
def test_the_pass_decides_by_itself(route: str) -> None:
    graph, _ = cleaned(*tower(), route)
    assert retain.decide(graph, Options()) is retain.NOTHING
    target = int(peak(graph) * 0.7)
    kept, least = (retain.decide(graph, Options(memory_budget=limit)) for limit in (target, 0))
    assert least.peak_bytes < kept.peak_bytes <= target
    assert least.added_seconds > kept.added_seconds > 0
    after = retain.apply(copied(graph), kept)
    assert peak(reuse.apply(after, reuse.decide(after, Options()))) <= kept.peak_bytes


@pytest.mark.parametrize("route", ROUTES)
def test_no_set_of_codecs_is_below_the_bound(route: str) -> None:
    """Every subset of what can be kept smaller, each with the reruns that the solver finds best for it."""
    graph, _ = cleaned(*tower(2), route)
    choice = choice_of(graph)
    assert len(choice.codes) == 4
    subsets = [s for count in range(5) for s in itertools.combinations(range(4), count)]
    positive = 0
    for share in (0.9, 0.8, 0.7, 0.6):
        target = int(peak(graph) * share)
        bound = choice.search.bounds.seconds(target)
        solutions = [choice.search._ask(subset, target, {}, EFFORT.simulations) for subset in subsets]
        kept = [solution.seconds for solution in solutions if solution.peak_bytes <= target]
        assert all(bound <= seconds * (1 + 1e-9) for seconds in kept), share
        assert not kept or choice.decide(target).added_seconds <= 1.2 * min(kept)
        positive += 0 < bound < math.inf
    assert positive, "a bound of nothing always holds"


def at_the_end_of_forward(graph: TrainGraph) -> int:
    memory = build_memory(graph)
    first = next(step for step, op in enumerate(memory.operators) if op.phase is not Phase.FORWARD)
    return int(live_bytes(memory)[first - 1])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["pictures", "attention"])
def test_operators_of_codecs_stand_where_they_may(name: str, route: str) -> None:
    graph, _ = cleaned(*MODELS[name](), route)
    choice = choice_of(graph)
    last = {code.storage: place for place, code in enumerate(choice.codes)}  # also makes again what is made of it
    alone = [place for place, code in enumerate(choice.codes) if not code.again]
    assert (alone != sorted(last.values())) is (name == "attention"), "of pictures the mask is too small"
    for taken in (alone, sorted(last.values())):
        written = choice.written(tuple(taken))
        order = [written.operators[op] for op in written.problem.sequence.tolist()]
        arranged = arrange(written.graph, [name for name in order if name])  # an error where a read comes too early
        assert at_the_end_of_forward(arranged) < at_the_end_of_forward(graph)


@pytest.mark.parametrize("route", ROUTES)
def test_plan_with_codecs_runs_to_the_same_bits_also_from_json(route: str) -> None:
    case = tower()
    free = search.run(graph_and_inputs(*case, route)[0], Options(memory_budget="+0%"))
    assert free.plan.decisions["retain"]["codes"] == ()
    graph, inputs = graph_and_inputs(*case, route)
    planned = search.run(graph, Options(memory_budget="50%"), deep=True)
    codes = planned.plan.decisions["retain"]["codes"]
    assert {codec for _, codec, *_ in codes} == {"bits"}
    assert all(after == -(-before // 8) for _, _, before, after, *_ in codes)
    assert "values encoded" in str(planned.plan)
    text = planned.plan.to_json()
    again = search.run(graph_and_inputs(*case, route)[0], Options(), Plan.from_json(text))
    assert again.plan.decisions == planned.plan.decisions
    results: list[Any] = []
    for one in (free, planned, again):
        used = clones(inputs)
        torch.manual_seed(2)
        results.append([*run_program(one, used), *used])
    assert_same(results[0], results[1], route)
    assert_same(results[0], results[2], route)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["pictures", "channels last", "attention"])
def test_programs_with_all_codecs_give_the_same_bits(name: str, route: str) -> None:
    """Of small values as well, which no budget would ask for."""
    graph, inputs = graph_and_inputs(*MODELS[name](), route)
    free = search.run(graph, Options())
    clean, _ = cleaned(*MODELS[name](), route)
    rows = tuple((*code[:2], 0, 0, 0.0, code.again) for code in all_codes(clean, with_results=True))
    forced = Decision((), 0, 0.0, 0.0, "gap", "all", rows)
    plan = Plan.from_json(free.plan.to_json())
    leading = [row.name for row in same_for_all_budgets(PIPELINE)]
    decisions = {key: plan.decisions[key] for key in leading}
    captured = graph_and_inputs(*MODELS[name](), route)[0]
    maker, start = prepared(captured, Options(), None, "", deep=True)
    assert start.decisions.keys() == decisions.keys()
    coded = maker.make(start, forced, 0.0)
    results: list[Any] = []
    for one in (free, coded):
        used = clones(inputs)
        torch.manual_seed(2)
        results.append([*run_program(one, used), *used])
    assert_same(*results, f"{name}, {route}")


COPIES: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "_to_copy": (torch.bfloat16, lambda kept: kept.float()),
    "clone": (torch.float32, lambda kept: kept.t().contiguous()),
}


@pytest.mark.parametrize("copy", COPIES)
def test_copy_of_what_is_kept_anyway_is_dropped_and_made_again(copy: str) -> None:
    """An exact widening and a change of layout need no codec: they run again, and the original stays."""
    dtype, function = COPIES[copy]

    def step(x: Tensor) -> tuple[Tensor, ...]:
        kept = x.tanh()
        copied = function(kept)
        large = (kept.repeat(4, 1) + copied.sum()).sum()
        return (copied + large).sum(), (kept + large).sum()

    graph = traced(step, torch.randn(512, 300, dtype=dtype))
    graph = late_graph(graph, {"add_1", "sum_3", "add_2", "sum_4"})
    choice = choice_of(graph)
    most = reruns_alone(choice, 1 << 60).peak_bytes
    decision = choice.decide(most - 1)
    assert decision.peak_bytes < most
    again = {name for _, name, *_ in decision.reruns}
    assert copy in again
    assert "tanh" not in again
    assert not decision.codes


def test_view_of_what_is_kept_anyway_is_not_kept() -> None:
    """Views have no bytes of their own, and lead to no codec."""
    graph = traced(lambda x: ((kept := x.tanh()).t()[1:].sum(), kept.view(-1).sum()), torch.randn(64, 30))
    graph = late_graph(graph, {"sum_1", "sum_2"})
    assert [storage.name for storage in build_memory(graph).saved] == ["tanh"]
    assert not choice_of(graph).codes

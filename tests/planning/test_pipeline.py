"""The runner: any subset of passes gives the same bits, limits and names are checked, plans are the same everywhere."""

from __future__ import annotations

import inspect
import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import roamc
from roamc.errors import REQUIRED, BudgetError, OptionError, VerifyError
from roamc.graph import TrainGraph
from roamc.graph.eager_memory import eager_live_bytes
from roamc.graph.memory import build_memory
from roamc.graph.value_numbers import Flow
from roamc.options import Options
from roamc.planning import pipeline, search
from roamc.planning.plan import Plan
from roamc.planning.planned import Planned
from roamc.runtime.program import Pair, Whole
from tests.graphs import assert_same, clones, graph_and_inputs, joint_graph, model_graph, run_real, traced
from tests.models import MODELS
from tests.random_graphs import random_model

OPTIONAL = tuple(step.name for step in pipeline.PIPELINE if step.name not in REQUIRED)
# Here are no marks, GPU, projections, budget, collectives.
IDLE = ("checkpoint", "masks", "scores", "project", "async_tp", "padding", "count", "retain", "overlap")
ALWAYS = tuple(name for name in OPTIONAL if name not in IDLE)
SUBSETS = [subset for count in range(len(ALWAYS) + 1) for subset in itertools.combinations(ALWAYS, count)]
NEAR_AN_END = [subset for subset in SUBSETS if len(subset) < 2 or len(subset) > len(ALWAYS) - 2]
ROOT = Path(__file__).parents[2]
X = torch.randn(16, 16)


def graph_of(name: str, route: str) -> tuple[TrainGraph, list[Any]]:
    return graph_and_inputs(*random_model(11), route) if name == "random" else model_graph(name, route)


def run_program(planned: Planned, inputs: list[Any]) -> list[Any]:
    """Outputs of the emitted program; of both halves, where there are two."""
    if not planned.graph.boundary:
        return list(Whole(planned)(list(inputs)))
    pair = Pair(planned)
    late = sum(port.phase.name == "BACKWARD" for port in planned.graph.inputs)
    first = pair.forward(inputs[: len(inputs) - late])
    outputs, saved = first[: pair.first_saved], first[pair.first_saved :]
    return [*outputs, *pair.backward([*saved, *inputs[len(inputs) - late :]])]


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("name", ["random", "nanogpt-dropout", "vit"])
@pytest.mark.parametrize("subsets", [NEAR_AN_END, SUBSETS], ids=["one-out-or-in", "all"])
def test_every_subset_of_passes_gives_the_same_bits(subsets: list[tuple[str, ...]], name: str, route: str) -> None:
    graph, inputs = graph_of(name, route)
    used = clones(inputs)
    torch.manual_seed(3)
    expected, _ = run_real(graph, used)
    state = torch.get_rng_state()
    for subset in subsets:
        planned = search.run(graph_of(name, route)[0], Options(disable=subset))
        assert set(planned.plan.decisions) == {step.name for step in pipeline.PIPELINE} - set(subset)
        again = clones(inputs)
        torch.manual_seed(3)
        got = run_program(planned, again)
        assert torch.equal(torch.get_rng_state(), state), f"without {subset}: the random state differs"
        assert_same([*expected, *used], [*got, *again], f"{name}, {route}, without {subset}")


@pytest.mark.parametrize("left_out", [(), ("normalize",), ("reorder",), ("reuse",), ("checkpoint", "reuse", "reorder")])
def test_budget_is_kept_without_other_passes(left_out: tuple[str, ...]) -> None:
    graph, inputs = graph_of("nanogpt-dropout", "step")
    used, again = clones(inputs), clones(inputs)
    torch.manual_seed(3)
    expected, _ = run_real(graph, used)
    planned = search.run(graph_of("nanogpt-dropout", "step")[0], Options(disable=left_out, memory_budget="75%"))
    assert planned.plan.needed_bytes <= planned.plan.budget_bytes
    torch.manual_seed(3)
    assert_same([*expected, *used], [*run_program(planned, again), *again], str(left_out))


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(60, 75))
def test_program_of_a_random_graph_gives_the_bits_of_the_graph(
    request: pytest.FixtureRequest, seed: int, route: str
) -> None:
    if seed % 2:
        request.getfixturevalue("arenas_of_any_size")
    graph, inputs = graph_and_inputs(*random_model(seed), route)
    used, again = clones(inputs), clones(inputs)
    torch.manual_seed(seed)
    expected, _ = run_real(graph, used)
    state = torch.get_rng_state()
    planned = search.run(graph, Options())
    torch.manual_seed(seed)
    got = run_program(planned, again)
    assert torch.equal(torch.get_rng_state(), state), f"seed {seed}, {route}: the random state differs"
    assert_same([*expected, *used], [*got, *again], f"seed {seed}, {route}")


@pytest.mark.parametrize(("name", "route"), list(zip(MODELS, itertools.cycle(("step", "joint")), strict=False)))
def test_every_shape_dtype_and_stride_is_derived_anew(name: str, route: str) -> None:
    search.run(model_graph(name, route)[0], Options(layout_nodes=0, order="lpmf"), deep=True)


def test_numbers_of_a_plan_are_those_of_the_memory_model() -> None:
    graph, _ = model_graph("nanogpt", "step")
    baseline = int(eager_live_bytes(build_memory(graph)).max())
    plan = search.run(graph, Options()).plan
    assert plan.baseline_bytes == baseline
    assert plan.bound_bytes <= plan.peak_bytes <= plan.baseline_bytes
    assert plan.live_bytes <= plan.arena_bytes <= plan.peak_bytes
    assert plan.fragmentation == plan.arena_bytes / plan.live_bytes - 1
    assert set(plan.fixed_bytes) == {"parameter", "input", "optimizer state"}


def test_without_reorder_nothing_is_known_of_the_bound() -> None:
    plan = search.run(model_graph("nanogpt", "step")[0], Options(disable=("reorder",))).plan
    assert plan.bound_bytes == 0
    assert plan.status != "optimal"


@pytest.mark.parametrize("name", ["layout", "reoder", "", "Reorder"])
def test_pass_that_cannot_be_left_out_names_those_that_can(name: str) -> None:
    with pytest.raises(
        OptionError, match=f"cannot leave out pass '{name}'.* Passes that can be left out: {', '.join(OPTIONAL)}"
    ):
        search.run(traced(lambda x: x.sin(), X), Options(disable=(name,)))


def test_budget_that_nothing_keeps_names_need_and_what_lives_there() -> None:
    with pytest.raises(BudgetError) as caught:
        search.run(model_graph("nanogpt", "step")[0], Options(memory_budget=1000))
    said = str(caught.value)
    assert f"({caught.value.plan.needed_bytes} bytes)" in said
    assert re.search(r"NanoGPT needs [\d.]+ [kM]B .* above memory_budget=1 kB, with as much recomputation", said)
    assert re.search(r"largest storages at that step: [\w ]+ [\d.]+ kB, .*\. Raise the budget", said)
    with pytest.raises(BudgetError, match=r"tangents_1 \(the gradient of output\) [\d.]+ kB"):
        roamc.plan(torch.nn.Linear(8, 500), torch.randn(4, 8), memory_budget=1000)
    with pytest.raises(BudgetError, match=r"tangents_1 \(the gradient of an output\) [\d.]+ kB"):
        search.run(joint_graph(torch.nn.Linear(8, 500), (torch.randn(4, 8),)), Options(memory_budget=1000))
    needed = caught.value.plan.needed_bytes
    kept = search.run(model_graph("nanogpt", "step")[0], Options(memory_budget=needed)).plan
    assert kept.needed_bytes <= needed, "the smallest budget that was named would do"


def test_without_retain_a_budget_is_a_limit() -> None:
    plan = search.run(model_graph("nanogpt", "step")[0], Options()).plan
    with pytest.raises(BudgetError, match="without recomputation"):
        search.run(model_graph("nanogpt", "step")[0], Options(memory_budget=plan.bound_bytes - 1, disable=("retain",)))


def test_budget_at_the_peak_changes_nothing() -> None:
    free = search.run(model_graph("nanogpt", "step")[0], Options()).plan
    kept = search.run(model_graph("nanogpt", "step")[0], Options(memory_budget=free.needed_bytes)).plan
    assert kept.peak_bytes == free.peak_bytes
    assert kept.added_seconds == 0


def test_fault_of_a_pass_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_phase(graph: TrainGraph, decision: object) -> TrainGraph:
        return graph.replace(phase={})

    steps = list(pipeline.PIPELINE)
    steps[0] = pipeline.Pass(steps[0].name, steps[0].decision, steps[0].decide, lose_a_phase)
    monkeypatch.setattr(pipeline, "PIPELINE", tuple(steps))
    with pytest.raises(VerifyError, match="after pass 'normalize': sin has no phase"):
        search.run(traced(lambda x: x.sin(), X), Options())


def test_seconds_are_told_per_pass() -> None:
    plan = search.run(traced(lambda x: x.sin(), X), Options()).plan
    assert {"normalize", "reorder", "layout", "verify"} <= set(plan.seconds)
    assert all(value >= 0 for value in plan.seconds.values())


def test_graph_without_operators_runs() -> None:
    planned = search.run(traced(lambda x: x.t(), X), Options())
    assert planned.plan.peak_bytes == 0
    assert torch.equal(run_program(planned, [X])[0], X.t())


@dataclass(frozen=True)
class Nothing:
    """A decision without choices."""


def identity_pass(**facts: set[str]) -> pipeline.Pass:
    """A pass that changes nothing."""
    module = SimpleNamespace(NAME="nothing", Decision=Nothing)
    module.decide = lambda graph, options: Nothing()
    module.apply = lambda graph, decision: graph
    return pipeline.Pass.of(module, **facts)


def test_a_pass_is_added_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = search.run(traced(lambda x: x.sin().cos(), X), Options(memory_budget="min")).plan
    added = pipeline.checked(*pipeline.PIPELINE[:3], identity_pass(), *pipeline.PIPELINE[3:])
    monkeypatch.setattr(pipeline, "PIPELINE", added)
    plan = search.run(traced(lambda x: x.sin().cos(), X), Options(memory_budget="min")).plan
    assert plan.decisions == {**plain.decisions, "nothing": {}}
    assert list(plan.decisions) == [each.name for each in added]
    again = search.run(traced(lambda x: x.sin().cos(), X), Options(), Plan.from_json(plan.to_json())).plan
    assert again.decisions == plan.decisions
    without = search.run(traced(lambda x: x.sin().cos(), X), Options(disable=("nothing",))).plan
    assert "nothing" not in without.decisions


@pytest.mark.parametrize(
    ("facts", "in_front_of", "says"),
    [
        ({"requires": {"kernels"}}, "reorder", "pass nothing requires kernels, which no pass in front of it leaves"),
        ({"requires": {"order"}}, "reorder", "pass nothing requires order"),
        ({"invalidates": {"order"}}, "reuse", "pass reuse requires order"),
        ({"invalidates": {"normal form"}}, "retain", "pass retain requires normal form"),
    ],
)
def test_a_pass_in_the_wrong_place_is_refused(facts: dict[str, set[str]], in_front_of: str, says: str) -> None:
    at = [each.name for each in pipeline.PIPELINE].index(in_front_of)
    with pytest.raises(ValueError, match=says):
        pipeline.checked(*pipeline.PIPELINE[:at], identity_pass(**facts), *pipeline.PIPELINE[at:])


def test_the_runner_names_no_pass() -> None:
    text = inspect.getsource(pipeline.Runner) + inspect.getsource(pipeline.State)
    for each in pipeline.PIPELINE:
        assert not re.search(rf"\b{each.name}\b", text), each.name


def judged(monkeypatch: pytest.MonkeyPatch, *, moved: bool = False) -> list[str]:
    """Passes behind which values are compared; with ``moved`` the last pass puts outputs of its own into the graph."""
    names: list[str] = []

    def check(graph: TrainGraph, before: Flow, after: str, *rest: Any, **named: Any) -> Flow:
        names.append(after)
        return value_check(graph, before, after, *rest, **named)

    def apply(graph: TrainGraph, decision: Any) -> TrainGraph:
        graph = last.apply(graph, decision)
        return graph.replace(outputs=(*graph.outputs,)) if moved else graph

    *others, last = pipeline.PIPELINE
    value_check = pipeline.value_flow.check
    monkeypatch.setattr(pipeline.value_flow, "check", check)
    monkeypatch.setattr(pipeline, "PIPELINE", (*others, replace(last, apply=apply)))
    search.run(graph_of("random", "step")[0], Options())
    return names


def test_values_are_read_again_only_where_a_pass_changed_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    names = judged(monkeypatch)
    assert "layout" not in names
    assert "reuse" in names


def test_a_pass_that_changes_more_than_the_layout_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "layout" in judged(monkeypatch, moved=True)

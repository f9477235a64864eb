"""A stage of a pipeline: its budget counts what every micro-batch in flight has saved."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roamc.errors import PlanError, VerifyError
from roamc.graph import Phase, TrainGraph, copied, verify
from roamc.graph.memory import build_memory
from roamc.options import parse_options
from roamc.planning import search
from roamc.planning.layout_judge import check_layout
from roamc.planning.plan import Plan
from roamc.planning.planned import Planned
from tests.graphs import captured_step

IN_FLIGHT = 4


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """The working peak of one micro-batch comes first, before anything is saved."""
    wide = x @ torch.ones(16, 2048)
    return model(wide @ torch.ones(2048, 16)).square().sum()  # type: ignore[no-any-return]


@functools.cache
def _captured() -> TrainGraph:
    layers = [part for _ in range(4) for part in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh())]
    return captured_step(nn.Sequential(*layers), (torch.zeros(256, 16),), loss_of, torch.optim.SGD).graph


def stage(in_flight: int = IN_FLIGHT) -> TrainGraph:
    return copied(_captured()).replace(in_flight=in_flight)


@functools.cache
def planned(budget: Any = None, in_flight: int = IN_FLIGHT) -> Planned:
    return search.run(stage(in_flight), parse_options({"memory_budget": budget, "profile": "cpu"}))


def saved(planned_graph: Planned) -> int:
    """What forward has saved, and of the batch what a later operator reads."""
    memory = build_memory(planned_graph.graph)
    (batch,) = (s for s in memory.storages if s.producer < 0 and s.nbytes == 256 * 16 * 4)
    late = any(memory.operators[use].phase is not Phase.FORWARD for use in memory.uses[batch.index])
    return memory.saved_bytes + batch.nbytes * late


@pytest.mark.parametrize("budget", [None, "70%", "min"])
def test_what_is_needed_is_the_peak_of_one_and_what_the_others_have_saved(budget: Any) -> None:
    planned_graph = planned(budget)
    assert planned_graph.plan.waiting_bytes == (IN_FLIGHT - 1) * saved(planned_graph) > 0
    assert planned_graph.plan.needed_bytes > planned_graph.plan.peak_bytes + planned_graph.plan.waiting_bytes
    phases = [op.phase is Phase.FORWARD for op in build_memory(planned_graph.graph).operators]
    assert phases == sorted(phases, reverse=True), "forward runs apart"
    assert "in flight" in str(planned_graph.plan)


def test_a_budget_is_kept_with_all_that_are_in_flight() -> None:
    free, kept = planned(), planned("70%")
    eager = _captured()
    assert kept.plan.needed_bytes <= kept.plan.budget_bytes < free.plan.needed_bytes
    assert kept.plan.budget_bytes > 0.7 * ((IN_FLIGHT - 1) * build_memory(eager).saved_bytes)
    alone = planned(kept.plan.needed_bytes - kept.plan.waiting_bytes, 1)
    assert saved(kept) < saved(alone), "one micro-batch alone drops nothing for this peak"


def test_a_share_of_time_lowers_what_waits_too() -> None:
    free, plan = planned().plan, planned("+5%").plan
    assert plan.needed_bytes < 0.97 * free.needed_bytes
    assert plan.waiting_bytes < free.waiting_bytes
    assert 0 < plan.added_seconds <= 0.05 * plan.step_seconds


def test_the_smallest_budget_is_kept() -> None:
    lowest = planned("min")
    assert lowest.plan.needed_bytes < planned("70%").plan.needed_bytes
    assert planned(lowest.plan.needed_bytes).plan.needed_bytes <= lowest.plan.needed_bytes


def test_a_plan_is_for_as_many_micro_batches_as_it_was_made_for() -> None:
    options = parse_options({"profile": "cpu"})
    plan = Plan.from_json(planned("70%").plan.to_json())
    assert search.run(stage(), options, plan).plan.decisions == plan.decisions
    with pytest.raises(PlanError):
        search.run(stage(1), options, plan)
    wrong = {**plan.decisions["layout"], "waiting_bytes": 1}
    with pytest.raises(PlanError, match="waiting_bytes"):
        search.run(stage(), options, dataclasses.replace(plan, decisions={**plan.decisions, "layout": wrong}))


def test_judge_names_a_forward_that_does_not_run_apart() -> None:
    graph = stage()
    first = build_memory(graph).operators[0].node.name
    mixed = graph.replace(phase={**graph.phase, first: Phase.BACKWARD})
    verify.check_graph(mixed.replace(in_flight=1), "reorder")
    with pytest.raises(VerifyError, match="belongs to FORWARD but stands behind or reads from BACKWARD"):
        verify.check_graph(mixed, "reorder")


def test_judge_names_a_layout_that_forgets_those_in_flight() -> None:
    planned_graph = planned("70%")
    layout = planned_graph.graph.layout
    assert layout is not None
    check_layout(planned_graph.graph)
    wrong = dataclasses.replace(layout, needed_bytes=layout.needed_bytes - planned_graph.plan.waiting_bytes)
    with pytest.raises(VerifyError, match=f"above the {wrong.needed_bytes} that the layout says"):
        check_layout(planned_graph.graph.replace(layout=wrong))


def test_a_batch_tensor_that_comes_twice_waits_once() -> None:
    model, x = nn.Linear(16, 16), torch.zeros(64, 16)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) * y).square().sum()  # type: ignore[no-any-return]

    def waiting(*batch: Tensor) -> int:
        graph = captured_step(model, batch, loss, torch.optim.SGD).graph
        return search.run(graph.replace(in_flight=2), parse_options({"profile": "cpu"})).plan.waiting_bytes

    assert waiting(x, x) == waiting(x, x.clone()) - x.nbytes

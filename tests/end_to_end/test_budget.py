"""A budget changes what is kept, never a bit of what comes out: losses, gradients, parameters, random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roamc import pipeline
from roamc.errors import BudgetError
from roamc.options import Options
from tests.graphs import assert_same, clones, model_graph
from tests.models import MODELS
from tests.test_pipeline import run_program

BUDGETS = ("70%", "min")
SMALL = {"layout_nodes": 10_000}


def planned(name: str, route: str, budget: str | None) -> tuple[pipeline.Planned, list[Any]]:
    """The plan, with the lowest budget instead of one that cannot be kept."""
    graph, inputs = model_graph(name, route)
    try:
        return pipeline.run(graph, Options(memory_budget=budget, **SMALL)), inputs
    except BudgetError:
        return planned(name, route, "min")


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("name", MODELS)
def test_budget_leaves_every_bit(name: str, route: str) -> None:
    free, inputs = planned(name, route, None)
    used = clones(inputs)
    torch.manual_seed(5)
    expected = run_program(free, used)
    state = torch.get_rng_state()
    for budget in BUDGETS:
        found, _ = planned(name, route, budget)
        again = clones(inputs)
        torch.manual_seed(5)
        got = run_program(found, again)
        assert torch.equal(torch.get_rng_state(), state), budget
        assert_same([*expected, *used], [*got, *again], f"{name}, {route}, {budget}")
        assert not found.plan.budget_bytes or found.plan.needed_bytes <= found.plan.budget_bytes

"""A budget changes what is kept, never a bit of what comes out: losses, gradients, parameters, random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from roamc.errors import BudgetError
from roamc.options import Options
from roamc.planning import search
from tests.end_to_end.helpers import (
    adamw,
    assert_backward_equal,
    assert_steps_equal,
    gradients_of,
    noise,
    optimized,
    seeded,
    square,
)
from tests.graphs import assert_same, clones, model_graph
from tests.models import MODELS
from tests.planning.test_pipeline import run_program

BUDGETS = ("70%", "min")
LONG = dict.fromkeys(("lstm", "t5", "resnet50", "mobilenetv2"), ("40%",))
"""Many operators: each plan takes long, the lowest peak longest."""

SMALL = {"layout_nodes": 10_000}


def planned(name: str, route: str, budget: str | None) -> tuple[planned.Planned, list[Any], bool]:
    """The plan, the inputs, and whether the budget is kept; the lowest plan that was found where it cannot be."""
    graph, inputs = model_graph(name, route)
    try:
        return search.run(graph, Options(memory_budget=budget, **SMALL)), inputs, True
    except BudgetError as error:
        return search.run(model_graph(name, route)[0], Options(**SMALL), error.plan), inputs, False


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("name", MODELS)
def test_budget_leaves_every_bit(name: str, route: str) -> None:
    free, inputs, _ = planned(name, route, None)
    used = clones(inputs)
    torch.manual_seed(5)
    expected = run_program(free, used)
    state = torch.get_rng_state()
    for budget in LONG.get(name, BUDGETS):
        budgeted, _, kept = planned(name, route, budget)
        again = clones(inputs)
        torch.manual_seed(5)
        got = run_program(budgeted, again)
        assert torch.equal(torch.get_rng_state(), state), budget
        assert_same([*expected, *used], [*got, *again], f"{name}, {route}, {budget}")
        if not kept or not budgeted.plan.budget_bytes:
            break  # that was the lowest
        assert budgeted.plan.needed_bytes <= budgeted.plan.budget_bytes


class Masked(nn.Module):
    """Dropout, pooling and a relu of which backward reads the sign: each leaves something that takes fewer bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = F.dropout(F.max_pool2d(F.relu(self.wide(x)), 2), 0.3)
        return self.head(F.dropout(x, 0.2).flatten(1))


def codecs_of(plan: roamc.Plan) -> set[str]:
    return {codec for _, codec, *_ in plan.decisions["retain"]["codes"]}


def test_smaller_forms_pass_from_forward_to_backward_of_a_compiled_model() -> None:
    """Two forwards in flight as well: each has codes of its own."""
    torch.manual_seed(0)
    batches = [(noise(16, 3, 32, 32, seed=seed),) for seed in range(3)]
    model = assert_backward_equal(Masked(), square, batches, lambda m: optimized(m, memory_budget="88%"))
    assert "signs" in codecs_of(roamc.plans(model)[0])
    first, second = (seeded(square, model, *batch) for batch in batches[:2])
    model.zero_grad()
    (first + second).backward()
    gradients = gradients_of(model)
    model.zero_grad()
    for batch in batches[:2]:
        seeded(square, model, *batch).backward()
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradients[name], gradient)


def test_whole_steps_with_smaller_forms_train_to_the_same_bits() -> None:
    torch.manual_seed(0)
    batches = [(noise(16, 3, 32, 32, seed=seed),) for seed in range(3)]
    step = assert_steps_equal(Masked(), square, adamw, batches, memory_budget="88%")
    assert codecs_of(roamc.plans(step)[0])

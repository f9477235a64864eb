"""Pass products: which products oneDNN makes, what is refused, and that a step with them is as good as without."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.compat_groups import planned_for
from roamc.compat_onednn import product_into
from roamc.errors import OptionError, PlanError, VerifyError
from roamc.graph import copied
from roamc.graph.ranks import with_same_plan
from roamc.operators.onednn import ONEDNN
from roamc.options import Options, parse_options
from roamc.passes import products
from roamc.passes.products import Decision
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.graphs import model_graph, traced
from tests.shards import GROUP, captured

pytestmark = pytest.mark.skipif(product_into() is None, reason="this torch has no such product by oneDNN")
FAST = Options(numerics="fast")


@pytest.fixture(autouse=True)
def onednn_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every product, on any machine."""
    monkeypatch.setattr(products, "faster_by_onednn", frozenset)


def chosen(function: Callable[..., Any], *inputs: Any, options: Options = FAST) -> tuple[str, ...]:
    return products.decide(traced(function, *inputs), options).onednn


F32 = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (torch.mm, (F32.double(), F32.double())),
        (torch.mm, (F32.bfloat16(), F32.bfloat16())),
        (torch.mm, (F32.long(), F32.long())),
        (torch.mm, (torch.ones(4, 0), torch.ones(0, 4))),
        (torch.mm, (torch.ones(0, 4), F32)),
        (lambda a, b: torch.addmm(a, b, b, alpha=0.5), (F32, F32)),
        (lambda a, b: torch.addmm(a, b, b, beta=2), (F32, F32)),
        (torch.mv, (F32, torch.ones(4))),
    ],
    ids=["float64", "bfloat16", "whole numbers", "no depth", "no rows", "alpha", "beta", "vector"],
)
def test_other_products_stay(function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    assert chosen(function, *inputs) == ()


def test_exact_leaves_all_products_to_torch() -> None:
    assert chosen(torch.mm, F32, F32, options=Options()) == ()
    assert chosen(torch.mm, F32, F32) == ("mm",)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch warns of it whatever is set
def test_the_user_may_switch_onednn_off() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        assert chosen(torch.mm, F32, F32) == ()


def test_slower_forms_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "faster_by_onednn", lambda forms: frozenset(f for f in forms if f.rows > 4))
    assert chosen(lambda a, b: (a @ a) + (b @ b)[:4, :4], F32, torch.ones(8, 8)) == ("mm_1",)


@pytest.mark.parametrize("name", ["sum_1", "a", "mm_1"])
def test_decision_of_what_is_no_such_product_is_refused(name: str) -> None:
    graph = traced(lambda a, b: (a @ a).sum() + (b @ b).sum(), F32, F32.double())
    with pytest.raises(PlanError, match=f"'{name}' is no product of float32 matrices on a CPU"):
        products.apply(graph, Decision((name,)))


def test_ranks_with_copies_of_parameters_take_one_library_or_torchs() -> None:
    """Each would measure for itself: with other bits on each rank, their copies drift apart."""
    with planned_for({GROUP: range(2)}):
        apart = captured("gpt")
        one_plan = with_same_plan(captured("gpt"), [GROUP])
        chosen_together = products.decide(one_plan, FAST)
        assert chosen_together.onednn
        assert products.decide(apart, FAST) == Decision()
        with pytest.raises(PlanError, match=f"the ranks of '{GROUP}' plan apart, and another rank may leave "):
            products.apply(apart, chosen_together)


def test_a_plan_with_products_of_onednn_is_refused_under_exact() -> None:
    graph = model_graph("nanogpt", "step")[0]
    plan = search.run(copied(graph), FAST).plan
    assert plan.decisions["products"]["onednn"]
    assert search.run(copied(graph), FAST, Plan.from_json(plan.to_json())).plan == plan
    with pytest.raises(VerifyError, match=r"onednn_\w+.default, which sums in another order .*'numerics': 'fast'"):
        search.run(copied(graph), Options(), plan)


def test_a_plan_for_a_torch_with_onednn_runs_without_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = model_graph("nanogpt", "step")[0]
    plan = search.run(copied(graph), FAST).plan
    monkeypatch.setattr(products, "product_into", lambda: None)
    assert search.run(copied(graph), FAST, plan).plan.notes == (*plan.notes, products.MISSING)
    assert search.run(copied(graph), FAST).plan.decisions["products"]["onednn"] == ()


def test_unknown_numerics_name_the_nearest() -> None:
    with pytest.raises(OptionError, match="numerics must be one of exact, fast, not 'fats'; did you mean 'fast'"):
        parse_options({"numerics": "fats"})


# -- whole steps ------------------------------------------------------------------------------------


class Model(nn.Module):
    """Attention, layers with and without a bias, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mix = nn.Linear(24, 48), nn.MultiheadAttention(48, 4, batch_first=True)
        self.wide, self.leave = nn.Linear(48, 96, bias=False), nn.Linear(96, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.enter(x))
        hidden = hidden + self.mix(hidden, hidden, hidden)[0]
        return self.leave(torch.tanh(self.wide(hidden)))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trained(
    kind: torch.dtype, way: str | None, steps: int = 3, **options: Any
) -> tuple[list[Tensor], list[Tensor], list[Plan]]:
    """Losses and parameters after some steps, and the latest plan; ``way`` None is eager."""
    torch.manual_seed(0)
    model, batches = Model().to(kind), [torch.randn(6, 20, 24).to(kind) for _ in range(steps)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "train_step":
        step = roamc.train_step(model, square, optimizer, strict=True, **options)
        return [step(x).detach().clone() for x in batches], list(model.parameters()), step.plans
    run: Any = model
    if way is not None:
        run = (
            torch.compile(model, backend="roamc", options={"strict": True, **options})
            if way == "compile"
            else (roamc.optimize(model, strict=True, **options))
        )
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = square(run, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses, list(model.parameters()), roamc.plans()[-1:]


@pytest.mark.parametrize("way", ["train_step", "optimize", "compile"])
def test_a_fast_step_is_as_good_as_an_exact_one(way: str) -> None:
    torch._dynamo.reset()
    best = torch.cat([p.flatten() for p in trained(torch.float64, None)[1]]).double()
    (_, exact, _), (_, fast, plans) = (trained(torch.float32, way, numerics=kind) for kind in ("exact", "fast"))
    assert plans[0].decisions["products"]["onednn"]  # whether its bits are others depends on the processor
    exact, fast = (torch.cat([p.detach().flatten() for p in parameters]).double() for parameters in (exact, fast))
    assert (fast - best).norm() <= 2 * (exact - best).norm()


@pytest.mark.parametrize("way", ["train_step", "optimize"])
@pytest.mark.parametrize("budget", ["light", "min"])
def test_recomputed_products_have_their_bits(way: str, budget: str | None) -> None:
    torch._dynamo.reset()
    plain, again = (trained(torch.float32, way, numerics="fast", memory_budget=limit) for limit in (None, budget))
    assert all(map(torch.equal, plain[0], again[0]))
    assert all(map(torch.equal, plain[1], again[1]))


def test_a_lowest_plan_runs_such_products_again() -> None:
    graph = model_graph("nanogpt", "step")[0]
    plan = search.run(graph, dataclasses.replace(FAST, memory_budget="min")).plan
    reruns = {operator for _, operator, *_ in plan.decisions["retain"]["reruns"]}
    assert reruns.intersection(plan.decisions["products"]["onednn"])


def test_disabled_pass_leaves_products_to_torch() -> None:
    planned = search.run(model_graph("nanogpt", "step")[0], dataclasses.replace(FAST, disable=("products",)))
    assert "products" not in planned.plan.decisions
    assert not {node.target for node in planned.graph.graph.nodes}.intersection(ONEDNN.values())


def test_a_copied_step_is_fast_as_well() -> None:
    model = nn.Linear(64, 64)
    step = roamc.train_step(model, square, torch.optim.SGD(model.parameters(), lr=0.1), numerics="fast")
    step(torch.randn(32, 64))
    assert "onednn" in copy.deepcopy(step).plan(torch.randn(32, 64)).to_json()

"""Pass async_tp: which collectives run with their products, what they give, and which faults the judge names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from roamc.compat_groups import planned_for
from roamc.cost import load_profile, seconds
from roamc.cost.collectives import collective_seconds, sent_bytes, traffic
from roamc.cost.workspace import workspace_bytes
from roamc.errors import OptionError, PlanError, VerifyError
from roamc.graph import TrainGraph, copied, operators, value_flow
from roamc.graph.ranks import with_same_plan
from roamc.graph.value_numbers import Flow, Numbers
from roamc.graph.verify import check_graph, constraints
from roamc.operators.products_sent import ALL_GATHER_MM, MM_REDUCE_SCATTER
from roamc.options import Options, parse_options
from roamc.passes import async_tp, shard
from roamc.passes.async_tp import Decision
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.graphs import traced
from tests.parallel import KINDS
from tests.shards import COLLECTIVES, GROUP, captured, counted, inputs_of, run_ranks

aten = torch.ops.aten
FAST = Options(numerics="fast", async_tp="on", profile="a100")
A100 = load_profile(profile="a100")
X = torch.zeros(8, 8)
BIG = torch.zeros(1024, 1024, device="meta")


@functools.cache
def _sharded(kind: str) -> TrainGraph:
    with planned_for({GROUP: range(2)}):
        graph = captured(kind)
        return shard.apply(graph, shard.decide(graph, Options(shard="sequence")))


def sharded(kind: str = "llama") -> TrainGraph:
    """The graph of one rank behind pass shard: the caller's to change."""
    return copied(_sharded(kind))


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every collective is worth it, however small."""
    monkeypatch.setattr(async_tp, "_faster", lambda graph, decision, options: decision)


def decided(function: Callable[..., Any], *inputs: Tensor, phases: str = "") -> Decision:
    graph = traced(function, *(inputs or (X, X)), **({"phases": phases} if phases else {}))
    return async_tp.decide(graph, FAST)


def applied(graph: TrainGraph) -> tuple[TrainGraph, TrainGraph, Flow]:
    """The graph, the one behind the pass, checked by the judges, and the values of the first."""
    before, limits = value_flow.read(graph, Numbers()), constraints(graph)
    after = async_tp.apply(copied(graph), async_tp.decide(graph, FAST))
    check_graph(after, "async_tp", limits, deep=True)
    value_flow.check(after, before, "async_tp", fast=True)
    return graph, after, before


def gathered(x: Tensor) -> Tensor:
    return COLLECTIVES.all_gather_into_tensor(x, 2, GROUP)  # type: ignore[no-any-return]


def scattered(x: Tensor, reduction: str = "sum") -> Tensor:
    return COLLECTIVES.reduce_scatter_tensor(x, reduction, 2, GROUP)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_collectives_and_products(kind: str) -> None:
    graph, after, _ = applied(sharded(kind))
    forward = {"gpt": (0, 2), "llama": (2, 2), "bert": (0, 2)}[kind]  # biases are added by addmm
    assert counted(after).get(("FORWARD", "all_gather_mm"), 0) == forward[0]
    assert counted(after)["FORWARD", "mm_reduce_scatter"] == forward[1]
    assert counted(after)["BACKWARD", "all_gather_mm"] == 2
    inputs = inputs_of(kind, 2)
    results = []
    for one in (graph, after):
        torch.manual_seed(0)
        results.append(run_ranks(one, inputs))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_exact_and_off_leave_all_as_it_is() -> None:
    graph = sharded()
    for options in (Options(async_tp="on"), Options(numerics="fast"), Options(numerics="fast", async_tp="off")):
        assert async_tp.decide(graph, options) == Decision()


def test_groups_with_symmetric_memory_are_taken_by_themselves_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, auto = sharded(), Options(numerics="fast", profile="a100")
    graph = with_same_plan(alone, [GROUP])
    monkeypatch.setattr(async_tp, "_faster", lambda graph, decision, options: decision)
    monkeypatch.setattr(async_tp, "has_symmetric_memory", {GROUP}.__contains__)
    assert async_tp.decide(graph, auto) == Decision()
    monkeypatch.setattr(async_tp, "main_device", lambda graph: torch.device("cuda"))
    assert async_tp.decide(graph, auto) == async_tp.decide(graph, FAST) != Decision()
    assert async_tp.decide(alone, auto) == async_tp.decide(alone, FAST) == Decision()  # other ranks may run others
    monkeypatch.setattr(async_tp, "has_symmetric_memory", {"another"}.__contains__)
    assert async_tp.decide(graph, auto) == Decision()


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: gathered(x).t() @ w.repeat(2, 1),
        lambda x, w: gathered(x)[:8] @ w,
        lambda x, w: gathered(x) @ gathered(w)[:8],  # which is not there yet
        lambda x, w: gathered(x.view(2, 4, 8)).view(16, 8).relu() @ w,
        lambda x, w: torch.addmm(w[0], gathered(x), w),
        lambda x, w: scattered(x @ w, "max"),
        lambda x, w: scattered((x @ w).t()),
        lambda x, w: scattered(product := x @ w) + product[:4],
        lambda x, w: scattered(torch.relu(x @ w)),
        lambda x, w: (aten.add_(y := gathered(x), 1.0), y @ w)[1],
        lambda x, w: (y := gathered(x), aten.add_(w, 1.0), y @ w)[2],
        lambda x, w: (y := x @ w, aten.add_(w, 1.0), scattered(y))[2],
    ],
    ids=[
        *("turned", "a part", "later matrix", "other product", "bias", "maximum", "turned product", "read twice"),
        *("not a product", "written after gathering", "matrix written", "factor written"),
    ],
)
def test_other_products_stay(function: Callable[..., Any]) -> None:
    first = decided(function)
    assert not first.scatters
    assert all("mm_1" not in names for names in first.gathers.values())
    assert not {name for name in first.gathers if name == "all_gather_into_tensor"}


@pytest.mark.usefixtures("pays")
def test_products_of_another_phase_stay() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        rows = gathered(x)
        return scattered(rows @ w) + (rows @ w)[:8]

    both = traced(step, X, X)
    assert async_tp.decide(both, FAST) == Decision({"all_gather_into_tensor": ("mm", "mm_1")})
    names = [node.name for node in operators(both.graph)]
    later = both.replace(phase={name: type(both.phase[name])(int(name != names[0])) for name in names})
    assert async_tp.decide(later, FAST) == Decision({}, {"reduce_scatter_tensor": "mm"})


def test_only_what_pays_by_the_profile_is_taken() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        return scattered(gathered(x) @ w @ w)

    with planned_for({GROUP: range(2)}):
        assert decided(step) == Decision()  # a launch more for each rank's rows
        large = decided(step, BIG, BIG)
    assert large == Decision({"all_gather_into_tensor": ("mm",)}, {"reduce_scatter_tensor": "mm_1"})


def test_cost_is_the_longer_of_product_and_ring_and_launches() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        rows = gathered(x)
        return scattered(rows @ w @ w) + (rows @ w)[:1024]

    graph = traced(step, BIG, BIG)
    with planned_for({GROUP: range(2)}):
        apart = {node.name: node for node in operators(graph.graph)}
        alone = {name: seconds(node, A100) - A100.overhead for name, node in apart.items()}
        sent = {name: sent_bytes(apart[name], 2) for name in ("all_gather_into_tensor", "reduce_scatter_tensor")}
        products = alone["mm"] + alone["mm_2"], alone["mm_1"]
        after = async_tp.apply(copied(graph), async_tp.decide(graph, FAST))
        gather, scatter = (node for node in operators(after.graph) if node.target in (ALL_GATHER_MM, MM_REDUCE_SCATTER))
        rings = [collective_seconds(node, A100) for node in (gather, scatter)]
        assert seconds(gather, A100) == pytest.approx(4 * A100.overhead + max(products[0], rings[0] or 0.0))
        assert seconds(scatter, A100) == pytest.approx(2 * A100.overhead + max(products[1], rings[1] or 0.0))
        assert [sent_bytes(node, 2) for node in (gather, scatter)] == list(sent.values())
        assert traffic(after, GROUP, 2) == traffic(graph, GROUP, 2)
    assert workspace_bytes(gather, 1) == 2 * BIG.nbytes
    assert workspace_bytes(scatter, 1) == 2 * BIG.nbytes


@pytest.mark.parametrize(
    "decision",
    [
        Decision({"nobody": ("mm",)}),
        Decision({"shard_all_gather": ()}),
        Decision({"shard_all_gather": ("mm_4",)}),
        Decision({"shard_reduce_scatter": ("mm_3",)}),
        Decision({}, {"shard_reduce_scatter": "mm_6"}),
        Decision({}, {"shard_all_gather": "mm"}),
        Decision({}, {"shard_reduce_scatter_2": "mm_13"}),
    ],
)
def test_decision_that_does_not_fit_the_graph_is_refused(decision: Decision) -> None:
    with pytest.raises(PlanError, match=r"cannot run with the (all-gather|reduce-scatter) '\w+' of this graph"):
        async_tp.apply(sharded(), decision)


def test_a_part_of_the_products_is_as_good() -> None:
    graph = sharded()
    before = value_flow.read(graph, Numbers())
    after = async_tp.apply(copied(graph), Decision({"shard_all_gather": ("mm_1",)}))
    check_graph(after, "async_tp", deep=True)
    value_flow.check(after, before, "async_tp", fast=True)
    (gather,) = (node for node in operators(after.graph) if node.target is ALL_GATHER_MM)
    assert gather.args[4] is True


def _with(position: int, value: Any) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        node.args = (*node.args[:position], value, *node.args[position + 1 :])

    return change


def _swapped(node: fx.Node) -> None:
    others: Any = node.args[1]
    _with(1, [others[0], others[2], others[1]])(node)


def _as(name: str, argument: int) -> Callable[[fx.Node], None]:
    """The argument of another operator in the place of one's own."""

    def change(node: fx.Node) -> None:
        (other,) = (each for each in node.graph.nodes if each.name == name)
        _with(argument, other.args[argument])(node)

    return change


def _repicked(node: fx.Node) -> None:
    (second,) = (user for user in node.users if user.args[1] == 1)
    _with(1, 2)(second)


FAULTS: dict[str, tuple[str, Callable[[fx.Node], None]]] = {
    "matrices swapped": ("shard_all_gather", _swapped),
    "other group": ("shard_all_gather", _with(3, "others")),
    "other number of ranks": ("shard_all_gather", _with(2, 4)),
    "rows of another gather": ("shard_all_gather_1", _as("shard_all_gather", 0)),
    "another product picked": ("shard_all_gather", _repicked),
    "mean for the sum": ("shard_reduce_scatter", _with(2, "avg")),
    "other factor": ("shard_reduce_scatter_1", _as("shard_reduce_scatter", 0)),
    "scattered in another group": ("shard_reduce_scatter", _with(4, "others")),
}


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("fault", FAULTS)
def test_judge_of_values_names_a_fault(fault: str) -> None:
    _, after, before = applied(sharded())
    name, change = FAULTS[fault]
    change(next(node for node in after.graph.nodes if node.name == name))
    with pytest.raises(VerifyError, match="after pass 'async_tp'"):
        value_flow.check(after, before, "async_tp", fast=True)


@pytest.mark.usefixtures("pays")
def test_a_plan_is_kept_and_is_refused_under_exact() -> None:
    fast = Options(numerics="fast", async_tp="on", profile="a100", shard="sequence")
    with planned_for({GROUP: range(2)}):
        planned = search.run(captured("llama"), fast, deep=True)
        assert len(planned.plan.decisions["async_tp"]["gathers"]) == 4
        plan = Plan.from_json(planned.plan.to_json())
        assert search.run(captured("llama"), fast, plan).plan == plan
        with pytest.raises(VerifyError, match=r"all_gather_mm.default, which sums in another order than an all-gather"):
            search.run(captured("llama"), Options(shard="sequence"), plan)


def test_unknown_word_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="async_tp must be one of auto, on, off, not 'onn'; did you mean 'on'"):
        parse_options({"async_tp": "onn"})

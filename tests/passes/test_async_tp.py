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
    monkeypatch.setattr(async_tp, "_faster", lambda graph, decision, sums, options: decision)


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
    pairs = [(phase, name) for phase in ("FORWARD", "BACKWARD") for name in ("all_gather_mm", "mm_reduce_scatter")]
    assert [counted(after)[pair] for pair in pairs] == [2, 2, 2, 2]
    together = [node for node in operators(after.graph) if node.target in (ALL_GATHER_MM, MM_REDUCE_SCATTER)]
    biases = [len([bias for bias in node.args[5] if bias]) for node in together if node.target is ALL_GATHER_MM]  # type: ignore[union-attr, misc]
    assert biases == ([0] * 4 if kind == "llama" else [3, 1, 0, 0]), "of q, k and v; of up"
    sums = [len(node.args[0]) for node in together if node.target is MM_REDUCE_SCATTER]  # type: ignore[arg-type]
    assert sums == [1, 1, 2 if kind == "llama" else 1, 3], "of up and gate; of q, k and v"
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
    monkeypatch.setattr(async_tp, "_faster", lambda graph, decision, sums, options: decision)
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
        lambda x, w: torch.addmm(w.repeat(2, 1), gathered(x), w),
        lambda x, w: torch.addmm(w[0], gathered(x), w, beta=2),
        lambda x, w: torch.addmm(gathered(w)[0], gathered(x), w)[:4],  # which is not there yet
        lambda x, w: scattered(x @ w, "max"),
        lambda x, w: scattered(x @ w + x.relu()),
        lambda x, w: scattered(torch.add(x @ w, w @ x, alpha=2)),
        lambda x, w: scattered(x @ w + (w @ x + w @ w)),  # summed from the last
        lambda x, w: scattered(x @ w + torch.addmm(w[0], w, x)),
        lambda x, w: scattered(x @ w + w[:1] @ x),
        lambda x, w: scattered(w[:1] @ x + x @ w),
        lambda x, w: scattered(x @ w[:, :1] + x @ w),
        lambda x, w: scattered(x @ w + x.bfloat16() @ w.bfloat16()),
        lambda x, w: scattered(y := x @ w + w @ x) + y[:4],
        lambda x, w: scattered((x @ w).t()),
        lambda x, w: scattered(product := x @ w) + product[:4],
        lambda x, w: scattered(torch.relu(x @ w)),
        lambda x, w: (aten.add_(y := gathered(x), 1.0), y @ w)[1],
        lambda x, w: (y := gathered(x), aten.add_(w, 1.0), y @ w)[2],
        lambda x, w: (y := x @ w, aten.add_(w, 1.0), scattered(y))[2],
    ],
    ids=[
        *("turned", "a part", "later matrix", "other product", "bias for each row", "bias doubled", "later bias"),
        *("maximum", "sum with another", "product doubled", "from the last", "bias of the second"),
        *("one row last", "one row first", "one column", "other dtype", "sum read twice"),
        *("turned product", "read twice"),
        *("not a product", "written after gathering", "matrix written", "factor written"),
    ],
)
def test_other_products_stay(function: Callable[..., Any]) -> None:
    first = decided(function)
    assert not first.scatters
    assert all("mm_1" not in names for names in first.gathers.values())
    assert not {name for name in first.gathers if name == "all_gather_into_tensor"}


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize(
    ("function", "decision"),
    [
        (lambda x, w: torch.addmm(w[0], gathered(x), w), Decision({"all_gather_into_tensor": ("addmm",)})),
        (lambda x, w: torch.addmm(w[:1], gathered(x), w), Decision({"all_gather_into_tensor": ("addmm",)})),
        (lambda x, w: scattered(torch.addmm(w[0], x, w)), Decision({}, {"reduce_scatter_tensor": ("addmm",)})),
        (
            lambda x, w: scattered(torch.addmm(w[0], x, w) + x @ x + w @ x),
            Decision({}, {"reduce_scatter_tensor": ("addmm", "mm", "mm_1")}),
        ),
        (
            lambda x, w: scattered((x @ w).view(2, 4, 8).view(8, 8) + x @ x, "avg"),
            Decision({}, {"reduce_scatter_tensor": ("mm", "mm_1")}),
        ),
    ],
    ids=["bias", "row", "bias of each rank", "sum and bias", "mean"],
)
def test_biases_and_sums_give_what_they_gave(function: Callable[..., Any], decision: Decision) -> None:
    graph, after, _ = applied(traced(function, X, X))
    assert async_tp.decide(graph, FAST) == decision
    torch.manual_seed(0)
    inputs = [[torch.randn(8, 8), torch.randn(8, 8)] for _ in range(2)]
    names = {node.name for node in operators(after.graph)}
    assert names.isdisjoint({"mm", "mm_1", "add", "add_1"} if decision.scatters else {})
    if "avg" not in str(graph.graph):
        torch.testing.assert_close(run_ranks(after, inputs), run_ranks(graph, inputs), rtol=0, atol=0)


@pytest.mark.usefixtures("pays")
def test_products_of_another_phase_stay() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        rows = gathered(x)
        return scattered(rows @ w) + (rows @ w)[:8]

    both = traced(step, X, X)
    assert async_tp.decide(both, FAST) == Decision({"all_gather_into_tensor": ("mm", "mm_1")})
    names = [node.name for node in operators(both.graph)]
    later = both.replace(phase={name: type(both.phase[name])(int(name != names[0])) for name in names})
    assert async_tp.decide(later, FAST) == Decision({}, {"reduce_scatter_tensor": ("mm",)})


def test_only_what_pays_by_the_profile_is_taken() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        return scattered(gathered(x) @ w @ w)

    with planned_for({GROUP: range(2)}):
        assert decided(step) == Decision()  # a launch more for each rank's rows
        large = decided(step, BIG, BIG)
    assert large == Decision({"all_gather_into_tensor": ("mm",)}, {"reduce_scatter_tensor": ("mm_1",)})


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
        Decision({}, {"shard_reduce_scatter": ("mm_6",)}),
        Decision({}, {"shard_all_gather": ("mm",)}),
        Decision({}, {"shard_reduce_scatter_2": ("mm_13",)}),
        Decision({}, {"shard_reduce_scatter_2": ("mm_15", "mm_13")}),
        Decision({"shard_all_gather_2": ("mm_11",)}, {"shard_reduce_scatter": ()}),
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


def _turned_round(position: int) -> Callable[[fx.Node], None]:
    """What the argument at ``position`` lists, from the last to the first."""

    def change(node: fx.Node) -> None:
        listed: Any = node.args[position]
        _with(position, [*reversed(listed)])(node)

    return change


def _cut(position: int) -> Callable[[fx.Node], None]:
    """The argument at ``position`` without the last that it lists."""

    def change(node: fx.Node) -> None:
        listed: Any = node.args[position]
        _with(position, listed[:-1])(node)

    return change


FAULTS: dict[str, tuple[str, str, Callable[[fx.Node], None]]] = {
    "matrices swapped": ("llama", "shard_all_gather", _swapped),
    "other group": ("llama", "shard_all_gather", _with(3, "others")),
    "other number of ranks": ("llama", "shard_all_gather", _with(2, 4)),
    "rows of another gather": ("llama", "shard_all_gather_1", _as("shard_all_gather", 0)),
    "another product picked": ("llama", "shard_all_gather", _repicked),
    "mean for the sum": ("llama", "shard_reduce_scatter", _with(3, "avg")),
    "other factor": ("llama", "shard_reduce_scatter_1", _as("shard_reduce_scatter", 0)),
    "scattered in another group": ("llama", "shard_reduce_scatter", _with(5, "others")),
    "factors of other products": ("llama", "shard_reduce_scatter_2", _turned_round(0)),
    "summed from the last": (
        "llama",
        "shard_reduce_scatter_3",
        lambda node: (_turned_round(0)(node), _turned_round(1)(node))[0],
    ),
    "a product left out": ("llama", "shard_reduce_scatter_3", lambda node: (_cut(0)(node), _cut(1)(node))[0]),
    "biases left out": ("gpt", "shard_all_gather", _with(5, [])),
    "biases swapped": ("gpt", "shard_all_gather", _turned_round(5)),
    "bias added again by every rank": (
        "gpt",
        "shard_reduce_scatter",
        lambda node: _with(2, node.graph.find_nodes(op="placeholder")[8])(node),
    ),
}


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("fault", FAULTS)
def test_judge_of_values_names_a_fault(fault: str) -> None:
    kind, name, change = FAULTS[fault]
    _, after, before = applied(sharded(kind))
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

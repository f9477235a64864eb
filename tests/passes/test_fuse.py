"""Pass fuse: which operators run as one, what stays whole, what is refused, and that no bit and no peak is worse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import roamc
from roamc import cost
from roamc.codegen.source import emit
from roamc.cost.tensor_objects import OBJECT
from roamc.errors import PlanError, VerifyError
from roamc.graph import Phase, TrainGraph, copied, operators, value_flow, verify
from roamc.graph.keep import KEEP, KEY
from roamc.graph.lifetimes import lifetimes, timeline
from roamc.graph.memory import build_memory
from roamc.graph.value_numbers import Numbers
from roamc.operators import blocks, ops
from roamc.operators.fused import Fused
from roamc.operators.fused import fuse as make_group
from roamc.options import Options
from roamc.passes import fuse
from roamc.passes.fuse import Decision, Effort, choose, estimates
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.graphs import assert_same, clones, graph_and_inputs, model_graph, peak, run_real, traced
from tests.models import make
from tests.random_graphs import random_model

aten = torch.ops.aten
X = torch.randn(16, 64)
WHOLE = (
    *("columns", "alternate", "running", "softmax down", "sum down", "random"),
    *("0-dim", "vector", "row", "column", "no rows", "no columns", "sign"),
)
MODELS = ("gpt2", "llama", "bert", "resnet50", "nanogpt-dropout")


@pytest.fixture(autouse=True)
def any_group_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of the smallest tensors as well, in blocks of a few rows."""
    monkeypatch.setattr(choose, "EFFORT", Effort(least_bytes=1, least_share=0.0))
    monkeypatch.setattr(estimates, "group_workspace", lambda group, threads: 0)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 10)


def groups(function: Callable[..., Any], *inputs: Any, phases: str = "") -> tuple[tuple[str, ...], ...]:
    graph = traced(function, *inputs, phases=phases)
    decision = fuse.decide(graph, Options())
    fuse.apply(graph, decision)
    return decision.groups


def fused(graph: TrainGraph) -> TrainGraph:
    return fuse.apply(graph, fuse.decide(graph, Options()))


def group_node(graph: TrainGraph) -> Any:
    return next(node for node in graph.graph.nodes if isinstance(node.target, Fused))


def test_a_chain_whose_values_nobody_else_reads_is_one_group() -> None:
    assert groups(lambda x, y: (x * y).sin() + y, X, X) == (("mul", "sin", "add"),)


def test_a_value_that_is_read_twice_inside_one_group_is_inside() -> None:
    def step(x: Tensor) -> Tensor:
        inner = x.exp()
        return inner * inner.mean(-1, keepdim=True) + inner

    assert groups(step, X) == (("exp", "mean", "mul", "add"),)


def test_a_group_may_end_with_one_element_for_each_row() -> None:
    assert groups(lambda x: (x * x).mean(-1), X) == (("mul", "mean"),)
    assert groups(lambda x: (x.exp() * x).sum(-1, keepdim=True), X) == (("exp", "mul", "sum_1"),)


def test_a_value_that_is_returned_is_no_value_inside() -> None:
    assert groups(lambda x: ((inner := x.sin()), inner.exp()), X) == ()


def test_a_value_that_a_product_reads_is_no_value_inside() -> None:
    def step(x: Tensor) -> Tensor:
        inner = x * 2
        return (inner @ x.t()).sum() + inner.exp().sin().sum()

    assert groups(step, X) == (("exp", "sin"),)


def test_rows_of_views_and_casts_are_followed() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        wide = (x.view(4, 4, 64) * 2).view(16, 64).double()
        return wide * y

    assert groups(step, X, X.double()) == (("mul", "_to_copy", "mul_1"),)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: (x.t() * 2).t().contiguous() + 1, (X,)),
        (lambda x: (x[::2] * 2).sum(0).exp(), (X,)),
        (lambda x: x.cumsum(0).exp(), (X,)),
        (lambda x: torch.softmax(x * 2, 0) @ x.t(), (X,)),
        (lambda x: (x * 2).sum(0) + 1, (X,)),
        (lambda x: (torch.rand_like(x) @ x.t()).exp(), (X,)),
        (lambda x: (x * 2).exp(), (torch.ones(()),)),
        (lambda x: (x * 2).exp(), (torch.ones(64),)),
        (lambda x: (x * 2).exp(), (torch.ones(16, 1),)),
        (lambda x: (x * 2).exp(), (torch.ones(1, 64),)),
        (lambda x: (x * 2).exp(), (torch.ones(0, 64),)),
        (lambda x: (x * 2).exp(), (torch.ones(16, 0),)),
        (lambda x: aten.threshold_backward(x, x.t() @ x @ x.t(), 0).exp(), (torch.randn(16, 16),)),
    ],
    ids=WHOLE,
)
def test_what_does_not_treat_rows_apart_stays(function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    assert groups(function, *inputs) == ()


def test_groups_end_at_the_boundary_of_a_phase() -> None:
    assert groups(lambda x: (x * 2).exp().sin().cos(), X, phases="FFBB") == (("mul", "exp"), ("sin", "cos"))


def written_between(x: Tensor, y: Tensor) -> Tensor:
    inner = x * 2
    x.add_(1)
    return inner + y


def test_a_group_does_not_read_what_was_written_since() -> None:
    assert groups(written_between, X, X) == ()


def test_a_group_that_does_is_refused() -> None:
    with pytest.raises(PlanError, match="add_ and mul use what one of them writes"):
        fuse.apply(traced(written_between, X, X), Decision((("mul", "add"),)))


def test_a_group_that_does_is_found_by_the_judge() -> None:
    graph = traced(written_between, X, X.clone())
    start = value_flow.read(graph, Numbers())
    changed = fuse.apply(graph, Decision((("mul", "add"),)))
    late = next(node for node in changed.graph.nodes if node.name == "add_")
    late.append(group_node(changed))
    with pytest.raises(VerifyError, match="add"):
        value_flow.check(changed, start, "fuse")


def test_operands_are_not_held_until_a_late_one_is_there() -> None:
    """Two operands would wait for the product in the place of one value."""

    def step(x: Tensor, late: Tensor) -> Tensor:
        inner = (x @ x.t()) * (x @ x.t()).sin()
        return inner + late @ late.t()

    graph = traced(step, X, X)
    assert fuse.decide(graph, Options()).groups == (("sin", "mul"),)


def test_a_group_runs_as_soon_as_its_operands_are_there() -> None:
    def step(x: Tensor, up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        inner = x.sin() * up
        other = x @ weight
        return other, aten.silu_backward(inner, up)

    graph = fused(traced(step, X, X, torch.randn(64, 64)))
    assert [node.name for node in graph.graph.nodes if node.op == "call_function"] == ["silu_backward", "mm"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("mul", "nothing"), "no operators mul, nothing"),
        ((), r"no operators \(none\)"),
        (("mul", "mul"), "no operators mul, mul"),
        (("mm", "exp"), "do not lead to one result"),
        (("cumsum", "sin_1"), "does not treat 16 rows of 64 apart"),
        (("exp", "mul"), "do not lead to one result"),
        (("mul", "exp", "sin"), "do not lead to one result"),
        (("cos", "neg"), "belongs to another phase"),
        (("mul", "exp_1"), "mul is read outside"),
        (("t",), "t is a view, and no operator"),
    ],
)
def test_a_decision_that_does_not_fit_is_refused(names: tuple[str, ...], said: str) -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        first = x * 2
        return first @ x.t(), first.exp().sum(-1), x.sin(), x.cos().neg(), first.exp(), x.cumsum(0).sin()

    graph = traced(step, X)
    with pytest.raises(PlanError, match=said):
        fuse.apply(graph.replace(phase={**graph.phase, "neg": Phase.BACKWARD}), Decision((names,)))


def test_what_the_user_keeps_is_no_value_inside() -> None:
    graph = traced(lambda x: (x.sin() * 2).cos(), X)
    first, kept, _ = operators(graph.graph)
    kept.meta["custom"] = {KEY: KEEP}
    assert fuse.decide(graph, Options()).groups == ((first.name, kept.name),)
    with pytest.raises(PlanError, match=r"mul is kept by roamc\.keep"):
        fuse.apply(graph, Decision((("sin", "mul", "cos"),)))


def test_a_group_whose_member_is_exchanged_is_found_by_the_judge() -> None:
    graph = traced(lambda x, y: (x * y).sin() + y, X, X)
    start = value_flow.read(graph, Numbers())
    changed = fused(graph)
    value_flow.check(changed, start, "fuse")
    next(node for node in group_node(changed).target.body.nodes if node.name == "sin").target = aten.cos.default
    with pytest.raises(VerifyError, match="add"):
        value_flow.check(changed, start, "fuse")


def test_a_group_that_gives_another_shape_is_found_by_the_judge() -> None:
    graph = fused(traced(lambda x, y: (x * y).sin() + y, X, X))
    verify.check_graph(graph, "fuse", deep=True)
    node = group_node(graph)
    node.meta["val"] = node.meta["val"].double()
    with pytest.raises(VerifyError, match="float64"):
        verify.check_graph(graph, "fuse", deep=True)


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_give_the_same_bits_at_no_higher_peak(seed: int, route: str) -> None:
    graph, inputs = graph_and_inputs(*random_model(seed), route)
    before, start, kept = peak(graph), value_flow.read(graph, Numbers()), verify.constraints(graph)
    torch.manual_seed(seed)
    wanted, _ = run_real(graph, clones(inputs))
    changed = fused(graph)
    verify.check_graph(changed, "fuse", kept, deep=True)
    value_flow.check(changed, start, "fuse")
    assert peak(changed) <= before
    torch.manual_seed(seed)
    assert_same(run_real(changed, clones(inputs))[0], wanted, f"seed {seed}")


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet50"])
def test_fusing_twice_is_fusing_once(name: str, route: str) -> None:
    graph = fused(model_graph(name, route)[0])
    assert fuse.decide(graph, Options()).groups == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("budget", [None, "70%", "min"])
@pytest.mark.parametrize("name", MODELS)
def test_steps_have_the_bits_of_steps_without_groups(name: str, budget: str | None, dtype: torch.dtype) -> None:
    """Loss and parameters after three steps; every program is judged, and some group of each runs."""
    results = []
    for disable in ((), ("fuse",)):
        torch.manual_seed(0)
        model, batch, loss = make(name, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = roamc.train_step(model, loss, optimizer, strict=True, memory_budget=budget, disable=disable)
        plan = step.plan(*batch)
        assert bool(plan.decisions.get("fuse", {"groups": ()})["groups"]) is not bool(disable)
        results.append([*(step(*batch) for _ in range(3)), *model.parameters(), *model.buffers()])
    assert_same(*results, said=name)


@pytest.mark.parametrize("name", ["evil\nimport os\n#.py", "torn\udc80.py", "nul\0.py"])
def test_a_file_name_cannot_become_code_of_the_program(name: str) -> None:
    graph = traced(lambda x: (x * 2).sin() @ x.t(), X)
    for node in graph.graph.nodes:
        node.meta["stack_trace"] = f'  File "/home/{name}", line 3, in forward\n    x * 2\n'
    planned = search.run(graph, Options())
    source = emit(planned.graph).listing
    assert "import os" not in source.splitlines()
    source.encode()


def test_a_member_that_works_in_pieces_has_whole_pieces_in_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 20)
    x, mask = torch.randn(9602, 64), torch.rand(9602, 64) > 0.5
    graph = traced(lambda x, mask: aten.native_dropout_backward(x.sin(), mask, 2.0).cos(), x, mask)
    nodes = operators(graph.graph)
    group, _ = make_group(nodes[-1], nodes)
    assert cost.group_workspace(group, 1) >= 2 << 20, "a value inside and a piece; the profiler measures 16 kB more"


TAKES_FOR_ANY_ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": lambda x, wide: aten.gelu(x.sin()).cos(),
    "its way back": lambda x, wide: aten.gelu_backward(x, x.sin()).cos(),
    "its way back, of a gradient in wider rows": lambda x, wide: aten.gelu_backward(wide[:, :64], x.sin()).cos(),
}


@pytest.mark.parametrize("block_bytes", [1 << 13, 1 << 20])
@pytest.mark.parametrize("name", TAKES_FOR_ANY_ROWS)
def test_what_a_member_takes_for_any_number_of_rows_it_takes_in_a_block(
    name: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)

    def members(rows: int) -> list[fx.Node]:
        graph = traced(TAKES_FOR_ANY_ROWS[name], torch.randn(rows, 64), torch.randn(rows, 128)).graph
        return [node for node in operators(graph) if not ops.is_view(node.target)]

    nodes = members(9602)
    group, _ = make_group(nodes[-1], nodes)
    rows = group.block_rows(1)
    arguments = sum(node.op == "placeholder" for node in group.body.nodes)
    beside = group.block_bytes(1) + OBJECT * -(-9602 // rows) * (1 + arguments)
    assert cost.group_workspace(group, 1) - beside == cost.workspace_bytes(members(rows)[1], 1), f"{rows} rows"


def test_a_plan_with_groups_comes_back_from_its_text() -> None:
    graph, _ = model_graph("gpt2", "step")
    plan = search.run(copied(graph), Options()).plan
    assert plan.decisions["fuse"]["groups"]
    again = search.run(copied(graph), Options(), Plan.from_json(plan.to_json()))
    assert again.plan.decisions == plan.decisions


class Words(nn.Module):
    """Tied logits over 96 words, a size that no other tensor has in its last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(96, 32), nn.Linear(32, 32)

    def forward(self, words: Tensor) -> Tensor:
        return self.inner(self.table(words)) @ self.table.weight.t()


def of_next_words(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten())


def test_one_tensor_of_tokens_and_words_is_alive_at_a_time() -> None:
    """Log-probabilities and their gradient take the memory of the logits, one after the other."""
    graph, _ = graph_and_inputs(Words(), (torch.randint(96, (4, 40)),), of_next_words, "step")
    memory = build_memory(search.run(graph, Options()).graph)
    large = np.array([storage.nbytes == 160 * 96 * 4 for storage in memory.counted], dtype=np.int64)
    assert large.any()
    assert timeline(large, *lifetimes(memory), len(memory.operators)).max() == 1


LOSSES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weights": {"weight": torch.rand(96)},
    "weights, none": {"weight": torch.rand(96), "reduction": "none"},
    "smooth": {"label_smoothing": 0.1},
    "ignored": {"ignore_index": 3},
}


@pytest.mark.parametrize("rows", [96, 160])  # as many as classes, and more
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_every_kind_have_the_bits_of_eager(name: str, dtype: torch.dtype, rows: int) -> None:
    settings = {key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in LOSSES[name].items()}
    x, labels = torch.randn(rows, 32).to(dtype), torch.randint(96, (rows,))

    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(model(x), labels, **settings)
        return (losses * torch.linspace(0.5, 1.5, rows, dtype=dtype)).sum() if losses.dim() else losses

    results = []
    for planned in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(32, 96).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if planned:
            step = roamc.train_step(model, loss, optimizer, strict=True)
            groups = step.plan(x, labels).decisions["fuse"]["groups"]
            assert any("nll_loss_backward" in group for group in groups) is ("none" not in name)
            loss_value = step(x, labels)
        else:
            loss_value = loss(model, x, labels)
            loss_value.backward()
            optimizer.step()
        results.append([loss_value.detach(), *model.parameters()])
    assert_same(*results, said=name)


def test_small_values_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "EFFORT", Effort())
    assert groups(lambda x, y: (x * y).sin() + y, X, X) == ()
    large = torch.randn(1024, 4096)
    assert groups(lambda x, y: (x * y).sin() + y, large, large) == (("mul", "sin", "add"),)

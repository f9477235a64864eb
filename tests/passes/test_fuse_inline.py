"""fuse: a value that groups of backward rebuild inside is not stored, has its bits, and costs no time that matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import roamc
from roamc.errors import PlanError, VerifyError
from roamc.graph import Phase, TrainGraph, copied, operators, placeholders, value_flow, verify
from roamc.graph.keep import KEEP, KEY
from roamc.graph.memory import build_memory
from roamc.graph.storage_ids import number_result
from roamc.graph.value_numbers import Numbers
from roamc.operators import blocks
from roamc.operators.fused import Fused
from roamc.options import Options
from roamc.passes import fuse
from roamc.passes.fuse import Decision, Effort, choose, estimates, inline, write
from roamc.planning import search
from roamc.planning.plan import Plan
from roamc.report.fused import grouped
from tests.graphs import assert_same, clones, graph_and_inputs, joint_graph, peak, run_real, saved_bytes, traced
from tests.kernel_groups import use_kernels
from tests.models import make
from tests.planning.test_pipeline import run_program
from tests.random_graphs import random_model

aten = torch.ops.aten
X = torch.randn(16, 64)
Made = tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]


@pytest.fixture(autouse=True)
def any_value_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups and copies of the smallest tensors as well, whatever time they take."""
    monkeypatch.setattr(choose, "EFFORT", Effort(least_bytes=1, least_share=0.0))
    monkeypatch.setattr(inline, "EFFORT", inline.Effort(least_bytes=1))
    monkeypatch.setattr(inline._Inliner, "_spare", lambda inliner: 1.0)
    monkeypatch.setattr(estimates, "group_workspace", lambda group, threads: 0)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 10)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of a GPU in programs for a CPU, where their operators run one by one."""
    use_kernels(monkeypatch)


def decided(function: Callable[..., Any], *inputs: Tensor, phases: str) -> Decision:
    return fuse.decide(traced(function, *inputs, phases=phases), Options())


def gate(x: Tensor, y: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """A gate, and the gradient of what it gates."""
    inner = x.sigmoid()
    return inner * y, gradient * inner


def test_what_backward_reads_is_rebuilt_in_its_group_and_stored_nowhere() -> None:
    graph = traced(gate, X, X, X, phases="FFB")
    decision = fuse.decide(graph, Options())
    assert decision.copies == (("sigmoid_in_mul_1", "sigmoid", "mul_1"),)
    assert decision.groups == (("sigmoid", "mul"), ("sigmoid_in_mul_1", "mul_1"))
    changed = fuse.apply(graph, decision)
    assert saved_bytes(changed) == 0
    assert [storage.name for storage in build_memory(changed).counted] == ["mul", "mul_1"]


def test_operators_of_what_would_live_longer_are_copied_as_well() -> None:
    def step(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        inner = x.sin()
        outer = inner.exp()
        return outer @ inner.t(), gradient * outer

    decision = decided(step, X, X, phases="FFFFB")
    assert decision.copies == (("exp_in_mul", "exp", "mul"), ("sin_in_mul", "sin", "exp_in_mul"))
    assert decision.groups == (("sin_in_mul", "exp_in_mul", "mul"),)


def test_what_lives_as_long_anyway_is_read_and_not_copied() -> None:
    def step(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        inner = x @ x.t()
        outer = inner.exp()
        return outer @ x, gradient * outer, inner @ gradient

    decision = decided(step, X, torch.randn(16, 16), phases="FFFFBB")
    assert decision.copies == (("exp_in_mul", "exp", "mul"),)


@pytest.mark.usefixtures("kernels")
def test_a_value_inside_a_group_that_a_copy_reads_counts() -> None:
    """It is smaller than what is rebuilt of it, and would be stored in its place: it is rebuilt as well."""

    def step(x: Tensor, y: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        wide = x.sigmoid().float()
        return (wide * y) @ y.t(), gradient * wide

    graph = traced(step, X.bfloat16(), X, X, phases="FFFFFB")
    options = Options(numerics="fast")
    groups = fuse.Decision((("sigmoid", "_to_copy", "mul"),))
    counted = estimates.Estimates.of(write.Site(graph), options)
    inlined = inline.with_inlines(graph, groups, counted, fast=True)
    assert [copy[1] for copy in inlined.decision.copies] == ["_to_copy", "sigmoid"]
    assert saved_bytes(fuse.apply(graph, inlined.decision)) == 0
    assert inlined.ledger.saved() == 16 * 16 * 4  # what forward returns


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("operator", "copied"), [(torch.neg, True), (torch.sin, False)])
def test_a_copy_in_a_kernel_has_the_bits_of_forward(operator: Callable[[Tensor], Tensor], copied: bool) -> None:
    """Forward computes it by ATen, whose sine has other last bits than that of a kernel."""

    def step(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        inner = operator(x)
        return inner @ x.t(), gradient * inner

    decision = fuse.decide(traced(step, X, X, phases="FFFB"), Options(numerics="fast"))
    assert bool(decision.copies) is copied


def test_every_reader_has_a_copy() -> None:
    def step(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        inner = x.sigmoid()
        return inner @ x.t(), (gradient * inner) @ x.t(), (gradient + inner) @ x.t()

    decision = decided(step, X, X, phases="FFFBBBBBB")
    assert [copy[1:] for copy in decision.copies] == [("sigmoid", "mul"), ("sigmoid", "add")]


def test_views_of_the_value_are_followed() -> None:
    def step(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        inner = x.sigmoid()
        return inner @ x.t(), gradient * inner.view(4, 4, 64)

    graph = traced(step, X, torch.randn(4, 4, 64), phases="FFFFB")
    decision = fuse.decide(graph, Options())
    assert decision.copies == (("sigmoid_in_mul", "sigmoid", "mul"),)
    assert saved_bytes(fuse.apply(graph, decision)) == 0


def test_what_forward_does_not_read_is_made_in_backward_alone() -> None:
    graph = traced(lambda x, gradient: gradient * x.sigmoid(), X, X, phases="FB")
    changed = fuse.apply(graph, fuse.decide(graph, Options()))
    assert [node.name for node in operators(changed.graph)] == ["mul"]


@pytest.mark.parametrize(
    ("function", "phases"),
    [
        (lambda x, g: (x.sigmoid() @ x.t(), g @ x.sigmoid().t()), "FFFFBB"),
        (lambda x, g: ((drawn := torch.rand_like(x)) * 2 @ x.t(), g * drawn), "FFFFB"),
        (lambda x, g: ((inner := x.sigmoid()) @ x.t(), x.add_(1), g * inner), "FFFFB"),
        (lambda x, g: ((inner := x.cumsum(0)) @ x.t(), g * inner), "FFFB"),
        (lambda x, g: ((inner := x.sigmoid()) @ x.t(), g * inner, inner.cumsum(0)), "FFFBB"),
    ],
    ids=("product", "random", "written", "whole", "read by a reader that stays"),
)
def test_what_cannot_be_rebuilt_is_stored(function: Callable[..., Any], phases: str) -> None:
    assert decided(function, X, X, phases=phases).copies == ()


class Handed(nn.Module):
    """Gives a loss and what lies inside, which eager's backward reads for ``square`` only."""

    scale: Tensor

    def __init__(self, square: bool) -> None:
        super().__init__()
        self.square, self.up, self.down = square, nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("scale", torch.randn(64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.up(x)
        loss = self.down(torch.relu(inner * 2 - 1) * self.scale).square().sum()
        return loss + inner.square().sum() if self.square else loss, inner


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("square", [False, True])
def test_a_copy_reads_a_result_of_forward_only_where_eager_does(square: bool) -> None:
    graph = joint_graph(Handed(square), (X,))
    copies = search.run(graph, Options(memory_budget="+0%")).plan.decisions["fuse"]["copies"]
    assert any(operator == "relu" for _, operator, _ in copies) == square, copies


def test_what_the_user_keeps_is_stored() -> None:
    graph = traced(gate, X, X, X, phases="FFB")
    operators(graph.graph)[0].meta["custom"] = {KEY: KEEP}
    assert fuse.decide(graph, Options()) == Decision()


def test_copies_take_no_more_time_than_groups_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline._Inliner, "_spare", lambda inliner: 0.0)
    assert decided(gate, X, X, X, phases="FFB") == Decision()


COPY = ("sigmoid_in_mul_1", "sigmoid", "mul_1")
GROUP = ("sigmoid_in_mul_1", "mul_1")


@pytest.mark.parametrize(
    ("groups", "copies", "said"),
    [
        ((GROUP,), (("sigmoid_in_mul_1", "nothing", "mul_1"),), "no operators nothing, mul_1"),
        ((GROUP,), (("sigmoid_in_mul_1", "sigmoid", "nothing"),), "no operators sigmoid, nothing"),
        ((("mul_1",),), (COPY,), "no operators sigmoid, mul_1"),
        ((("mul", "mul_1"),), (("mul", "sigmoid", "mul_1"),), "no operators sigmoid, mul_1"),
        ((("rand_in_add", "add"),), (("rand_in_add", "rand_like", "add"),), "rand_like cannot run once more"),
        ((("mul_in_mul_1", "mul_1"),), (("mul_in_mul_1", "mul", "mul_1"),), "before the first reader"),
        ((("late", "mul_1", "exp"),), (("late", "sigmoid", "exp"),), "before the first reader"),
        ((GROUP, ("sigmoid_in_mul_1", "mul_1", "exp")), (COPY,), "no operators sigmoid, mul_1"),
    ],
)
def test_a_decision_that_does_not_fit_is_refused(groups: Any, copies: Any, said: str) -> None:
    def step(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        inner, drawn = x.sigmoid(), torch.rand_like(x)
        return inner * x, (gradient * inner).exp(), gradient + drawn

    graph = traced(step, X, X, phases="FFFBBB")
    with pytest.raises(PlanError, match=said):
        fuse.apply(graph, Decision(groups, copies))


# -- the judge of values ---------------------------------------------------------------------------------------------


def subtracted(x: Tensor, y: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    inner = x - y
    return inner * y, gradient * inner


def of_body(graph: TrainGraph, name: str) -> fx.Node:
    (group,) = (node.target for node in operators(graph.graph) if node.name == "mul_1")
    assert isinstance(group, Fused)
    return next(node for node in group.body.nodes if node.name == name)


def another_leaf(graph: TrainGraph) -> None:
    reader = next(node for node in operators(graph.graph) if node.name == "mul_1")
    x, y, *_ = placeholders(graph.graph)
    reader.args = tuple(y if argument is x else argument for argument in reader.args)


def written_leaf(graph: TrainGraph) -> None:
    x, reader = placeholders(graph.graph)[0], operators(graph.graph)[-1]
    with graph.graph.inserting_before(reader):
        added = graph.graph.call_function(aten.add_.Tensor, (x, 1))
    added.meta["val"] = x.meta["val"]
    number_result(added)
    graph.phase[added.name] = Phase.BACKWARD  # type: ignore[index]


def other_order(graph: TrainGraph) -> None:
    copy = of_body(graph, "sub_in_mul_1")
    copy.args = copy.args[::-1]


def another_operator(graph: TrainGraph) -> None:
    of_body(graph, "sub_in_mul_1").target = aten.add.Tensor


@pytest.mark.parametrize("fault", [another_leaf, written_leaf, other_order, another_operator])
def test_a_copy_that_gives_another_value_is_found_by_the_judge(fault: Callable[[TrainGraph], None]) -> None:
    graph = traced(subtracted, X, X.clone(), X.clone(), phases="FFB")
    start = value_flow.read(graph, Numbers())
    changed = fuse.apply(graph, fuse.decide(graph, Options()))
    assert value_flow.check(changed, start, "fuse").operators["mul_1"] == start.operators["mul_1"]
    fault(changed)
    with pytest.raises(VerifyError, match="mul_1"):
        value_flow.check(changed, start, "fuse")


def test_a_copy_of_a_random_operator_is_found_by_the_judge() -> None:
    """Also of the first draw of all, whose state the body of a group could be taken to begin with."""

    def step(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        drawn = torch.rand_like(gradient)
        return gradient * drawn.exp(), gradient - drawn

    graph = traced(step, X, X, phases="FFBB")
    start = value_flow.read(graph, Numbers())
    changed = fuse.apply(graph, fuse.decide(graph, Options()))
    value_flow.check(changed, start, "fuse")
    reader = next(node for node in operators(changed.graph) if node.name == "mul")
    assert isinstance(reader.target, Fused)
    drawn, other = sorted(placeholders(reader.target.body), key=lambda node: node.name != "rand_like")
    with reader.target.body.inserting_after(max(drawn, other)):
        again = reader.target.body.call_function(aten.rand_like.default, (other,))
    again.meta = drawn.meta
    drawn.replace_all_uses_with(again)
    reader.target.body.erase_node(drawn)
    reader.args = tuple(argument for argument in reader.args if argument.name != "rand_like")  # type: ignore[union-attr]
    with pytest.raises(VerifyError, match="mul"):
        value_flow.check(changed, start, "fuse")


# -- bits ------------------------------------------------------------------------------------------------------------


def check_random(seed: int, route: str, options: Options) -> int:
    """The graph of a random model with copies: judged, run, and compared; the number of copies."""
    graph, inputs = graph_and_inputs(*random_model(seed), route)
    most, stored = peak(graph), saved_bytes(graph)
    start, kept = value_flow.read(graph, Numbers()), verify.constraints(graph)
    torch.manual_seed(seed)
    wanted, _ = run_real(graph, clones(inputs))
    decision = fuse.decide(graph, options)
    changed = fuse.apply(graph, decision)
    verify.check_graph(changed, "fuse", kept, deep=True)
    value_flow.check(changed, start, "fuse", fast=options.numerics == "fast")
    assert peak(changed) <= most
    assert saved_bytes(changed) < stored or not decision.copies
    torch.manual_seed(seed)
    assert_same(run_real(changed, clones(inputs))[0], wanted, f"seed {seed}")
    return len(decision.copies)


@pytest.mark.parametrize(("seed", "route"), [(0, "step"), (1, "joint")])
def test_random_graphs_with_copies_have_the_same_bits(seed: int, route: str) -> None:
    assert check_random(seed, route, Options()) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(2, 16))
def test_many_random_graphs_with_copies_have_the_same_bits(seed: int, route: str) -> None:
    check_random(seed, route, Options())


@pytest.mark.thorough
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(16))
def test_random_graphs_with_copies_in_kernels_have_the_same_bits(seed: int, route: str) -> None:
    check_random(seed, route, Options(numerics="fast"))


class Gated(nn.Module):
    """Two layers of normalised rows, gates and products."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(32, 64, bias=False) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(64, 32, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        for layer, down in enumerate(self.downs):
            normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
            gate, up = self.gates[2 * layer](normed), self.gates[2 * layer + 1](normed)
            x = x + F.dropout(down(F.silu(gate) * up), 0.25)
        return x


def gated(dtype: torch.dtype = torch.float32) -> Made:
    torch.manual_seed(0)
    return Gated().to(dtype), (torch.randn(16, 64, 32, dtype=dtype),), lambda model, x: model(x).square().mean()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("route", ["step", "joint"])
def test_programs_with_copies_in_kernels_have_the_bits_of_the_operators(route: str, numerics: Any) -> None:
    plain, inputs = graph_and_inputs(*gated(), route)
    free = search.run(plain, Options(disable=("fuse", "products")))
    planned = search.run(
        graph_and_inputs(*gated(), route)[0], Options(numerics=numerics, disable=("products",)), deep=True
    )
    assert planned.plan.decisions["fuse"]["copies"]
    results: list[Any] = []
    for one in (free, planned):
        used = clones(inputs)
        torch.manual_seed(2)
        results.append([*run_program(one, used), *used])
    assert_same(*results, route)


def run_steps(of: Made, **options: Any) -> list[Any]:
    """Loss of three steps, parameters and buffers behind them."""
    torch.manual_seed(0)
    model, batch, loss = of
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = roamc.train_step(model, loss, optimizer, strict=True, **options)
    assert bool(step.plan(*batch).decisions.get("fuse", {}).get("copies")) is ("disable" not in options)
    return [*(step(*batch) for _ in range(3)), *model.parameters(), *model.buffers()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_with_copies_has_the_bits_of_one_without_groups(dtype: torch.dtype) -> None:
    results = [run_steps(gated(dtype), **more) for more in ({}, {"disable": "fuse"})]
    assert_same(*results, said=str(dtype))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("budget", [None, "70%", "min"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steps_with_copies_have_the_bits_of_steps_without_groups(
    name: str, budget: str | None, dtype: torch.dtype
) -> None:
    def run(**more: Any) -> list[Any]:
        torch.manual_seed(0)
        return run_steps(make(name, dtype), memory_budget=budget, **more)

    assert_same(run(), run(disable="fuse"), said=name)


def gradients(run: Callable[[nn.Module], Any]) -> list[Any]:
    """Output and gradients of one forward and backward."""
    model, batch, loss = gated()
    torch.manual_seed(1)
    loss_value = loss(run(model), *batch)
    loss_value.backward()
    return [loss_value.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("route", ["compile", "optimize"])
def test_what_passes_from_forward_to_backward_follows_the_copies(route: str, threads: int) -> None:
    def with_roamc(model: nn.Module) -> Any:
        if route == "optimize":
            return roamc.optimize(model, strict=True)
        return torch.compile(model, backend="roamc", options={"strict": True})

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same(gradients(with_roamc), gradients(lambda model: model), route)
    finally:
        torch.set_num_threads(before)


def test_a_plan_with_copies_comes_back_from_its_text() -> None:
    graph, _ = graph_and_inputs(*gated(), "joint")
    planned = search.run(copied(graph), Options())
    assert planned.plan.decisions["fuse"]["copies"]
    again = search.run(copied(graph), Options(), Plan.from_json(planned.plan.to_json()))
    assert again.plan.decisions == planned.plan.decisions


def test_the_report_says_what_is_rebuilt() -> None:
    graph = traced(gate, X, X, X, phases="FFB")
    changed = fuse.apply(graph, fuse.decide(graph, Options()))
    groups = [(group.count, group.nbytes, group.rebuilt) for group in grouped(changed)]
    assert groups == [(2, 2 * X.nbytes, X.nbytes)]

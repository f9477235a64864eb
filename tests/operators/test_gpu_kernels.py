"""Triton kernels of groups, without a GPU: under Triton's interpreter, compiled ahead of time, and in plans."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from roamc.compat import FakeTensorMode
from roamc.errors import PlanError, VerifyError
from roamc.graph import TrainGraph, copied, operators, value_flow, verify
from roamc.graph.value_numbers import Numbers
from roamc.operators import blocks, ops
from roamc.operators.fused import fuse as group_of
from roamc.operators.gpu import fused_kernel, launch
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.kernel import kernel_text, unfit
from roamc.operators.gpu.printed import is_exact
from roamc.options import Options
from roamc.passes import fuse
from roamc.passes.fuse import Decision
from roamc.passes.fuse.choose import Finder
from roamc.passes.fuse.estimates import Estimates
from roamc.passes.fuse.write import Site
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.graphs import assert_same, clones, graph_and_inputs, traced
from tests.kernel_groups import use_kernels
from tests.planning.test_pipeline import run_program

aten = torch.ops.aten
HALF = torch.bfloat16


def run(module: str, *arguments: str) -> None:
    """Run a program of this folder with one thread; its output is the message of a failure."""
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.operators.{module}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-3000:]


@pytest.mark.parametrize("seed, count", [(0, 15), *((seed, 40) for seed in range(8))])
def test_kernels_of_random_groups_agree_with_their_operators(seed: int, count: int) -> None:
    run("interpreted", "--seed", str(seed), "--count", str(count))


@pytest.mark.parametrize("seed, count", [(0, 1), *((seed, 3) for seed in range(3))])
def test_kernel_of_every_operator_agrees_with_it(seed: int, count: int) -> None:
    run("interpreted", "--forms", "--seed", str(seed), "--count", str(count))


def test_kernels_compile_for_gpus_that_are_not_here_and_spill_nothing() -> None:
    run("compiled")


@pytest.mark.thorough
def test_kernels_spill_nothing_and_compute_alike_in_all_shapes_of_their_launches() -> None:
    run("compiled", "--shapes")


# -- the pass on graphs of a GPU --------------------------------------------------------------------------------------


def on_gpu(*shapes: Any) -> list[Tensor]:
    """Fake tensors in bfloat16 on a GPU."""
    with FakeTensorMode():
        return [torch.empty(shape, device="cuda", dtype=HALF) for shape in shapes]


def norm_and_gate(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight
    return torch.nn.functional.silu(normed) * normed


@pytest.fixture
def graph() -> TrainGraph:
    with torch.no_grad():
        return traced(norm_and_gate, *on_gpu((8, 16, 64), (64,)))


def test_exact_groups_hold_operators_that_have_the_same_bits_everywhere(graph: TrainGraph) -> None:
    assert fuse.decide(graph, Options()).groups == (("_to_copy", "pow_1"), ("mul", "_to_copy_1", "mul_1"))


def test_fast_groups_hold_sums_along_rows(graph: TrainGraph) -> None:
    (group,) = fuse.decide(graph, Options(numerics="fast")).groups
    assert {"pow_1", "mean", "rsqrt", "silu", "mul_2"} <= set(group)


def fused(graph: TrainGraph, numerics: Any) -> FusedKernel:
    fuse.apply(graph, fuse.decide(graph, Options(numerics=numerics)))
    (group,) = [node.target for node in operators(graph.graph) if isinstance(node.target, FusedKernel)]
    return group


def test_the_result_may_lie_over_an_operand_that_is_read_element_by_element(graph: TrainGraph) -> None:
    assert fused(graph, "fast").rule.overwrites == (0,)


def test_the_result_may_lie_over_an_operand_whose_rows_are_added_up() -> None:
    with torch.no_grad():
        graph = traced(lambda x, y: (x - x.sum(-1, keepdim=True)) * y, *on_gpu((8, 64), (64,)))
    assert fused(graph, "fast").rule.overwrites == (0,)


def test_a_group_reads_and_writes_every_element_once(graph: TrainGraph) -> None:
    text = fused(graph, "fast").text
    assert text.source.count("tl.load(") == 2
    assert text.source.count("tl.store(") == 1
    assert text.reads == 1


def test_groups_with_other_last_bits_are_refused_unless_fast(graph: TrainGraph) -> None:
    before = value_flow.read(graph, Numbers(), "capture")
    decision = fuse.decide(graph, Options(numerics="fast"))
    after = fuse.apply(copied(graph), decision)
    value_flow.check(after, before, "fuse", fast=True)
    with pytest.raises(VerifyError, match="other last bits"):
        value_flow.check(after, before, "fuse")


def test_operands_of_other_devices_and_dtypes_stay_outside() -> None:
    def function(x: Tensor, wide: Tensor) -> Tensor:
        return (x * 2 + wide) * 3

    with FakeTensorMode():
        operands = torch.empty(4, 64, device="cuda"), torch.empty(4, 64, device="cuda", dtype=torch.float64)
    with torch.no_grad():
        graph = traced(function, *operands)
    assert fuse.decide(graph, Options()).groups == ()
    with pytest.raises(PlanError, match="another device or dtype"):
        fuse.apply(graph, Decision((("mul", "add"),)))


def test_elements_in_another_order_stay_outside() -> None:
    with torch.no_grad():
        graph = traced(lambda x: (x * 2).transpose(0, 1) * 3, *on_gpu((64, 64)))
    assert fuse.decide(graph, Options()).groups == ()


# -- several results --------------------------------------------------------------------------------------------------


def residual_and_norm(x: Tensor, more: Tensor, weight: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
    """RMS norm of a sum that is read as well, by way of a view, as are the statistics of the norm."""
    total = x + more
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    normed = (wide * scale).to(x.dtype) * weight
    return normed.view(-1, 64) @ matrix, total.view(-1, 64) @ matrix, scale


def residual_graph() -> TrainGraph:
    with torch.no_grad():
        return traced(residual_and_norm, *on_gpu((8, 16, 64), (8, 16, 64), (64,), (64, 64)))


def test_what_is_read_outside_is_a_result_of_the_group_as_well() -> None:
    graph = residual_graph()
    before = value_flow.read(graph, Numbers(), "capture")
    kept = verify.constraints(graph)
    decision = fuse.decide(graph, Options(numerics="fast"))
    graph = fuse.apply(graph, decision)
    verify.check_graph(graph, "fuse", kept, deep=True)
    value_flow.check(graph, before, "fuse", fast=True)
    names = [node.name for node in operators(graph.graph)]
    assert names[:4] == ["mul_1_group", "add", "rsqrt", "mul_1"]
    group = next(node.target for node in operators(graph.graph) if isinstance(node.target, FusedKernel))
    assert group.rule.overwrites == ()
    assert group.text.source.count("tl.load(") == 3
    assert group.text.source.count("tl.store(") == 3
    assert "tl.store(rsqrt_out + row, rsqrt, row < 128)" in group.text.source


def viewed_twice(x: Tensor, y: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
    """A product reads a view of a view of a value, as does a group; the first view has no other reader."""
    rows = (x * 2).view(32, 4, 64).view(-1, 64)
    return (rows + y.sin()).cos(), rows @ matrix


def test_views_of_views_that_are_read_outside_move_with_the_group() -> None:
    with torch.no_grad():
        graph = traced(viewed_twice, *on_gpu((8, 16, 64), (128, 64), (64, 64)))
    before, kept = value_flow.read(graph, Numbers(), "capture"), verify.constraints(graph)
    graph = fuse.apply(graph, Decision((("mul", "sin", "add", "cos"),)))
    verify.check_graph(graph, "fuse", kept, deep=True)
    value_flow.check(graph, before, "fuse", fast=True)
    (group,) = [node for node in operators(graph.graph) if isinstance(node.target, FusedKernel)]
    assert len(group.users) == 2


def test_what_leaves_a_group_must_not_come_back() -> None:
    with torch.no_grad():
        graph = traced(lambda x, m: (y := x * 2) + (y @ m), *on_gpu((64, 64), (64, 64)))
    assert fuse.decide(graph, Options()).groups == ()
    with pytest.raises(PlanError, match="mm reads mul before all that the group reads exists"):
        fuse.apply(graph, Decision((("mul", "add"),)))


def test_groups_that_read_one_another_run_one_behind_the_other() -> None:
    """Each chosen group moves results, and what the next may read from there moves with them."""
    with torch.no_grad():
        graph = traced(chained, *on_gpu((64, 64), (64, 64)))
    before = value_flow.read(graph, Numbers(), "capture")
    kept = verify.constraints(graph)
    graph = fuse.apply(graph, fuse.decide(graph, Options()))
    verify.check_graph(graph, "fuse", kept, deep=True)
    value_flow.check(graph, before, "fuse")
    groups = [node.target for node in operators(graph.graph) if isinstance(node.target, FusedKernel)]
    assert len(groups) > 1
    assert any(len(group.results) > 1 for group in groups)


def test_a_group_runs_behind_the_place_where_the_results_of_another_come_to_exist() -> None:
    """``early`` exists where its group runs, behind the product; ``other`` stood in front of that, and may not stay."""

    def waiting(x: Tensor, y: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
        early, other = x * 2, y * 3
        late = early * (matrix @ matrix)
        total = other + early
        return late.relu() @ matrix, late @ matrix, total @ matrix

    with torch.no_grad():
        graph = traced(waiting, *on_gpu((64, 64), (64, 64), (64, 64)))
    before = value_flow.read(graph, Numbers(), "capture")
    kept = verify.constraints(graph)
    graph = fuse.apply(graph, Decision((("mul_1", "add"), ("mul", "mul_2", "relu"))))
    verify.check_graph(graph, "fuse", kept, deep=True)
    value_flow.check(graph, before, "fuse")


def test_an_operator_belongs_to_one_group() -> None:
    """A value that two groups read could be a result of either; the one that is chosen first has it."""
    with torch.no_grad():
        graph = traced(lambda x: (x * 2 + 1).relu(), *on_gpu((64, 64)))
    first, *_, last = operators(graph.graph)
    site = Site(graph)
    finder = Finder(site, 1, Estimates.of(site, Options()), fast=False)
    assert [node.name for node in finder.group(last)] == ["mul", "add", "relu"]
    finder.taken.add(first)
    assert [node.name for node in finder.group(last)] == ["add", "relu"]


def chained(x: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
    first = x * 2
    second = (first + 1).neg()
    product = second @ matrix
    third = (product + first) * second
    return third.relu() @ matrix, third, (first @ matrix) * 3 + second


def test_an_element_for_each_row_beside_all_makes_a_kernel_with_rows() -> None:
    body = make_fx(lambda x, y: (y * 2, x * (y * 2)), tracing_mode="fake")(torch.ones(8, 4), torch.ones(8, 1)).graph
    body.eliminate_dead_code()
    frame = FusedKernel.frame(blocks.last_member(body))
    assert frame is not None
    assert "tl.store(mul_out + row, mul, row < 8)" in kernel_text("kernel", body, frame).source


def test_zero_keeps_its_sign_in_all_versions_of_triton() -> None:
    """Triton 3.6 computes ``-x`` as ``0 - x``, and reads the number -0.0 as 0.0."""
    body = make_fx(lambda x: (x + 1).neg() * 2, tracing_mode="fake")(torch.ones(8, 4)).graph
    frame = FusedKernel.frame(blocks.last_member(body))
    assert frame is not None
    assert "= -" not in kernel_text("kernel", body, frame).source
    body = make_fx(lambda x: x * -0.0, tracing_mode="fake")(torch.ones(8, 4)).graph
    assert unfit(blocks.last_member(body), frame, set()) == "-0.0 would lose its sign"


class Gated(nn.Module):
    """Two layers as in LLaMA, without attention: RMS norms written out, gates, sums that go on."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(32, 64, bias=False) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(64, 32, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        for layer, down in enumerate(self.downs):
            normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
            x = x + down(torch.nn.functional.silu(self.gates[2 * layer](normed)) * self.gates[2 * layer + 1](normed))
        return x


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("route", ["step", "joint"])
def test_programs_with_several_results_of_a_group_keep_all_bits(
    monkeypatch: pytest.MonkeyPatch, route: str, numerics: Any, budget: str | None
) -> None:
    """The groups of a GPU in a program for a CPU, where their operators run one by one."""
    torch.manual_seed(0)
    workload = Gated(), (torch.randn(16, 64, 32),), lambda model, x: model(x).square().mean()
    plain, _ = graph_and_inputs(*workload, route)
    free = search.run(plain, Options(disable=("fuse", "products")))
    use_kernels(monkeypatch)
    graph, inputs = graph_and_inputs(*workload, route)
    options = Options(numerics=numerics, disable=("products",), memory_budget=budget)
    planned = search.run(graph, options, deep=True)
    groups = [node.target for node in operators(planned.graph.graph) if isinstance(node.target, FusedKernel)]
    assert any(len(group.results) > 1 for group in groups)
    results: list[Any] = []
    for one in (free, planned):
        used = clones(inputs)
        torch.manual_seed(2)
        results.append([*run_program(one, used), *used])
    assert_same(*results, route)
    again = search.run(graph_and_inputs(*workload, route)[0], options, Plan.from_json(planned.plan.to_json()))
    assert again.plan.decisions == planned.plan.decisions


def print_alone(function: Any, *operands: Tensor) -> str:
    """Why the last operator of a function does not print; "" if it does."""
    body = make_fx(function, tracing_mode="fake")(*operands).graph
    members = [node for node in body.nodes if node.op == "call_function" and not ops.is_view(node.target)]
    frame = FusedKernel.frame(members[-1])
    assert frame is not None
    return next((said for node in members if (said := unfit(node, frame, members))), "")


@pytest.mark.parametrize(
    ("function", "operand", "said"),
    [
        (lambda x: (x * 2).sum(-1), torch.ones(()), "no rows"),
        (lambda x: torch.softmax(x * 2, -1), torch.ones(()), "no rows"),
        (lambda x: (x * 2).sum(-1), torch.ones(4, 8, dtype=torch.int64), "makes torch.int64"),
        (lambda x: (x * 2).amax(-1), torch.ones(4, 8, dtype=torch.int32), "makes torch.int32"),
        (lambda x: (x * 2) ** 2.5, torch.ones(4, 8), "another exponent"),
        (lambda x: torch.pow(2.0, x * 2), torch.ones(4, 8), "another exponent"),
        (lambda x: torch.pow(x * 2, x), torch.ones(4, 8), "another exponent"),
        (lambda x: (x * 2).int() + 1, torch.ones(4, 8), "floats become integers"),
        (lambda x: (x * 2) > -1, torch.ones(4, 8, dtype=torch.uint8), "a number below zero"),
        (lambda x: (x * 2).view(torch.int32) + 1, torch.ones(4, 8), "another order"),
        (lambda x: torch.as_strided(x * 2, (8, 4), (4, 1)) + 1, torch.ones(4, 8).t(), "another order"),
    ],
)
def test_calls_without_a_form_stay_outside(function: Any, operand: Tensor, said: str) -> None:
    assert said in print_alone(function, operand)


def test_weights_of_classes_that_a_group_makes_stay_outside() -> None:
    def function(grad: Tensor, scores: Tensor, labels: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        return aten.nll_loss_backward(grad, scores, labels, weight * 2, 1, -100, total)

    operands = torch.ones(()), torch.ones(6, 6), torch.ones(6, dtype=torch.int64), torch.ones(6), torch.ones(())
    assert "at places that it finds itself" in print_alone(function, *operands)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_powers_of_16_bits_that_aten_rounds_twice_are_not_exact(dtype: torch.dtype) -> None:
    body = make_fx(lambda x: (x**3, x**-2, x**2), tracing_mode="fake")(torch.ones(2, dtype=dtype)).graph
    powers = [node for node in body.nodes if node.op == "call_function"]
    wide = dtype is torch.float32
    assert [is_exact(node) for node in powers] == [wide, wide, True]


def test_columns_far_apart_have_offsets_of_64_bits() -> None:
    with torch.device("meta"):
        operand = torch.empty(1 << 14, 1 << 18).t()
        body = make_fx(lambda x: x - x.sum(-1, keepdim=True), tracing_mode="fake")(operand).graph
    frame = FusedKernel.frame(blocks.last_member(body))
    assert frame is not None
    source = kernel_text("kernel", body, frame).source
    assert "column = tl.arange(0, COLUMNS)[None, :].to(tl.int64)" in source
    assert "column * 262144" in source


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_results_that_are_not_finite_agree(special: float) -> None:
    group, _, _ = on_cpu()
    group.__dict__["exact"] = False
    want = torch.tensor([special, 1.0, -3.0])
    assert group._agrees(want * (1 + 1e-6), want)
    assert not group._agrees(want * 2, want)


def test_a_launch_is_on_the_device_of_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[Tensor] = []

    @contextlib.contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        devices.append(tensor)
        yield
        devices.pop()

    def launched(*args: Tensor, **options: Any) -> None:
        assert devices == [out]
        assert args == (operand, out)
        assert options == {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": False}

    operand, out = torch.ones(4, 8), torch.empty(4, 8)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(launch, "jit_function", lambda text: {(text.programs,): launched})
    body = make_fx(lambda x: x * 2, tracing_mode="fake")(operand).graph
    frame = FusedKernel.frame(blocks.last_member(body))
    assert frame is not None
    run_kernel = launch.launcher(kernel_text("kernel", body, frame))
    assert run_kernel is not None
    run_kernel(operand, out=out)


# -- where kernels do not run -----------------------------------------------------------------------------------------


def on_cpu() -> tuple[FusedKernel, list[Tensor], Tensor]:
    """A group with its kernel, operands on a CPU, and what its operators give."""
    operands = [torch.randn(4, 32), torch.randn(32)]
    body = make_fx(lambda x, y: (x * 2 + y).neg(), tracing_mode="fake")(*operands).graph
    members = [node for node in body.nodes if node.op == "call_function"]
    assert not any(unfit(node, FusedKernel.frame(members[-1]), members) for node in members)
    group, _ = group_of(blocks.last_member(body), members, FusedKernel)
    return group, operands, -(operands[0] * 2 + operands[1])


def test_without_triton_operators_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(text: object) -> None:
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(launch, "jit_function", missing)
    group, operands, want = on_cpu()
    out = torch.empty(4, 32)
    with pytest.warns(RuntimeWarning, match="Triton is not installed"):
        group.write(*operands, out=out)
    assert torch.equal(out, want)


def test_an_old_triton_runs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its divisions are ``div.rn.ftz.f32``, which takes numbers below 2**-126 for zero."""
    monkeypatch.setattr(launch, "triton_version", lambda: "3.5.1")
    group, operands, want = on_cpu()
    out = torch.empty(4, 32)
    with pytest.warns(RuntimeWarning, match=r"Triton 3\.5\.1 is too old") as caught:
        group.write(*operands, out=out)
    assert caught[0].filename == __file__  # the line of the user
    assert torch.equal(out, want)


@pytest.mark.parametrize("over", [False, True], ids=["elsewhere", "over an operand"])
@pytest.mark.parametrize("fails", [False, True], ids=["wrong", "fails"])
def test_a_kernel_that_fails_or_is_wrong_is_given_up(
    monkeypatch: pytest.MonkeyPatch, *, fails: bool, over: bool
) -> None:
    def broken(*args: Tensor, out: Tensor) -> None:
        if fails:
            raise RuntimeError("no compiler")
        out.fill_(7)

    monkeypatch.setattr(fused_kernel, "launcher", lambda text: broken)
    group, operands, want = on_cpu()
    out = operands[0] if over else torch.empty(4, 32)
    with pytest.warns(RuntimeWarning, match="operators run one by one"):
        group.write(*operands, out=out)
    assert torch.equal(out, want)
    again = torch.empty(4, 32)
    group.write(*([torch.ones(4, 32), torch.zeros(32)]), out=again)
    assert torch.equal(again, torch.full((4, 32), -2.0))

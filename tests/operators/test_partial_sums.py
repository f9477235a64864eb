"""Layer norms and sums over rows as members of groups on a GPU: in the pass, in plans, and in programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roamc.codegen.group_judge import check_group
from roamc.cost import load_profile, seconds, workspace_bytes
from roamc.graph import TrainGraph, operators, value_flow, verify
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from roamc.graph.value_numbers import Numbers
from roamc.operators.gpu import fused_kernel, partial_sums
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.options import Options
from roamc.passes import fuse
from roamc.planning import search
from tests.graphs import assert_same, clones, graph_and_inputs, traced
from tests.kernel_groups import use_kernels
from tests.operators.test_gpu_kernels import on_gpu, print_alone
from tests.planning.test_pipeline import run_program

aten = torch.ops.aten
FAST = Options(numerics="fast")


def block(x: Tensor, w: Tensor, b: Tensor, m1: Tensor, b1: Tensor, m2: Tensor) -> tuple[Tensor, ...]:
    """Half a layer of GPT and its backward, written out."""
    largest = m1.repeat(1024, 1).amax()  # here the peak is
    total = x * 3 + x
    normed, mean, rstd = aten.native_layer_norm(total, [64], w, b, 1e-5)
    up = aten.addmm(b1, normed.view(-1, 64), m1)
    grad = ((aten.gelu(up) @ m2).view(x.shape) + total) * 2
    inner = aten.gelu_backward(grad.view(-1, 64) @ m2.t(), up)
    inner = inner.view(-1, 256)
    back, bias = (inner @ m1.t()).view(x.shape), inner.sum([0], True).view(256)
    product = normed.view(-1, 64).t() @ inner
    below, *sums = aten.native_layer_norm_backward(back, total, [64], mean, rstd, w, b, [True] * 3)
    below = below + grad
    return largest, product, bias, below, *sums, below.sum([0, 1])


def graph() -> TrainGraph:
    with torch.no_grad():
        return traced(block, *on_gpu((4, 300, 64), (64,), (64,), (64, 256), (256,), (256, 64)))


def groups(graph: TrainGraph) -> dict[str, Any]:
    """Names of the operators of each group to its node."""
    nodes = {node.target.title: node for node in operators(graph.graph) if isinstance(node.target, FusedKernel)}
    return {title.removeprefix("fused(").removesuffix(")"): node for title, node in nodes.items()}


def test_norms_and_gradients_of_biases_join_what_stands_around_them() -> None:
    layer_graph = graph()
    before, kept = value_flow.read(layer_graph, Numbers(), "capture"), verify.constraints(layer_graph)
    highest = int(live_bytes(build_memory(layer_graph)).max())
    layer_graph = fuse.apply(layer_graph, fuse.decide(layer_graph, FAST))
    verify.check_graph(layer_graph, "fuse", kept, deep=True)
    value_flow.check(layer_graph, before, "fuse", fast=True)
    assert int(live_bytes(build_memory(layer_graph)).max()) <= highest
    assert list(groups(layer_graph)) == [
        "mul.Tensor, add.Tensor, native_layer_norm",
        "add.Tensor, mul.Tensor",
        "gelu_backward, sum.dim_IntList",
        "native_layer_norm_backward, add.Tensor, sum.dim_IntList",
    ]


def test_casts_that_name_their_device_are_members() -> None:
    """As torch's formulas for gradients write them."""

    def function(x: Tensor) -> Tensor:
        wide = aten._to_copy(x * 2, dtype=torch.float32, layout=torch.strided, device=x.device)
        return aten._to_copy(wide * 3, dtype=x.dtype, layout=torch.strided, device=x.device)

    with torch.no_grad():
        cast_graph = traced(function, *on_gpu((8, 16, 64)))
    (group,) = groups(fuse.apply(cast_graph, fuse.decide(cast_graph, Options()))).values()
    assert len(group.target.members) == 4
    check_group(group.target, 1)


def test_exact_groups_have_no_sums() -> None:
    layer_graph = graph()
    titles = groups(fuse.apply(layer_graph, fuse.decide(layer_graph, Options())))
    assert not any("norm" in title or "sum" in title for title in titles)


def test_partial_sums_are_workspace_and_their_end_is_a_launch() -> None:
    layer_graph = graph()
    layer_graph = fuse.apply(layer_graph, fuse.decide(layer_graph, FAST))
    sums = groups(layer_graph)["native_layer_norm_backward, add.Tensor, sum.dim_IntList"]
    assert sums.target.launches == 2
    assert sums.target.rule.overwrites == ()
    parts = -(-1200 // (partial_sums.TOGETHER // 64))
    assert workspace_bytes(sums, 1) == 3 * parts * 64 * 4
    whole = groups(layer_graph)["mul.Tensor, add.Tensor, native_layer_norm"]
    assert (whole.target.launches, workspace_bytes(whole, 1)) == (1, 0)


def test_what_a_kernel_without_sums_takes_is_known_before_it_is_printed() -> None:
    layer_graph = graph()
    nodes = groups(fuse.apply(layer_graph, fuse.decide(layer_graph, FAST)))
    node = nodes["mul.Tensor, add.Tensor, native_layer_norm"]
    assert seconds(node, load_profile("cuda")) > 0
    assert workspace_bytes(node, 1) == 0
    assert "text" not in node.target.__dict__


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 1 << 14, (1 << 14) + 1, 10**6])
def test_programs_take_all_rows_and_there_are_no_more_than_so_many(rows: int) -> None:
    partials = partial_sums.partial_sums("kernel", fused_kernel.Matrix(rows, 64), 64, [0])
    assert partials.parts <= partial_sums.PARTS
    assert partials.chunk % 64 == 0
    assert (partials.parts - 1) * partials.chunk < rows <= partials.parts * partials.chunk


def two_dims(x: Tensor, w: Tensor) -> Tensor:
    return aten.native_layer_norm(x * 2, [8, 16], w, w, 1e-5)[0]


@pytest.mark.parametrize(
    ("function", "shapes", "said"),
    [
        (lambda x: (y := x * 2) - y.sum([0, 1]), ((4, 8, 16),), "a sum over rows, before all rows are added"),
        (lambda x: (x * 2).sum([0, 1]), ((2, 2, partial_sums.WIDEST + 1),), "adds up over rows of more than"),
        (lambda x: (x * 2).sum([0]), ((4, 8, 16),), "neither"),
        (two_dims, ((4, 8, 16), (8, 16)), "neither"),
    ],
)
def test_other_calls_stay_outside(function: Any, shapes: Any, said: str) -> None:
    assert said in print_alone(function, *(torch.ones(shape) for shape in shapes))


class Layers(nn.Module):
    """Two layers as in GPT, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return x


@pytest.mark.parametrize(("route", "budget"), [("step", None), ("joint", "min")])
def test_programs_have_the_bits_of_the_operators(
    monkeypatch: pytest.MonkeyPatch, route: str, budget: str | None
) -> None:
    """The groups of a GPU in a program for a CPU, where their operators run one by one."""
    torch.manual_seed(0)
    workload = Layers(), (torch.randn(16, 64, 32),), lambda model, x: model(x).square().mean()
    plain, _ = graph_and_inputs(*workload, route)
    free = search.run(plain, Options(disable=("fuse", "products")))
    use_kernels(monkeypatch)
    planned, inputs = graph_and_inputs(*workload, route)
    result = search.run(planned, Options(numerics="fast", disable=("products",), memory_budget=budget), deep=True)
    titles = groups(result.graph)
    assert any("native_layer_norm_backward" in title for title in titles)
    assert any(node.target.text.partials is not None for node in titles.values())
    results: list[Any] = []
    for one in (free, result):
        used = clones(inputs)
        results.append([*run_program(one, used), *used])
    assert_same(*results, route)

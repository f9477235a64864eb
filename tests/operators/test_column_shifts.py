"""Rotary embeddings and other members that move columns inside a kernel: text, judge, pass and bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from roamc.codegen.group_needs import tensor_of
from roamc.codegen.group_verdicts import GroupFault, Place, Verdict
from roamc.codegen.kernel_judge import judge_kernel
from roamc.cost.count import group_traffic
from roamc.graph import operators, placeholders
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.kernel import LONGEST_ROW
from roamc.options import Options
from roamc.passes import fuse
from roamc.planning import search
from tests.graphs import assert_same, clones, graph_and_inputs, traced
from tests.kernel_groups import use_kernels
from tests.operators.test_gpu_kernels import on_gpu, run
from tests.planning.test_pipeline import run_program
from tests.planted import planted

aten = torch.ops.aten


def columns(x: Tensor, first: int, end: int, step: int = 1) -> Tensor:
    """``x[..., first:end:step]``, which Python's own indexing does not make of a fake tensor on a GPU."""
    sliced: Tensor = aten.slice.Tensor(x, x.dim() - 1, first, end, step)
    return sliced


def half(x: Tensor) -> Tensor:
    width = x.shape[-1]
    return torch.cat([-columns(x, width // 2, width), columns(x, 0, width // 2)], -1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding of heads that lie token by token."""
    heads = x.transpose(1, 2)
    return heads * cos + half(heads) * sin


def backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    sizes, width = list(grad.shape), grad.shape[-1] // 2
    product = grad * sin
    right = aten.slice_backward(-columns(product, 0, width), sizes, 3, width, 2**63 - 1, 1)
    return right + aten.slice_backward(columns(product, width, 2 * width), sizes, 3, 0, width, 1) + grad * cos


def partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """That of GPT-NeoX, on the first half of the columns."""
    first, rest = x.chunk(2, -1)
    return torch.cat([first * cos + half(first) * sin, rest], -1) * 2


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """That of models that cut in halves what they have computed."""
    first, second = (x * cos).chunk(2, -1)
    return torch.cat([-second, first], -1) * sin


def back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Backward, stored token by token."""
    return backward(grad, cos, sin).transpose(1, 2).clone(memory_format=torch.contiguous_format)


SHAPES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "rotary": (rotary, [(2, 48, 3, 32), (48, 32), (48, 32)]),
    "backward": (backward, [(2, 3, 48, 32), (48, 32), (48, 32)]),
    "back": (back, [(2, 48, 48, 32), (48, 32), (48, 32)]),
    "halves": (halves, [(2, 3, 48, 32), (48, 32), (48, 32)]),
    "partly": (partly, [(2, 3, 48, 32), (48, 16), (48, 16)]),
}


def groups_of(function: Callable[..., Any], *inputs: Tensor, numerics: Any = "fast") -> list[FusedKernel]:
    """The groups that pass fuse makes of a function on a GPU."""
    with torch.no_grad():
        graph = traced(function, *inputs)
    fuse.apply(graph, fuse.decide(graph, Options(numerics=numerics)))
    return [node.target for node in operators(graph.graph) if isinstance(node.target, FusedKernel)]


@pytest.fixture(params=SHAPES)
def group(request: pytest.FixtureRequest) -> FusedKernel:
    return group_named(request.param)


def group_named(name: str) -> FusedKernel:
    function, shapes = SHAPES[name]
    (kernel,) = groups_of(function, *on_gpu(*shapes))
    return kernel


def operand(group: FusedKernel, base: fx.Node) -> Place:
    """Where an argument lies: slices of one tensor lie in its memory."""
    return Place(base.meta["roamc_storages"], tensor_of(base).storage_offset() * tensor_of(base).itemsize)


def verdict_of(group: FusedKernel, out: Place | None = None) -> str:
    """What the judge says; "" if nothing is wrong."""
    places = [operand(group, node) for node in placeholders(group.body)]
    try:
        judge_kernel(group.body, group.text, places, [out or Place("out")])
    except GroupFault as fault:
        return str(fault)
    return ""


# -- the pass ---------------------------------------------------------------------------------------------------------


def test_a_rotary_embedding_is_one_kernel_of_exact_operators(group: FusedKernel) -> None:
    assert group.exact
    assert verdict_of(group) == ""


def test_a_copy_in_another_order_is_read_by_no_member() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x * 2).transpose(0, 1).clone(memory_format=torch.contiguous_format) * y

    titles = [kernel.title for kernel in groups_of(function, *on_gpu((4, 6, 16), (6, 4, 16)))]
    assert titles == ["fused(clone, mul.Tensor)"]


def test_a_copy_of_columns_stays_apart() -> None:
    assert groups_of(lambda x: (x * 2).t().clone(memory_format=torch.contiguous_format), *on_gpu((16, 16))) == []


def test_exact_plans_have_it_too() -> None:
    function, shapes = SHAPES["rotary"]
    assert [kernel.title for kernel in groups_of(function, *on_gpu(*shapes), numerics="exact")] == [
        "fused(mul.Tensor, neg, cat, mul.Tensor, add.Tensor)"
    ]


def test_slices_of_an_operand_count_no_bytes_of_their_own() -> None:
    heads, tables = 2 * 48 * 3 * 32 * 2, 2 * 48 * 32 * 2
    assert group_traffic(group_named("rotary").body).read == heads + tables


def test_no_operand_may_be_written_over(group: FusedKernel) -> None:
    assert group.rule.overwrites == ()


def test_a_member_with_fewer_columns_is_no_result() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        turned = -columns(x, 8, 16)
        return turned, torch.cat([turned, columns(x, 0, 8)], -1) * 2

    assert [kernel.title for kernel in groups_of(function, *on_gpu((4, 6, 16)))] == ["fused(cat, mul.Tensor)"]


@pytest.mark.parametrize(
    ("function", "shape", "alone"),
    [
        (lambda x: half(x * 2) + 1, (4, LONGEST_ROW + 2), "mul"),  # rows are read in pieces
        (lambda x: torch.cat([x * 2, x], 0) + 1, (8, 16), "mul"),  # another dimension
        (lambda x: half(x) + columns(x * 2, 0, 1), (8, 16), "mul"),  # one column for all
        (lambda x: aten.slice_backward(columns(x * 2, 0, 8), [8, 16], 1, 0, 16, 2) + x, (8, 16), "mul"),  # apart
        (lambda x: half(torch.softmax(x, -1)) + 1, (8, 16), "_softmax"),  # a softmax at other columns
        (lambda x: half((x * 2).transpose(0, 1)) + 1, (16, 16), "mul"),  # columns of a square
    ],
)
def test_what_a_program_cannot_hold_stays_apart(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], alone: str
) -> None:
    titles = [kernel.title for kernel in groups_of(function, *on_gpu(shape))]
    assert not any(alone in title for title in titles)


# -- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 8))])
def test_kernels_of_random_groups_agree_with_their_operators(seed: int) -> None:
    run("shifted", "--seed", str(seed), "--count", "25" if seed == 0 else "150")


class Attention(nn.Module):
    """Attention of four heads on two of keys, with rotary embeddings, as in LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.back = nn.Linear(32, 64, bias=False), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01]).repeat(2)
        queries, keys, values = self.project(x).view(*x.shape[:2], 8, 8).split([4, 2, 2], 2)
        queries, keys = (rotary(heads, angles.cos(), angles.sin()) for heads in (queries, keys))
        seen = torch.softmax(queries @ keys.repeat_interleave(2, 1).transpose(-1, -2), -1)
        output: Tensor = self.back((seen @ values.transpose(1, 2).repeat_interleave(2, 1)).transpose(1, 2).flatten(2))
        return output


@pytest.mark.parametrize("budget", [None, pytest.param("85%", marks=pytest.mark.thorough)])
def test_programs_with_such_groups_have_the_bits_of_those_without(monkeypatch: Any, budget: Any) -> None:
    torch.manual_seed(0)
    workload = Attention(), (torch.randn(4, 48, 32),), lambda model, x: model(x).square().mean()
    plain, _ = graph_and_inputs(*workload, "joint")
    free = search.run(plain, Options(disable=("fuse", "products")))
    use_kernels(monkeypatch)
    planned, inputs = graph_and_inputs(*workload, "joint")
    result = search.run(planned, Options(numerics="fast", disable=("products",), memory_budget=budget), deep=True)
    titles = [getattr(node.target, "title", "") for node in operators(result.graph.graph)]
    assert any("cat" in title for title in titles)
    assert any("slice_backward" in title for title in titles)
    results: list[Any] = []
    for one in (free, result):
        used = clones(inputs)
        results.append([*run_program(one, used), *used])
    assert_same(*results, "rotary")


# -- the judge --------------------------------------------------------------------------------------------------------

V = Verdict
FAULTS: dict[str, tuple[str, str, str, Verdict]] = {
    "the wrong half": ("rotary", r"column < 16, neg, slice_2_value", "column < 16, slice_2_value, neg", V.NUMBERS),
    "halves meet elsewhere": ("rotary", r"tl.where\(column < 16", "tl.where(column < 15", V.NUMBERS),
    "the half without its sign": ("rotary", r"= \(slice_1_value \* -1\.0\)", "= (slice_1_value)", V.NUMBERS),
    "shifted to the other side": ("rotary", r"\(column - 16\)", "(column + 16)", V.OUTSIDE),
    "shifted by a column less": ("backward", r"\(column \+ 16\)", "(column + 15)", V.ELEMENTS),
    "not shifted": ("backward", r"(sin_1 .*)\(column \+ 16\)", r"\1column", V.ELEMENTS),
    "read without its mask": ("rotary", r"\(column - 16\), inside & \(column >= 16\), 0", "(column - 16)", V.OUTSIDE),
    "read beside its columns": ("rotary", r"inside & \(column < 16\)", "inside & (column < 17) & (row < 9)", V.MASK),
    "a column is not read": ("rotary", r"inside & \(column < 16\)", "inside & (column < 15)", V.MASK),
    "rows of the half lie nearer": ("rotary", r"(slice_1 \+ .*) \* 96", r"\1 * 95", V.ELEMENTS),
    "the other half of the operand": ("rotary", r"tl.load\(slice_1 \+", "tl.load(slice_2 +", V.ELEMENTS),
    "the table at the lane's column": ("backward", r"(sin_1 \+ .*)\(column - 16\)", r"\1column", V.ELEMENTS),
    "the sign of a shift": ("backward", r"(sin_1 \+ .*)\(column \+ 16\)", r"\1(column + -16)", V.OUTSIDE),
    "no zeros beside a gradient": ("backward", r"tl.where\(column < 16, 0.0, ([a-z_0-9]*)\)", r"\1 + 1.0", V.NUMBERS),
    "zeros on the other side": (
        "backward",
        r"tl.where\(column < 16, 0.0, ([a-z_0-9]*)\)",
        r"tl.where(column < 16, \1, 0.0)",
        V.NUMBERS,
    ),
    "a copy in its own order": ("back", r"out \+ .*, clone", "out + row * 32 + column, clone", V.PLACE),
    "a copy of another order": ("back", r"// 48 % 48", "// 24 % 48", V.PLACE),
    "a copy of other columns": ("back", r"clone, inside", "add, inside", V.NUMBERS),
    "columns that pass are turned": ("partly", r"column < 16, add", "column < 24, add", V.NUMBERS),
}
"""What is wrong: the group, what is printed, what stands in its place, and what the judge says."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    name, right, wrong, verdict = FAULTS[fault]
    assert verdict.value in verdict_of(planted(group_named(name), right, wrong))


def test_a_result_over_an_operand_that_is_read_at_a_shift_is_refused(group: FusedKernel) -> None:
    first = placeholders(group.body)[0]
    assert Verdict.OVERWRITTEN.value in verdict_of(group, operand(group, first))


def test_a_kernel_without_rows_is_refused() -> None:
    group = group_named("rotary")
    group.__dict__["text"] = dataclasses.replace(group.text, constants={"BLOCK": 1024})
    assert Verdict.ELEMENTS.value in verdict_of(group)

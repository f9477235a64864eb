"""The judge of kernels names every fault planted in layer norms and in sums over rows. No GPU is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from roamc.codegen.group_judge import check_group
from roamc.codegen.group_verdicts import Verdict
from roamc.errors import VerifyError
from roamc.graph.storage_ids import STORAGES
from roamc.operators.fused import fuse
from roamc.operators.gpu.fused_kernel import FusedKernel
from tests.codegen.test_kernel_judge import on_gpu, verdict_of
from tests.graphs import traced
from tests.planted import planted

aten = torch.ops.aten
HALF, FLOAT = torch.bfloat16, torch.float32
MASK = [True, True, True]


def norm(x: Tensor, more: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """A residual sum, its layer norm, and the statistics."""
    total = x + more
    value, mean, rstd = aten.native_layer_norm(total, [50], weight, bias, 1e-5)
    return total, value.relu(), mean, rstd


def backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, more: Tensor) -> tuple[Tensor, ...]:
    """The backward of a layer norm, its sum with another gradient, and a gradient of a bias."""
    inner, *sums = aten.native_layer_norm_backward(grad, x, [50], mean, rstd, weight, weight, MASK)
    total = inner + more
    return total, *sums, total.sum([0, 1])


def bias(grad: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """A gradient of a bias alone: the values that are added up are no result."""
    return ((grad * x).sum([0], True),)


def rms(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The backward of an RMS norm as GPUs have it, behind what :func:`group` makes its forward of."""
    value, _, rstd = aten.native_layer_norm(x, [50], weight, weight, 1e-5)
    return value, rstd, *aten._fused_rms_norm_backward(grad, x, [50], rstd, weight, MASK[:2])


def as_rms(graph: fx.Graph) -> None:
    """Write RMS norms for layer norms: without a GPU, torch traces the parts of one."""
    for node in list(graph.nodes):
        if node.target is aten.native_layer_norm.default:
            x, sizes, weight, _, eps = node.args
            node.target, node.args = aten._fused_rms_norm.default, (x, sizes, weight, eps)
            node.meta["val"], node.meta[STORAGES] = node.meta["val"][::2], node.meta[STORAGES][::2]
            for user in node.users:
                user.args = (node, int(user.args[1] == 2))


ROWS, STATISTIC, COLUMN = (4, 10000, 50), (4, 10000, 1), (50,)
GROUPS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "norm": (norm, (on_gpu((2, 60, 50), HALF), on_gpu((2, 60, 50), HALF), on_gpu(COLUMN), on_gpu(COLUMN))),
    "backward": (
        backward,
        (*(on_gpu(ROWS) for _ in range(2)), *(on_gpu(STATISTIC) for _ in range(2)), on_gpu(COLUMN), on_gpu(ROWS, HALF)),
    ),
    "bias": (bias, (on_gpu((40000, 50), HALF), on_gpu((40000, 50), HALF, (1, 40000)))),
    "rms": (rms, (on_gpu((40000, 50)), on_gpu((40000, 50)), on_gpu(COLUMN))),
}


def group(name: str) -> FusedKernel:
    """A group of GROUPS, with all that its function returns as results."""
    run, inputs = GROUPS[name]
    with torch.no_grad():
        graph = traced(run, *inputs).graph
    if name == "rms":
        as_rms(graph)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    results = [node for node in nodes if node in graph.output_node().all_input_nodes]
    kernel, _ = fuse(nodes[-1], nodes, FusedKernel, results)
    assert isinstance(kernel, FusedKernel)
    return kernel


@pytest.mark.parametrize("name", GROUPS)
def test_kernels_as_they_are_printed_pass(name: str) -> None:
    assert verdict_of(group(name)) == ""


V = Verdict
FAULTS: dict[str, tuple[str, str, str, Verdict]] = {
    # layer norm
    "unbiased variance": ("norm", r"total_1 / 50\.0", "total_1 / 49.0", V.NUMBERS),
    "no eps": ("norm", r" \+ 1e-05\)", " + 0.0)", V.NUMBERS),
    "distances from zero": ("norm", r"= add - t_1", "= add - 0.0", V.NUMBERS),
    "weight and bias exchanged": ("norm", r"weight_1 \+ column", "bias_1 + column", V.NUMBERS),
    "padding counts": (
        "norm",
        r"total_1 = tl\.sum\(tl\.where\(column < 50, (\w+), 0\.0\)",
        r"total_1 = tl.sum(\1",
        V.NUMBERS,
    ),
    "the mean in the place of the scale": (
        "norm",
        r"tl\.store\(getitem_2_out \+ row, \w+",
        "tl.store(getitem_2_out + row, t_1",
        V.NUMBERS,
    ),
    "statistics exchanged": ("norm", r"getitem_1_out \+ row", "getitem_2_out + row", V.TWICE),
    "a statistic of the row before": ("backward", r"mean_1 \+ row,", "mean_1 + (row - 1),", V.OUTSIDE),
    "statistics of the first row": ("backward", r"rstd_1 \+ row,", "rstd_1 + row * 0,", V.ELEMENTS),
    "the mean of the gradient left out": ("backward", r" - \w+ - t \*", " - t *", V.NUMBERS),
    "not scaled by rstd": ("rms", r"\) \* native_layer_norm_1", ")", V.NUMBERS),
    # the rows that a program adds up
    "the last block of rows left out": (
        "backward",
        r"range\(0, CHUNK, ROWS\)",
        "range(0, CHUNK - ROWS, ROWS)",
        V.MISSING,
    ),
    "the first block of rows left out": ("bias", r"range\(0, CHUNK, ROWS\)", "range(ROWS, CHUNK, ROWS)", V.NUMBERS),
    "the last rows left out": ("bias", r"row < 40000", "row < 39999", V.MASK),
    "rows of the next program": ("bias", r"part \* CHUNK", "(part + 1) * CHUNK", V.MASK),
    "rows behind the last one count": ("bias", r"tl\.where\(inside, (\w+), 0\.0\)", r"(\1 + 1.0)", V.NUMBERS),
    "sums begin at one": (
        "bias",
        r"down = tl\.zeros\(\(ROWS, COLUMNS\), tl\.float32\)",
        "down = tl.full((ROWS, COLUMNS), 1.0, tl.float32)",
        V.NUMBERS,
    ),
    "another value is added up": (
        "backward",
        r"down_2 \+ tl\.where\(inside, \w+",
        "down_2 + tl.where(inside, grad_1_value",
        V.NUMBERS,
    ),
    "only the last block is kept": ("bias", r"down = down \+ ", "down = ", V.NUMBERS),
    # the rows of partial sums
    "partial sums along columns": ("bias", r"(partials \+ .*, tl\.sum\(down), 0,", r"\1, 1,", V.TWICE),
    "one sum is not written": ("backward", r"    tl\.store\(partials \+ \d{3,} .*\n", "", V.MISSING),
    "two sums in one place": ("backward", r"(store\(partials \+ )part \*", r"\1 10450 + part *", V.TWICE),
    "all programs write one row": ("bias", r"(store\(partials \+ )part", r"\1part * 0", V.PLACE),
    "rows of partial sums lie nearer": ("bias", r"(store\(partials \+ part \*) 50", r"\1 49", V.PLACE),
    "padding is written": ("bias", r"(tl\.sum\(down, 0, keep_dims=True\)), column < 50", r"\1", V.MASK),
    "a column is not written": (
        "bias",
        r"(tl\.sum\(down, 0, keep_dims=True\)), column < 50",
        r"\1, column < 49",
        V.MISSING,
    ),
    "partial sums are written for each block": (
        "bias",
        r"\n    tl\.store\(partials",
        "\n        tl.store(partials",
        V.TWICE,
    ),
    "partial sums are read": ("bias", r"tl\.load\(grad_1 \+ row \* 50", "tl.load(partials + row * 50", V.VALUE),
    # the second kernel
    "a row of partial sums left out": ("bias", r"part < \d+", "part < 17", V.NUMBERS),
    "a row of partial sums too many": ("bias", r"part < \d+", "part < 256", V.OUTSIDE),
    "partial sums counted twice": ("bias", r"tl\.sum\((out_parts), 0", r"tl.sum(\1 + \1, 0", V.NUMBERS),
    "the sums of another result": ("backward", r"partials \+ 10450 \+", "partials +", V.NUMBERS),
    "a column behind the last one": ("bias", r"keep_dims=True\), column < 50\)", "keep_dims=True))", V.MASK),
    "a column left out at the end": (
        "bias",
        r"(out_parts, 0, keep_dims=True\)), column < 50",
        r"\1, column < 49",
        V.MISSING,
    ),
    "a column in the place of the next": ("bias", r"tl\.store\(out \+ column", "tl.store(out + column + 1", V.MASK),
    "the same columns in all programs": ("bias", r"tl\.program_id\(0\) \* COLUMNS", "0", V.MISSING),
    "one partial sum for all": (
        "bias",
        r"partials \+ part \* 50 \+ column, inside",
        "partials + column, inside",
        V.NUMBERS,
    ),
}
"""What is wrong: the group, what is printed, what stands in its place, and what the judge says."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    name, right, wrong, verdict = FAULTS[fault]
    assert verdict.value in verdict_of(planted(group(name), right, wrong))


def with_partials(kernel: FusedKernel, **changes: Any) -> FusedKernel:
    """The group, whose launch is told otherwise how its sums end."""
    partials = kernel.text.partials
    assert partials is not None
    kernel.__dict__["text"] = dataclasses.replace(kernel.text, partials=dataclasses.replace(partials, **changes))
    return kernel


def test_sums_in_half_of_the_columns_are_refused() -> None:
    kernel = group("bias")
    partials = kernel.text.partials
    assert partials is not None
    half = dataclasses.replace(partials, columns=25)
    source = kernel.text.source.replace(partials.source(["out"]), half.source(["out"]))
    kernel.__dict__["text"] = dataclasses.replace(kernel.text, source=source, partials=half)
    assert Verdict.MISSING.value in verdict_of(kernel)


@pytest.mark.parametrize("results", [(3, 1, 0), (1, 2, 3)])
def test_sums_that_are_stored_to_other_results_are_refused(results: tuple[int, ...]) -> None:
    assert Verdict.PLACE.value in verdict_of(with_partials(group("backward"), results=results))


@pytest.mark.parametrize("change", [-1, 1])
def test_another_number_of_partial_sums_is_refused(change: int) -> None:
    kernel = group("bias")
    partials = kernel.text.partials
    assert partials is not None
    assert Verdict.MISSING.value in verdict_of(with_partials(kernel, parts=partials.parts + change))


def test_a_kernel_without_its_second_is_refused() -> None:
    kernel = group("bias")
    kernel.__dict__["text"] = dataclasses.replace(kernel.text, partials=None)
    with pytest.raises(VerifyError, match=Verdict.MISSING.value):
        check_group(kernel, 1)

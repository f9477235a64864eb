"""The judge of Triton kernels names every planted fault, and passes kernels as they are printed. No GPU is needed.

Random kernels are judged in :mod:`tests.operators.interpreted`, beside Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.codegen.group_judge import check_group, check_groups, key_of
from roamc.codegen.group_verdicts import Place, Verdict
from roamc.compat import FakeTensorMode
from roamc.errors import VerifyError
from roamc.operators.activations import Table
from roamc.operators.fused import fuse
from roamc.operators.gpu import kernel, operands, shifts
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.options import Options
from roamc.passes import fuse as fuse_pass
from tests.graphs import traced
from tests.planted import planted

aten = torch.ops.aten
HALF, FLOAT = torch.bfloat16, torch.float32
INT, BOOL, BYTES = torch.int64, torch.bool, torch.uint8


def on_gpu(shape: tuple[int, ...], dtype: torch.dtype = FLOAT, stride: tuple[int, ...] | None = None) -> Tensor:
    """A fake tensor on a GPU."""
    with FakeTensorMode():
        if stride is not None:
            return torch.empty_strided(shape, stride, device="cuda", dtype=dtype)
        return torch.empty(shape, device="cuda", dtype=dtype)


def group_of(function: Callable[..., Any], *inputs: Tensor) -> FusedKernel:
    with torch.no_grad():
        graph = traced(function, *inputs).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    results = [node for node in nodes if node in graph.output_node().all_input_nodes]
    group, _ = fuse(nodes[-1], nodes, FusedKernel, results)
    assert isinstance(group, FusedKernel)
    return group


def verdict_of(group: FusedKernel, over: int | None = None) -> str:
    """What the judge says; "" if nothing is wrong. The last result lies over argument ``over``, or alone."""
    places = [Place(at) for at, node in enumerate(group.body.nodes) if node.op == "placeholder"]
    try:
        alone = [Place(node) for node in group.results[:-1]]
        check_group(group, 1, places, [*alone, Place("alone" if over is None else over)])
    except VerifyError as error:
        return str(error)
    return ""


def flat(x: Tensor, y: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """All kinds of operands on a square: one transposed, one for each row, one for each column."""
    return (x - y) * row / column


def rows(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight - scale


def sums(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)


def several(x: Tensor, more: Tensor) -> tuple[Tensor, ...]:
    """A sum, its square, the scale of each row, and the scaled sum."""
    total = x + more
    square = total * total
    scale = torch.rsqrt(square.mean(-1, keepdim=True) + 1e-6)
    return total, square, scale, total * scale


def parts(x: Tensor) -> tuple[Tensor, ...]:
    """Values of a long row before any sum, behind one and behind two."""
    doubled = x * 2
    shifted = doubled - doubled.amax(-1, keepdim=True)
    return doubled, shifted, shifted / shifted.exp().sum(-1, keepdim=True)


def losses(scale: Tensor, logs: Tensor, labels: Tensor, total: Tensor, weight: Tensor) -> Tensor:
    grad = aten.nll_loss_backward(scale, logs, labels, weight, 1, -100, total)
    return aten._log_softmax_backward_data(grad, logs, 1, torch.float32)


def losses_of_rows(scale: Tensor, logs: Tensor, labels: Tensor, total: Tensor) -> Tensor:
    """The loss of each row has a gradient of its own."""
    grad = aten.nll_loss_backward(scale / 3, logs, labels, None, 0, -100, total)
    return aten._log_softmax_backward_data(grad, logs, 1, torch.float32)


def picks(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of each row's label."""
    return torch.ops.roamc.label_scores(logits.float().log_softmax(-1), labels, [1], False, 3)


def drops(x: Tensor, seed: Tensor) -> Tensor:
    """A dropout by a mask that follows from a seed."""
    mask = torch.ops.roamc.counter_mask(seed, list(x.shape), list(x.stride()), 0.5)
    return aten.native_dropout_backward(x, mask, 2.0)


def moved(x: Tensor, seed: Tensor) -> Tensor:
    """The dropped columns in another order."""
    dropped = drops(x, seed)
    return torch.cat([aten.slice.Tensor(dropped, -1, 16, 32), aten.slice.Tensor(dropped, -1, 0, 16)], -1)


def decodes(y: Tensor, right: Tensor, grad: Tensor) -> Tensor:
    """The slope at an input that is made from its output and a bit."""
    return aten.gelu_backward(grad, torch.ops.roamc.activation_input(y, right, "gelu"))


GROUPS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "flat": (flat, (on_gpu((40, 40)), on_gpu((40, 40), FLOAT, (1, 40)), on_gpu((40, 1)), on_gpu((40,)))),
    "rows": (rows, (on_gpu((2, 50, 50), HALF), on_gpu((50,), HALF), on_gpu((2, 50, 1), HALF))),
    "sums": (sums, (on_gpu((70, 64)), on_gpu((70, 64)))),
    "losses": (losses, (on_gpu(()), on_gpu((30, 10)), on_gpu((30,), INT), on_gpu(()), on_gpu((10,)))),
    "losses of rows": (losses_of_rows, (on_gpu((30,)), on_gpu((30, 10)), on_gpu((30,), INT), on_gpu(()))),
    "picks": (picks, (on_gpu((30, 10), HALF), on_gpu((30,), INT))),
    "picks of long rows": (picks, (on_gpu((3, kernel.LONGEST_ROW + 9), HALF), on_gpu((3,), INT))),
    "long": (lambda x: torch.softmax(x * 2, -1), (on_gpu((3, kernel.LONGEST_ROW + 9)),)),
    "several": (several, (on_gpu((36, 30)), on_gpu((36, 30)))),
    "parts": (parts, (on_gpu((3, kernel.LONGEST_ROW + 9)),)),
    "dropout": (drops, (on_gpu((40, 40), HALF), on_gpu((2,), INT))),
    "dropout in rows": (lambda x, seed: drops(x, seed).softmax(-1), (on_gpu((50, 48)), on_gpu((2,), INT))),
    "dropout in pieces": (
        lambda x, seed: drops(x, seed).softmax(-1),
        (on_gpu((3, kernel.LONGEST_ROW + 9)), on_gpu((2,), INT)),
    ),
    "dropout added up": (lambda x, seed: drops(x, seed).sum([0]), (on_gpu((500, 48)), on_gpu((2,), INT))),
    "dropout moved": (moved, (on_gpu((50, 32)), on_gpu((2,), INT))),
    "dropout of many elements": (drops, (on_gpu((40, 1 << 26), HALF), on_gpu((2,), INT))),
    "decode": (decodes, (on_gpu((40, 40), HALF), on_gpu((200,), BYTES), on_gpu((40, 40), HALF))),
    "decode of 32 bits": (decodes, (on_gpu((40, 40)), on_gpu((200,), BYTES), on_gpu((40, 40)))),
    "decode in rows": (
        lambda *of: decodes(*of).softmax(-1),
        (on_gpu((50, 48), torch.float16), on_gpu((300,), BYTES), on_gpu((50, 48), torch.float16)),
    ),
    "mask": (lambda x, chosen: torch.where(chosen, x, x * 2), (on_gpu((40, 40)), on_gpu((40, 40), BOOL))),
}


@pytest.mark.parametrize("name", GROUPS)
def test_kernels_as_they_are_printed_pass(name: str) -> None:
    run, inputs = GROUPS[name]
    assert verdict_of(group_of(run, *inputs)) == ""


V = Verdict
FAULTS: dict[str, tuple[str, str, str, Verdict]] = {
    # masks by a seed
    "another word of the seed": ("dropout", r"tl.load\(seed_1\)", "tl.load(seed_1 + 1)", V.NUMBERS),
    "half of the seed": ("dropout", r"(t = tl.load\(seed_1\))", r"\1 & 0xFFFFFFFF", V.NUMBERS),
    "the counter begins at 0": ("dropout", r"tl.load\(seed_1 \+ 1\)", "tl.load(seed_1 + 1) * 0", V.NUMBERS),
    "half of the counter": ("dropout", r"\(t_2 >> 32\)", "(t_2 >> 63)", V.NUMBERS),
    "mask of the next element": ("dropout", r"index & 1", "(index + 1) & 1", V.NUMBERS),
    "mask at a shifted place": ("dropout", r"\(index >> 2\)", "((index + 4) >> 2)", V.NUMBERS),
    "mask by another length of rows": ("dropout in rows", r"element = row \* 48", "element = row * 64", V.NUMBERS),
    "mask at unmoved columns": ("dropout moved", r"\+ column \+ 16\n", "+ column\n", V.NUMBERS),
    "another probability": ("dropout", r"< 0", "< 429496730", V.NUMBERS),
    "another stream": ("dropout", r", 0, 0\)", ", 0, 1)", V.NUMBERS),
    # decodes by tables
    "bits of the next element": ("decode", r"right_1 \+ index % 200", "right_1 + (index + 1) % 200", V.ELEMENTS),
    "bits of the part before": ("decode", r"index // 200", "index // 200 - 1", V.NUMBERS),
    "the last part has the bits of the first": ("decode", r"index // 200", "index // 200 % 7", V.NUMBERS),
    "a table's other half": ("decode", r"t \* 65536", "(1 - t) * 65536", V.NUMBERS),
    "a number behind a table": ("decode", r"t \* 65536", "t * 65536 + 65536", V.OUTSIDE),
    "bits of another dtype": ("decode", r">> 16\) & 65535", ">> 15) & 65535", V.NUMBERS),
    "bits of another row": ("decode in rows", r"\+ column\) % 300", "+ column + 48) % 300", V.ELEMENTS),
    "another cell": ("decode of 32 bits", r"- 25856", "- 25855", V.NUMBERS),
    "another line of a cell": ("decode of 32 bits", r"\* 2 \+ 1\)", "* 2 + 3)", V.NUMBERS),
    "another side's cells": ("decode of 32 bits", r"t \* 13177", "(1 - t) * 13177", V.NUMBERS),
    # several results
    "results are exchanged": (
        "several",
        r"tl.store\(add_out \+ ([^,]*), add,",
        r"tl.store(add_out + \1, x_1_value,",
        V.NUMBERS,
    ),
    "a result is stored in the place of another": ("several", r"tl.store\(add_out", "tl.store(mul_out", V.TWICE),
    "a result is not stored": ("several", r"    tl.store\(mul_out .*\n", "", V.MISSING),
    "a statistic is stored for each element": (
        "several",
        r"rsqrt_out \+ row, rsqrt, row < 36",
        "rsqrt_out + row * 30 + column, rsqrt, inside",
        V.TWICE,
    ),
    "a statistic of other rows": ("several", r"rsqrt_out \+ row, rsqrt", "rsqrt_out + row + 1, rsqrt", V.PLACE),
    "a result is read": ("several", r"tl.load\(x_1 \+", "tl.load(mul_out +", V.VALUE),
    "a part is not stored": ("parts", r" *tl.store\(sub_out .*\n", "", V.MISSING),
    # the elements of operands
    "rows lie further apart": ("rows", r"x_1 \+ row \* 50", "x_1 + row * 51", V.OUTSIDE),
    "rows lie nearer": ("rows", r"x_1 \+ row \* 50", "x_1 + row * 49", V.ELEMENTS),
    "a square is not transposed": ("flat", r"y_1 \+ index // 40 \+ \(index % 40\) \* 40", "y_1 + index", V.ELEMENTS),
    "a square is transposed": ("flat", r"x_1 \+ index,", "x_1 + index // 40 + (index % 40) * 40,", V.ELEMENTS),
    "one for each row is one for each column": ("flat", r"row_1 \+ index // 40", "row_1 + index % 40", V.ELEMENTS),
    "one for each column is one for each row": (
        "flat",
        r"column_1 \+ index % 40",
        "column_1 + index // 40",
        V.ELEMENTS,
    ),
    "one for each row is one for each column of rows": (
        "rows",
        r"scale_1 \+ row, row < 100",
        "scale_1 + column, column < 50",
        V.ELEMENTS,
    ),
    "another operand": ("flat", r"row_1 \+ index // 40", "column_1 + index // 40", V.ELEMENTS),
    "one element too far": ("sums", r"y_1 \+ row \* 64 \+ column", "y_1 + row * 64 + column + 1", V.OUTSIDE),
    "one element too near": ("sums", r"y_1 \+ row \* 64 \+ column", "y_1 + row * 64 + (column + 63) % 64", V.ELEMENTS),
    "a label for all rows": ("losses", r"labels_1 \+ row,", "labels_1 + row * 0,", V.ELEMENTS),
    "operands of one shape are exchanged": ("flat", r"x_1_value - y_1_value", "y_1_value - x_1_value", V.NUMBERS),
    "operands of a quotient are exchanged": (
        "flat",
        r"div_rn\(mul, column_1_value\)",
        "div_rn(column_1_value, mul)",
        V.NUMBERS,
    ),
    "branches are exchanged": ("mask", r"x_1_value, mul\)", "mul, x_1_value)", V.NUMBERS),
    "a value before it is made": ("rows", r"tl\.rsqrt\(add\)", "tl.rsqrt(rsqrt)", V.UNKNOWN),
    # masks
    "a load without a mask": ("flat", r"x_1 \+ index, inside, 0", "x_1 + index", V.OUTSIDE),
    "a mask lets one element in": ("flat", r"index < 1600", "index < 1601", V.OUTSIDE),
    "a mask leaves one element out": ("flat", r"index < 1600", "index < 1599", V.MASK),
    "a mask lets a row in": ("rows", r"scale_1 \+ row, row < 100", "scale_1 + row, row < 101", V.OUTSIDE),
    "a mask leaves a column out": (
        "rows",
        r"weight_1 \+ column, column < 50",
        "weight_1 + column, column < 49",
        V.MASK,
    ),
    "a store without a mask": ("flat", r"div, inside\)", "div)", V.MASK),
    "a store lets a column in": ("rows", r"sub, inside\)", "sub, (row < 100) & (column < 51))", V.MASK),
    "a store leaves a row out": ("sums", r"sum_1, row < 70", "sum_1, row < 69", V.MISSING),
    # sums
    "a sum along columns": ("rows", r"(total = tl.sum\(.*), 1,", r"\1, 0,", V.DIMENSION),
    "a sum of padding": (
        "losses",
        r"tl\.where\(column < 10, nll_loss_backward, 0\.0\)",
        "nll_loss_backward + 1",
        V.NUMBERS,
    ),
    "a mean of other columns": ("rows", r"total / 50\.0", "total / 64.0", V.NUMBERS),
    "the last column is not added": ("rows", r"tl\.where\(column < 50", "tl.where(column < 49", V.NUMBERS),
    "a piece is left out": (
        "long",
        r"(total = tl.full(?:.*\n)    for start in range\(0), 16393",
        r"\1, 12288",
        V.NUMBERS,
    ),
    "the first piece is stored alone": (
        "long",
        r"(    for start in range\(0), 16393(.*\n(?:        .*\n)*.*tl.store)",
        r"\1, 4096\2",
        V.MISSING,
    ),
    "a sum of other elements": ("sums", r"tl\.sum\(mul,", "tl.sum(x_1_value,", V.NUMBERS),
    # numbers
    "another number": ("mask", r"\* 2\.0", "* 3.0", V.NUMBERS),
    "one gradient for all rows": ("losses of rows", r"scale_1 \+ row,", "scale_1 + row * 0,", V.ELEMENTS),
    "another label": ("losses", r"\(column == ", "(column + 1 == ", V.NUMBERS),
    "the score of another label": ("picks", r"\(column == ", "(column + 1 == ", V.NUMBERS),
    "another label is left out": ("picks", r"!= 3", "!= 4", V.NUMBERS),
    "the weight of what is ignored": ("losses", r"== -100, 0", "== -1, 0", V.OUTSIDE),
    "another function": ("rows", r"tl\.rsqrt", "tl.sqrt_rn", V.NUMBERS),
    # the result
    "stored in another place": ("flat", r"out \+ index,", "out + index // 40 + (index % 40) * 40,", V.PLACE),
    "rows of the result lie nearer": ("rows", r"out \+ row \* 50", "out + row * 49", V.PLACE),
    "stored over an operand": ("flat", r"tl\.store\(out", "tl.store(x_1", V.PLACE),
    "stored twice": ("flat", r"(    tl\.store.*\n)", r"\1\1", V.TWICE),
    "the result is read": ("flat", r"tl\.load\(x_1", "tl.load(out", V.VALUE),
    "a sum is stored for every column": ("sums", r"out \+ row,", "out + row + column * 0,", V.TWICE),
    "another value is stored": ("flat", r"div, inside\)", "mul, inside)", V.NUMBERS),
    "never stored": ("flat", r"    tl\.store.*\n", "", V.MISSING),
    "the same rows in all programs": ("rows", r"tl\.program_id\(0\) \* ROWS", "0", V.ELEMENTS),
    "programs overlap": ("rows", r"tl\.program_id\(0\) \* ROWS", "tl.program_id(0) * 15", V.ELEMENTS),
    "programs along an axis that is not there": ("flat", r"program_id\(0\)", "program_id(1)", V.TWICE),
}
"""What is wrong: the group, what is printed, what stands in its place, and what the judge says."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    name, right, wrong, verdict = FAULTS[fault]
    run, inputs = GROUPS[name]
    assert verdict.value in verdict_of(planted(group_of(run, *inputs), right, wrong))


@pytest.mark.parametrize(("name", "change"), [("flat", -1), ("rows", 1), ("sums", -1)])
def test_another_number_of_programs_is_refused(name: str, change: int) -> None:
    run, inputs = GROUPS[name]
    group = group_of(run, *inputs)
    group.__dict__["text"] = dataclasses.replace(group.text, programs=group.text.programs + change)
    assert Verdict.MISSING.value in verdict_of(group)


def test_places_that_32_bits_do_not_hold_are_refused() -> None:
    x = on_gpu((1 << 17, 1 << 15))
    group = group_of(lambda x: (x * 2).sum(-1), x)
    assert verdict_of(group) == ""
    assert Verdict.OUTSIDE.value in verdict_of(planted(group, r"\.to\(tl\.int64\)", ""))


@pytest.mark.parametrize(
    "mode", [FakeTensorMode(), torch.device("meta"), torch.inference_mode()], ids=["fake", "meta", "inference"]
)
def test_surroundings_make_no_difference(mode: Any) -> None:
    group = group_of(rows, *GROUPS["rows"][1])
    _ = group.text
    with mode:
        assert verdict_of(group) == ""
        assert Verdict.ELEMENTS.value in verdict_of(planted(group, r"x_1 \+ row \* 50", "x_1 + row * 49"))


SQUARES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: (x * 2) / (x * 2).sum(-1),
    lambda x, y: (x * 2).amax(-1).unsqueeze(0) + y,
    lambda x, y: (x * 2).mean(-1, keepdim=True).t() - y,
    lambda x, y: (x * 2).t() - y,
)


@pytest.mark.parametrize("function", SQUARES)
def test_values_inside_that_are_read_in_another_order_are_seen(
    function: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Printing refuses them; here it is made to print them."""
    monkeypatch.setattr(shifts, "keeps_order", lambda *of: True)
    monkeypatch.setattr(operands, "in_order", lambda *of: True)
    assert Verdict.ELEMENTS.value in verdict_of(group_of(function, on_gpu((64, 64)), on_gpu((64, 64))))


@pytest.mark.parametrize("number", [1e39, 1e300, 1e-41, 3, 0.0])
def test_a_divisor_is_inverted_in_float64(number: float) -> None:
    """The reciprocal of 1e39 is a number of float32, and 1e39 is not."""
    x = on_gpu((40, 400))
    assert verdict_of(group_of(lambda x, y: (x / number) * 1e38 + y, x, x)) == ""


# -- results over operands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GROUPS)
def test_results_lie_over_what_a_group_says(name: str) -> None:
    run, inputs = GROUPS[name]
    group = group_of(run, *inputs)
    assert [verdict_of(group, over) for over in group.rule.overwrites] == [""] * len(group.rule.overwrites)


def test_a_result_over_what_other_programs_read_is_refused() -> None:
    run, inputs = GROUPS["flat"]
    assert Verdict.OVERWRITTEN.value in verdict_of(group_of(run, *inputs), over=1)
    group = group_of(lambda x, column: (x * column).sum(-1), on_gpu((64, 64)), on_gpu((64,)))
    assert group.rule.overwrites == ()
    assert Verdict.OVERWRITTEN.value in verdict_of(group, over=1)
    run, inputs = GROUPS["losses"]
    group = group_of(run, *inputs)
    weight = [node.name for node in group.body.nodes].index("weight_1")
    assert Verdict.OVERWRITTEN.value in verdict_of(group, over=weight)


def test_an_operand_that_is_read_behind_the_store_is_refused() -> None:
    run, inputs = GROUPS["flat"]
    again = r"\1    x_1_value = tl.load(x_1 + index, inside, 0)\n"
    assert Verdict.OVERWRITTEN.value in verdict_of(
        planted(group_of(run, *inputs), r"(    tl\.store.*\n)", again), over=0
    )


def test_another_table_is_refused() -> None:
    run, inputs = GROUPS["decode"]
    group = group_of(run, *inputs)
    right = key_of(group, 1, [], [])
    group.__dict__["text"] = dataclasses.replace(group.text, tables=(Table("silu", HALF),))
    assert Verdict.NUMBERS.value in verdict_of(group)
    assert key_of(group, 1, [], []) != right


def test_groups_of_a_graph_are_judged() -> None:
    with torch.no_grad():
        graph = traced(rows, *GROUPS["rows"][1])
    graph = fuse_pass.apply(graph, fuse_pass.decide(graph, Options(numerics="fast")))
    check_groups(graph)
    (group,) = [node.target for node in graph.graph.nodes if isinstance(node.target, FusedKernel)]
    planted(group, r"x_1 \+ row \* 50", "x_1 + row * 49")
    with pytest.raises(VerifyError, match="other elements are read"):
        check_groups(graph)

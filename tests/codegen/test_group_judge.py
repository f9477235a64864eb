"""The judge of groups names every planted fault, passes every sound group, and sees both faults that got past all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from roamc.codegen import group_judge
from roamc.codegen.group_judge import check_group, check_groups
from roamc.codegen.group_verdicts import Place, Verdict
from roamc.errors import VerifyError
from roamc.graph import operators, placeholders
from roamc.operators import blocks, fused, ops
from roamc.operators.fused import Fused, fuse
from roamc.options import Options
from roamc.passes import fuse as fuse_pass
from roamc.passes.fuse import choose, estimates
from roamc.planning import search
from tests.codegen.random_groups import random_case
from tests.graphs import traced
from tests.planted import planted

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks of small tensors, and groups of the smallest."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 9)
    monkeypatch.setattr(choose, "EFFORT", choose.Effort(least_bytes=1, least_share=0.0))
    monkeypatch.setattr(estimates, "group_workspace", lambda group, threads: 0)


def group_of(function: Callable[..., Tensor], *inputs: Tensor) -> Fused:
    nodes = operators(traced(function, *inputs).graph)
    return fuse(nodes[-1], [node for node in nodes[-1].graph.nodes if node.op == "call_function"])[0]


def verdict_of(group: Fused, places: Sequence[Place] | None = None, out: Place | None = None) -> str:
    try:
        check_group(group, 1, places, [out] if out is not None else None)
    except VerifyError as error:
        return str(error)
    return ""


# -- sound groups -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 1200, 100))
def test_groups_that_fit_pass_and_forced_ones_pass_only_with_right_numbers(first: int) -> None:
    """Of all operators of random functions, those that pass fuse would leave apart included."""
    sound = wrong = 0
    for seed in range(first, first + 100):
        case = random_case(seed)
        if case is None:
            continue
        said = verdict_of(case.group)
        if not case.misfit:
            sound += 1
            assert said == "", f"seed {seed}\n{case.group.text.source}"
        if not said:
            assert torch.equal(case.group(*case.arguments), case.wanted), f"seed {seed}\n{case.group.text.source}"
        wrong += said != ""
    assert sound >= 15
    assert wrong >= 3


@pytest.mark.parametrize("seed", range(0, 200, 5))
def test_results_over_operands_pass_only_where_the_numbers_stay(seed: int) -> None:
    case = random_case(seed)
    group = case.group if case is not None else None
    if case is None or group is None or case.misfit:
        return
    places = [Place(at) for at, _ in enumerate(case.arguments)]
    expected = case.wanted
    for at, argument in enumerate(case.arguments):
        if (argument.shape, argument.dtype) != (expected.shape, expected.dtype) or not argument.is_contiguous():
            continue
        arguments = [tensor.clone() if number == at else tensor for number, tensor in enumerate(case.arguments)]
        group.write(*arguments, out=arguments[at])
        passes = verdict_of(group, places, Place(at)) == ""
        assert at not in group.rule.overwrites or passes
        assert not passes or torch.equal(arguments[at], expected), f"argument {at}\n{group.text.source}"


# -- planted faults ---------------------------------------------------------------------------------------------------


def norm(x: Tensor, grad: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """All kinds of operands and values on a square: all elements, one for each row, one for each column."""
    inner = grad * weight
    dot = (inner * x).sum(-1, keepdim=True)
    return inner * scale - (dot * scale * -0.5).expand(x.shape) / 16 * (x / grad)


def losses(logs: Tensor, target: Tensor, grad: Tensor, total: Tensor, weight: Tensor) -> Tensor:
    inner = aten.nll_loss_backward(grad, logs, target, weight, 1, -100, total)
    return aten._log_softmax_backward_data(inner, logs, 1, logs.dtype)


def gate(x: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    return aten.silu_backward(grad * up, x)


GROUPS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "norm": (norm, (torch.randn(16, 16), torch.randn(16, 16), torch.randn(16), torch.randn(16, 1))),
    "losses": (
        losses,
        (torch.randn(20, 6), torch.zeros(20, dtype=torch.int64), torch.tensor(1.0), torch.tensor(2.0), torch.rand(6)),
    ),
    "gate": (gate, (torch.randn(2, 10, 8), torch.randn(2, 10, 8), torch.randn(2, 10, 8))),
    "mean": (lambda x, y: (x.double() * y).mean(-1), (torch.randn(20, 8), torch.randn(20, 8).double())),
    "labels": (
        lambda x, y, one, all: aten.nll_loss_backward(one, x * 2, y, None, 1, -100, all) * 3,
        (torch.randn(20, 8), torch.zeros(20, dtype=torch.int64), torch.tensor(1.0), torch.tensor(2.0)),
    ),
    "less": (lambda x, y: torch.where(x > y, x, y * 2), (torch.randn(20, 8), torch.randn(20, 8))),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_as_they_are_printed_pass(name: str) -> None:
    run, inputs = GROUPS[name]
    assert verdict_of(group_of(run, *inputs)) == ""


V = Verdict
FAULTS: dict[str, tuple[str, str, str, Verdict]] = {
    # the elements of operands
    "rows lie further apart": ("norm", r"(x_1 = .*\), \()16, 1", r"\g<1>17, 1", V.OUTSIDE),
    "rows lie nearer": ("norm", r"(x_1 = .*\), \()16, 1", r"\g<1>15, 1", V.ELEMENTS),
    "rows are columns of a square": ("norm", r"(x_1 = .*\), \()16, 1", r"\g<1>1, 16", V.ELEMENTS),
    "one for each row is one for each column": (
        *("norm", r"scale_1\.as_strided\(\(16, 1\), \(1, 0\)\)\.split\(rows\)"),
        *("scale_1.as_strided((1, 16), (0, 1)).split(rows)", V.ELEMENTS),
    ),
    "one for each column is one for each row": (
        "norm",
        r"mul_out\(grad_1, weight_1,",
        "mul_out(grad_1, scale_1,",
        V.VALUE,
    ),
    "one for all": ("norm", r"(scale_1 = .*\), \()1, 0", r"\g<1>0, 0", V.ELEMENTS),
    "a column is shared": ("norm", r"(weight_1 = .*\), \()0, 1", r"\g<1>0, 0", V.ELEMENTS),
    "operands of one shape are exchanged": ("norm", r"div_out\(x_1, grad_1,", "div_out(grad_1, x_1,", V.VALUE),
    "one operand twice": ("gate", r"mul_out\(grad_1, up_1,", "mul_out(grad_1, grad_1,", V.VALUE),
    "an operand in the place of a value inside": ("gate", r"\(block_0, x_1,", "(up_1, x_1,", V.VALUE),
    "labels in shorter blocks": (
        *("losses", r"(target_1 = .*)split\(rows\)", r"\1split(rows - 1)"),
        V.SHAPE,
    ),
    "every second label": ("losses", r"(target_1 = .*\), \()1, 0", r"\g<1>2, 0", V.OUTSIDE),
    "a label for all rows": ("losses", r"(target_1 = .*\), \()1, 0", r"\g<1>0, 0", V.ELEMENTS),
    # values inside
    "a value of an earlier member": ("norm", r"sum_IntList_out\(block_1,", "sum_IntList_out(block_0,", V.VALUE),
    "a value that is gone": (
        "norm",
        r"mul_out\(grad_1, weight_1, out=block_0\)",
        "mul_out(grad_1, weight_1, out=block_1)",
        V.VALUE,
    ),
    "a value before it is made": ("gate", r"mul_out\(grad_1, up_1,", "mul_out(block_0, up_1,", V.VALUE),
    "a place that is read while it is written": ("norm", r"(div_out\(.*?), out=block_\d", r"\1, out=block_2", V.SHAPE),
    "a value inside over an operand": ("gate", r"up_1, out=block_0", "up_1, out=up_1", V.PLACE),
    "a value inside in the place of the result": ("gate", r"up_1, out=block_0", "up_1, out=out", V.PLACE),
    # how much memory
    "one row too few": ("gate", r"torch\.empty\(\(rows,", "torch.empty((rows - 1,", V.SHAPE),
    "one column too few": ("gate", r"torch\.empty\(\(rows, 8\)", "torch.empty((rows, 7)", V.SHAPE),
    "bytes that nobody counts": (
        "gate",
        r"(    block_0 = .*\n)",
        r"\1    block_1 = torch.empty((rows, 8), dtype=torch.int8)\n",
        V.BYTES,
    ),
    "another dtype": ("mean", r"dtype=torch\.float64\)\n", "dtype=torch.float32)\n", V.DTYPE),
    "the last block is as long as the others": (
        "gate",
        r"            block_0 = block_0\[:len\(out\)\]",
        "            pass",
        V.SHAPE,
    ),
    "the last block is one row short": ("gate", r"block_0\[:len\(out\)\]", "block_0[: len(out) - 1]", V.SHAPE),
    # calls
    "along the columns": ("norm", r"\[-1\], True", "[0], True", V.DIMENSION),
    "along both dimensions": ("norm", r"\[-1\], True", "[-2, -1], True", V.DIMENSION),
    "softmax along the columns": ("losses", r"logs_1, -1,", "logs_1, 0,", V.DIMENSION),
    "a sum without columns": ("norm", r"\[-1\], True", "[-1], False", V.SHAPE),
    "another number": ("norm", r"-0\.5", "0.5", V.ARGUMENT),
    "another operator": ("norm", r"sub_out\(", "mul_out(", V.CALL),
    "one member too few": ("gate", r"        mul_out\(.*\n", "", V.CALL),
    "one member too many": ("gate", r"(        silu.*\n)", r"\1\1", V.CALL),
    "members in another order": ("less", r"(        gt.*\n)(        mul.*\n)", r"\2\1", V.CALL),
    "a result of the wrong shape": ("norm", r"block_2\.expand\(len\(out\), 16\)", "block_2", V.SHAPE),
    "classes ignored": ("losses", r"-100", "-1", V.ARGUMENT),
    # the result
    "the last block is missing": ("gate", r"(    up_1 = )(.*)", r"\1[*\2][:-1]", V.MISSING),
    "blocks run twice": (
        *("gate", r"    for (.*) in (zip\(.*\)):\n((?:        .*\n)+)"),
        *(r"    kept = \1\n    for \1 in zip(*kept):\n\3    for \1 in zip(*kept):\n\3", V.TWICE),
    ),
    "the result is written every second row": ("mean", r"(    out = .*\), \()1, 0", r"\g<1>2, 0", V.OUTSIDE),
    "all rows of the result in one place": ("mean", r"(    out = .*\), \()1, 0", r"\g<1>0, 0", V.PLACE),
    "the result is transposed": ("norm", r"(    out = .*\), \()16, 1", r"\g<1>1, 16", V.PLACE),
    # what no other line of this table reaches
    "labels in two dimensions": ("losses", r"view\(-1\)", "view(1, -1)", V.UNKNOWN),
    "the end of a block": ("gate", r"block_0\[:len\(out\)\]", "block_0[len(out):]", V.UNKNOWN),
    "another function of torch": ("gate", r"torch\.empty", "torch.zeros", V.UNKNOWN),
    "rows behind the last one": (
        "mean",
        r"out\.as_strided\(\(20, 1\), \(1, 0\)\)",
        "out.as_strided((40, 1), (0, 0))",
        V.OUTSIDE,
    ),
    "the last member is missing": ("gate", r"        silu.*\n", "", V.CALL),
    "a number in the place of an operand": ("gate", r"grad_1, up_1, out", "grad_1, 2.0, out", V.ARGUMENT),
    "the weights of half of the classes": (
        "losses",
        r"weight_1, 1,",
        "weight_1.as_strided((3,), (2,)), 1,",
        V.ELEMENTS,
    ),
    "a block is transposed": (
        *("norm", r"mul_out\(block_0, x_1,", "mul_out(block_0.as_strided((len(out), 16), (1, 16)), x_1,", V.ELEMENTS),
    ),
    "three rows for all": ("gate", r"grad_1, up_1, out", "grad_1, up_1[:3], out", V.SHAPE),
    "one row for a member along rows": ("losses", r"block_0, logs_1,", "block_0, logs_1[:1],", V.SHAPE),
    "a value inside is spread over more rows": ("norm", r"expand\(len\(out\), 16", "expand(len(out) + 1, 16", V.SHAPE),
    "the result in the place of a value inside": ("gate", r"grad_input=out", "grad_input=block_0", V.PLACE),
    "a gradient over what it reads": ("labels", r"grad_input=block_1", "grad_input=block_0", V.OVERWRITTEN),
    "an earlier name": ("gate", r"x_1 = x_1", "y_1 = x_1", V.UNKNOWN),
}
"""What is wrong: the group, what is printed, what stands in its place, and what the judge says."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    name, right, wrong, verdict = FAULTS[fault]
    run, inputs = GROUPS[name]
    said = verdict_of(planted(group_of(run, *inputs), right, wrong))
    assert verdict.value in said


def test_a_block_of_one_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch adds up one row in another order than several."""
    run, inputs = GROUPS["gate"]
    for rows in (1, 19):
        monkeypatch.setattr(Fused, "block_rows", lambda group, threads, rows=rows: rows)
        assert Verdict.LONE_ROW.value in verdict_of(group_of(run, *inputs))


@pytest.mark.parametrize(
    "change", [lambda x: x.double(), lambda x: x[:, :4], lambda x: x.t()], ids=["dtype", "part", "t"]
)
def test_operands_of_a_call_are_those_of_the_group(change: Callable[[Tensor], Tensor]) -> None:
    graph = traced(lambda x, y: (x * y).sin(), torch.randn(16, 8), torch.randn(16, 8))
    graph = fuse_pass.apply(graph, fuse_pass.decide(graph, Options()))
    check_groups(graph)
    argument = placeholders(graph.graph)[1]
    argument.meta["val"] = change(argument.meta["val"])
    with pytest.raises(VerifyError, match="shapes do not fit: y_1 is"):
        check_groups(graph)


def test_a_result_with_other_strides_than_in_the_group_is_refused() -> None:
    graph = traced(lambda x, y: (x * y).sin(), torch.randn(16, 16), torch.randn(16, 16))
    graph = fuse_pass.apply(graph, fuse_pass.decide(graph, Options()))
    (node,) = [node for node in graph.graph.nodes if isinstance(node.target, Fused)]
    node.meta["val"] = node.meta["val"].t()
    with pytest.raises(VerifyError, match="the result is written elsewhere: in memory sin has other strides"):
        check_groups(graph)


# -- the faults that got past all other judges ------------------------------------------------------------------------

SQUARES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: (x * 2) / (x * 2).sum(-1),
    lambda x, y: (x * 2).amax(-1).unsqueeze(0) + y,
    lambda x, y: (x * 2).mean(-1).view(1, -1) * y,
    lambda x, y: (x * 2).sum(-1, keepdim=True).t() - y,
)


@pytest.mark.parametrize("function", SQUARES)
def test_one_for_each_row_read_as_one_for_each_column_is_seen(
    function: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_sees_another", lambda *of: False)
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    graph = traced(function, x, y)
    with pytest.raises(VerifyError, match=r"group \w+, \w+: (other elements are read|shapes do not fit)"):
        check_groups(fuse_pass.apply(graph, fuse_pass.decide(graph, Options())))


def before_the_mend(group: Fused) -> tuple[int, ...]:
    """The arguments over which a result was said to go, what all blocks read included."""
    last = group.nodes[-1]
    taken = {node for at, node in enumerate(last.args) if at not in ops.rule(last.target).overwrites}
    result = blocks.only_tensor(last)
    return tuple(
        at
        for at, node in enumerate(placeholders(group.body))
        if node not in taken and fused.same_geometry(node.meta["val"], result)
    )


def test_a_result_over_what_later_blocks_read_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Tensor, column: Tensor) -> Tensor:
        return (x * (column * 2)).sin().sum(-1) @ x

    graph = traced(step, torch.randn(512, 512), torch.randn(512))
    planned = search.run(graph, Options())
    check_groups(planned.graph)
    monkeypatch.setattr(Fused, "_overwrites", before_the_mend)
    graph = traced(step, torch.randn(512, 512), torch.randn(512))
    with pytest.raises(VerifyError, match="what is still read is overwritten"):
        check_groups(search.run(graph, Options()).graph)


@pytest.mark.parametrize(("far", "passes"), [(0, True), (4, False), (-4, False), (640, True), (-640, True)])
def test_a_result_may_lie_over_an_operand_element_by_element_alone(far: int, passes: bool) -> None:
    """All of it in one block, where earlier blocks do not come in; 640 bytes are the whole operand."""
    run, inputs = GROUPS["gate"]
    places = [Place("grad"), Place("up"), Place("shared", 1000)]
    said = verdict_of(group_of(run, *inputs), places, Place("shared", 1000 + far))
    assert said == "" if passes else "writes the result over self, which it reads elsewhere" in said


# -- what it costs ----------------------------------------------------------------------------------------------------


def test_groups_that_differ_in_names_alone_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    judge = group_judge.check_group
    monkeypatch.setattr(
        group_judge, "check_group", lambda group, *rest: judged.append(group.name) or judge(group, *rest)
    )

    def layers(x: Tensor, weight: Tensor) -> Tensor:
        for factor in (2, 2, 2, 3):
            x = (x * factor).sin() @ weight
        return x

    graph = traced(layers, torch.randn(64, 64), torch.randn(64, 64))
    check_groups(fuse_pass.apply(graph, fuse_pass.decide(graph, Options())))
    assert judged == ["sin", "sin_3"]

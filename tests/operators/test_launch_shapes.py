"""Shapes of launches: which kernels have several, and that these have one source and the same elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.codegen.group_judge import check_group
from roamc.errors import VerifyError
from roamc.operators.gpu import kernel, multi_tensor
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.kernel_keys import nameless
from roamc.operators.gpu.launch import jit_function
from roamc.operators.gpu.launch_shapes import LaunchShape, launched_in
from tests.codegen.test_kernel_judge import GROUPS, group_of, on_gpu
from tests.operators.updates import groups_of

aten = torch.ops.aten


def doubled(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2 + y).neg()


def rotated(x: Tensor, first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotary embedding of a head whose columns are ``first`` and ``second``."""
    return x * cos + aten.cat([-second, first], 2) * sin


def heads(columns: int) -> tuple[Tensor, ...]:
    whole, half, angle = (4, 300, columns), (4, 300, columns // 2), (300, columns)
    return tuple(map(on_gpu, (whole, half, half, angle, angle)))


ALONE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], tuple[tuple[int, int], ...]]] = {
    "flat": (doubled, (on_gpu((40, 400)),) * 2, ((1024, 4), (1024, 8), (2048, 4))),
    "few elements": (
        lambda x, y: (x * 2 + y).neg(),
        (on_gpu((3, 30)),) * 2,
        ((1024, 4), (1024, 8), (1024, 2)),
    ),
    "short rows": (rotated, heads(64), ((16, 4), (16, 8), (32, 4))),
    "wide rows": (rotated, heads(8192), ((1, 16), (1, 8))),
}
"""Name to a function whose elements are each computed alone, its operands, and blocks and warps of its launches."""

JOINED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "sums along rows": (lambda x: x - x.sum(-1, keepdim=True), (on_gpu((70, 64)),)),
    "sums along long rows": (lambda x: torch.softmax(x * 2, -1), (on_gpu((3, kernel.LONGEST_ROW + 9)),)),
    "sums over rows": (lambda x: ((y := x * 2), y.sum([0])), (on_gpu((700, 64)),)),
}


def made(name: str) -> FusedKernel:
    function, operands = ALONE[name][:2] if name in ALONE else JOINED[name]
    return group_of(function, *operands)


@pytest.mark.parametrize("name", ALONE)
def test_kernels_without_sums_have_several_shapes_that_the_judge_passes(name: str) -> None:
    group = made(name)
    assert group.shapes == tuple(LaunchShape(*shape) for shape in ALONE[name][2])
    assert launched_in(group.printed, group.matrix, group.shapes[0]) == group.printed
    for shape in group.shapes:
        group.launch_in(shape)
        assert group.text.source == group.printed.source
        check_group(group, 1)


@pytest.mark.parametrize("name", ["dropout", "dropout moved"])
def test_masks_by_a_seed_are_the_same_in_all_shapes(name: str) -> None:
    function, operands = GROUPS[name]
    group = group_of(function, *operands)
    assert len(group.shapes) > 1
    for shape in group.shapes:
        group.launch_in(shape)
        check_group(group, 1)


@pytest.mark.parametrize("name", JOINED)
def test_kernels_with_sums_keep_the_shape_that_follows_from_the_matrix(name: str) -> None:
    group = made(name)
    (shape,) = group.shapes
    other = LaunchShape(shape.block, shape.warps * 2)
    with pytest.raises(ValueError, match="no shape"):
        group.launch_in(other)


@pytest.mark.parametrize("name", JOINED)
def test_the_judge_names_a_kernel_with_sums_and_other_warps(name: str) -> None:
    group = made(name)
    group.__dict__["text"] = replace(group.printed, warps=2 * group.printed.warps)
    with pytest.raises(VerifyError, match=r"joined in another order: .*tl\.\w+ depends"):
        check_group(group, 1)


def test_the_judge_names_a_kernel_with_sums_and_other_rows_of_a_program() -> None:
    group = made("sums along rows")
    other = LaunchShape(2 * group.shapes[0].block, group.shapes[0].warps)
    group.__dict__["text"] = launched_in(group.printed, group.matrix, other)
    with pytest.raises(VerifyError, match=r"it is launched with ROWS=32, .*printed for ROWS=16, .*tl\.sum depends"):
        check_group(group, 1)


def test_the_judge_names_a_launch_with_programs_of_another_shape() -> None:
    group = made("flat")
    text = launched_in(group.printed, group.matrix, group.shapes[2])
    group.__dict__["text"] = replace(text, programs=group.printed.programs)
    with pytest.raises(VerifyError, match="programs are launched"):
        check_group(group, 1)


def test_the_judge_names_a_source_that_is_right_in_its_printed_shape_alone() -> None:
    group = made("flat")
    fixed = replace(group.printed, source=group.printed.source.replace("* BLOCK", "* 1024"))
    group.__dict__["text"] = fixed
    check_group(group, 1)
    group.__dict__["text"] = launched_in(fixed, group.matrix, group.shapes[2])
    with pytest.raises(VerifyError, match="other elements are read"):
        check_group(group, 1)


def test_a_kernel_of_several_tensors_keeps_the_shape_in_which_their_programs_begin() -> None:
    several, _ = multi_tensor.join(groups_of(torch.optim.AdamW, [(1024,), (2048,)], torch.float32))
    assert several.shapes == (LaunchShape(1024, 4),)
    assert several.text is several.printed
    check_group(several, 1)


def test_groups_have_one_key_if_names_alone_differ() -> None:
    def renamed(one: Tensor, other: Tensor) -> Tensor:
        twice = one * 2
        return (twice + other).neg()

    operands = (on_gpu((40, 400)),) * 2
    assert made("flat").key == group_of(renamed, *operands).key
    assert made("flat").key != group_of(lambda x, y: (x * 3 + y).neg(), *operands).key
    assert made("flat").key != group_of(lambda x, y: (x * 2 + y).neg(), *(on_gpu((400, 40)),) * 2).key
    assert made("flat").key != group_of(lambda x, y: (x * 2 + y).abs(), *operands).key


def test_kernels_that_differ_in_names_alone_are_one_function_to_compile() -> None:
    def renamed(one: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        twice = one * 2
        return twice, twice.sum([0])

    first = group_of(JOINED["sums over rows"][0], on_gpu((700, 64)))
    second, third = (group_of(renamed, on_gpu((rows, 64)), on_gpu((64,))) for rows in (700, 800))
    functions = [jit_function(group.text) for group in (first, second, third)]
    ends = [jit_function(group.text, group.text.partials.function) for group in (first, second, third)]
    assert functions[0] is functions[1] is not functions[2]
    assert ends[0] is ends[1] is not functions[0]


def test_kernels_with_other_numbers_that_are_not_finite_are_two_functions() -> None:
    def filled(number: float) -> str:
        def fill(x: Tensor, mask: Tensor) -> Tensor:
            return aten.masked_fill.Scalar(x, mask, number).neg()

        return nameless(group_of(fill, torch.ones(8, 16), torch.ones(8, 16, dtype=torch.bool)).text.source)

    assert len({filled(number) for number in (float("inf"), float("-inf"), float("nan"))}) == 3


def test_functions_of_triton_and_constants_are_no_names() -> None:
    assert nameless("a = tl.exp(b)  # m.py:1\n") == nameless("c = tl.exp(d)\n") == "v0 = tl.exp(v1)\n"
    assert nameless("a = tl.exp(b)") != nameless("a = tl.log(b)")
    assert nameless("a = ROWS") != nameless("a = BLOCK")

"""What is made of a part of a value and put there is made there, and only where nobody sees a difference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.capture import part_writes, sharing
from roamc.capture.in_place_values import writes_over
from roamc.capture.part_writes import to_parts
from roamc.capture.sharing import Half
from roamc.graph import TrainGraph
from roamc.graph.memory import WROTE_OVER, build_memory
from roamc.graph.rewrite import mode_of
from roamc.graph.storage_ids import number
from roamc.operators import ops
from tests.graphs import assert_same, clones, run_real, traced
from tests.operator_calls import rows_with

aten = torch.ops.aten
WHOLE, OTHER = torch.randn(6, 8), torch.randn(6, 4)


def halved(x: Tensor, _: Tensor) -> Tensor:
    y = x.clone()
    z = aten.slice_scatter.default(y, y[:, :4] * 0.5, 1, 0, 4)
    return z + z.t().sum()


def added(x: Tensor, other: Tensor) -> Tensor:
    y = x.exp()
    z = aten.slice_scatter.default(y, y[:, 2:6] + other, 1, 2, 6)
    return z.view(-1).sin()


def row(x: Tensor, other: Tensor) -> Tensor:
    y = x.exp()
    return aten.select_scatter.default(y, -y[2], 0, 2) * 2


def diagonal(x: Tensor, other: Tensor) -> Tensor:
    y = x.exp()
    return aten.diagonal_scatter.default(y, y.diagonal() - other[0, 0]) * 2


def twice(x: Tensor, other: Tensor) -> Tensor:
    y = x.exp()
    z = aten.slice_scatter.default(y, y[:, :4] * 0.5, 1, 0, 4)
    return aten.slice_scatter.default(z, z[:, 2:6] + other, 1, 2, 6) * 2


def view_of_a_view(x: Tensor, _: Tensor) -> Tensor:
    y = x.exp()
    value = y[2:][:, 1] * 2
    z = aten.select_scatter.default(y[2:], value, 1, 1)
    return aten.slice_scatter.default(y, z, 0, 2, 6).sin()


def put_back_elsewhere(x: Tensor, _: Tensor) -> Tensor:
    y = x.exp()
    value = y[2:][:, 1] * 2
    z = aten.select_scatter.default(y[2:], value, 1, 1)
    return aten.slice_scatter.default(y, z, 0, 0, 4).sin()


def of_the_callers(x: Tensor, _: Tensor) -> Tensor:
    return aten.slice_scatter.default(x, x[:, :4] * 0.5, 1, 0, 4) * 2


def handed_out(x: Tensor, _: Tensor) -> Tensor:
    y = x.clone()
    return aten.slice_scatter.default(y, y[:, :4] * 0.5, 1, 0, 4)


def old_value_is_read(x: Tensor, _: Tensor) -> Tensor:
    y = x.clone()
    z = aten.slice_scatter.default(y, y[:, :4] * 0.5, 1, 0, 4)
    return z + y


def part_is_read_again(x: Tensor, _: Tensor) -> Tensor:
    y = x.clone()
    part = y[:, :4]
    z = aten.slice_scatter.default(y, part * 0.5, 1, 0, 4)
    return z.sum() * part


def made_is_read_again(x: Tensor, _: Tensor) -> Tensor:
    y = x.clone()
    scaled = y[:, :4] * 0.5
    z = aten.slice_scatter.default(y, scaled, 1, 0, 4)
    return z.sum() * scaled


def another_part(x: Tensor, _: Tensor) -> Tensor:
    y = x.clone()
    return aten.slice_scatter.default(y, y[:, 2:6] * 0.5, 1, 0, 4) * 2


def of_itself(x: Tensor, _: Tensor) -> Tensor:
    y = x.clone()
    return aten.slice_scatter.default(y, y[:, :4] * y[:, 2:6], 1, 0, 4) * 2


def with_last_bits(x: Tensor, _: Tensor) -> Tensor:
    y = x.clone()
    return aten.slice_scatter.default(y, y[:, :4].tanh(), 1, 0, 4) * 2


def wider(x: Tensor, _: Tensor) -> Tensor:
    y = x.bfloat16()
    return aten.slice_scatter.default(y, y[:, :4] * torch.ones(6, 4), 1, 0, 4) * 2


def written_behind(x: Tensor, _: Tensor) -> Tensor:
    y = x.clone()
    z = aten.slice_scatter.default(y, y[:, :4] * 0.5, 1, 0, 4)
    return z.mul_(2) + 1


def by_itself(function: Callable[..., Any], *, phases: str = "", marked: bool = True) -> tuple[Any, int]:
    """The graph of ``function`` with writes in parts, and how many scatters are gone."""
    graph = traced(function, WHOLE, OTHER, phases=phases)
    gone = erased_by(graph, marked=marked)
    graph.module.recompile()
    number(graph.graph)
    return graph, len(gone)


def erased_by(graph: TrainGraph, *, marked: bool = True) -> set[str]:
    """Write in parts where eager does; the names of the scatters that are gone."""
    for node in graph.graph.nodes:
        if marked and (node.target is aten.tanh.default or ops.rule(node.target).rounds_once):
            node.meta[WROTE_OVER] = True
    mode = mode_of(graph.graph)
    assert mode is not None
    half = Half(graph.graph, mode, graph.phase, [node.name for node in graph.graph.output_node().args[0]])
    gone: set[str] = set()
    for node in list(graph.graph.nodes):
        gone.update(to_parts(half, node) if node.name not in gone else ())
    return gone


@pytest.mark.parametrize(
    ("function", "gone"),
    [(halved, 1), (added, 1), (row, 1), (diagonal, 1), (twice, 2), (view_of_a_view, 2)]
    + [(case, 0) for case in (of_the_callers, handed_out, old_value_is_read, part_is_read_again, made_is_read_again)]
    + [(case, 0) for case in (another_part, put_back_elsewhere, of_itself, with_last_bits, wider, written_behind)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_scatter_is_left_where_it_must_be(function: Callable[..., Any], gone: int) -> None:
    expected, _ = run_real(traced(function, WHOLE, OTHER), clones([WHOLE, OTHER]))
    graph, count = by_itself(function)
    assert count == gone
    inputs = clones([WHOLE, OTHER])
    got, _ = run_real(graph, inputs)
    assert_same(expected, got, function.__name__)
    assert_same([WHOLE, OTHER], inputs, function.__name__)


def test_what_backward_reads_stays() -> None:
    letters = ["F"] * len(traced(halved, WHOLE, OTHER).phase)
    _, gone = by_itself(halved, phases="".join([*letters[:-1], "B"]))
    assert not gone


def test_what_eager_makes_anew_stays() -> None:
    _, gone = by_itself(halved, marked=False)
    assert not gone


def test_the_part_has_no_bytes() -> None:
    graph, _ = by_itself(twice)
    assert [storage.name for storage in build_memory(graph).counted] == ["exp", "mul_1"]


ODD = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40, 0.3, -2.7, 1e30]
ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    aten.clamp.default: (-0.5, 0.5),
    aten.clamp_min.default: (0.0,),
    aten.clamp_max.default: (0.0,),
    aten.fill.Scalar: (0.3,),
}
"""What such an operator is called with behind its first argument; others with nothing, or with a tensor."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("target", rows_with("rounds_once"), ids=str)
def test_rounded_operators_have_the_same_bits_in_a_part(target: Any, dtype: torch.dtype) -> None:
    whole = torch.tensor(ODD * 7, dtype=dtype).view(10, 7).t().contiguous()
    part = whole[1:6, ::3]
    beside = whole.flip(0)[1:6, ::3].contiguous()
    rest = ARGUMENTS.get(target, () if len(target._schema.arguments) == 1 else (beside.to(dtype),))
    if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        rest = (beside > 0, 0.3 if target is aten.masked_fill.Scalar else torch.tensor(0.3, dtype=dtype))
    if target is aten.fill.Tensor:
        rest = (torch.tensor(0.3, dtype=dtype),)
    wanted = target(part.clone(), *rest)
    writes_over(target)(part, *rest)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(part.contiguous().view(integer), wanted.contiguous().view(integer))


def written_often(count: int) -> Callable[..., Tensor]:
    def function(x: Tensor, _: Tensor) -> Tensor:
        y = x.exp()
        for _turn in range(count):
            y = aten.select_scatter.default(y, -y[2], 0, 2)
        return y * 2

    return function


def lines_of_writes(count: int) -> int:
    """How many lines of the rewriting run for a value of which ``count`` parts are written."""
    lines = 0

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.endswith((part_writes.__file__, sharing.__file__)):
            return None
        lines += event == "line"
        return called

    graph = traced(written_often(count), WHOLE, OTHER)
    before = sys.gettrace()
    sys.settrace(called)
    try:
        gone = erased_by(graph)
    finally:
        sys.settrace(before)
    assert len(gone) == count
    return lines


def test_work_grows_with_the_writes() -> None:
    assert lines_of_writes(80) < 2.2 * lines_of_writes(40)

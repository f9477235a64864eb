"""Copies that only feed a write to a view become views of what they copy, and only those that may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.capture.view_writes import put_at_once, without_copies
from roamc.graph.rewrite import mode_of
from tests.graphs import assert_same, run_real, traced

aten = torch.ops.aten
BASE, ROW, WIDE = torch.randn(6, 8), torch.randn(1, 4), torch.randn(6, 4, dtype=torch.float64)


def assigned(x: Tensor, source: Tensor) -> Tensor:
    copy = aten.copy.default(aten.slice.Tensor(x, 1, 0, 4), source)
    return aten.slice_scatter.default(x, copy, 1, 0, 4)


def filled(x: Tensor, source: Tensor) -> Tensor:
    fill = aten.fill.Tensor(aten.select.int(x, 0, 2), source[0, 0])
    return aten.select_scatter.default(x, fill, 0, 2)


def read_twice(x: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    copy = aten.copy.default(aten.slice.Tensor(x, 1, 0, 4), source)
    return aten.slice_scatter.default(x, copy, 1, 0, 4), copy.sin()


def written_in_between(x: Tensor, source: Tensor) -> Tensor:
    source = source * 2
    copy = aten.copy.default(aten.slice.Tensor(x, 1, 0, 4), source)
    source.add_(1)
    return aten.slice_scatter.default(x, copy, 1, 0, 4)


def written_behind(x: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    source = source * 2
    copy = aten.copy.default(aten.slice.Tensor(x, 1, 0, 4), source)
    y = aten.slice_scatter.default(x, copy, 1, 0, 4)
    return y, source.add_(1)


def copied_over_a_copy(x: Tensor, source: Tensor) -> Tensor:
    copy = aten.copy.default(aten.slice.Tensor(x, 1, 0, 4), source)
    return aten.select_scatter.default(copy, source[0], 0, 1)


def of_another_part(x: Tensor, source: Tensor) -> Tensor:
    x = x * source[0, 0]
    copy = aten.copy.default(aten.slice.Tensor(x, 1, 0, 4), aten.slice.Tensor(x, 1, 2, 6))
    return aten.slice_scatter.default(x, copy, 1, 0, 4)


def of_the_part_itself(x: Tensor, source: Tensor) -> Tensor:
    x = x * source[0, 0]
    copy = aten.copy.default(aten.slice.Tensor(x, 1, 0, 4), aten.slice.Tensor(x, 1, 0, 4))
    return aten.slice_scatter.default(x, copy, 1, 0, 4)


@pytest.mark.parametrize(
    ("function", "source", "left"),
    [
        pytest.param(assigned, ROW.expand(6, 4), 0, id="expanded"),
        pytest.param(assigned, ROW, 0, id="broadcast"),
        pytest.param(assigned, torch.randn(4, 6).t(), 0, id="transposed"),
        pytest.param(filled, ROW, 0, id="a number"),
        pytest.param(written_behind, ROW, 0, id="written behind"),
        pytest.param(of_the_part_itself, ROW, 0, id="of the part itself"),
        pytest.param(of_another_part, ROW, 1, id="of another part"),
        pytest.param(assigned, WIDE, 1, id="another dtype"),
        pytest.param(read_twice, ROW, 1, id="read by another"),
        pytest.param(written_in_between, ROW, 1, id="written in between"),
        pytest.param(copied_over_a_copy, ROW, 1, id="written over"),
    ],
)
def test_a_copy_is_left_where_it_must_be(function: Callable[..., Any], source: Tensor, left: int) -> None:
    inputs = [BASE.clone(), source]
    expected, _ = run_real(traced(function, *inputs), [BASE.clone(), source.clone()])
    graph = traced(function, *inputs)
    mode = mode_of(graph.graph)
    assert mode is not None
    without_copies(graph.graph, mode, ())
    graph.module.recompile()
    assert sum(node.target in (aten.copy.default, aten.fill.Tensor) for node in graph.graph.nodes) == left
    got, _ = run_real(graph, [BASE.clone(), source.clone()])
    assert_same(expected, got, function.__name__)


def into_a_view_of_a_view(x: Tensor, source: Tensor) -> Tensor:
    x = x * 2
    part = aten.select_scatter.default(x[2:], source[0].repeat(2), 0, 1)
    return aten.slice_scatter.default(x, part, 0, 2, 6)


def into_a_third_view(x: Tensor, source: Tensor) -> Tensor:
    x = x * 2
    row = aten.slice_scatter.default(x[2:][1], source[0], 0, 1, 5)
    part = aten.select_scatter.default(x[2:], row, 0, 1)
    return aten.slice_scatter.default(x, part, 0, 2, 6)


def to_another_place(x: Tensor, source: Tensor) -> Tensor:
    x = x * 2
    part = aten.select_scatter.default(x[2:], source[0].repeat(2), 0, 1)
    return aten.slice_scatter.default(x, part, 0, 0, 4)


def part_is_read(x: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    x = x * 2
    part = aten.select_scatter.default(x[2:], source[0].repeat(2), 0, 1)
    return aten.slice_scatter.default(x, part, 0, 2, 6), part.sin()


def of_a_part(x: Tensor, source: Tensor) -> Tensor:
    x = (x * 2)[1:]
    part = aten.select_scatter.default(x[2:], source[0].repeat(2), 0, 1)
    return aten.slice_scatter.default(x, part, 0, 2, 5)


@pytest.mark.parametrize(
    ("function", "gone"),
    [(into_a_view_of_a_view, 1), (into_a_third_view, 2), (to_another_place, 0), (part_is_read, 0), (of_a_part, 0)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_scatter_puts_a_value_into_a_view_of_a_view(function: Callable[..., Any], gone: int) -> None:
    expected, _ = run_real(traced(function, BASE, ROW), [BASE.clone(), ROW.clone()])
    graph = traced(function, BASE, ROW)
    mode = mode_of(graph.graph)
    assert mode is not None
    assert len(put_at_once(graph.graph, mode, ())) == gone
    graph.module.recompile()
    got, _ = run_real(graph, [BASE.clone(), ROW.clone()])
    assert_same(expected, got, function.__name__)


def test_a_part_filled_with_itself_leaves_its_whole() -> None:
    graph = traced(of_the_part_itself, BASE, ROW)
    mode = mode_of(graph.graph)
    assert mode is not None
    assert without_copies(graph.graph, mode, ("slice_scatter",)) == []
    assert without_copies(graph.graph, mode, ()) == ["slice_scatter", "copy"]


def test_a_named_copy_stays() -> None:
    graph = traced(assigned, BASE, ROW)
    mode = mode_of(graph.graph)
    assert mode is not None
    without_copies(graph.graph, mode, ("copy",))
    assert [node.name for node in graph.graph.nodes if node.target is aten.copy.default] == ["copy"]

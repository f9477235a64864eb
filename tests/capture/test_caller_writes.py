"""What is made and copied to a tensor of the caller's is made there, and only where nobody sees a difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.capture.caller_writes import to_callers
from roamc.capture.sharing import Half
from roamc.graph import TrainGraph
from roamc.graph.memory import WROTE_OVER, build_memory
from roamc.graph.rewrite import mode_of
from roamc.graph.storage_ids import number
from tests.end_to_end.helpers import assert_same, noise
from tests.graphs import assert_same as assert_bits
from tests.graphs import clones, run_real, traced

aten = torch.ops.aten
BUFFER, ROWS = torch.randn(4, 4), torch.randn(4, 4)


def average(x: Tensor, rows: Tensor) -> Tensor:
    moved = aten.lerp.Scalar(x, rows, 0.1)
    result = moved.sin()
    aten.copy_.default(x, moved)
    return result


def chain(x: Tensor, rows: Tensor) -> Tensor:
    seen = x.exp()
    moved = (x * 0.9).add(rows)
    result = moved.t().cos() + seen
    aten.copy_.default(x, moved)
    return result


def old_value_is_read(x: Tensor, rows: Tensor) -> Tensor:
    moved = x + rows
    result = x.sin() * moved
    aten.copy_.default(x, moved)
    return result


def middle_is_read(x: Tensor, rows: Tensor) -> Tensor:
    half = x * 0.5
    moved = half + rows
    result = half.sin() * moved
    aten.copy_.default(x, moved)
    return result


def returned(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    moved = x + rows
    view = moved.t()
    aten.copy_.default(x, moved)
    return view, view.sin()


def transposed(x: Tensor, rows: Tensor) -> Tensor:
    moved = x.t() + rows
    aten.copy_.default(x, moved)
    return moved.sin()


def part_of_itself(x: Tensor, rows: Tensor) -> Tensor:
    moved = x + x.t()
    aten.copy_.default(x, moved)
    return moved * rows


def written_again(x: Tensor, rows: Tensor) -> Tensor:
    moved = x + rows
    aten.copy_.default(x, moved)
    moved.mul_(2)
    return moved.sin()


def of_another(x: Tensor, rows: Tensor) -> Tensor:
    moved = rows + x
    aten.copy_.default(x, moved)
    return moved.sin()


def part_copied(x: Tensor, rows: Tensor) -> Tensor:
    moved = aten.slice_scatter.default(x, rows[:2], 0, 1, 3)
    result = moved.t().cos()
    aten.copy_.default(x, moved)
    return result


def part_scaled(x: Tensor, rows: Tensor) -> Tensor:
    moved = aten.slice_scatter.default(x, aten.mul.Tensor(x[:, 1:3], 0.5), 1, 1, 3)
    result = moved + rows
    aten.copy_.default(x, moved)
    return result


def part_of_a_part(x: Tensor, rows: Tensor) -> Tensor:
    inner = aten.select_scatter.default(x[1:], rows[1:, 0], 1, 2)
    moved = aten.slice_scatter.default(x, inner, 0, 1, 4)
    aten.copy_.default(x, moved)
    return moved.sin()


def several_parts(x: Tensor, rows: Tensor) -> Tensor:
    one = aten.slice_scatter.default(x, rows[:2], 0, 1, 3)
    two = aten.slice_scatter.default(one, aten.mul.Tensor(one[2:], 0.5), 0, 2, 4)
    moved = aten.select_scatter.default(two + 1, rows[3], 0, 0)
    aten.copy_.default(x, moved)
    return moved.sin()


def through_a_view(x: Tensor, rows: Tensor) -> Tensor:
    flat = aten.slice_scatter.default(x.view(16), rows.view(16)[:4], 0, 1, 5)
    moved = flat.view(4, 4)
    aten.copy_.default(x, moved)
    return moved.sin()


def by_index(x: Tensor, rows: Tensor) -> Tensor:
    moved = aten.index_put.default(x, [torch.tensor([2, 0])], rows[:2])
    aten.copy_.default(x, moved)
    return moved.sin()


def part_of_the_old_one(x: Tensor, rows: Tensor) -> Tensor:
    moved = aten.slice_scatter.default(x, x[2:], 0, 1, 3)
    aten.copy_.default(x, moved)
    return moved * rows


def old_value_is_read_behind_a_part(x: Tensor, rows: Tensor) -> Tensor:
    moved = aten.slice_scatter.default(x, rows[:2], 0, 1, 3)
    result = x.sin() * moved
    aten.copy_.default(x, moved)
    return result


def value_of_a_part_is_read(x: Tensor, rows: Tensor) -> Tensor:
    value = aten.mul.Tensor(x[:, 1:3], 0.5)
    moved = aten.slice_scatter.default(x, value, 1, 1, 3)
    aten.copy_.default(x, moved)
    return moved.sum() + value * 2


def in_place(graph: TrainGraph, named: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Names of the copies that are gone."""
    mode = mode_of(graph.graph)
    assert mode is not None
    half = Half(graph.graph, mode, graph.phase, named)
    written = tuple(node.name for node in list(graph.graph.nodes) if to_callers(half, node))
    number(graph.graph)
    return written


@pytest.mark.parametrize(
    ("function", "phases", "left"),
    [
        pytest.param(average, "", 0, id="average"),
        pytest.param(chain, "", 0, id="chain"),
        pytest.param(average, "FBF", 1, id="read in backward"),
        pytest.param(old_value_is_read, "", 1, id="old value read"),
        pytest.param(middle_is_read, "", 1, id="value in between read"),
        pytest.param(returned, "", 1, id="returned"),
        pytest.param(transposed, "", 1, id="transposed"),
        pytest.param(part_of_itself, "", 1, id="part of itself"),
        pytest.param(written_again, "", 1, id="written again"),
        pytest.param(of_another, "", 1, id="of another tensor"),
        pytest.param(part_copied, "", 0, id="part copied"),
        pytest.param(part_scaled, "", 0, id="part scaled"),
        pytest.param(part_of_a_part, "", 0, id="part of a part"),
        pytest.param(several_parts, "", 0, id="several parts"),
        pytest.param(through_a_view, "", 0, id="through a view"),
        pytest.param(by_index, "", 0, id="by index"),
        pytest.param(value_of_a_part_is_read, "", 0, id="value of a part read"),
        pytest.param(part_of_the_old_one, "", 1, id="part of the old value"),
        pytest.param(old_value_is_read_behind_a_part, "", 1, id="old value read behind a part"),
    ],
)
def test_a_copy_is_left_where_it_must_be(function: Callable[..., Any], phases: str, left: int) -> None:
    graph = traced(function, BUFFER, ROWS, phases=phases)
    gone = in_place(graph)
    graph.module.recompile()
    assert len(gone) == 1 - left
    copied = {node.args[0].op for node in graph.graph.nodes if node.target is aten.copy_.default}
    assert ("placeholder" in copied) == left
    inputs, same = clones([BUFFER, ROWS]), clones([BUFFER, ROWS])
    expected, _ = run_real(traced(function, BUFFER, ROWS), same)
    got, _ = run_real(graph, inputs)
    assert_bits(expected, got, function.__name__)
    assert_bits(same, inputs, function.__name__)


def test_values_on_the_way_have_no_bytes() -> None:
    graph = traced(chain, BUFFER, ROWS)
    in_place(graph)
    assert [storage.name for storage in build_memory(graph).counted] == ["exp", "cos", "add_1"]


def test_a_named_value_stays() -> None:
    graph = traced(average, BUFFER, ROWS)
    assert in_place(graph, ("lerp",)) == ()
    graph = traced(part_of_a_part, BUFFER, ROWS)
    assert in_place(graph, ("select_scatter",)) == ()


def test_a_value_that_eager_writes_to_a_part_has_no_bytes() -> None:
    graph = traced(part_scaled, BUFFER, ROWS)
    for node in graph.graph.nodes:
        if node.target is aten.mul.Tensor:
            node.meta[WROTE_OVER] = True
    in_place(graph)
    assert [node.target for node in graph.graph.nodes if node.target is aten.mul_.Tensor]
    assert [storage.name for storage in build_memory(graph).counted] == ["add"]


class Centred(nn.Module):
    """A layer on inputs less their running mean, which backward could compute again from what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        for layer in self.layers:
            x = layer((x - self.mean).tanh()) + self.mean
        return x


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("route", ["compile", "optimize"])
def test_two_forwards_before_their_backwards(route: str, budget: str | None) -> None:
    """The second forward writes the buffer that the first one has read."""

    def trained(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
        torch.manual_seed(0)
        model = Centred()
        called = wrap(model)
        losses = [called(noise(64, 16, seed=seed)).square().sum() for seed in (1, 2)]
        for loss in losses:
            loss.backward()
        return {"losses": losses, "mean": model.mean, "gradients": [p.grad for p in model.parameters()]}

    def ours(model: nn.Module) -> nn.Module:
        if route == "optimize":
            return roamc.optimize(model, memory_budget=budget, strict=True)
        return torch.compile(model, backend="roamc", options={"memory_budget": budget, "strict": True})

    assert_same(trained(ours), trained(lambda model: torch.compile(model, backend="aot_eager")))

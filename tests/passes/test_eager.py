"""No moment of a small graph's plan takes what eager may not take there, whatever comes on top."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roamc.graph import TrainGraph
from roamc.graph.memory import WROTE_OVER, build_memory
from roamc.options import Options
from roamc.passes import layout
from roamc.passes.layout.eager import AFTER, BETWEEN, NUMBERS, eager_floor
from roamc.passes.layout.placement import Table, arena_live, excess, make_table, peak, placements
from roamc.planning import search
from tests.graphs import graph_and_inputs, traced
from tests.random_graphs import random_model

MB = 1 << 20
X = torch.zeros(512, 512)


def halves() -> TrainGraph:
    """1 MB each but for the sum: sin is saved, mul and neg are backward's own, add is handed out."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = x.sin()
        return s.sum(), (-(s * 2)) + 1

    graph = traced(function, X, phases="FFBBB", saved=("sin",), boundary=True)
    for node in graph.graph.nodes:
        node.meta.pop("seq_nr", None)  # traced in one piece, they are no nodes of autograd
    return graph


def table_of(graph: TrainGraph, *, idle: bool = True) -> Table:
    memory = build_memory(graph)
    floor = eager_floor(memory, boundary=graph.boundary)
    return make_table(memory, graph, 64, floor=floor, idle=idle)


def over(table: Table, with_allocator: list[bool]) -> int:
    mask = np.array(with_allocator)
    return excess(table, mask, peak(arena_live(table, mask)))


def test_what_eager_holds_at_the_callers_own_moments() -> None:
    floor = eager_floor(build_memory(halves()), boundary=True)
    assert floor[BETWEEN] == (MB + 4, MB + 4), "what is saved, and the sum, which the caller's loss is made of"
    assert floor[AFTER] == (MB + 4, MB), "what is handed out"


def test_a_part_that_is_handed_out_is_not_there_beside_the_whole_that_it_lies_in() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = x.sin()[:256].sigmoid()
        return part, part * 2

    graph = traced(function, X, phases="FFFB", saved=("sigmoid",), boundary=True)
    next(node for node in graph.graph.nodes if node.name == "sigmoid").meta[WROTE_OVER] = True
    floor = eager_floor(build_memory(graph), boundary=True)
    assert floor[BETWEEN] == (MB, MB)
    assert floor["mul"] == (MB * 3 // 2, MB * 3 // 2)


@pytest.mark.parametrize("idle", [True, False])
def test_an_arena_beside_the_update_is_seen_where_it_is_kept(idle: bool) -> None:
    inside = [False] * 5
    # The arena has 2 MB, and so has eager at its worst step, beside the sum. Above that is the gradient being made,
    # and with the arena still there two more of its size for the optimizer.
    assert over(table_of(halves(), idle=idle), inside) == (3 if idle else 1) * MB + NUMBERS


def test_without_an_arena_nothing_is_above_eager_in_its_own_order() -> None:
    table = table_of(halves())
    outside = (~table.foreign).tolist()
    assert over(table, outside) == 0
    assert over(table, placements(table)[0].with_allocator.tolist()) == 0


def test_an_operator_that_may_take_something_has_no_more_beside_it_than_in_eager() -> None:
    table = table_of(traced(lambda x: x.sin().cos().tan().sum(), X))
    # Beside the sum, eager has 1 MB and the arena still 2, as much as eager has at its worst step.
    assert over(table, [False] * 4) == NUMBERS + 4
    assert over(table, [True] * 3 + [False]) == 0


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(60, 66))
def test_no_random_graph_is_planned_above_eager(seed: int, route: str) -> None:
    planned = search.run(graph_and_inputs(*random_model(seed), route)[0], Options())
    assert planned.graph.eager_floor
    assert layout.above_eager(planned.graph, Options()) == 0, f"seed {seed}, {route}"


def test_large_graphs_are_not_compared_moment_by_moment() -> None:
    graph = traced(lambda x: x.relu().exp(), torch.empty(layout.EFFORT.small_graph))
    planned = search.run(graph, Options())
    assert planned.plan.baseline_bytes > layout.EFFORT.small_graph
    assert not planned.graph.eager_floor

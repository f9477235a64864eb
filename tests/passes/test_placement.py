"""The placement between arena and allocator: what moves where on small timelines, and its promises on random graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roamc.graph import TrainGraph
from roamc.graph.lifetimes import lifetimes, live_bytes, sizes, timeline
from roamc.graph.memory import Place, build_memory
from roamc.options import Options
from roamc.passes.layout import trims
from roamc.passes.layout.effort import EFFORT
from roamc.passes.layout.placement import Placement, Table, cost, make_table, outside_live, peak, placements
from roamc.solvers.layout.effort import LARGE_PAGE
from tests.graphs import graph_and_inputs, model_graph, traced
from tests.random_graphs import random_model

UNIT = 64
MB = torch.zeros(512, 512)  # 2**20 bytes


def table_of(graph: TrainGraph) -> Table:
    return make_table(build_memory(graph), graph, UNIT)


def padded_live(graph: TrainGraph) -> int:
    """Peak if everything lay with the allocator, every size up to the alignment."""
    memory = build_memory(graph)
    padded = -(-sizes(memory.counted) // UNIT) * UNIT
    return peak(timeline(padded, *lifetimes(memory), len(memory.operators)))


def with_allocator_names(graph: TrainGraph) -> set[str]:
    return names_of(graph, placements(table_of(graph))[0])


def names_of(graph: TrainGraph, placement: Placement) -> set[str]:
    return {s.name for s, apart in zip(build_memory(graph).counted, placement.with_allocator, strict=True) if apart}


def test_everything_lies_in_the_arena_where_that_costs_nothing() -> None:
    assert with_allocator_names(traced(lambda x: x.sin().cos().tan().sum(), MB)) == set()


def test_an_arena_does_not_keep_its_size_where_gradients_grow() -> None:
    #        0: sin  1: sum | 2: mul  3: neg  4: add      1 MB each but for sum, a number
    # sin       x       x        x                        saved
    # mul                        x      x
    # neg                               x     x
    # add                                     x           a gradient, handed out
    # All in the arena: 2 MB of it at step 2, and add on top at step 4. One with the allocator: no more than lives.
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = x.sin()
        return s.sum(), (-(s * 2)) + 1

    graph = traced(function, MB, phases="FFBBB", saved=("sin",), boundary=True)
    assert placements(table_of(graph))[0].peak_bytes == 2 * 2**20 + 4
    assert len(with_allocator_names(graph)) == 1


@pytest.mark.parametrize("idle", ["free", "keep"])
def test_an_arena_that_is_taken_again_for_backward_lies_beside_what_is_saved(idle: str) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = x.sin()
        return s.sum(), (-(s * 2)) + 1

    graph = traced(function, MB, phases="FFBBB", saved=("sin",), boundary=True)
    table, keeps = table_of(graph), Options(idle_arena=idle).keeps_arena
    assert table.boundary == 2
    for placement in placements(table):
        outside = outside_live(table, placement.with_allocator)
        inside = ~table.foreign & ~placement.with_allocator
        needed = trims.taken(table, inside, 8 << 20, outside, keeps=keeps)
        again = idle == "free" and "sin" in names_of(graph, placement)
        # sin, the loss, and what step 2 makes outside the arena
        assert needed == (8 << 20) + LARGE_PAGE + (int(outside[2]) if again else 0)
        assert not again or outside[2] >= 2**20 + 4


def test_outputs_that_the_caller_may_drop_count_both_ways() -> None:
    graph = traced(lambda x: ((y := x.sin()), y.cos().tan())[0:2], MB, phases="FFB", saved=("cos",), boundary=True)
    table = table_of(graph)
    assert table.dead.tolist() == [3, 3, 3]
    assert table.dropped.tolist() == [2, 3, 3], "sin is done with when forward ends; tan is made in backward"


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(60, 80))
def test_random_graph_splits_are_what_they_say(seed: int, route: str) -> None:
    graph = graph_and_inputs(*random_model(seed), route)[0]
    table, memory, said = table_of(graph), build_memory(graph), f"seed {seed}, {route}"
    ranked = placements(table)
    live = int(live_bytes(memory).max())
    own = np.array([s.place is Place.TEMPORARY for s in memory.counted])
    costs = [cost(placement.total // 2, placement, EFFORT) for placement in ranked]
    assert costs[0] == min(costs), said
    lowest = min(ranked, key=lambda placement: placement.total)
    price = lowest.passed // EFFORT.allocator_price + EFFORT.allocator_call
    assert ranked[0].total <= lowest.total + 2 * (price + 1), said
    assert len({placement.with_allocator.tobytes() for placement in ranked}) == len(ranked), said
    for placement in ranked:
        assert not (placement.with_allocator & ~own).any(), said
        assert (placement.with_allocator | ~table.elsewhere).all(), said
        arena = peak(timeline(table.padded * (own & ~placement.with_allocator), table.born, table.dead, table.steps))
        assert arena + peak(outside_live(table, placement.with_allocator)) == placement.peak_bytes, said
        assert live <= placement.peak_bytes, said
        assert placement.total <= 2 * (placement.peak_bytes + UNIT * len(own)), said


@pytest.mark.parametrize("name", ["nanogpt", "bert", "resnet50", "lstm"])
def test_a_module_never_takes_more_than_the_allocator_would(name: str) -> None:
    graph = model_graph(name, "joint")[0]
    table = table_of(graph)
    best, alone = placements(table)[0], 2 * padded_live(graph)
    assert best.total <= alone * 1.03 + 2 * EFFORT.allocator_call
    limit = int(live_bytes(build_memory(graph)).max())
    assert placements(table, limit)[0].peak_bytes <= limit

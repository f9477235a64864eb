"""reorder: a legal order with no higher peak; views and picks follow the operators they belong to."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.testing import FileCheck

from roamc.errors import PlanError
from roamc.graph import TrainGraph
from roamc.graph.memory import build_memory
from roamc.graph.verify import check_graph, constraints
from roamc.options import Options
from roamc.passes import reorder, reuse
from roamc.solvers.order import ALGORITHMS
from tests.graphs import assert_same, clones, graph_and_inputs, peak, run_real, traced
from tests.random_graphs import random_model

X = torch.zeros(256)  # 1024 bytes


def reordered(graph: TrainGraph, options: Options = Options()) -> TrainGraph:  # noqa: B008
    return reorder.apply(graph, reorder.decide(graph, options))


def two_branches(x: Tensor) -> Tensor:
    """Program order makes both big values first; best is one branch after the other."""
    a, b = x.sin(), x.cos()
    return a.sum() + b.sum()


def test_finishes_one_branch_before_the_next_begins() -> None:
    graph = traced(two_branches, X)
    FileCheck().check("%sin").check("%cos").check("%sum_1").check("%sum_2").check("%add").run(str(graph.graph))
    # sin and cos together 2048, then + 4. One branch after the other: 1024 + 4 + 4.
    assert peak(graph) == 2052
    after = reordered(graph)
    assert peak(after) == 1032
    FileCheck().check("%sin").check_next("%sum_1").check_next("%cos").check_next("%sum_2").check_next("%add").run(
        str(after.graph)
    )


def test_update_runs_as_soon_as_its_gradient_exists() -> None:
    def step(x: Tensor, p: Tensor, q: Tensor) -> Tensor:
        first, second = x * 2, x * 3
        p.add_(first)
        q.add_(second)
        return x.sum()

    graph = traced(step, X, X.clone(), X.clone(), phases="BBUUF")
    assert peak(graph) == 2048
    after = reordered(graph)
    FileCheck().check("%mul :").check_next("%add_ :").check("%mul_1").check_next("%add__1").run(str(after.graph))
    assert peak(after) == 1024


def test_view_moves_to_its_first_reader_and_pick_stays_with_its_operator() -> None:
    def function(x: Tensor) -> Tensor:
        big = x.view(16, 16) * 2
        turned = big.t()
        values, indices = x.view(16, 16).max(dim=1)
        return (turned.sum(0) + values) * indices

    after = str(reordered(traced(function, X)).graph)
    FileCheck().check("aten.max.dim").check_next("getitem").check_next("getitem").run(after)
    FileCheck().check("%t :").check_next("aten.sum.dim_IntList").check_same("%t").run(after)


def test_write_stays_between_the_reads_around_it() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a = x * 2
        before = a.sum()
        a.add_(y)
        return before, a.sum()

    after = str(reordered(traced(function, X, X.clone())).graph)
    FileCheck().check("%sum_1").check("%add_").check("%sum_2").run(after)


def test_boundary_is_not_crossed() -> None:
    # Both values belong to FORWARD, their sums to BACKWARD: with a boundary both must be made before any sum.
    free = reordered(traced(two_branches, X, phases="FFBBB"))
    split = reordered(traced(two_branches, X, phases="FFBBB", boundary=True))
    assert {op.node.name for op in build_memory(split).operators[:2]} == {"sin", "cos"}
    assert (peak(free), peak(split)) == (1032, 2052)


def test_decide_changes_nothing_and_tells_what_it_tried() -> None:
    graph = traced(two_branches, X)
    before = str(graph.graph)
    decision = reorder.decide(graph, Options())
    assert str(graph.graph) == before
    assert decision.peak_bytes == min(peak for _, peak in decision.candidates) == 1032
    assert decision.candidates[0] == ("program", 2052)
    assert decision.bound_bytes <= decision.peak_bytes
    assert (decision.status == "optimal") == (decision.bound_bytes == decision.peak_bytes)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_order_option_runs_one_algorithm(name: str) -> None:
    decision = reorder.decide(traced(two_branches, X), Options(order=name))
    assert decision.algorithm.split("+")[0] == name


@pytest.mark.parametrize("change", ["drop", "double", "rename"])
def test_order_of_another_graph_is_refused(change: str) -> None:
    graph = traced(two_branches, X)
    decision = reorder.decide(graph, Options())
    order = {"drop": decision.order[1:], "double": (*decision.order, "add"), "rename": ("x", *decision.order[1:])}
    with pytest.raises(PlanError, match="not a permutation"):
        reorder.apply(graph, dataclasses.replace(decision, order=order[change]))


def test_order_that_reads_before_it_makes_is_refused() -> None:
    graph = traced(two_branches, X)
    decision = reorder.decide(graph, Options())
    with pytest.raises(PlanError, match="add would run before"):
        reorder.apply(graph, dataclasses.replace(decision, order=tuple(reversed(decision.order))))


@pytest.mark.parametrize("disable", [(), ("reuse",)], ids=["reuse", "alone"])
@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(20, 30))
def test_random_graph_gives_the_same_bits_at_no_higher_peak(seed: int, route: str, disable: tuple[str, ...]) -> None:
    graph, inputs = graph_and_inputs(*random_model(seed), route)
    used = clones(inputs)
    torch.manual_seed(seed)
    expected, _ = run_real(graph, used)
    kept, before = constraints(graph), peak(graph)
    decision = reorder.decide(graph, options := Options(disable=disable))
    after = reorder.apply(graph, decision)
    check_graph(after, "reorder", kept, deep=True)
    if not disable:
        after = reuse.apply(after, reuse.decide(after, options))
    assert peak(after) == decision.peak_bytes <= before, f"seed {seed}, {route}"
    torch.manual_seed(seed)
    got, _ = run_real(after, inputs)
    assert_same((*expected, *used), (*got, *inputs), f"seed {seed}, {route}")


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(30, 35))
def test_applied_twice_is_applied_once(seed: int, route: str) -> None:
    graph, _ = graph_and_inputs(*random_model(seed), route)
    decision = reorder.decide(graph, Options())
    once = reorder.apply(graph, decision)
    before = str(once.graph)
    assert str(reorder.apply(once, decision).graph) == before, f"seed {seed}, {route}"
    again = reorder.decide(once, Options())
    assert again.peak_bytes <= decision.peak_bytes

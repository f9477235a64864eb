"""layout: every temporary lies in the arena or with the allocator; the arena is no smaller than what lives in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.testing import FileCheck

from roamc.codegen.source import emit
from roamc.errors import PlanError, VerifyError
from roamc.graph import TrainGraph
from roamc.graph.lifetimes import lifetimes, live_bytes
from roamc.graph.memory import Place, build_memory
from roamc.options import Options
from roamc.passes import layout
from roamc.passes.layout import choose
from roamc.passes.layout.placement import Placement, Table
from roamc.planning.layout_judge import check_layout
from roamc.solvers.layout import LayoutSolution
from tests.graphs import graph_and_inputs, model_graph, traced
from tests.random_graphs import random_model

KB = torch.zeros(16, 16)  # 1024 bytes


def laid_out(graph: TrainGraph, options: Options = Options()) -> tuple[TrainGraph, layout.Decision]:  # noqa: B008
    decision = layout.decide(graph, options)
    return layout.apply(graph, decision), decision


def temporaries(graph: TrainGraph) -> dict[str, int]:
    return {s.name: s.nbytes for s in build_memory(graph).counted if s.place is Place.TEMPORARY}


def test_chain_takes_two_places_in_turn() -> None:
    graph, decision = laid_out(traced(lambda x: x.sin().cos().tan().exp().sum(), KB))
    assert decision.arena_bytes == decision.live_bytes == 2048
    assert decision.status == "optimal"
    assert {decision.offset[name] for name in ("sin", "tan")} != {decision.offset[name] for name in ("cos", "exp")}
    assert sorted(decision.offset.values()) == [0, 0, 1024, 1024]
    views = FileCheck()
    for name in ("sin", "cos", "tan", "exp"):
        views.check(f'{name} = arena.view("{name}", {decision.offset[name]}, (16, 16), (16, 1), torch.float32)')
    views.run(emit(graph).source)


def test_temporaries_of_another_gpu_are_outside_the_arena() -> None:
    with FakeTensorMode():
        first, second = torch.empty(32, 16, device="cuda:0"), torch.empty(16, 16, device="cuda:1")
    with torch.no_grad():
        graph = traced(lambda x, y: (x.sin().cos().sum(), y.sin().cos().sum()), first, second)
    graph, decision = laid_out(graph)
    assert {*decision.offset} == {"sin", "cos"}
    assert {*decision.with_allocator} == {"sin_1", "cos_1"}
    moved = dataclasses.replace(graph.layout, offset={**decision.offset, "sin_1": 0})  # type: ignore[type-var]
    with pytest.raises(VerifyError, match="sin_1 lies in the arena and belongs into another memory"):
        check_layout(graph.replace(layout=moved))


def test_outputs_are_outside_the_arena() -> None:
    graph, decision = laid_out(traced(lambda x: ((y := x.sin()), y.cos())[0:2], KB))
    assert (decision.arena_bytes, decision.offset, decision.with_allocator) == (0, {}, ())
    assert decision.outside_bytes == 2048
    FileCheck().check_not("arena.view").check("sin = aten_sin(").check("return (sin, cos,)").run(emit(graph).source)


def test_result_without_an_out_form_stays_with_the_allocator_when_that_is_lower() -> None:
    # native_layer_norm allocates: with the allocator, its result is counted once; copied, twice while the copy is made.
    graph, decision = laid_out(traced(lambda x: F.layer_norm(x, (16,)).sum(), KB))
    assert decision.with_allocator == ("native_layer_norm#0", "native_layer_norm#1", "native_layer_norm#2")
    assert (decision.copied_bytes, decision.arena_bytes) == (0, 0)
    assert decision.outside_bytes == 1024 + 64 + 64
    FileCheck().check("native_layer_norm = aten_native_layer_norm(").check_not("copy_").run(emit(graph).source)


def test_result_without_an_out_form_that_lives_long_is_copied_where_that_is_lower() -> None:
    def function(x: Tensor) -> Tensor:
        kept = F.conv1d(x[None, :4], x[:4, :12].view(4, 4, 3))
        wide = (x.repeat(4, 4) + 1).cos().sum()
        return kept.sum() + wide

    graph, decision = laid_out(traced(function, KB))
    total = decision.arena_bytes + decision.outside_bytes
    assert set(decision.offset) | set(decision.with_allocator) == set(temporaries(graph))
    assert total >= int(live_bytes(build_memory(graph)).max())


@pytest.mark.parametrize("alignment", [1, 64, 512, 4096])
def test_every_offset_is_aligned(alignment: int) -> None:
    graph = traced(lambda x: x[:3, :5].contiguous().sin().cos().sum().exp(), KB)
    _, decision = laid_out(graph, Options(alignment=alignment))
    assert decision.alignment == max(alignment, torch.float32.itemsize), "no tensor begins inside of an element"
    assert decision.offset
    assert all(offset % decision.alignment == 0 for offset in decision.offset.values())


def test_cpu_default_alignment_is_torchs() -> None:
    assert laid_out(traced(lambda x: x.sin().cos(), KB))[1].alignment == 64


def test_storage_on_another_device_lies_with_the_allocator() -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin().sum() + torch.zeros(2, device="cuda").cos().sum().to("cpu")

    _, decision = laid_out(traced(function, torch.zeros(256, 256)))
    assert {"zeros", "cos", "sum_2"} <= set(decision.with_allocator)
    assert "sin" in decision.offset


def test_empty_graph_needs_no_arena() -> None:
    _, decision = laid_out(traced(lambda x: x.t(), KB))
    assert (decision.arena_bytes, decision.outside_bytes, decision.offset, decision.with_allocator) == (0, 0, {}, ())


def test_zero_bytes_need_no_room() -> None:
    graph, decision = laid_out(traced(lambda x: x[:0].sin().cos().sum(), KB))
    assert decision.arena_bytes == 0
    check_layout(graph)


def test_storage_in_the_arena_and_outside_is_refused() -> None:
    graph = traced(lambda x: x.sin().cos().sum(), KB)
    decision = layout.decide(graph, Options())
    twice = (*decision.with_allocator, *decision.offset)
    both = dataclasses.replace(decision, offset=dict.fromkeys(twice, 0), with_allocator=twice)
    with pytest.raises(PlanError, match="not this graph's temporaries"):
        layout.apply(graph, both)


@pytest.mark.parametrize("change", ["drop", "add", "rename"])
def test_layout_of_another_graph_is_refused(change: str) -> None:
    graph = model_graph("nanogpt", "step")[0]
    decision = layout.decide(graph, Options())
    offset = dict(decision.offset)
    if change != "add":
        offset.popitem()
    if change != "drop":
        offset["other"] = 0
    with pytest.raises(PlanError, match="not this graph's temporaries"):
        layout.apply(graph, dataclasses.replace(decision, offset=offset))


def test_decide_changes_nothing_and_is_the_same_twice() -> None:
    graph, _ = model_graph("nanogpt", "step")
    before = str(graph.graph)
    first, second = layout.decide(graph, Options()), layout.decide(graph, Options())
    assert first == second
    assert str(graph.graph) == before


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(40, 52))
def test_random_graph_has_all_temporaries_in_the_arena_or_with_the_allocator(seed: int, route: str) -> None:
    graph, decision = laid_out(graph_and_inputs(*random_model(seed), route)[0])
    said = f"seed {seed}, {route}"
    check_layout(graph)
    sizes = temporaries(graph)
    assert set(decision.offset).isdisjoint(decision.with_allocator), said
    assert set(decision.offset) | set(decision.with_allocator) == set(sizes), said
    assert decision.arena_bytes >= decision.live_bytes >= live_in_arena(graph, decision), said
    assert decision.arena_bytes + decision.outside_bytes >= int(live_bytes(build_memory(graph)).max()), said


@pytest.mark.parametrize("budget", [None, 4_000, 1_000_000])
@pytest.mark.parametrize(("seed", "route"), [(24, "step"), (5, "joint")])
def test_placements_that_cannot_win_are_not_laid_out(
    seed: int, route: str, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, options = graph_and_inputs(*random_model(seed), route)[0], Options(memory_budget=budget, layout_nodes=0)
    solve, solved = choose._solve, list[bytes]()

    def noted(table: Table, placement: Placement, **rest: Any) -> LayoutSolution:
        solved.append(placement.with_allocator.tobytes())
        return solve(table, placement, **rest)

    monkeypatch.setattr(choose, "_solve", noted)
    chosen = layout.decide(graph, options)
    few = len(solved)
    assert len(set(solved)) == few
    monkeypatch.setattr(choose, "_least_rank", lambda *args, **kwargs: (False, False, -1, False, 0))
    assert layout.decide(graph, options) == chosen
    assert few < len(solved) - few


def live_in_arena(graph: TrainGraph, decision: layout.Decision) -> int:
    """Most bytes, rounded up to the alignment, of placed storages at one step: counted one by one."""
    memory = build_memory(graph)
    born, dead = lifetimes(memory)
    placed = [
        (int(b), int(d), s.nbytes)
        for s, b, d in zip(memory.counted, born, dead, strict=True)
        if s.name in decision.offset
    ]
    unit = decision.alignment
    steps = range(len(memory.operators))
    return max((sum(-(-n // unit) * unit for b, d, n in placed if b <= step < d) for step in steps), default=0)


@pytest.mark.parametrize("seed", range(52, 55))
def test_applied_twice_is_applied_once(seed: int) -> None:
    graph, decision = laid_out(graph_and_inputs(*random_model(seed), "step")[0])
    assert layout.apply(graph, decision).layout == graph.layout, f"seed {seed}"
    assert layout.decide(graph, Options()) == decision

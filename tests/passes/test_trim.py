"""Trims of the arena lower the peak, programs that have them give the same bits, and the judge finds faults in them."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch

from roamc import compat
from roamc.errors import PlanError, VerifyError
from roamc.graph import TrainGraph
from roamc.options import Options
from roamc.passes import layout
from roamc.planning import search
from roamc.planning.layout_judge import check_layout
from roamc.planning.planned import Planned
from roamc.runtime.blocks import Block
from roamc.runtime.program import Pair, Whole
from roamc.solvers.layout.effort import TrimEffort
from tests.graphs import assert_same, clones, graph_and_inputs, model_graph
from tests.random_graphs import random_model

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="arenas are trimmed on Linux only"),
    pytest.mark.usefixtures("arenas_of_any_size"),
]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trims of 64 bytes in every arena, free of charge, and fresh memory dear; what is trimmed is poisoned."""
    trim = TrimEffort(least_bytes=1, pieces=(64,))
    free = {"allocator_call": 0, "allocator_price": 2, "trim_price": 1 << 40, "small_trim_price": 1 << 40}
    monkeypatch.setattr(layout, "EFFORT", dataclasses.replace(layout.EFFORT, trim=trim, **free))
    monkeypatch.setattr("roamc.solvers.layout.trim.LARGE_PAGE", 64)
    monkeypatch.setattr("roamc.planning.layout_judge.PIECE", 64)
    # Buffers of a product in bfloat16 are larger than all that these graphs hold.
    for part in ("shared_bytes", "thread_bytes"):
        monkeypatch.setattr(f"roamc.operators.costs.products.{part}", lambda first, second, result: 0)
    plain = Block.give_back

    def give_back(block: Block, low: int, high: int) -> None:
        plain(block, low, high)
        whole = torch.empty(0, dtype=torch.uint8).set_(block.storage, block.start, (block.nbytes,), (1,))
        whole[low:high].fill_(255)

    monkeypatch.setattr(Block, "give_back", give_back)


def planned(seed: int, route: str, *, with_trims: bool) -> tuple[Planned, list[Any]]:
    graph, inputs = graph_and_inputs(*random_model(seed), route)
    with pytest.MonkeyPatch.context() as patch:
        if not with_trims:
            never = dataclasses.replace(layout.EFFORT.trim, least_bytes=1 << 60)
            patch.setattr(layout, "EFFORT", dataclasses.replace(layout.EFFORT, trim=never))
        return search.run(graph, Options()), inputs


def two_steps(planned_graph: Planned, inputs: list[Any]) -> list[Any]:
    """The second starts with what the first has left."""
    torch.manual_seed(3)
    whole, used = Whole(planned_graph), clones(inputs)
    return [*whole(list(used)), *whole(list(used)), *used]


def two_passes(planned_graph: Planned, inputs: list[Any], *, elsewhere: bool) -> list[Any]:
    """Two forwards in flight at the same time; saved tensors of hooks lie elsewhere."""
    torch.manual_seed(3)
    pair = Pair(planned_graph)
    late = len(pair.executable.program.entries["backward"].parameters) - len(planned_graph.graph.saved)
    steps = [clones(inputs) for _ in range(2)]
    forwards = [list(pair.forward(used[: len(used) - late])) for used in steps]
    outputs = []
    for used, results in zip(steps, forwards, strict=True):
        saved = [t.clone() if elsewhere else t for t in results[pair.first_saved :]]
        outputs += results[: pair.first_saved]
        outputs += [None if g is None else g.clone() for g in pair.backward([*saved, *used[len(used) - late :]])]
    return outputs


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("seed", range(80, 92))
def test_steps_with_trims_give_the_same_bits(seed: int) -> None:
    (some, inputs), (none, _) = (planned(seed, "step", with_trims=flag) for flag in (True, False))
    assert not none.plan.decisions["layout"]["trims"]
    assert some.plan.peak_bytes <= none.plan.peak_bytes * 1.01
    assert_same(two_steps(some, inputs), two_steps(none, inputs), f"seed {seed}")


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("how", ["plain", "retain_graph", "hooks"])
@pytest.mark.parametrize("seed", range(80, 86))
def test_passes_with_trims_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, seed: int, how: str) -> None:
    monkeypatch.setattr(compat, "keeps_graph", lambda: how == "retain_graph")
    (some, inputs), (none, _) = (planned(seed, "joint", with_trims=flag) for flag in (True, False))
    assert some.plan.peak_bytes <= none.plan.peak_bytes * 1.01
    outputs, wanted = (two_passes(each, inputs, elsewhere=how == "hooks") for each in (some, none))
    assert_same(outputs, wanted, f"seed {seed}, {how}")


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("route", ["step", "joint"])
def test_random_graphs_do_have_trims(route: str) -> None:
    assert sum(bool(planned(seed, route, with_trims=True)[0].plan.decisions["layout"]["trims"]) for seed in range(6))


def with_trim(graph: TrainGraph, **changes: Any) -> TrainGraph:
    """Its first trim changed."""
    assert graph.layout is not None
    first, *rest = graph.layout.trims
    changed = dataclasses.replace(graph.layout, trims=(dataclasses.replace(first, **changes), *rest))
    return graph.replace(layout=changed)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("route", ["step", "joint"])
def test_the_judge_finds_planted_faults(route: str) -> None:
    graph = search.run(model_graph("bert", route)[0], Options()).graph
    assert graph.layout is not None
    assert graph.layout.trims
    check_layout(graph)
    lower = dataclasses.replace(graph.layout, peak_bytes=graph.layout.peak_bytes - 1)
    twice = dataclasses.replace(graph.layout, trims=(*graph.layout.trims, graph.layout.trims[0]))
    whole = {"low": 0, "high": graph.layout.arena_bytes}
    for broken, says in (
        (graph.replace(layout=lower), f"above the {lower.peak_bytes} that the layout says"),
        (graph.replace(layout=twice), "trim the same bytes"),
        (graph.replace(layout=dataclasses.replace(graph.layout, trims=())), "that the layout says"),
        (with_trim(graph, **whole, after="", before=""), "which is trimmed"),
        (with_trim(graph, high=graph.layout.arena_bytes + 1), "outside the arena"),
        (with_trim(graph, after="ghost"), "names no operator"),
        (with_trim(graph, low=graph.layout.trims[0].low + 1), "does not begin and end at multiples of 64 bytes"),
    ):
        with pytest.raises(VerifyError, match=says):
            check_layout(broken)


@pytest.mark.usefixtures("tiny")
def test_numbers_of_a_layout_with_trims_are_counted_again_from_its_places() -> None:
    planned_graph = search.run(model_graph("bert", "step")[0], Options())
    graph, said = planned_graph.graph, planned_graph.plan.decisions["layout"]
    assert graph.layout is not None
    again = layout.recounted(graph, graph.layout)
    assert {name: said[name] for name in again} == again
    bare = layout.recounted(graph, dataclasses.replace(graph.layout, trims=()))
    assert (bare["trimmed_bytes"], bare["peak_bytes"] > again["peak_bytes"]) == (0, True)
    for changed in ({"after": "ghost"}, {"before": "ghost"}):
        strange = with_trim(graph, **changed).layout
        assert strange is not None
        with pytest.raises(PlanError, match="names 'ghost', which is no operator of this graph"):
            layout.recounted(graph, strange)


def test_a_budget_goes_before_the_price(monkeypatch: pytest.MonkeyPatch) -> None:
    trim = TrimEffort(least_bytes=1, pieces=(4096,))
    monkeypatch.setattr(layout, "EFFORT", dataclasses.replace(layout.EFFORT, trim=trim))
    free = layout.decide(model_graph("nanogpt-dropout", "joint")[0], Options())
    tight = layout.decide(model_graph("nanogpt-dropout", "joint")[0], Options(memory_budget=1))
    assert tight.needed_bytes <= free.needed_bytes

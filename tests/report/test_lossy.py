"""A plan and its explanation tell which values are not exact, how far off they are, and what is projected."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

from roamc.cost import load_profile
from roamc.graph import Phase, TrainGraph, main_device, operators
from roamc.operators.projection import projection
from roamc.optim import CompAct
from roamc.options import Options
from roamc.planning import search
from roamc.planning.plan import Plan
from roamc.planning.planned import Planned
from roamc.report.explain import Explanation, explain, find_peak, lives_of
from roamc.report.html import render
from roamc.report.picture import draw, follow
from roamc.report.projected import projected
from roamc.report.text import tables
from tests.graphs import captured_step
from tests.passes.retain.test_projections import chain
from tests.passes.retain.test_tempo import mlps, squares, tokens


def kept_outputs() -> TrainGraph:
    """Three MLPs with dropout whose GELUs must keep their outputs."""
    return captured_step(mlps(dropout=0.1), (tokens(),), squares).graph


def planned_with(**options: Any) -> Planned:
    return search.run(kept_outputs(), search.options_of(options))


@pytest.fixture(scope="module")
def light() -> Planned:
    return planned_with(memory_budget="light", codecs="tempo")


def explained(graph: TrainGraph, planned: Planned) -> Explanation:
    return explain(find_peak(graph, lives_of(graph, eager=True)), planned, lives_of(planned.graph))


def test_encoded_values_have_readers_bits_and_an_error(light: Planned) -> None:
    report = explained(kept_outputs(), light)
    rows = {(row.codec, row.readers): row for row in report.smaller}
    slopes, masks = rows["tempo", "slope"], rows["bits", ""]
    assert (slopes.count, slopes.error, slopes.bits) == (3, 4e-6, 1)
    assert (masks.error, masks.bits) == (0, 1)
    assert slopes.before == 32 * slopes.after
    (listed,) = (each for each in tables(report) if each.title.startswith("encoded"))
    shown = [dict(zip(listed.headings, row, strict=True)) for row in listed.rows]
    told = {(row["codec"], row["readers"], row["bits"], row["error"]) for row in shown}
    assert told == {("tempo", "slope", "1", "4e-06"), ("bits", "", "1", "")}
    assert {row["readers"] for row in json.loads(json.dumps(report.to_dict()))["smaller"]} == {"slope", ""}


def test_the_page_lists_what_the_text_does(light: Planned) -> None:
    graph = kept_outputs()
    profile = load_profile(main_device(graph))
    before = follow(graph, lives_of(graph, eager=True), profile)
    report = explained(graph, light)
    page = render(draw(report, before, light.graph, lives_of(light.graph), profile))
    for listed in tables(report):
        assert f"<h2>{listed.title[0].upper()}{listed.title[1:]}</h2>" in page
        assert all(f">{cell}</td>" in page for row in listed.rows for cell in row if "<" not in cell)


def test_the_plan_names_codecs_with_an_error(light: Planned) -> None:
    assert "note: codec tempo: 3 of 5 values, slopes of activations off by 4e-06 of their norm;" in str(light.plan)
    again = search.run(kept_outputs(), search.options_of({"codecs": "tempo"}), Plan.from_json(light.plan.to_json()))
    assert "note: codec tempo: 3 values, slopes of activations off by 4e-06 of their norm" in str(again.plan)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"codecs": "tempo"}, "codec tempo is not used: all values wait as they are"),
        ({"codecs": "tempo", "disable": "retain"}, None),
        ({"memory_budget": "light", "codecs": "compact:rank=64"}, "codec compact:rank=64 is not used: it makes no"),
        ({"memory_budget": "light"}, None),
    ],
    ids=str,
)
def test_a_codec_that_is_not_used_is_named(options: dict[str, Any], says: str | None) -> None:
    notes = [note for note in planned_with(**options).plan.notes if "codec" in note]
    assert len(notes) == (says is not None)
    assert all(note.startswith(str(says)) for note in notes)


def test_offers_that_are_not_taken_are_counted() -> None:
    graph = captured_step(mlps(keep=False), (tokens(),), squares).graph
    plan = search.run(graph, search.options_of({"memory_budget": "light", "codecs": "tempo"})).plan
    assert "codec tempo: 0 of 5 values; the rest are kept or made again" in plan.notes
    assert "offered" not in plan.decisions["retain"]


def projecting() -> TrainGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Tanh(), nn.Linear(48, 32, bias=False))
    optimizer = CompAct(model.named_parameters(), rank=1 / 4, dense=())
    return captured_step(model, (torch.randn(64, 32),), squares, lambda _, lr: optimizer).graph


def test_projected_weights_have_their_rank_and_bytes() -> None:
    planned = search.run(projecting(), Options())
    rows = {row.name: row for row in projected(planned.graph, planned.plan)}
    assert rows.keys() == {"0.weight", "2.weight"}
    for name, (m, n) in {"0.weight": (48, 32), "2.weight": (32, 48)}.items():
        row = rows[name]
        assert (row.rank, row.columns, row.gradient_bytes) == (n // 4, n, m * n // 4 * 4)
        assert row.state_bytes == 2 * row.gradient_bytes
        assert row.waits == "input"
    assert rows["0.weight"].source == ""
    assert rows["2.weight"].source
    (listed,) = (each for each in tables(explained(projecting(), planned)) if each.title.startswith("projected"))
    assert {row[:2] for row in listed.rows} == {("0.weight", "8 of 32"), ("2.weight", "12 of 48")}


def test_what_waits_is_read_off_the_graph() -> None:
    planned = search.run(projecting(), Options())
    graph, plan = planned.graph, planned.plan
    for node in operators(graph.graph):
        if any(each.target is projection for each in node.all_input_nodes) and graph.phase[node.name] is Phase.BACKWARD:
            graph = graph.replace(phase={**graph.phase, node.name: Phase.FORWARD})
    assert {row.waits for row in projected(graph, plan)} == {"projection"}
    late = {node.name: Phase.BACKWARD for node in operators(graph.graph)}
    assert {row.waits for row in projected(graph.replace(phase=late), plan)} == {"input", "neither"}
    assert projected(graph, dataclasses.replace(plan, decisions={})) == ()


def test_projections_of_forward_wait_in_the_place_of_inputs() -> None:
    def graph() -> TrainGraph:
        model, x = chain()
        return captured_step(model, (x,), squares, lambda p, lr: CompAct(p, lr=lr, rank=1 / 4, dense=())).graph

    planned = search.run(graph(), search.options_of({"memory_budget": "light"}))
    report = explained(graph(), planned)
    early = [row for row in report.smaller if row.codec == "projections"]
    codes = [code[1] for code in planned.plan.decisions["retain"]["codes"]]
    assert sum(row.count for row in early) == codes.count("projections") > 0
    assert all(0 < row.bits < 32 and not row.error for row in early)
    assert {row.waits for row in report.projected} >= {"projection"}
    assert len(report.projected) == 8

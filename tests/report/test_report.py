"""The explanation's numbers are those of the memory model, and its text shows them."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from roamc.cli import zoo
from roamc.cli.request import Request, answer
from roamc.frontends.workload import capture
from roamc.graph import TrainGraph
from roamc.graph.eager_memory import eager_live_bytes
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from roamc.options import Options
from roamc.planning import search
from roamc.report import text
from roamc.report.explain import Explanation, Peak, allocating, explain, find_peak, groups, lives_of
from roamc.report.progress import Stages
from tests.models import MODELS, make

SIZES = {"batch": 2, "seq": 16, "layers": 2, "width": 32, "heads": 4, "vocab": 64}


def captured(halves: bool = False) -> TrainGraph:
    return capture(zoo.make("gpt", SIZES), forward_backward=halves)


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return answer(Request("gpt", sizes=SIZES), source=True)


def check_sums(peak: Peak) -> None:
    """Whatever way its storages are added up, the live bytes come out."""
    assert sum(storage.nbytes for storage in peak.storages) == peak.live_bytes
    assert sum(peak.by_kind.values()) == peak.live_bytes
    assert sum(peak.by_phase.values()) == peak.live_bytes
    assert sum(group.nbytes for group in groups(peak)) == peak.live_bytes
    assert sum(group.count for group in groups(peak)) == len(peak.storages)
    assert max(peak.phase_peaks.values()) == peak.live_bytes
    assert all(storage.born <= peak.step < storage.dead for storage in peak.storages)
    assert list(peak.storages) == sorted(peak.storages, key=lambda storage: -storage.nbytes)


@pytest.mark.parametrize("halves", [False, True])
def test_eager_peak_is_that_of_the_memory_model(halves: bool) -> None:
    graph = captured(halves)
    peak = find_peak(graph, lives_of(graph, eager=True))
    live = eager_live_bytes(build_memory(graph))
    assert peak.live_bytes == live.max() == live[peak.step]
    check_sums(peak)


@pytest.mark.parametrize("halves", [False, True])
def test_planned_peak_is_that_of_the_memory_model(halves: bool) -> None:
    planned = search.run(captured(halves), Options())
    peak = find_peak(planned.graph, lives_of(planned.graph))
    live = live_bytes(build_memory(planned.graph))
    assert peak.live_bytes == live.max() == live[peak.step]
    assert peak.live_bytes == planned.plan.decisions["reorder"]["peak_bytes"]
    check_sums(peak)


@pytest.mark.parametrize("name", [name for name in MODELS if name in ("nanogpt-dropout", "lstm")])
def test_sums_hold_for_other_models(name: str) -> None:
    model, batch, loss = make(name)
    workload = replace(zoo.make("gpt", SIZES), model=model, batch=batch, loss_fn=loss)
    graph = capture(workload, clip_grad_norm=1.0)
    check_sums(find_peak(graph, lives_of(graph, eager=True)))
    planned = search.run(graph, Options(layout_nodes=0)).graph
    check_sums(find_peak(planned, lives_of(planned)))


def test_eager_baseline_of_the_plan_is_eagers_peak(explanation: Explanation) -> None:
    assert explanation.eager.live_bytes == explanation.plan.baseline_bytes


def test_saved_storages_are_made_in_forward(explanation: Explanation) -> None:
    saved = [storage for storage in explanation.eager.storages if storage.kind == "saved"]
    assert saved
    assert {storage.phase for storage in saved} == {"FORWARD"}


def test_storages_name_the_line_of_the_model(explanation: Explanation) -> None:
    lines = [storage.source for storage in explanation.eager.storages if storage.phase == "FORWARD"]
    assert sum("zoo.py:" in line for line in lines) > 0.9 * len(lines)


def test_updates_name_their_parameter(explanation: Explanation) -> None:
    planned = search.run(captured(), Options())
    memory = build_memory(planned.graph)
    update_births = [index for index, op in enumerate(memory.operators) if op.phase.name == "UPDATE" and op.births]
    assert update_births
    peak = find_peak(planned.graph, lives_of(planned.graph))
    names = {storage.source for storage in peak.storages if storage.phase == "UPDATE"}
    parameters = {name for name, _ in zoo.make("gpt", SIZES).model.named_parameters()}
    assert names <= parameters


def test_places_are_those_of_the_layout(explanation: Explanation) -> None:
    layout = explanation.plan.decisions["layout"]
    for storage in explanation.planned.storages:
        assert (storage.place == "allocator") == (storage.name in layout["with_allocator"])
        assert (storage.place == "arena") == (storage.name in layout["offset"])
    assert {storage.place for storage in explanation.eager.storages} <= {"allocator", "caller"}


def test_operators_without_out_form_add_up() -> None:
    planned = search.run(captured(), Options())
    rows = allocating(planned.graph)
    layout = planned.plan.decisions["layout"]
    size = {storage.name: storage.nbytes for storage in build_memory(planned.graph).counted}
    assert rows
    assert sum(row.copied_bytes for row in rows) == layout["copied_bytes"]
    assert sum(row.allocator_bytes for row in rows) == sum(size[name] for name in layout["with_allocator"])


def test_candidates_are_sorted_and_one_is_taken(explanation: Explanation) -> None:
    peaks = [peak for _, peak in explanation.candidates]
    assert peaks == sorted(peaks)
    assert explanation.order in dict(explanation.candidates)


def test_without_reorder_there_are_no_candidates() -> None:
    graph = captured()
    eager = find_peak(graph, lives_of(graph, eager=True))
    planned = search.run(graph, Options(disable=("reorder",)))
    explained = explain(eager, planned, lives_of(planned.graph))
    assert explained.candidates == ()
    assert "orders tried" not in shown(explained)


def test_stage_times_include_capture(explanation: Explanation) -> None:
    assert next(iter(explanation.plan.seconds)) == "capture"
    assert text.stage_times({"emit": 1.0, "other": 2.0, "capture": 3.0}) == "capture 3.00 s, emit 1.00 s, other 2.00 s"


def test_explanation_is_json(explanation: Explanation) -> None:
    data = json.loads(json.dumps(explanation.to_dict(top=3)))
    assert len(data["eager"]["storages"]) == len(data["planned"]["groups"]) == 3
    assert data["source"].startswith("def bind(arena):")
    assert np.isclose(data["plan"]["seconds"]["capture"], explanation.plan.seconds["capture"])


def shown(explained: Explanation, **how: bool) -> str:
    out = io.StringIO()
    text.show_explanation(Console(file=out, width=160, **how), explained, 5)  # type: ignore[arg-type]
    return out.getvalue()


def test_text_is_plain_where_it_is_no_terminal(explanation: Explanation) -> None:
    written = shown(explanation)
    assert "\x1b" not in written
    assert "─" not in written
    assert explanation.source in written


def test_text_has_every_section(explanation: Explanation) -> None:
    written = shown(explanation)
    for section in (
        "gpt needs ",
        "peak of gpt",
        "peak of eager",
        "without an out=",
        "orders tried",
        "layout",
        "emitted",
    ):
        assert section in written


def test_no_colour_is_respected(explanation: Explanation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = shown(explanation, force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" in coloured
    assert "\x1b[3" not in shown(explanation, force_terminal=True)


def test_progress_is_a_line_from_time_to_time_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROAMC_PROGRESS", "1")
    monkeypatch.setattr("roamc.ticker.FIRST", 0.0)
    monkeypatch.setattr("roamc.report.progress.LINES", 0.01)
    with Stages("waiting", 3) as stages:
        time.sleep(0.3)
        stages.now("waiting on", 1)
        time.sleep(0.3)
    lines = capsys.readouterr()
    assert lines.out == ""
    assert lines.err.startswith("waiting (0 s)\n")
    assert lines.err.endswith("waiting on, 1 of 3 (1 s)\n")


def test_progress_of_a_short_command_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROAMC_PROGRESS", "1")
    with Stages("waiting", 3) as stages:
        stages.now("waiting", 1)
    assert capsys.readouterr() == ("", "")


def test_progress_is_shown_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROAMC_PROGRESS", "1")
    monkeypatch.setattr("roamc.ticker.FIRST", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Stages("waiting") as stages:
        time.sleep(0.3)
        stages.now("still waiting")
        time.sleep(0.3)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "still waiting" in shown.err

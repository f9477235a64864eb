"""Plans that are kept for later runs: taken where all that they depend on is the same, and never believed."""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.checkpoint import CheckpointPolicy

import roamc
from roamc import cost
from roamc.cli.request import Request, answer
from roamc.cost.products import Form
from roamc.graph import TrainGraph, copied, operators
from roamc.graph.fingerprint import fingerprint
from roamc.options import Options
from roamc.planning import kept_plans, search
from roamc.planning.plan import KEPT, Plan
from roamc.planning.planned import Planned
from roamc.report.text import show_plan
from tests.graphs import captured_step, joint_graph
from tests.small_models import small_net, square


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plans that take no time are kept as well, in a folder of the test's own."""
    monkeypatch.setattr(kept_plans, "WORTH", 0.0)
    monkeypatch.setattr("roamc.files.plans_folder", lambda: tmp_path / "plans")
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[TrainGraph]:
    """The graphs for which a plan was searched."""
    graphs: list[TrainGraph] = []
    init = search.PlanSearch.__init__

    def noted(self: Any, graph: TrainGraph, *args: Any, **keywords: Any) -> None:
        graphs.append(graph)
        init(self, graph, *args, **keywords)

    monkeypatch.setattr(search.PlanSearch, "__init__", noted)
    return graphs


def _graph(rows: int = 2048) -> TrainGraph:
    return captured_step(small_net(), [torch.randn(rows, 16)], square).graph


OPTIONS = Options(memory_budget=0, profile="cpu")


@pytest.mark.parametrize(
    "settings",
    [
        *({"memory_budget": budget} for budget in (None, "+0%", "70%", "min", "light", "total:1GB")),
        *({"memory_budget": budget, "codecs": "tempo"} for budget in ("+0%", "+5%", "70%")),
        {"memory_budget": "+5%", "disable": "retain"},
    ],
    ids=str,
)
def test_the_plan_of_an_earlier_run_is_the_plan(
    settings: dict[str, Any], folder: Path, searches: list[TrainGraph]
) -> None:
    options = search.options_of(settings)
    plans = [kept_plans.run(_graph(), options).plan for _ in range(2)]
    assert len(searches) == len([*folder.iterdir()]) == 1
    assert plans[0].to_json() == plans[1].to_json()
    assert KEPT in plans[1].seconds
    assert KEPT not in plans[0].seconds


def test_a_step_by_a_kept_plan_has_the_same_bits(searches: list[TrainGraph]) -> None:
    x, models = torch.randn(2048, 16), [small_net(), small_net()]
    for model in models:
        step = roamc.train_step(model, square, torch.optim.AdamW(model.parameters()), memory_budget="70%")
        for _ in range(3):
            step(x)
    assert len(searches) == 1
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_torch_compile_takes_a_kept_plan(searches: list[TrainGraph]) -> None:
    x = torch.randn(2048, 16)
    for _ in range(2):
        torch.compiler.reset()
        torch.compile(small_net(), backend="roamc", options={"memory_budget": "80%"})(x).sum().backward()
    assert len(searches) == 1


def _overwritten(graph: TrainGraph) -> TrainGraph:
    first, *others = graph.inputs
    return graph.replace(inputs=(dataclasses.replace(first, overwritten=not first.overwritten), *others))


def _marked(graph: TrainGraph) -> TrainGraph:
    marked = copied(graph)
    operators(marked.graph)[0].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return marked


def _with_lists(graph: TrainGraph) -> TrainGraph:
    """The same step, of 8 rows, with an optimizer of which eager holds lists of tensors."""
    foreach = functools.partial(torch.optim.AdamW, foreach=True)
    other = captured_step(small_net(), [torch.randn(8, 16)], square, foreach).graph
    assert fingerprint(other) == fingerprint(graph)
    return other


def test_what_a_plan_depends_on_names_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _graph()
    changed = [
        *({"memory_budget": 1}, {"alignment": 128}, {"layout_nodes": 5}, {"order": "program"}),
        *({"disable": ("reorder",)}, {"idle_arena": "free"}, {"profile": "a100"}, {"codecs": ("tempo",)}),
        *({"numerics": "fast"}, {"shard": "sequence"}, {"async_tp": "on"}, {"gpu": "h100"}),
    ]
    others = [kept_plans.file_for(graph, dataclasses.replace(OPTIONS, **one)) for one in changed]
    graphs = (_graph(1024), _overwritten(graph), _marked(graph), small := _graph(8), _with_lists(small))
    graphs += (graph.replace(in_flight=2), graph.replace(sums=True), graph.replace(notes=("a note",)))
    others += [
        kept_plans.file_for(each, OPTIONS) for each in (*graphs, joint_graph(small_net(), [torch.randn(2048, 16)]))
    ]
    profile = dataclasses.replace(cost.load_profile("cpu", "cpu"), bandwidth=1e9)
    for place, value in {
        "roamc.cost.load_profile": lambda *_: profile,
        "torch.get_num_threads": lambda: 7,
        "torch.__version__": "2.99",
        "roamc.planning.kept_plans._source": lambda: "another",
        "roamc.planning.kept_plans.device_model": lambda _: "another",
        "roamc.planning.kept_plans.kernel_settings": lambda: {"torch.backends.mkldnn.enabled": False},
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(place, value)
            others.append(kept_plans.file_for(graph, OPTIONS))
    fast = dataclasses.replace(OPTIONS, numerics="fast")
    monkeypatch.setattr("roamc.cost.products.stored", lambda: {Form(1, 1, 1, 1, False, False): (1.0, 2.0)})
    others.append(kept_plans.file_for(graph, fast))
    assert None not in others
    assert len({*others, kept_plans.file_for(graph, OPTIONS)}) == len(others) + 1
    named = {name for one in changed for name in one}
    assert named.union(kept_plans.BESIDE) == {field.name for field in dataclasses.fields(Options)}


def test_what_no_plan_depends_on_does_not() -> None:
    changed: list[dict[str, Any]] = [{"max_plans": 2}, {"strict": True}, {"tune": False}]
    files = {kept_plans.file_for(_graph(), dataclasses.replace(OPTIONS, **one)) for one in ({}, *changed)}
    assert len(files) == 1


@pytest.mark.parametrize("option", [{"cache": False}, {"plan": ("plan.json",)}, {"memory_budget": "device"}])
def test_options_that_keep_nothing(option: dict[str, Any]) -> None:
    assert kept_plans.file_for(_graph(8), dataclasses.replace(OPTIONS, **option)) is None


def test_without_the_cache_nothing_is_read_or_written(folder: Path, searches: list[TrainGraph]) -> None:
    for _ in range(2):
        kept_plans.run(_graph(8), dataclasses.replace(OPTIONS, cache=False))
    assert len(searches) == 2
    assert not folder.exists()


def test_ranks_that_are_elsewhere_have_another_plan(
    folder: Path, searches: list[TrainGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan() -> None:
        layers = {"0": "colwise", "2": "rowwise"}
        roamc.plan(small_net(), torch.randn(64, 16), forward_backward=True, mesh={"tp": 2}, tp_plan=layers)

    for _ in range(2):
        plan()
    assert len(searches) == 1
    monkeypatch.setattr(kept_plans, "numbers_in", lambda group: [0, 8])  # on another node: slower to reach
    plan()
    assert len(searches) == 2
    files = {*folder.iterdir()}
    monkeypatch.setattr(kept_plans, "ranks_in", lambda group: None)  # nothing is known of them
    plan()
    assert len(searches) == 3
    assert {*folder.iterdir()} == files


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _with_other_bytes(text: str) -> str:
    return text.replace('"arena_bytes": ', '"arena_bytes": 1')


@pytest.mark.parametrize("change", [_cut, _with_other_bytes, lambda text: "", lambda text: "[]"])
def test_a_damaged_plan_is_made_anew_and_kept(
    change: Any, folder: Path, searches: list[TrainGraph], caplog: pytest.LogCaptureFixture
) -> None:
    first = kept_plans.run(_graph(), OPTIONS).plan
    (file,) = folder.iterdir()
    text = file.read_text()
    file.write_text(change(text))
    with caplog.at_level(logging.WARNING, "roamc"):
        second = kept_plans.run(_graph(), OPTIONS).plan
    assert len(searches) == 2
    assert f"is planned anew: the plan that was kept of it is refused: {file}" in caplog.text
    assert second == first
    assert file.read_text() == text


def _wrong(planned: Planned) -> Plan:
    """A plan, with its checksum, that lies about what it needs."""
    placed = {**planned.plan.decisions["layout"], "needed_bytes": planned.plan.peak_bytes}
    decisions = {**planned.plan.decisions, "layout": placed}
    return dataclasses.replace(planned.plan, needed_bytes=planned.plan.peak_bytes, decisions=decisions)


@pytest.mark.parametrize("other", ["another graph", "a lie", "more than the budget"])
def test_a_plan_that_does_not_hold_is_made_anew(
    other: str, searches: list[TrainGraph], caplog: pytest.LogCaptureFixture
) -> None:
    least = search.run(_graph(), Options(memory_budget="min", profile="cpu"))
    options = dataclasses.replace(OPTIONS, memory_budget=least.plan.needed_bytes + 4096)
    file = kept_plans.file_for(_graph(), options)
    assert file is not None
    file.parent.mkdir()
    stored = {
        "another graph": lambda: search.run(_graph(1024), options).plan,
        "a lie": lambda: _wrong(least),
        "more than the budget": lambda: search.run(_graph(), Options(memory_budget="+0%", profile="cpu")).plan,
    }[other]()
    stored.save(file)
    del searches[:]
    with caplog.at_level(logging.WARNING, "roamc"):
        planned = kept_plans.run(_graph(), options)
    assert len(searches) == 1
    assert "is planned anew: the plan that was kept of it is refused" in caplog.text
    assert planned.plan == search.run(_graph(), options).plan
    assert roamc.load_plan(file) == planned.plan


def _no_home() -> Path:
    raise RuntimeError("there is no home folder")


def _locked(path: Path) -> bool:
    raise PermissionError(13, "Permission denied", str(path))


@pytest.mark.parametrize("fault", ["a file in its place", "no home", "may not be entered", "a link to nowhere in it"])
def test_a_folder_that_is_of_no_use_hinders_nothing(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = search.run(_graph(8), OPTIONS).plan
    if fault == "a file in its place":
        folder.write_text("a file")
    elif fault == "no home":
        monkeypatch.setattr("roamc.files.plans_folder", _no_home)
    elif fault == "may not be entered":
        monkeypatch.setattr(Path, "is_file", _locked)
    else:
        folder.mkdir()
        (folder / "link.json").symlink_to("nowhere")
    with caplog.at_level(logging.INFO, "roamc"):
        assert kept_plans.run(_graph(8), OPTIONS).plan == expected
    assert ("is not kept: " in caplog.text) == (fault == "a file in its place")
    assert ("is refused: [Errno 13]" in caplog.text) == (fault == "may not be entered")


def test_the_plans_used_last_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "MOST", 2)
    files = []
    for age, rows in ((400, 8), (300, 16), (200, 32)):
        if rows == 32:
            kept_plans.run(_graph(8), OPTIONS)  # it is used: no longer the oldest
        kept_plans.run(_graph(rows), OPTIONS)
        files.append(kept_plans.file_for(_graph(rows), OPTIONS))
        if rows != 32:
            stamp = files[-1].stat().st_mtime - age  # type: ignore[union-attr]
            os.utime(files[-1], (stamp, stamp))  # type: ignore[arg-type]
    assert {*folder.iterdir()} == {files[0], files[2]}


def test_planning_that_takes_no_time_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "WORTH", 1e9)
    kept_plans.run(_graph(8), OPTIONS)
    assert not folder.exists()


def test_the_graph_is_left_as_it_was_where_a_kept_plan_is_taken(folder: Path) -> None:
    graph = _graph()
    kept_plans.run(copied(graph), OPTIONS)
    before = [(node.name, node.args) for node in graph.graph.nodes]
    assert kept_plans.taken(kept_plans.file_for(graph, OPTIONS), graph, OPTIONS) is not None
    assert [(node.name, node.args) for node in graph.graph.nodes] == before


def test_the_command_line_takes_a_kept_plan_where_one_plan_is_asked_for(searches: list[TrainGraph]) -> None:
    request = Request("gpt", sets=("layers=1", "width=64", "heads=2", "vocab=100"), memory_budget="70%")
    first, second, curve = answer(request), answer(request), answer(request, curve=True)
    assert len(searches) == 2  # the curve is made of many plans
    assert KEPT in second.plan.seconds
    assert first.plan == second.plan == curve.plan
    assert curve.curve is not None
    sheets = [io.StringIO(), io.StringIO()]
    for report, sheet in zip((first, second), sheets, strict=True):
        show_plan(Console(file=sheet, width=200), report.plan)
    told = "  by the plan of an earlier run"
    assert told not in sheets[0].getvalue()
    assert sheets[1].getvalue().splitlines()[-1].endswith(told)


def test_a_kept_plan_that_does_not_fit_its_gpu_still_says_what_would(searches: list[TrainGraph]) -> None:
    request = Request("gpt", device="cuda", gpu="rtx4090", memory_budget="+0%", sizes={"batch": 640})
    notes = [answer(request).plan.notes for _ in range(2)]
    assert len(searches) == 2
    assert notes[0] == notes[1]
    assert "it fits" in notes[0][0]

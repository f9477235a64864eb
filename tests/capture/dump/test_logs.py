"""A log of torch.compile with roamc gives the plans that roamc made in the process that wrote it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from roamc.capture.dump import files, graphs
from roamc.options import parse_options
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.capture.dump.logged import OWN
from tests.models import MODELS

Pair = tuple[str, str, Plan, str]
"""Name of a model, the plan made live as JSON, the plan from its log, and the notes of its graph."""


def run_logged(folder: Path, names: Sequence[str], budget: str = "none") -> Path:
    """Compile models in another process, whose log and plans go into ``folder``; return the log."""
    command = (sys.executable, "-m", "tests.capture.dump.logged", str(folder / "plans.json"), budget, *names)
    environment = {**os.environ, "TORCH_TRACE": str(folder), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
    (log,) = folder.glob("*.log")
    return log


def write_log(folder: Path, names: Sequence[str], budget: str = "none") -> tuple[Path, list[tuple[str, list[str]]]]:
    """Plan models by torch.compile in another process; return its log, and the plans of each model."""
    log = run_logged(folder, names, budget)
    return log, json.loads((folder / "plans.json").read_text("utf-8"))


def logged(folder: Path, names: Sequence[str], budget: str = "none") -> list[Pair]:
    """Plan models by torch.compile in another process, and again from its log."""
    log, rows = write_log(folder, names, budget)
    live = [(name, plan) for name, plans in rows for plan in plans]
    dumps = files.of_file(log)
    assert len(dumps) == len(live)
    options = parse_options({"memory_budget": budget} if budget != "none" else {})
    pairs = []
    for (name, text), dump in zip(live, dumps, strict=True):
        graph = graphs.train_graph(dump, json.loads(text)["name"], {})
        pairs.append((name, text, search.run(graph, options).plan, "; ".join(graph.notes)))
    return pairs


@pytest.mark.parametrize("name", [*OWN, *(name for name in MODELS if name != "lstm")])  # torch.compile leaves that out
def test_a_log_gives_the_plan_that_was_made_live(name: str, tmp_path: Path) -> None:
    for _, live, plan, notes in logged(tmp_path, [name]):
        made_live, read = ({**json.loads(text), "notes": ()} for text in (live, plan.to_json()))
        assert read == made_live  # torch.compile's notes say where it splits a model
        assert not notes


def test_random_writes_in_place_give_the_plan_that_was_made_live(tmp_path: Path) -> None:
    for _, live, plan, _ in logged(tmp_path, [f"in-place:{seed}" for seed in (3, 8, 9, 14, 63, 64, 79, 157, 190, 191)]):
        made_live, read = json.loads(live), json.loads(plan.to_json())
        assert {**read, "notes": ()} == {**made_live, "notes": ()}


def test_a_log_with_a_budget_gives_the_plan_that_was_made_live(tmp_path: Path) -> None:
    for _, live, plan, _ in logged(tmp_path, ["checkpointed"], "80%"):
        assert json.loads(plan.to_json()) == json.loads(live)


@pytest.mark.parametrize(("name", "share"), [("nanogpt-dropout", 0.02), ("gated", 0.1)])
def test_inductors_log_has_about_the_planned_peak_and_says_whose_it_is(name: str, share: float, tmp_path: Path) -> None:
    peaks = {}
    for compiler in ("aot_eager", "inductor"):
        (tmp_path / compiler).mkdir()
        (dump,) = files.of_file(run_logged(tmp_path / compiler, [f"{name}@{compiler}"]))
        graph = graphs.train_graph(dump, name, {})
        assert (files.DECOMPOSED in graph.notes) == (compiler == "inductor")
        plan = search.run(graph, parse_options({})).plan
        assert all(words in str(plan) for words in ("peak", "eager's peak", "same graph, program order"))
        peaks[compiler] = plan.peak_bytes
    assert peaks["inductor"] == pytest.approx(peaks["aot_eager"], rel=share)

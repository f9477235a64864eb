"""Saved plans on the command line: written by both commands, told again without their models, told apart by content."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import roamc
from roamc.planning.pipeline import PIPELINE
from roamc.report.saved import show_decisions
from tests.cli.test_cli import run

SMALL = ("--batch", "2", "--seq", "16", "--layers", "1", "--width", "32", "--heads", "4", "--vocab", "64")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    shown = run(
        "explain", "gpt", *SMALL, "--memory-budget", "min", "--no-curve", "--save", str(path), columns=160
    ).stdout
    assert f"the plan is in {path}" in shown
    return path


def test_explain_saves_what_plan_saves(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    run("plan", "gpt", *SMALL, "--memory-budget", "min", "--save", str(other))
    assert saved.read_text() == other.read_text()


@pytest.mark.parametrize("columns", [60, 160])
def test_a_saved_plan_is_told_again(saved: Path, columns: int) -> None:
    plan = roamc.load_plan(saved)
    shown, explained = (run(command, str(saved), columns=columns).stdout for command in ("plan", "explain"))
    joined = " ".join(shown.split())
    assert joined.startswith(" ".join(str(plan).split()))
    assert f"as written in {saved}, made with roamc {plan.versions['roamc']} and torch" in joined
    assert explained.startswith(shown)
    assert "operators recomputed" in joined
    for part in ("decisions", "recomputed for a lower peak", "layout"):
        assert f"\n{part}\n" in explained
    decided = explained.partition("\ndecisions\n")[2].partition("\nrecomputed")[0]
    names = [step.name for step in PIPELINE if step.name in plan.decisions]
    assert [line.split()[0] for line in decided.splitlines() if line.startswith(tuple(f"{n} " for n in names))] == names
    if columns == 60:
        assert max(len(line) for line in explained.splitlines() if str(saved) not in line) <= 60


def test_its_json_says_where_it_is_from(saved: Path) -> None:
    data = json.loads(run("plan", str(saved), "--json").stdout)
    assert data["needed_bytes"] == roamc.load_plan(saved).needed_bytes
    assert str(saved) in data["origin"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("plan", "--batch", "3"), "--batch"),
        (("plan", "--memory-budget", "1GB"), "--memory-budget"),
        (("explain", "--graph"), "--graph"),
        (("explain", "--no-curve"), "--curve"),
        (("explain", "--by", "line"), "--by"),
        (("explain", "--save", "again.json"), "--save"),
    ],
)
def test_options_that_need_the_graph_are_refused(saved: Path, words: tuple[str, ...], option: str) -> None:
    error = run(words[0], str(saved), *words[1:], code=1).stderr
    advice = "leave it out, or give the model in place of the plan"
    assert error == f"error: {saved} is a saved plan without its model and graph, which {option} needs: {advice}\n"


def test_other_files_are_told_apart(saved: Path, tmp_path: Path) -> None:
    changed, config, report = (tmp_path / f"{name}.json" for name in ("changed", "config", "report"))
    report.write_text(json.dumps(roamc.load_plan(saved).report()))
    assert f"{report}: a report of --json, not a plan: write one with --save" in run("plan", str(report), code=1).stderr
    changed.write_text(saved.read_text().replace('"status": "', '"status": "x'))
    config.write_text(json.dumps({"hidden_size": 4, "format": 12}))
    assert f"{changed}: it was changed after it was saved" in run("explain", str(changed), code=1).stderr
    assert f"{config} is no configuration of a transformers model" in run("plan", str(config), code=1).stderr


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_no_plan_is_made_by_decisions_of_a_saved_one(saved: Path, command: str) -> None:
    error = run(command, "gpt", *SMALL, "--option", f"plan={saved}", code=1).stderr
    assert "the command line plans anew: leave it out" in error


def test_a_saved_plan_is_parsed_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, loads = list[str](), json.loads
    monkeypatch.setattr(json, "loads", lambda text, **how: texts.append(text) or loads(text, **how))
    run("plan", str(saved))
    assert texts == [saved.read_text()]


def test_a_decision_of_a_pass_that_there_is_not_is_shown(saved: Path) -> None:
    plan, out = roamc.load_plan(saved), io.StringIO()
    plan = replace(plan, decisions={**plan.decisions, "newer": {"name": "of it"}})
    show_decisions(Console(file=out, width=160), plan, 1)
    assert "\nnewer" in out.getvalue()

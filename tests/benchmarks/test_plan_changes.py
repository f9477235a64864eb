"""Plans of two trees are compared case by case, and what rises is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_changes
from benchmarks.plan_changes import FIELDS, compare, verdict

CASE = {"model": "gpt2", "route": "optimize", "budget": "70%"}


def planned(order: str = "a b", **numbers: float) -> dict[str, Any]:
    """A case with one plan."""
    return {**CASE, "plans": [{**dict.fromkeys(FIELDS, 100), **numbers, "decisions": {"reorder": order}}]}


def refused(least: int) -> dict[str, Any]:
    """A case whose budget no plan keeps."""
    return {**CASE, "refused": least}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (planned(), planned(needed_bytes=101), "equal"),  # the same decisions: only the account of them is another
        (planned(), planned("b a"), "other, no higher"),
        (planned(), planned("b a", needed_bytes=90), "other, no higher"),
        (planned(), planned("b a", needed_bytes=101), "higher: needed_bytes 100 to 101"),
        (planned(), planned("b a", added_seconds=100.5), "higher: added_seconds 100 to 100.5"),
        (planned(), refused(10), "higher: refused, at least 10 bytes"),
        (refused(10), planned(), "other, no higher"),
        (refused(10), refused(10), "equal"),
        (refused(10), refused(9), "other, no higher"),
        (refused(10), refused(11), "higher: the smallest budget"),
    ],
)
def test_verdicts(before: dict[str, Any], after: dict[str, Any], said: str) -> None:
    assert verdict(before, after) == said


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_case_that_is_missing_is_higher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = planned(), {**planned(), "budget": "min"}
    before, after = written(tmp_path / "before", *both), written(tmp_path / "after", both[0])
    assert compare(before, before) == 0
    assert compare(before, after) == 1
    assert "gpt2 optimize min higher: missing" in capsys.readouterr().out


def test_a_plan_is_recorded_as_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_changes, "BUDGETS", (None,))
    (first,), (second,) = (plan_changes.worker("lstm", "train_step") for _ in range(2))
    assert first == second
    assert verdict(first, second) == "equal"
    assert first["plans"][0]["decisions"]["reorder"]["order"]

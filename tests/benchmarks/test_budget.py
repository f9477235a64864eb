"""The budget table: names of programs, one tiny model through the workers, and how results are read."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import blocks, budget, processes_table, programs, table
from benchmarks.programs import Name

ROWS = ("eager", "optimize", "optimize@min")


def test_names_come_apart() -> None:
    assert Name.parse("train_step@300MB") == Name("train_step", "", "300MB")
    assert Name.parse("inductor+select") == Name("inductor", "select", "")
    with pytest.raises(ValueError, match="families are"):
        Name.parse("jax@0.5")


def test_every_row_comes_behind_the_one_it_has_to_be_like() -> None:
    for model in budget.MODELS:
        rows = budget.rows_of(model)
        for at, row in enumerate(rows):
            assert Name.parse(row).values_like() in (*rows[:at], "")


@pytest.mark.parametrize("name", blocks.BLOCKED)
@pytest.mark.parametrize("how", blocks.HOW)
def test_checkpointing_leaves_every_gradient(name: str, how: str) -> None:
    plain, wrapped = blocks.make(name, quick=True), blocks.make(name, quick=True)
    blocks.wrap(wrapped, how)
    for work in (plain, wrapped):
        torch.manual_seed(3)
        work.model(*work.batch).backward()
    assert sum(isinstance(module, blocks.Checkpointed) for module in wrapped.model.modules()) >= 2
    for one, other in zip(plain.model.parameters(), wrapped.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("budget")


@pytest.fixture(scope="module")
def measured_rows(folder: Path) -> dict[str, Any]:
    """What the peak worker says, but for the heap, which only a fresh process counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "_measured", lambda step: step() or {"measured": 10**6, "backward": 10**6})
        patch.setattr(budget, "by_line", lambda heap, step: budget.Lines(0, 0, ""))
        patch.setattr(budget, "Heap", Still)
        return {row: budget.peak_worker("gpt", row, True, "cpu", folder / f"gpt {row}.pt") for row in ROWS}


class Still:
    """A heap that never moves."""

    def live(self) -> int:
        return 0


def test_lowest_peak_gives_the_same_bits(measured_rows: dict[str, Any], folder: Path) -> None:
    assert measured_rows["optimize@min"]["reruns"] > 0
    for row in ("optimize", "eager"):
        assert budget._compare(folder / "gpt optimize@min.pt", folder / f"gpt {row}.pt")["equal"]


def test_times_are_of_every_row_and_round(measured_rows: dict[str, Any], folder: Path) -> None:
    steps = {row: budget.timed_step("gpt", row, True, "cpu", folder) for row in measured_rows}
    seconds = budget.race(steps, 2)
    assert {row: len(times) for row, times in seconds.items()} == dict.fromkeys(ROWS, 2)


def test_plan_that_is_kept_is_taken(measured_rows: dict[str, Any], folder: Path) -> None:
    program = programs.build("optimize", blocks.make("gpt", quick=True), "cpu")
    with programs.plan_kept_in(folder / "gpt optimize@min.json"):
        program.step(None)
    assert program.plans()[0].decisions["retain"]["reruns"]


def test_broken_budget_is_said() -> None:
    row = {
        **{"measured": 5 << 20, "budget_bytes": 4 << 20, "peak_bytes": 4 << 20, "workspace": 0, "arena_bytes": 0},
        **{"reruns": 1, "added_seconds": 0.0, "added_bound_seconds": 0.0, "planning": 0.0, "backward": 5 << 20},
        **{"worst_line": "mm(a, b)", "worst_line_bytes": 5 << 20},
    }
    assert budget.over_budget(row) == 1 << 20
    assert "FAILURE: 1048576 bytes above" in budget.line("gpt", "optimize@4MB", row)
    assert budget.over_budget({**row, "measured": 4 << 20}) == 0
    assert "needs 5.0 MB" in budget.line("gpt", "optimize@4MB", {"refused": 5_000_000})


def test_table_has_a_line_for_every_row(measured_rows: dict[str, Any]) -> None:
    rows = [{"model": "gpt", "kind": row, "threads": 1, **result} for row, result in measured_rows.items()]
    lines = table._budget([*rows, {"model": "gpt", "kind": "optimize@1MB", "refused": 5_000_000}])
    assert sum(line.startswith("| gpt |") for line in lines) == 4
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_times_of_several_processes_are_medians_with_their_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ("eager", "inductor", "optimize", "optimize@+1%", "optimize+freed@+1%", "optimize+fast")
    sheet = budget.Sheet("gpt", list(rows), True, "cpu", Path())
    sheet.found = {row: {"measured": 10**6} for row in rows}
    slow = iter((1.0, 1.2, 1.1))  # of the freed arena, process after process

    def racer(row: str) -> Any:
        taken = next(slow) if "freed" in row else 0.5 if row == "inductor" else 1.0
        return contextlib.nullcontext(lambda seed: taken)

    monkeypatch.setattr(sheet, "_racer", racer)
    sheet.time_in(3, 2)
    freed = sheet.found["optimize+freed@+1%"]["times"]
    assert freed["optimize@+1%"] == freed["optimize"] == {"median": 1.1, "least": 1.0, "most": 1.2}
    assert freed["inductor"]["median"] == 2.2
    assert set(sheet.found["optimize"]["times"]) == {"eager", "inductor"}
    lines = processes_table.programs(sheet.results())
    assert "runs in 3 processes" in lines[0]
    last = "| gpt | optimize+freed@+1% | 1.0 | 1.00 | 1.10 (1.00 to 1.20) | 2.20 (2.00 to 2.40) | 1.10 (1.00 to 1.20) |"
    assert last + " 1.10 (1.00 to 1.20) |" in lines

"""The tables that are shown are those of the results files."""

from __future__ import annotations

import re

from benchmarks import collectives, seeds_table, summary, table
from benchmarks._measure import HERE

ROW = {"model": "gpt", "dtype": "float32", "kind": "optimize 50%", "budget": 100}


def test_papers_show_what_was_measured() -> None:
    page = (HERE.parent / "README.md").read_text()
    assert table.filled(page) == page
    assert sorted(re.findall(r"<!-- table: (\w+) -->", page)) == sorted(table.MARKS)
    assert (HERE / "RESULTS.md").read_text() == table.full()


def test_the_overview_has_a_row_for_each_model() -> None:
    rows = [
        {"model": model, "kind": kind, "measured": 2_000_000, "time": {"of eager": 1.25}}
        for model in ("gpt", "bert")
        for kind in (*summary.COLUMNS, "inductor@0.5")
    ]
    *_, first, second = summary.overview(rows)
    assert first == "| gpt" + " | 2.0 (1.25)" * len(summary.COLUMNS) + " |"
    assert second.startswith("| bert ")


def test_a_budget_that_was_exceeded_is_named() -> None:
    (good,) = summary.kept([{**ROW, "measured": 100}, {**ROW, "refused": 120}])
    assert "1 were refused" in good
    assert good.endswith("all that were not refused.")
    (bad,) = summary.kept([{**ROW, "measured": 100}, {**ROW, "measured": 103}])
    assert "exceeded, by 3.00% at most: gpt float32 optimize 50%" in bad


def test_values_are_counted_where_they_were_compared() -> None:
    (text,) = summary.kept([{**ROW, "measured": 100, "equal": equal} for equal in (True, False)])
    assert text.endswith('those of `"+0%"` in 1 of 2.')


def test_falling_budgets_are_a_line_of_peaks_and_one_of_times() -> None:
    rows = [
        {"model": "gpt", "kind": f"train_step@{at}", "measured": 2_000_000 - number, "time": {"of free": 1.0}}
        for number, at in enumerate(table.budget.FALLING[:-1])
    ]
    rows.append({"model": "gpt", "kind": "train_step@min", "refused": 3_000_000})
    *_, peaks, times = table._falling(rows)
    assert peaks.count("| 2.0 ") == times.count("| 1.000 ") == len(rows) - 1
    assert peaks.endswith("| – |")


def test_collectives_are_counted_by_split_and_way() -> None:
    place = {"model": "gpt", "ranks": 2, "split": "DDP", "way": "R", "budget": "none", "unwaited": 0}
    measured = {**place, "runs": 50, "worst": 2e-7, "eager": 1e-7, "same": True, "as_first": True}
    other = {**measured, "worst": 6e-7, "same": False, "unwaited": 1}
    rows = [measured, other, {**place, "refused": "needs 3 MB"}, {**place, "fault": "no end after 10 s"}]
    assert table._collectives(rows)[-1] == "| 2 | DDP | R | 4 | 1 | 100 | 6.0e-07 | 1.0e-07 | 1 of 2 | 2 |"
    assert [collectives.sound(row) for row in rows] == [True, False, True, False]
    assert not collectives.sound({**other, "unwaited": 0})
    assert not collectives.sound({**measured, "as_first": False})


def test_programs_of_the_seeds_are_compared_with_eager() -> None:
    eager = {"model": "bert", "kind": "eager", "measured": 200_000_000, "states": 80_000_000, "time": 1.0, "error": 0.0}
    other = {**eager, "kind": "train_step both@light", "measured": 50_000_000, "time": 1.234, "error": 8.1e-7}
    assert seeds_table.programs([eager, other])[-2:] == [
        "| bert | eager | 200.0 | 1.000 | 80.0 | 1.00 | 0 |",
        "| bert | train_step both@light | 50.0 | 0.250 | 80.0 | 1.23 | 8e-07 |",
    ]


def test_losses_of_the_seeds_have_a_gap_to_dense() -> None:
    dense = {"kind": "dense", "rate": 2.5e-3, "rest": 1e-2, "losses": [2.0, 2.1, 2.2], "steps": 1000, "gap": 0.0}
    text = seeds_table.losses([dense, {**dense, "kind": "n/4", "losses": [2.1, 2.2, 2.3], "gap": 0.1}])
    assert "after 1,000 steps, mean of 3 seeds" in text[0]
    assert text[-2:] == [
        "| dense | 2.100 | 2.000 to 2.200 | – | 0.0025 | 0.01 |",
        "| n/4 | 2.200 | 2.100 to 2.300 | +0.100 | 0.0025 | 0.01 |",
    ]

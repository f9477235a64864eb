"""A sample of torch's databases of modules and operators, bit for bit; `make sweep` runs all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sweeps import command, pool
from tests.sweeps.compare import different, judge
from tests.sweeps.databases import cases, entries, spread
from tests.sweeps.run_databases import jobs_behind, work


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled here is left behind."""
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "every"), [("module", 39), ("op", 29)])
def test_sample_of_entries(name: str, every: int) -> None:
    """The middle sample of one entry in so many."""
    chosen = [entry for entry in entries() if entry.database == name][7::every]
    failed, judged = [], 0
    for entry in chosen:
        samples = cases(entry)
        verdict = judge(samples[len(samples) // 2]) if samples else None
        judged += verdict is not None and verdict.counts
        if verdict is not None and verdict.counts and verdict.outcome != "same":
            failed.append(f"{entry}: {verdict}")
    assert failed == []
    assert judged > len(chosen) / 2


def test_bits_and_geometry_are_compared() -> None:
    def outputs(tensor: Tensor | None) -> dict[str, Tensor | None]:
        return {"output 0": tensor}

    x = torch.tensor([[0.0, 1.0], [2.0, float("nan")]])
    assert different(outputs(x), outputs(x.clone())) == ""
    assert "other bits" in different(outputs(x), outputs(x * -1 * -1 + torch.tensor([[-0.0, 1e-7], [0, 0]])))
    assert "other bits" in different(outputs(torch.zeros(1)), outputs(-torch.zeros(1)))
    assert "(1, 2)" in different(outputs(x), outputs(x.t().contiguous().t()))
    assert "float64" in different(outputs(x.double()), outputs(x))
    assert "None" in different(outputs(None), outputs(x))
    assert "results" in different({}, outputs(x))


def test_spread_takes_first_and_last() -> None:
    assert spread(10, 3) == [0, 4, 9]
    assert spread(2, 5) == [0, 1]
    assert spread(3, None) == [0, 1, 2]
    assert spread(3, 1) == [0]


def test_a_run_goes_on_where_its_log_ends(tmp_path: Path) -> None:
    log, add = tmp_path / "log", next(entry for entry in entries() if str(entry) == "op add float32")
    log.write_text('{"entry": "op add float32", "sample": 0, "outcome": "same"}\n{"entry": "op add flo')
    (job,) = jobs_behind(command.rows_in(log), [add], 2)
    assert [(row["sample"], row["outcome"]) for row in work(job, 0)] == [(len(cases(add)) - 1, "same")]
    assert jobs_behind(command.rows_in(tmp_path / "none"), [add], None) == [(add, None, frozenset())]


def fragile(job: str, first: int) -> Iterator[dict[str, Any]]:
    """Three cases; the second one of job "b" ends the process."""
    for case in range(first, 3):
        if (job, case) == ("b", 1):
            os._exit(3)
        yield {"outcome": "same", "text": ""}


def test_crash_costs_one_case() -> None:
    rows = {(job, case): row for job, case, row in pool.run(fragile, ["a", "b", "c"], workers=2)}
    assert len(rows) == 9
    crashed = {key: row["text"] for key, row in rows.items() if row["outcome"] == "crash"}
    assert crashed == {("b", 1): "the process ended with 3"}

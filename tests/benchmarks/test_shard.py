"""Planned layers have the bytes of the paper's table 2, whatever the sizes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import shard, shard_table

SIZES = {"batch": 2, "seq": 64, "width": 128, "heads": 8, "dropout": 0.1}
UNIT = 2 * 64 * 128
X = 5 * 8 * 64 / 128


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row.name == "both" else pytest.mark.thorough) for row in shard.ROWS]
)
def test_an_inner_layer_saves_the_bytes_of_the_formula(row: shard.Row) -> None:
    two, three = (shard.planned(SIZES, layers, row, 2) for layers in (2, 3))
    wanted = row.formula(2, X) if row.split else 34 + X
    assert (shard.saved_bytes(three) - shard.saved_bytes(two)) / UNIT == pytest.approx(wanted, rel=0.01)


def entry(model: str, row: str, ms: float) -> dict[str, Any]:
    return {"model": model, "ranks": 8, "row": row, "saved": 1, "saved_of_sbh": 4.25, "formula": 4.25, "ms": ms}


def test_tables_show_what_was_planned_beside_the_paper() -> None:
    rows = [entry("gpt3-22b", name, ms) for name, ms in (("t", 20.0), ("both", 21.0), ("full", 28.0))]
    asked = {
        "model": "gpt3-22b",
        "ranks": 8,
        "row": "both",
        "layers": 4,
        "shard": "off",
        "budget": 2e9,
        "hand_ms": 84.0,
    }
    rows.append({**asked, "needed": 2.5e9, "refused": True})
    rows.append({**asked, "needed": 1.9e9, "refused": False, "ms": 83.0, "free_ms": 80.0})
    waited = {"program_ms": 10.0, "exposed_ms": 4.0, "bound_ms": 3.5}
    peaks = {"peak": 1e9, "reorder_peak": 1.1e9, "program_peak": 2e9}
    rows.append({"model": "gpt3-22b", "ranks": 8, "row": "both", "layers": 4, **waited, **peaks})
    text = "\n".join(shard_table.full(rows))
    assert "| both | 4.25 (4.25) | 21.0 (20.3) | 5.0% (3.6%) |" in text
    assert "| gpt3-22b | 100.0% (16.1%) | 5.0% (4.0%) | 40.0% (39.0%) | 20.0 |" in text
    assert "| gpt3-22b, 8 | both | 2.000 | 84.0 | off | refused | 2.500 |  |" in text
    assert "| gpt3-22b, 8 | both | 2.000 | 84.0 | off | 83.0 | 1.900 | 80.0 |" in text
    assert "| gpt3-22b | 1.34 (1.42) | 1.01 (1.1) | 33.3% (29.1%) |" in text
    assert "| gpt3-22b, 8 | both | 10.00 | 4.00 | 40% | 3.50 | 1.000 | 1.100 | 2.000 |" in text
    assert shard_table.full([]) == []

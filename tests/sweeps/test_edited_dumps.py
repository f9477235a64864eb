"""Every edit of ``python -m tests.sweeps.edited_dumps``, of a graph of six operators in place of those of models."""

from __future__ import annotations

import pytest

from tests.capture.dump.test_text import CLASS
from tests.sweeps import edited_dumps

SMALL = CLASS.replace("return (x @ w).relu()", "x = checkpoint(layer, x)").replace(
    "# File", "# ac_graph_id: 4 - PREFER_RECOMPUTE File"
)


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts in place of what torch prints for models."""
    monkeypatch.setattr(edited_dumps, "printed", {"gated": CLASS, "checkpointed": SMALL}.__getitem__)
    edited_dumps.unedited.cache_clear()


@pytest.mark.parametrize("name", ["gated", "checkpointed"])
def test_no_edit_is_silent(name: str) -> None:
    outcomes = {what: edited_dumps.judge(name, what) for what in edited_dumps.EDITS[name]}
    assert not {what: row for what, row in outcomes.items() if row["outcome"] not in (*edited_dumps.GOOD, "left out")}
    assert sum(row["outcome"] != "left out" for row in outcomes.values()) > 0.8 * len(outcomes)


def test_a_silent_edit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    larger = edited_dumps.all_of(r"\b16\b", "32")
    monkeypatch.setitem(edited_dumps.EDITS, "gated", {"another model": larger})
    assert edited_dumps.judge("gated", "another model")["outcome"] == "silent"

"""The benchmark of planning: one small graph, and how its rows are shown."""

from __future__ import annotations

from benchmarks import planning, table
from roamc.graph import copied
from tests.graphs import model_graph


def test_rows_say_what_a_budget_adds_and_leaves_open() -> None:
    graph = model_graph("nanogpt-dropout", "joint")[0]
    head = {"model": "nanogpt", "operators": planning._operators(graph)}
    rows = [
        {**head, "kind": f"optimize {budget}", **planning._planned(copied(graph), budget, 1.0)}
        for budget in ("none", "70%", "1%")
    ]
    assert rows[0]["added"] == rows[0]["gap"] == 0
    assert 0 <= rows[1]["gap"] <= rows[1]["added"]
    assert rows[1]["needed"] <= rows[1]["budget"]
    assert [row["refused"] for row in rows] == [False, False, True]
    assert all(planning._line(row) for row in rows)
    line = table._planning([*rows, {**rows[0], "kind": "train_step none", "torch": 2.0}])
    assert any("| nanogpt | optimize |" in text and "– " in text for text in line)
    assert line[-1] == "torch's own partitioner takes 2.0 s for nanogpt, train_step."

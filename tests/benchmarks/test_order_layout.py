"""The comparison of order and layout: one small graph through everything, and the arithmetic of its tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import order_layout, table
from roamc.solvers.layout import lower_bound
from roamc.solvers.order import make_problem
from roamc.solvers.order.evaluate import peak_bytes


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    return order_layout.measure("alexnet", 1, "compiled", 1.0)


def test_nobody_is_below_our_bound(row: dict[str, Any]) -> None:
    peaks = [rival["peak"] for rival in row["orders"].values()] + [row["model_ilp"]["peak"], row["ours"]["peak"]]
    assert min(peaks) >= row["ours"]["bound"] > 0
    assert row["ours"]["arena"] >= row["ours"]["arena_bound"]


def test_ours_is_no_worse_than_any_rival(row: dict[str, Any]) -> None:
    assert row["ours"]["peak"] <= order_layout.best_order(row)[1] <= row["pytorch"]["program_peak"]
    arenas = [rival["arena"] for rival in row["layouts"].values() if "arena" in rival]
    assert row["ours"]["arena"] <= min(arenas)


def test_pytorch_reserves_at_least_what_is_alive(row: dict[str, Any]) -> None:
    pytorch = row["pytorch"]
    assert min(pytorch["reserved"], pytorch["expandable"]) >= pytorch["eager_peak"] >= pytorch["program_peak"]


def test_line_and_tables_show_it(row: dict[str, Any]) -> None:
    assert order_layout.line(row).startswith("alexnet")
    assert table._order_row({**row, "model_ilp": {"status": "UNKNOWN"}})[5] == "–"
    assert "–" in table._mean_row([row], "compiled")


def test_lives_of_a_layout_problem_follow_the_order() -> None:
    problem = make_problem([0] * 3, [], [(64, 0, [2], False), (64, 1, [], False), (64, 1, [], True)])
    for order in ([0, 1, 2], [1, 0, 2]):
        lives = order_layout.layout_problem(problem, np.array(order))
        assert lower_bound(lives) == peak_bytes(problem, np.array(order))
    assert (lives.born.tolist(), lives.dead.tolist()) == ([1, 0, 0], [3, 1, 3])


def test_a_chain_of_in_place_reuses_is_one_storage_from_its_first_birth() -> None:
    problem = make_problem([0] * 4, [], [(64, 0, [1], False), (64, 1, [2], False), (64, 2, [3], False)])
    lives = order_layout.layout_problem(problem, np.arange(4), ((1, 2), (0, 1)))
    assert lives.size.tolist() == [0, 0, 64]
    assert (int(lives.born[2]), int(lives.dead[2])) == (0, 4)


def made_up(model: str, batch: int) -> dict[str, Any]:
    share = {1: 100, 32: 300}[batch]
    return {
        "model": model, "batch": batch, "kind": "sgd", "fixed": 100, "plan": {"peak": share + 40},
        "pytorch": {"reserved": 400, "expandable": 300}, "ours": {"arena": share},
        "reuse": {"arena": share - 40} if model != "bert" else None,
    }  # fmt: skip


def test_mean_is_over_the_papers_models_and_counts_what_is_fixed() -> None:
    rows = [made_up(model, batch) for model in (*order_layout.PAPER, "gpt2") for batch in (1, 32)]
    assert order_layout.saved(rows[0]) == pytest.approx(0.6)
    assert order_layout.mean_saved(rows, "sgd") == pytest.approx(0.4)
    assert order_layout.mean_saved(rows, "sgd", allocator="expandable") == pytest.approx(0.25)
    assert order_layout.mean_saved(rows, "sgd", ours="plan") == pytest.approx(0.32)
    assert order_layout.mean_saved(rows, "sgd", ours="reuse") == pytest.approx(0.4 + 0.08 * 6 / 7)
    assert order_layout.mean_saved(rows[1:], "sgd") is None
    assert order_layout.mean_saved(rows, "adam") is None

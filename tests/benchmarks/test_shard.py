"""Planned layers have the bytes of the paper's table 2, whatever the sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks import shard, shard_iteration, shard_table
from roamc.cost import DeviceProfile, load_profile
from roamc.cost.utilisation import all_products

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
    assert "| gpt3-22b, 8 | both | 10.00 | 4.00 | 40% | 3.50 | 1.000 | 1.100 | 2.000 |" in text
    assert shard_table.full([]) == []


def test_iterations_stand_beside_the_papers() -> None:
    each = {"model": "gpt3-22b", "ranks": 8, "factors": {"flops": 1.1, "bandwidth": 0.9}}
    rows = [{**each, "row": row, "iteration": taken} for row, taken in (("full", 1.5), ("both", 1.1))]
    layers = [entry("gpt3-22b", name, 20.0) for name in ("t", "both", "full")]
    text = "\n".join(shard_table.full([*layers, *rows]))
    assert "products at 1.100 times its rate, memory at 0.900 times" in text
    assert "| gpt3-22b | 1.50 (1.42), +5.6% | 1.10 (1.1), +0.0% | 36.4% (29.1%) | 41.7 / 43.8 |" in text


@pytest.mark.parametrize("model", shard_table.ITERATIONS)
def test_utilisation_is_the_papers_for_its_seconds(model: str) -> None:
    paper = shard_table.ITERATIONS[model]
    assert paper.utilised(paper.both) == pytest.approx(paper.utilisation, abs=0.3)


def test_an_iteration_is_its_longest_stage_the_idle_time_and_the_update() -> None:
    times = shard_iteration.Times(layer=2.0, embedding=1.0, head=3.0, sent=0.5, update=10.0)
    whole = shard_table.Iteration(4, 8, 1, 1, 5, 1, 0.0, 0.0, (0.0, 0.0))
    assert times.iteration(whole) == 5 * (4 * 2.0 + 1.0 + 3.0) + 10.0
    staged = dataclasses.replace(whole, layers=6, stages=3, parts=2)
    assert times.iteration(staged) == 5 * 8.0 + (6.0 + 5.0) / 2 + 10.0


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    return load_profile(profile=shard.PROFILE)


@pytest.mark.thorough
def test_two_constants_give_the_two_times_of_a_layer(profile: DeviceProfile) -> None:
    plans = [shard_iteration.planned(shard.sizes_of("gpt3-22b"), layers, shard.ROWS[1]) for layers in (1, 2)]
    asked = shard_iteration.layer_seconds(*plans, shard_iteration.scaled(profile, 0.5, 0.7))
    _, factors = shard_iteration.fitted(*plans, asked)
    assert factors == pytest.approx({"flops": 0.5, "bandwidth": 0.7}, rel=1e-3)


def test_a_layer_adds_its_gradients_to_sums_in_float32(profile: DeviceProfile) -> None:
    plans = [shard_iteration.planned(SIZES, layers, shard.ROWS[1]) for layers in (1, 2)]
    layer, width = shard_iteration.Part.between(*plans, profile), SIZES["width"]
    split, whole = 12 * width**2 + 7 * width, 6 * width  # matrices and biases of their columns; norms, other biases
    assert layer.parameters == split // 8 + whole
    alone = sum(shard_iteration.layer_seconds(*plans, profile))
    assert layer.seconds - alone == pytest.approx(layer.parameters * 6 / profile.bandwidth)


@pytest.mark.thorough
def test_head_and_loss_are_split_among_the_ranks(profile: DeviceProfile) -> None:
    plans = [shard_iteration.planned(SIZES, 1, shard.ROWS[4], last=last) for last in (False, True)]
    without, behind = (all_products(each.graph)["bfloat16"] for each in plans)
    tokens = SIZES["batch"] * SIZES["seq"]
    assert behind - without == 3 * 2 * tokens * SIZES["width"] * shard_iteration.VOCAB // 8

"""The report of a pipeline's stage: every number is of one micro-batch or of all in flight, says so, and adds up."""

from __future__ import annotations

import html
import io
import re

import pytest
from rich.console import Console

from roamc import cost
from roamc.cli.request import Request, mesh_of, picture, workload_of
from roamc.frontends.workload import capture
from roamc.graph.eager_memory import eager_lifetimes, eager_live_bytes
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from roamc.report import text
from roamc.report.explain import Explanation
from roamc.report.html import render
from roamc.report.picture import Picture
from roamc.units import format_bytes

SIZES = {"batch": 2, "seq": 16, "layers": 3, "width": 32, "heads": 4, "vocab": 64}
REQUEST = Request(
    "gpt", SIZES, ("dropout=0.0",), "sgd", mesh="pp=3", memory_budget="70%", options=("layout_nodes=0", "profile=cpu")
)
IN_FLIGHT = 3
TOKENS = 8 * SIZES["batch"] * SIZES["seq"]
"""Bytes of a micro-batch's token numbers, which backward of the embedding reads; its targets nobody reads here."""


@pytest.fixture(scope="module")
def drawn() -> Picture:
    return picture(REQUEST, curve=True)


@pytest.fixture(scope="module")
def explained(drawn: Picture) -> Explanation:
    return drawn.report


@pytest.fixture(scope="module")
def written(explained: Explanation) -> str:
    out = io.StringIO()
    text.show_explanation(Console(file=out, width=160), explained, 3)
    return out.getvalue()


def test_the_plans_numbers_are_counted_again(explained: Explanation) -> None:
    plan, after = explained.plan, build_memory(explained.graph)
    assert plan.in_flight == IN_FLIGHT
    assert plan.waiting_bytes == (IN_FLIGHT - 1) * (after.saved_bytes + TOKENS)
    with mesh_of(REQUEST).planned_for():
        graph = capture(workload_of(REQUEST))
    memory = build_memory(graph)
    live = eager_live_bytes(memory)
    most = int((live + cost.workspaces(memory.operators, plan.threads, eager=True)).max())
    own = cost.tensor_objects(memory, list(graph.graph.nodes), *eager_lifetimes(memory)).peak()
    one = most + cost.objects(most, own)
    assert plan.baseline_bytes == live.max() == explained.eager.live_bytes
    assert plan.baseline_needed_bytes == one + (IN_FLIGHT - 1) * (memory.saved_bytes + TOKENS)
    assert plan.budget_bytes == int(0.7 * plan.baseline_needed_bytes) >= plan.needed_bytes
    assert explained.planned.live_bytes == live_bytes(after).max()


def test_the_curve_and_the_plan_need_bytes_of_all_in_flight(explained: Explanation) -> None:
    curve = explained.curve
    assert curve is not None
    assert curve.now.needed_bytes == explained.plan.needed_bytes
    assert curve.spots[0].needed_bytes > explained.plan.budget_bytes
    rows = text.curve_rows(curve, explained.plan.baseline_needed_bytes)
    spots = sorted({*curve.spots, curve.now}, key=lambda spot: -spot.needed_bytes)
    shares = [spot.needed_bytes / explained.plan.baseline_needed_bytes for spot in spots]
    assert [row[1] for row in rows] == [f"{share:.3f}" for share in shares]
    assert max(shares) < 1, "nothing of one micro-batch is compared with what all of them need"


def test_text_says_of_what_each_number_is(explained: Explanation, written: str) -> None:
    plan = explained.plan
    for row in (
        rf"peak +{format_bytes(plan.peak_bytes)}  "
        rf"{plan.peak_bytes / plan.baseline_bytes:.3f} of eager's, one of 3 in flight",
        rf"in flight +{format_bytes(plan.waiting_bytes)}  on top of the peak: saved for the other 2 of 3 in flight",
        rf"needs +{format_bytes(plan.needed_bytes)}  {plan.needed_bytes / plan.baseline_needed_bytes:.3f} of eager's "
        rf"{format_bytes(plan.baseline_needed_bytes)}, all that are in flight",
        rf"eager's peak +{format_bytes(plan.baseline_bytes)}  same graph, program order, one of 3 in flight",
        "peak of gpt as planned, one micro-batch",
    ):
        assert re.search(row, written), row


def test_page_and_text_have_the_same_numbers(drawn: Picture, explained: Explanation) -> None:
    page = html.unescape(render(drawn))
    assert explained.curve is not None
    for needed, share, *_ in text.curve_rows(explained.curve, explained.plan.baseline_needed_bytes):
        assert f"needs {needed}, {share} of eager's" in page
    assert all(remark in page for _, _, remark in explained.plan.rows())
    assert page.count("of one micro-batch</h2>") == 4


def test_json_has_what_the_shares_are_of(explained: Explanation) -> None:
    data = explained.to_dict(3)
    assert data["plan"]["in_flight"] == IN_FLIGHT
    assert data["plan"]["baseline_needed_bytes"] > data["plan"]["baseline_bytes"] == data["eager"]["live_bytes"]
    assert data["curve"]["now"]["needed_bytes"] == data["plan"]["needed_bytes"]


def test_a_plan_without_a_pipeline_speaks_of_no_micro_batch() -> None:
    page = picture(Request("gpt", SIZES | {"layers": 1}))
    assert "micro-batch" not in str(page.report.plan)
    assert "micro-batch" not in render(page)

"""What loggers and notebooks get of a plan."""

from __future__ import annotations

import dataclasses
import html
import io
from xml.etree import ElementTree

import pytest
from rich.console import Console

from roamc.errors import BudgetError
from roamc.planning.plan import Plan
from roamc.planning.plan_files import check_kept
from roamc.planning.planned import Terms
from roamc.report.frontier import Point
from roamc.report.text import show_points
from tests.planning.test_plan import small_plan


def test_metrics_are_numbers_of_the_plan_by_name() -> None:
    plan = small_plan()
    metrics = plan.metrics()
    assert {type(value) for value in metrics.values()} == {int, float}
    for name in ("peak_bytes", "total_bytes", "bound_bytes", "arena_bytes", "baseline_bytes", "added_seconds"):
        assert metrics[f"roamc/{name}"] == getattr(plan, name)
    assert metrics["roamc/fixed_bytes"] == sum(plan.fixed_bytes.values()) > 0
    assert plan.metrics("")["added_share"] == plan.added_seconds / plan.step_seconds
    asked = dataclasses.replace(plan, budget_bytes=7, room_bytes=9, step_seconds=4.0, added_seconds=1.0, bound_bytes=0)
    assert asked.metrics().keys() - metrics.keys() == {"roamc/budget_bytes", "roamc/room_bytes"}
    assert metrics.keys() - asked.metrics().keys() == {"roamc/bound_bytes"}, "0 is unknown there"
    assert asked.metrics()["roamc/added_share"] == 0.25


def test_metrics_are_of_every_number() -> None:
    numbers = [item.name for item in dataclasses.fields(Plan) if item.type in ("Bytes", "Bytes | None", "Seconds")]
    asked = dataclasses.replace(small_plan(), **dict.fromkeys(numbers, 7))
    assert {f"roamc/{name}" for name in numbers} <= asked.metrics().keys()


def test_a_step_that_takes_no_time_has_no_share_of_it() -> None:
    decisions = {**small_plan().decisions, "retain": {"reruns": (("a", "b"),)}}
    no_time = {"step_seconds": 0.0, "added_seconds": 2.0, "added_bound_seconds": 1.0}
    plan = dataclasses.replace(small_plan(), budget_bytes=9, room="9 B", room_bytes=9, decisions=decisions, **no_time)
    assert (plan.added_share, plan.added_bound_share) == (0, 0)
    assert ("added time", "0.0%", "predicted; 1 operator recomputed") in plan.rows()
    assert "more time" not in plan.headline
    show_points(Console(file=io.StringIO()), "small", [Point(9, plan, fits=False)])
    with pytest.raises(BudgetError, match=r"plan\.json: .* adds 2\.0 s to a step of 0 s, above memory_budget='\+5%'"):
        check_kept(plan, Terms(0, added_share=0.05), "+5%", "plan.json")


def test_a_notebook_shows_the_headline_rows_and_notes() -> None:
    plan = dataclasses.replace(small_plan(), name="a<b>", notes=("x < y & z",))
    shown = plan._repr_html_()
    assert shown.startswith("<p><b>a&lt;b&gt; needs ")
    for label, value, _ in plan.rows():
        assert f">{html.escape(label)}</th>" in shown
        assert f">{html.escape(value)}</td>" in shown
    assert shown.endswith("<ul><li>x &lt; y &amp; z</li></ul>")
    ElementTree.fromstring(f"<div>{shown}</div>")

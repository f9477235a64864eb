"""Budgets compared, and the curve of peak against added time: true plans, never better where the peak is lower."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from roamc.budget import Budget
from roamc.errors import BudgetError
from roamc.graph import TrainGraph, copied
from roamc.options import Options
from roamc.planning import search
from roamc.planning.plan import Plan
from roamc.planning.search import PlanSearch
from roamc.report.axis import Mark
from roamc.report.curve import BETWEEN, Curve, Spot, staircase, targets, trace
from roamc.report.curve_chart import HEIGHT, WIDTH, curve_chart
from roamc.report.frontier import frontier
from roamc.report.text import BAR, curve_rows
from tests.graphs import model_graph

SHARES = ("100%", "95%", "90%", "85%", "80%", "75%", "70%", "65%", "55%", "min")
QUICK = Options(layout_nodes=0)


@pytest.mark.parametrize(("name", "route"), [("nanogpt", "step"), ("nanogpt-dropout", "joint")])
def test_ten_falling_budgets_have_no_higher_peak_and_no_less_time(name: str, route: str) -> None:
    graph, _ = model_graph(name, route)
    points = frontier(graph, QUICK, SHARES)
    assert [point.budget for point in points] == list(SHARES)
    plans = [point.plan for point in points]
    assert all(after.needed_bytes <= before.needed_bytes for before, after in pairwise(plans))
    assert all(after.added_seconds >= before.added_seconds for before, after in pairwise(plans))
    assert all(point.fits == (point.plan.needed_bytes <= point.plan.budget_bytes) for point in points[:-1])
    assert points[-1].plan.needed_bytes < points[0].plan.needed_bytes
    assert points[-1].plan.added_seconds > points[0].plan.added_seconds


@pytest.mark.parametrize(
    ("name", "budgets"), [("nanogpt", ("min", "90%", 1, "light")), ("nanogpt-dropout", (150_000, "80%"))]
)
def test_budgets_may_come_in_any_sequence(name: str, budgets: tuple[Budget, ...]) -> None:
    """Each has the plan that it has alone, a refused one that of "min"."""
    graph, _ = model_graph(name, "step")
    points = frontier(graph, Options(), budgets)
    assert [(point.budget, point.fits) for point in points] == [(budget, budget != 1) for budget in budgets]
    assert [point.plan for point in points] == [plan_alone(graph, budget) for budget in budgets]
    assert len({point.plan.needed_bytes for point in points}) == len(budgets) - (1 in budgets)


def plan_alone(graph: TrainGraph, budget: Budget) -> Plan:
    try:
        return search.run(copied(graph), Options(memory_budget=budget)).plan
    except BudgetError as error:
        return error.plan


@pytest.fixture(scope="module", params=["nanogpt", "nanogpt-dropout"])
def traced(request: pytest.FixtureRequest) -> tuple[PlanSearch, Curve]:
    trials = PlanSearch(model_graph(request.param, "step")[0], replace(QUICK, memory_budget="80%"), many=True)
    curve = trace(trials, trials.run().plan)
    assert curve is not None
    return trials, curve


def test_curve_is_made_of_plans(traced: tuple[PlanSearch, Curve]) -> None:
    trials, curve = traced
    plans = {(plan.needed_bytes, plan.added_seconds) for plan in trials.plans}
    assert {(spot.needed_bytes, spot.added_seconds) for spot in (*curve.spots, curve.now)} <= plans
    assert curve.spots[-1].needed_bytes == min(plan.needed_bytes for plan in trials.plans)
    assert curve.spots[0].added_seconds == 0
    assert curve.step_seconds == trials.first.plan.step_seconds, "without seconds that other operators hide"


def test_curve_falls_and_never_lies_below_its_bound(traced: tuple[PlanSearch, Curve]) -> None:
    _, curve = traced
    for before, after in pairwise(curve.spots):
        assert after.needed_bytes < before.needed_bytes
        assert after.added_seconds > before.added_seconds
    assert [seconds for _, seconds in curve.bounds] == sorted(seconds for _, seconds in curve.bounds)
    for spot in (*curve.spots, curve.now):
        assert 0 <= spot.bound_seconds <= spot.added_seconds
        assert all(seconds <= spot.added_seconds for peak, seconds in curve.bounds if peak >= spot.needed_bytes)
    assert curve.spots[-1].bound_seconds > 0


def test_plan_of_the_curve_is_that_of_the_budget_alone() -> None:
    options = replace(QUICK, memory_budget="80%")
    alone = PlanSearch(model_graph("nanogpt", "step")[0], options).run().plan
    assert PlanSearch(model_graph("nanogpt", "step")[0], options, many=True).run().plan == alone
    free = PlanSearch(model_graph("nanogpt", "step")[0], QUICK).run().plan
    assert PlanSearch(model_graph("nanogpt", "step")[0], QUICK, many=True).run().plan == free


def test_no_curve_where_nothing_may_run_again() -> None:
    trials = PlanSearch(model_graph("nanogpt", "step")[0], Options(disable=("retain",)), many=True)
    assert trace(trials, trials.run().plan) is None


def test_targets_fall_by_the_same_share() -> None:
    peaks = targets(1 << 20, 1 << 27)
    assert peaks == tuple(1 << power for power in range(26, 20, -1))
    assert len(peaks) == BETWEEN
    assert targets(5, 5) == ()


def test_only_plans_that_no_other_beats_stay() -> None:
    trials = PlanSearch(model_graph("nanogpt", "step")[0], QUICK, many=True)
    trials.first  # noqa: B018 - is made when it is asked for
    trials.attempt(0)
    both = staircase(trials.plans)
    assert [plan.added_seconds for plan in both] == sorted(plan.added_seconds for plan in trials.plans)
    assert staircase([*both, *both]) == both


SPOTS = (Spot(1000, 0.0, 0.0), Spot(500, 1.0, 0.5), Spot(100, 4.0, 2.0))
HAND_MADE = Curve(SPOTS, SPOTS[1], tuple((spot.needed_bytes, spot.bound_seconds) for spot in SPOTS), 10.0)


def test_rows_are_narrow_and_bars_are_to_scale() -> None:
    rows = curve_rows(HAND_MADE, 2000)
    assert [row[:4] for row in rows] == [
        ("1 kB", "0.500", "0.0%", "0.0%"),
        ("500 B", "0.250", "10.0%", "5.0%"),
        ("100 B", "0.050", "40.0%", "20.0%"),
    ]
    assert [row[4] for row in rows] == ["", "##---", "#" * (BAR // 2) + "-" * (BAR // 2)]
    assert [row[5] for row in rows] == ["", "this plan", "the lowest"]


def test_drawing_places_plans_and_bound() -> None:
    chart = curve_chart(HAND_MADE, 2000)
    assert [dot.now for dot in chart.dots] == [False, True, False]
    xs, ys = [dot.x for dot in chart.dots], [dot.y for dot in chart.dots]
    assert WIDTH > xs[0] > xs[1] > xs[2] > 0
    assert HEIGHT == ys[0] > ys[1] > ys[2] > 0
    assert "needs 500 B, 0.250 of eager's\nadded time 10.00%, 1 s a step" in chart.dots[1].text
    # Down from the right: what the plan with the lower peak costs holds from the next higher one on.
    assert chart.line == f"M{WIDTH} {ys[0]}H{xs[0]}V{ys[1]}H{xs[1]}V{ys[2]}H{xs[2]}"
    assert chart.bound.startswith(f"M{WIDTH} {ys[0]}H{xs[0]}H{xs[1]}V")
    assert labels(chart.y_ticks)[:3] == ["0", "10", "20"]
    assert (chart.unit, labels(chart.x_ticks)) == ("kB", ["0.2", "0.4", "0.6", "0.8", "1"])


def test_drawing_of_one_plan_has_axes() -> None:
    only = Spot(1000, 0.0, 0.0)
    chart = curve_chart(Curve((only,), only, ((1000, 0.0),), 10.0), 1000)
    assert len(chart.dots) == 1
    assert chart.x_ticks
    assert chart.y_ticks


def test_curve_of_a_step_that_takes_no_time_has_no_shares() -> None:
    curve = Curve((Spot(1000, 0.0, 0.0),), Spot(1000, 0.0, 0.0), ((1000, 0.0),), 0.0)
    assert curve_chart(curve, 1000).y_ticks == ()
    assert [row[2:4] for row in curve_rows(curve, 1000)] == [("0.0%", "0.0%")]


def labels(ticks: tuple[Mark, ...]) -> list[str]:
    return [tick.text for tick in ticks]

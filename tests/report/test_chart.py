"""Shapes, read back from their paths, are the numbers that they were made of."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.options import Options
from roamc.report.axis import SPAN, TICKS, Axis, byte_ticks, byte_unit, step_axis, time_axis
from roamc.report.box_chart import APART, LETTER, LINE, NUMBERED, box_chart, largest
from roamc.report.chart import WIDTH, Shape, merge, spread, timeline_chart
from roamc.report.explain import KINDS
from roamc.report.picture import Picture, Trimmed
from tests.graphs import model_graph
from tests.report.pictures import picture_of

HEIGHT = 200


@pytest.fixture(scope="module")
def picture() -> Picture:
    graph, _ = model_graph("nanogpt", "step")
    return picture_of(graph, Options())[0]


@pytest.fixture(scope="module", params=["time", "steps"])
def axis(request: pytest.FixtureRequest, picture: Picture) -> Axis:
    """Both axes over the planned order."""
    if request.param == "time":
        return time_axis([work.seconds for work in picture.after.work])
    return step_axis(len(picture.after.work))


def upper_edge(path: str, steps: int) -> list[float]:
    """The y of an area at every step."""
    match = re.fullmatch(rf"M0 {HEIGHT}((?:V[\d.]+H\d+)*)V{HEIGHT}Z", path)
    assert match is not None
    levels: list[float] = []
    for level, end in re.findall(r"V([\d.]+)H(\d+)", match[1]):
        levels += [float(level)] * (int(end) - len(levels))
    assert len(levels) == steps
    return levels


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=300), st.integers(1, 40))
def test_merged_columns_cover_all_steps_and_keep_the_peak(live: list[int], most: int) -> None:
    values = np.array(live, dtype=np.int64)
    columns = merge(values, step_axis(len(live)), most)
    widths = np.diff(columns.edges)
    assert (columns.edges[0], columns.edges[-1]) == (0, len(live))
    assert len(widths) == min(len(live), most)
    assert widths.max() - widths.min() <= 1
    for index, step in enumerate(columns.fullest):
        part = values[columns.edges[index] : columns.edges[index + 1]]
        assert values[step] == part.max()
        assert columns.edges[index] <= step < columns.edges[index + 1]
    assert values[columns.fullest].max() == values.max()


@given(
    st.lists(st.tuples(st.integers(0, 10**12), st.sampled_from([0.0, 1e-6, 0.5])), min_size=1, max_size=300),
    st.integers(1, 40),
)
def test_columns_of_time_cover_all_steps_and_keep_the_peak(rows: list[tuple[int, float]], most: int) -> None:
    values, axis = np.array([live for live, _ in rows]), time_axis([seconds for _, seconds in rows])
    columns = merge(values, axis, most)
    assert (columns.edges[0], columns.edges[-1]) == (0, len(rows))
    assert 0 < len(columns.fullest) <= most
    assert (np.diff(columns.edges) > 0).all()
    assert (np.diff(axis.edges[columns.edges])[:-1] > 0).all()
    assert values[columns.fullest].max() == values.max()


def test_a_step_is_as_wide_as_its_time() -> None:
    axis = time_axis([0.25, 0, 0.75, 1])
    assert axis.edges.tolist() == [0, SPAN / 8, SPAN / 8, SPAN / 2, SPAN]
    assert axis.title == "predicted time, ms"
    assert [(tick.text, tick.at) for tick in axis.ticks] == [
        (f"{at:,}", SPAN * at / 2000) for at in (500, 1000, 1500, 2000)
    ]
    assert (axis.middle(2), time_axis([0, 0]).edges.tolist()) == (SPAN * 5 / 16, [0, SPAN / 2, SPAN])


def test_the_largest_are_numbered_apart_from_each_other(picture: Picture, axis: Axis) -> None:
    top, boxes = picture.report.plan.arena_bytes, largest(picture.arena)
    names = [n for n in box_chart("a", "a", picture.arena, picture.after, axis, top, HEIGHT).names if n.number]
    assert [name.number for name in names] == list(range(1, NUMBERED + 1))
    assert boxes[-1].storage.nbytes >= max(b.storage.nbytes for b in picture.arena if b not in boxes)
    for one, other in itertools.combinations(names, 2):
        assert abs(one.x - other.x) * WIDTH / 100 >= APART - 0.1 or abs(one.y - other.y) >= LINE - 0.2
    for box, name in zip(boxes, names, strict=True):
        assert (box.storage.output or box.storage.name).startswith(name.text.removesuffix("…"))
        left, right = (WIDTH * int(axis.edges[step]) / axis.span for step in (box.storage.born, box.storage.dead))
        assert left - 3 * LETTER <= name.x * WIDTH / 100 <= max(left + LETTER, right) + 0.1


def test_names_stand_in_their_rectangles(picture: Picture, axis: Axis) -> None:
    top, scale = picture.report.plan.arena_bytes, WIDTH / axis.span
    names = box_chart("arena", "after", picture.arena, picture.after, axis, top, HEIGHT).names
    assert any(name.text for name in names if name.number)
    assert [name.number for name in names] == [*range(1, NUMBERED + 1), *[0] * (len(names) - NUMBERED)]
    for name in (name for name in names if name.text):
        x = name.x * WIDTH / 100 + (3 * LETTER if name.number else 0)
        end = x + LETTER * len(name.text)
        around = [
            box
            for box in picture.arena
            if (box.storage.output or box.storage.name).startswith(name.text.removesuffix("…"))
            and scale * axis.edges[box.storage.born] <= x
            and end <= scale * axis.edges[box.storage.dead] + 0.1
            and HEIGHT * (1 - box.high / top) + LINE / 2 <= name.y + 0.1
            and name.y <= HEIGHT * (1 - box.low / top) - LINE / 2 + 0.1
        ]
        assert len(around) == 1


@pytest.mark.parametrize("most", [10_000, 37])
def test_areas_are_the_stacked_live_bytes(picture: Picture, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr("roamc.report.chart.merge", lambda live, axis: merge(live, axis, most))
    course = picture.before
    steps, top = len(course.live), int(course.live.max())
    chart = timeline_chart("x", course, step_axis(steps), top, HEIGHT, {})
    columns = merge(course.live, step_axis(steps), most)
    fullest = np.repeat(columns.fullest, np.diff(columns.edges))
    names = [shape.name for shape in reversed(chart.shapes)]
    assert names == [kind for kind in KINDS if course.by_kind[kind].any()]
    for count, shape in enumerate(reversed(chart.shapes), start=1):
        total = np.sum([course.by_kind[kind] for kind in names[:count]], axis=0)[fullest]
        assert np.allclose(upper_edge(shape.path, steps), HEIGHT * (1 - total / top), atol=0.051)
    assert min(upper_edge(chart.shapes[0].path, steps)) == 0
    assert (chart.peak, chart.peak_at) == (course.peak + 0.5, 0)


def test_what_the_caller_holds_is_the_base(picture: Picture) -> None:
    course, axis = picture.before, step_axis(len(picture.before.live))
    peak = int(course.live.max())
    held = {"parameter": peak, "input": 2 * peak}
    chart = timeline_chart("x", course, axis, 4 * peak, HEIGHT, {"room": ("room", 8 * peak)}, held)
    *areas, upper, lower = chart.shapes
    assert min(upper_edge(areas[0].path, axis.span)) == 0
    assert max(upper_edge(areas[0].path, axis.span)) <= HEIGHT / 4
    assert upper == Shape("input", f"M0 {HEIGHT}V{HEIGHT // 4}H{axis.span}V{HEIGHT}Z")
    assert lower == Shape("parameter", f"M0 {HEIGHT}V{3 * HEIGHT // 4}H{axis.span}V{HEIGHT}Z")
    assert (chart.peak_at, chart.lines[0].at) == (0, 0)


def test_boxes_are_at_their_steps_and_addresses(picture: Picture, axis: Axis) -> None:
    top = picture.report.plan.arena_bytes
    chart = box_chart("arena", "after", picture.arena, picture.after, axis, top, HEIGHT)
    assert sum(shape.path.count("M") for shape in chart.shapes) == len(picture.arena)
    for shape in chart.shapes:
        boxes = [box for box in picture.arena if box.storage.kind == shape.name]
        rectangles = re.findall(r"M(\d+) ([\d.]+)h(\d+)v([\d.]+)h-\3z", shape.path)
        for box, (born, upper, life, size) in zip(boxes, rectangles, strict=True):
            edges = axis.edges[[box.storage.born, box.storage.dead]].tolist()
            assert [int(born), int(born) + int(life)] == edges
            assert float(upper) == pytest.approx(HEIGHT * (1 - box.high / top), abs=0.051)
            assert float(upper) + float(size) == pytest.approx(HEIGHT * (1 - box.low / top), abs=0.051)


def test_trims_lie_below_the_boxes(picture: Picture) -> None:
    top, axis = picture.report.plan.arena_bytes, step_axis(len(picture.after.live))
    chart = box_chart("arena", "after", picture.arena, picture.after, axis, top, HEIGHT, (Trimmed(0, top // 2, 1, 3),))
    assert chart.shapes[0] == Shape("trim", f"M1 {HEIGHT // 2}h2v{HEIGHT // 2}h-2z")


def test_every_step_is_in_the_row_of_its_phase(picture: Picture) -> None:
    axis = step_axis(len(picture.after.live))
    chart = timeline_chart("x", picture.after, axis, int(picture.after.live.max()), HEIGHT, {})
    rows = {}
    for shape in chart.phases:
        runs = re.findall(r"M(\d+) 0h(\d+)v1h-\2z", shape.path)
        rows[shape.name] = {step for at, width in runs for step in range(int(at), int(at) + int(width))}
    for phase, steps in rows.items():
        assert steps == {step for step, work in enumerate(picture.after.work) if work.phase == phase}
    assert list(rows) == ["FORWARD", "BACKWARD", "UPDATE"]


@given(st.integers(1, 10**6))
def test_step_ticks_are_few_and_in_the_middle_of_their_steps(steps: int) -> None:
    ticks = step_axis(steps).ticks
    assert 1 <= len(ticks) <= TICKS
    assert [tick.text for tick in ticks] == [f"{int(tick.at + 0.5):,}" for tick in ticks]
    assert all(0 < tick.at < steps for tick in ticks)


@given(st.integers(0, 10**15))
def test_byte_ticks_have_room_between_them(top: int) -> None:
    ticks, (power, _) = byte_ticks(top, HEIGHT), byte_unit(top)
    places = [tick.at for tick in ticks]
    assert places[0] == HEIGHT
    assert all(
        tick.at == pytest.approx(HEIGHT * (1 - float(tick.text) * power / max(top, 1)), abs=0.051) for tick in ticks
    )
    assert all(before - after >= 39.9 or top < 5 for before, after in itertools.pairwise(places))


@given(st.lists(st.floats(0, 100), max_size=6))
def test_labels_do_not_touch_and_keep_their_order(wanted: list[float]) -> None:
    positions = spread(wanted, 14, 0, 100)
    order = sorted(range(len(wanted)), key=lambda index: (wanted[index], index))
    places = [positions[index] for index in order]
    assert all(after - before >= 14 - 1e-9 for before, after in itertools.pairwise(places))
    assert all(-1e-9 <= place <= 100 + 1e-9 for place in places)


def test_labels_with_room_stay_where_they_are() -> None:
    assert spread([50, 10, 90], 14, 0, 100) == [50, 10, 90]


def test_where_nothing_is_alive_everything_is_flat(picture: Picture) -> None:
    nothing = np.zeros(len(picture.after.live), dtype=np.int64)
    course = replace(picture.after, by_kind=dict.fromkeys(KINDS, nothing), live=nothing)
    axis = step_axis(len(nothing))
    chart = timeline_chart("x", course, axis, 0, HEIGHT, {"arena": ("arena", 0)})
    assert (chart.shapes, chart.peak_at, chart.lines[0].at) == ((), HEIGHT, HEIGHT)
    assert box_chart("arena", "after", (), course, axis, 0, HEIGHT).shapes == ()

"""A picture of a plan as one HTML page: no network, no other files, every word of the user's code escaped.

The template, its style and its script are in ``page/`` and end up inside the page. The script adds what a drawing
cannot do by itself: the names under the pointer, and magnification. The names come from one JSON table of numbers and
a list of texts, each text once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from roamc import files
from roamc.report import text
from roamc.report.chart import WIDTH, Chart, box_chart, timeline_chart
from roamc.report.curve_chart import curve_chart
from roamc.report.explain import KINDS, by_default, groups
from roamc.report.picture import Box, Course, Picture
from roamc.units import Bytes, format_bytes

TIMELINE, ARENA, OUTSIDE = 240, 440, 110
"""Heights of the plots in pixels."""

MEANING = {
    "saved": "computed in forward, read in backward",
    "gradient": "of a parameter",
    "output": "returned to the caller",
    "tangent": "incoming gradient of an output",
    "temporary": "everything else",
}
"""Explains each kind of storage to readers of the page."""


def write(path: Path, picture: Picture) -> None:
    """Write ``picture`` as one HTML page to the file ``path``.

    Raises:
        OSError: the file cannot be written.
    """
    # A file name of the user's may hold what UTF-8 cannot say.
    files.write_text(path, render(picture), errors="backslashreplace")


def render(picture: Picture) -> str:
    """Return ``picture`` as one HTML page; the same plan gives the same text, except for the line ``planned in``."""
    # Escaped whatever the template is called: names and lines come from the user's code.
    pages = Environment(
        loader=PackageLoader("roamc.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters.update(bytes=format_bytes, short=text.short)
    pages.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "sort_keys": True}
    plan, report = picture.report.plan, picture.report
    return pages.get_template("page.html").render(
        plan=plan,
        plot_width=WIDTH,
        rows=plan.rows(),
        layout_rows=text.layout_rows(plan),
        seconds=sum(plan.seconds.values()),
        peaks={"eager": report.eager, "planned": report.planned},
        by=by_default(report.planned),
        groups=text.group_rows(report.planned),
        rest=sum(group.nbytes for group in groups(report.planned)[20:]),
        tables=text.tables(report),
        kinds=[kind for kind in KINDS if picture.before.by_kind[kind].any() or picture.after.by_kind[kind].any()],
        meaning=MEANING,
        charts=charts(picture),
        curve=None if report.curve is None else curve_chart(report.curve, plan.baseline_needed_bytes),
        data=table(picture),
    )


def charts(picture: Picture) -> dict[str, Chart]:
    """Return every plot of ``picture`` by its name.

    ``before`` and ``after`` are timelines of eager's and of the planned order, to one scale. ``arena`` and ``outside``
    show the storages of the planned order; each is left out if it has none.
    """
    report, plan = picture.report, picture.report.plan
    top = _room(max(report.eager.live_bytes, report.planned.live_bytes, plan.arena_bytes))
    bound = {"bound": ("lower bound", plan.bound_bytes)} if plan.bound_bytes else {}
    lines = {**bound, "arena": ("arena", plan.arena_bytes)}
    before = {**lines, "peak": ("peak", report.eager.live_bytes)}
    after = {**lines, "eager": ("eager", report.eager.live_bytes), "peak": ("peak", report.planned.live_bytes)}
    plots = [
        timeline_chart("before", picture.before, top, TIMELINE, before),
        timeline_chart("after", picture.after, top, TIMELINE, after),
    ]
    outside = OUTSIDE if picture.arena else ARENA  # the only drawing of storages gets the room
    places = (("arena", picture.arena, ARENA, picture.trims), ("outside", picture.outside, outside, ()))
    for name, boxes, height, trims in places:
        if boxes:
            plots.append(box_chart(name, "after", boxes, picture.after, max(box.high for box in boxes), height, trims))
    return {plot.name: plot for plot in plots}


def table(picture: Picture) -> dict[str, Any]:
    """Return what the page's script shows of ``picture`` under the pointer, as plain data, ready for JSON.

    Each text is stored once, in ``texts``; everywhere else its index there stands for it. The keys:

    - ``before``, ``after``: the two orders, each with ``work``, a row (node, operator, phase, line, module) for each
      step, and ``live``, the live bytes at each step.
    - ``boxes``: under ``arena`` and ``outside``, one row for each storage: (name, kind, place, operator, line, module,
      bytes, born, dead, low, names of the results that lie in it).
    - ``texts``: the list of all texts.
    """
    texts: dict[str, int] = {}
    data: dict[str, Any] = {
        "before": _course(picture.before, texts),
        "after": _course(picture.after, texts),
        "boxes": {"arena": _boxes(picture.arena, texts), "outside": _boxes(picture.outside, texts)},
    }
    return {**data, "texts": list(texts)}


def _room(size: Bytes) -> Bytes:
    """Return ``size`` and a margin of 4 %, the bytes at the upper edge of a plot whose highest line is ``size``."""
    return size + size // 25


def _course(course: Course, texts: dict[str, int]) -> dict[str, Any]:
    work = [_numbers((w.name, text.short(w.operator), w.phase, w.source, w.module), texts) for w in course.work]
    return {"work": work, "live": course.live.tolist()}


def _boxes(boxes: Iterable[Box], texts: dict[str, int]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for box in boxes:
        s = box.storage
        words = _numbers((s.name, s.kind, s.place, text.short(s.operator), s.source, s.module), texts)
        rows.append([*words, s.nbytes, s.born, s.dead, box.low, _numbers(box.tensors, texts)])
    return rows


def _numbers(words: Iterable[str], texts: dict[str, int]) -> list[int]:
    """Return the number of each of ``words`` in ``texts``, text to number; a new text gets the next number there."""
    return [texts.setdefault(word, len(texts)) for word in words]

"""A picture of a plan as one HTML page: no network, no other files, every word of the user's code escaped.

The template, its style and its script are in ``page/`` and end up inside the page. The script adds what a drawing
cannot do by itself: the names under the pointer, and magnification. The names come from one JSON table of numbers and
a list of texts, each text once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from roamc import files
from roamc.planning.plan import HELD, Plan
from roamc.report import text
from roamc.report.axis import Axis, step_axis, time_axis
from roamc.report.box_chart import box_chart, largest
from roamc.report.chart import Chart, timeline_chart
from roamc.report.curve_chart import curve_chart
from roamc.report.explain import KINDS, by_default
from roamc.report.picture import Box, Course, Picture
from roamc.units import Bytes, format_bytes, format_parts

TIMELINE, ARENA, OUTSIDE = 240, 440, 110
"""Heights of the plots in pixels."""

BASE = ("parameter", "optimizer state", "assumed optimizer state", "accumulated gradient", "buffer", "input")
"""Roles of ``Plan.fixed_bytes``, the base of the charts from below; others count as inputs."""

MEANING = {
    "saved": "computed in forward, read in backward",
    "gradient": "of a parameter",
    "output": "returned to the caller",
    "tangent": "incoming gradient of an output",
    "temporary": "everything else",
}
"""Explains each kind of storage to readers of the page."""

FAR = 3
"""A device of more than this many times the bytes of the highest line is drawn at the upper edge, not to scale."""

FOLDED = 12
"""Number of rows of a table that are shown before it is unfolded."""

SPARE = ("share", "storages", "place", "operator", "phase", "steps", "runs", "bits", "readers")
"""Headings of the columns that a narrow page leaves out."""


@dataclass(frozen=True)
class Level:
    """One row of what the charts stack, and of what leads from there to the total.

    Attributes:
        style: name of its colour; "sum" for a sum of the rows above; "" for what the charts do not show.
        name: what it is.
        remark: explains it.
        eager: its bytes at eager's peak.
        planned: its bytes at the planned peak.
    """

    style: str
    name: str
    remark: str
    eager: Bytes
    planned: Bytes


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
    pages.filters.update(bytes=format_bytes, short=text.short, called=text.called)
    pages.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "sort_keys": True}
    plan, report = picture.report.plan, picture.report
    modules = by_default(report.planned) == "module"
    return pages.get_template("page.html").render(
        plan=plan,
        layout_rows=text.layout_rows(plan),
        stages=text.stage_times(plan.seconds),
        seconds=sum(plan.seconds.values()),
        peaks={"eager": report.eager, "planned": report.planned},
        groups={by: text.group_rows(report.planned, by) for by in (("module", "line") if modules else ("line",))},
        storage_rows=text.storage_rows,
        tables=text.tables(report),
        levels=list(levels(picture)),
        folded=FOLDED,
        spare=SPARE,
        charts=charts(picture),
        largest={"arena": largest(picture.arena), "outside": largest(picture.outside)},
        curve=None if report.curve is None else curve_chart(report.curve, plan.baseline_needed_bytes),
        data=table(picture),
    )


def levels(picture: Picture) -> Iterator[Level]:
    """Yield what the charts stack at both peaks, from below, their sum, what the charts leave out, and the total."""
    report, plan = picture.report, picture.report.plan
    eager, planned = report.eager, report.planned
    for role, size in held(plan).items():
        yield Level(role, HELD[role], "held by the caller", size, size)
    for kind in KINDS:
        if picture.before.by_kind[kind].any() or picture.after.by_kind[kind].any():
            yield Level(kind, kind, MEANING[kind], eager.by_kind.get(kind, 0), planned.by_kind.get(kind, 0))
    base, margin = sum(held(plan).values()), sum(plan.margin_bytes.values())
    yield Level("sum", "peak in the charts", "", base + eager.live_bytes, base + planned.live_bytes)
    inside = "of operators, and tensor objects, estimated"
    more = f"{inside}; and what others in flight hold" if plan.in_flight > 1 else inside
    gaps = plan.baseline_bytes - eager.live_bytes, plan.peak_bytes - planned.live_bytes
    workspace = plan.baseline_needed_bytes - plan.baseline_bytes, plan.needed_bytes - plan.peak_bytes
    eager_margin = plan.baseline_total_bytes - base - plan.baseline_needed_bytes
    rest = (
        Level("", "gaps", "in the arena, and results on their way into it", *gaps),
        Level("", "workspace", more, *workspace),
        Level("", "margin", format_parts(plan.margin_bytes), eager_margin, margin),
    )
    yield from (level for level in rest if level.eager or level.planned)
    yield Level("sum", "total", "", plan.baseline_total_bytes, plan.total_bytes)


def held(plan: Plan) -> dict[str, Bytes]:
    """Return what the caller holds by :data:`BASE`, the lowest in the charts first."""
    sizes = dict.fromkeys(BASE, 0)
    for role, size in plan.fixed_bytes.items():
        sizes[role if role in BASE else "input"] += size
    return {role: size for role, size in sizes.items() if size}


def charts(picture: Picture) -> dict[str, tuple[Chart, ...]]:
    """Return every plot of ``picture`` by its name, over predicted time and over steps.

    ``before`` and ``after`` are timelines of eager's and of the planned order, to one scale. ``arena`` and ``outside``
    show the storages of the planned order; each is left out if it has none.
    """
    return {
        name: tuple(plot(picture, name, axis) for axis in axes(course))
        for name, course in (
            ("before", picture.before),
            ("after", picture.after),
            *(((name, picture.after)) for name in ("arena", "outside") if getattr(picture, name)),
        )
    }


def axes(course: Course) -> tuple[Axis, Axis]:
    """Return both x axes of a plot over the steps of ``course``."""
    return time_axis([work.seconds for work in course.work]), step_axis(len(course.work))


def plot(picture: Picture, name: str, axis: Axis) -> Chart:
    """Return the plot of ``picture`` that :func:`charts` calls ``name``, over ``axis``."""
    if name in ("before", "after"):
        return _timeline(picture, name, axis)
    boxes, trims = (picture.arena, picture.trims) if name == "arena" else (picture.outside, ())
    height = OUTSIDE if name == "outside" and picture.arena else ARENA  # the only drawing of storages gets the room
    return box_chart(name, "after", boxes, picture.after, axis, max(box.high for box in boxes), height, trims)


def _timeline(picture: Picture, name: str, axis: Axis) -> Chart:
    report, plan = picture.report, picture.report.plan
    base = held(plan)
    bottom, eager, total = sum(base.values()), plan.baseline_total_bytes, plan.total_bytes
    highest = max(eager, total)
    room = plan.room_bytes
    far = room > FAR * highest
    lines = {
        **({"bound": ("lower bound", bottom + plan.bound_bytes)} if plan.bound_bytes and name == "after" else {}),
        **({"room": (f"↑ {plan.room}" if far else plan.room, room)} if room else {}),
        **({"eager": ("eager's total", eager)} if name == "after" else {}),
        "total": ("total", eager if name == "before" else total),
        "peak": ("peak", bottom + (report.eager if name == "before" else report.planned).live_bytes),
    }
    course = picture.before if name == "before" else picture.after
    return timeline_chart(
        name, course, axis, _with_margin(highest if far else max(highest, room)), TIMELINE, lines, base
    )


def table(picture: Picture) -> dict[str, Any]:
    """Return what the page's script shows of ``picture`` under the pointer, as plain data, ready for JSON.

    Each text is stored once, in ``texts``; everywhere else its index there stands for it. The keys:

    - ``before``, ``after``: the two orders, each with ``work``, a row (node, operator, phase, line, module) for each
      step, ``live``, the live bytes at each step, and ``time``, its width on the time axis.
    - ``held``: bytes that the caller holds at every step.
    - ``boxes``: under ``arena`` and ``outside``, one row for each storage: (name, kind, place, operator, line, module,
      bytes, born, dead, low, names of the results that lie in it).
    - ``texts``: the list of all texts.
    """
    texts: dict[str, int] = {}
    data: dict[str, Any] = {
        "held": sum(held(picture.report.plan).values()),
        "before": _course(picture.before, texts),
        "after": _course(picture.after, texts),
        "boxes": {"arena": _boxes(picture.arena, texts), "outside": _boxes(picture.outside, texts)},
    }
    return {**data, "texts": list(texts)}


def _with_margin(size: Bytes) -> Bytes:
    """Return ``size`` and a margin of 4 %, the bytes at the upper edge of a plot whose highest line is ``size``."""
    return size + size // 25


def _course(course: Course, texts: dict[str, int]) -> dict[str, Any]:
    work = [_numbers((w.name, text.short(w.operator), w.phase, w.source, w.module), texts) for w in course.work]
    time, _ = axes(course)
    return {"work": work, "live": course.live.tolist(), "time": np.diff(time.edges).tolist()}


def _boxes(boxes: Iterable[Box], texts: dict[str, int]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for box in boxes:
        s = box.storage
        words = _numbers((text.called(s), s.kind, s.place, text.short(s.operator), s.source, s.module), texts)
        rows.append([*words, s.nbytes, s.born, s.dead, box.low, _numbers(box.tensors, texts)])
    return rows


def _numbers(words: Iterable[str], texts: dict[str, int]) -> list[int]:
    """Return the number of each of ``words`` in ``texts``, text to number; a new text gets the next number there."""
    return [texts.setdefault(word, len(texts)) for word in words]

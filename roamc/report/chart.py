"""Turn a picture's numbers into shapes: areas, boxes, ticks and labels in the coordinates of an SVG plot.

A plot is a window of its own, ``steps`` wide and ``height`` high, that the page stretches to its width: x is a step
and y a pixel, counted downwards. Shapes are SVG paths, one per kind and not one element per storage: a page with
thousands of storages then holds a few dozen elements, some 25 characters for each box.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from roamc.graph import Phase
from roamc.graph.memory import Int64s, Step
from roamc.report.explain import KINDS
from roamc.report.picture import Box, Course, Trimmed
from roamc.units import Bytes, format_bytes

COLUMNS = 1600
"""Maximum number of columns of a timeline, about two to a pixel; with more steps, neighbouring ones share a column."""

LABEL = 14.0
"""Least distance in pixels between two labels at the side."""

WIDTH = 784
"""Pixels to which the page stretches a plot."""

NAMED = 60
"""Maximum number of rectangles whose storage is named in the drawing, largest first."""

LINE, LETTER = 11.0, 6.2
"""Pixels of height and of width that a letter of a storage's name takes in the drawing."""

SHORTEST = 5
"""A rectangle with room for fewer letters than this has no name."""


@dataclass(frozen=True)
class Shape:
    """One SVG path, in the coordinates of its plot, and the name of the kind or phase that decides its colour."""

    name: str
    path: str


@dataclass(frozen=True)
class Mark:
    """A tick of an axis or a line across a plot.

    Attributes:
        name: name of its style, such as "peak"; empty for a tick.
        at: x of a tick below the plot, y of a tick at the side or of a line; in the plot's coordinates.
        text: its label.
        label_at: the same coordinate of the label, moved so that no two lie over each other.
    """

    name: str
    at: float
    text: str
    label_at: float


@dataclass(frozen=True)
class Name:
    """A storage's name inside its rectangle; x is the left end and y the middle of the text, in pixels of the plot."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Chart:
    """One plot with its axes.

    Attributes:
        name: name of the plot, unique in the page.
        group: plots of one group share their steps and are magnified together.
        steps: width in steps.
        height: height in pixels.
        top: bytes at the upper edge.
        shapes: areas or rectangles; the first is painted first.
        x_ticks: ticks at steps.
        y_ticks: ticks at bytes.
        lines: horizontal lines across the plot.
        phases: the steps in which each phase runs, as a row of height 1 for each, to be drawn below the plot.
        peak: x of the step to mark, the middle of that step.
        peak_at: y of its live bytes; None in a plot of rectangles.
        names: names of the storages whose rectangles have room for one.
    """

    name: str
    group: str
    steps: int
    height: int
    top: Bytes
    shapes: tuple[Shape, ...]
    x_ticks: tuple[Mark, ...]
    y_ticks: tuple[Mark, ...]
    lines: tuple[Mark, ...]
    phases: tuple[Shape, ...]
    peak: float
    peak_at: float | None = None
    names: tuple[Name, ...] = ()


@dataclass(frozen=True)
class Columns:
    """Neighbouring steps merged: column i stands for the steps ``[edges[i], edges[i + 1])``.

    Attributes:
        edges: int64[m + 1] steps.
        fullest: int64[m], the first step with the most live bytes of each column, whose bytes the column shows.
    """

    edges: Int64s
    fullest: Int64s


def merge(live: Int64s, most: int = COLUMNS) -> Columns:
    """Merge n steps into at most ``most`` columns of nearly the same width.

    ``live``, int64[n], has the live bytes at each step. The fullest step of each column is kept, and so is the peak.
    """
    count = min(len(live), most)
    edges = np.arange(count + 1, dtype=np.int64) * len(live) // max(count, 1)
    fullest = [a + int(np.argmax(live[a:b])) for a, b in pairwise(edges.tolist())]
    return Columns(edges, np.array(fullest, dtype=np.int64))


def timeline_chart(name: str, course: Course, top: Bytes, height: int, lines: Mapping[str, tuple[str, Bytes]]) -> Chart:
    """Return the plot of live bytes over the steps, stacked by kind.

    Args:
        name: name of the plot, and of its group.
        course: live bytes by kind.
        top: bytes at the upper edge.
        height: height in pixels.
        lines: maps the style of each line across the plot to (label, bytes).
    """
    columns = merge(course.live)
    return Chart(
        name=name,
        group=name,
        steps=len(course.live),
        height=height,
        top=top,
        shapes=tuple(_stack(course, columns, top, height)),
        x_ticks=step_ticks(len(course.live)),
        y_ticks=byte_ticks(top, height),
        lines=_lines(lines, top, height),
        phases=_phases(course, columns),
        peak=course.peak + 0.5,
        peak_at=round(_y(int(course.live[course.peak]), top, height), 1),
    )


def box_chart(
    name: str, group: str, boxes: Sequence[Box], course: Course, top: Bytes, height: int, trims: Sequence[Trimmed] = ()
) -> Chart:
    """Return the plot of storages as rectangles over steps and bytes.

    Args:
        name: name of the plot.
        group: plots of one group are magnified together.
        boxes: the storages.
        course: the order in which they live.
        top: bytes at the upper edge.
        height: height in pixels.
        trims: trimmed ranges, drawn below the storages.
    """
    kinds = {box.storage.kind for box in boxes}
    return Chart(
        name=name,
        group=group,
        steps=len(course.live),
        height=height,
        top=top,
        shapes=(
            *_trims(trims, top, height),
            *(Shape(kind, _boxes(boxes, kind, top, height)) for kind in KINDS if kind in kinds),
        ),
        x_ticks=step_ticks(len(course.live)),
        y_ticks=byte_ticks(top, height),
        lines=(),
        phases=_phases(course, merge(course.live)),
        peak=course.peak + 0.5,
        names=tuple(_names(boxes, len(course.live), top, height)),
    )


def step_ticks(steps: int) -> tuple[Mark, ...]:
    """Return at most eight ticks for a plot of ``steps`` steps.

    Ticks stand at round step numbers, counted from 1, each in the middle of its step.
    """
    apart = max(1, round_up(steps / 8))
    numbers = range(apart, steps + 1, apart)
    return tuple(Mark("", number - 0.5, f"{number:,}", number - 0.5) for number in numbers)


def byte_ticks(top: Bytes, height: int) -> tuple[Mark, ...]:
    """Return ticks at round sizes from 0 to ``top`` bytes, at least 40 pixels apart in a plot of ``height`` pixels."""
    apart = max(1, round_up(top * 40 / height))
    marks = [(round(_y(size, top, height), 1), format_bytes(size)) for size in range(0, top + 1, apart)]
    return tuple(Mark("", at, text, at) for at, text in marks)


def spread(wanted: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """Return places in ``[low, high]`` near those in ``wanted``, at least ``apart`` from each other.

    First each place is raised to ``apart`` above the one before it, then all are lowered where ``high`` demands it.
    Where they do not fit, places go below ``low``. Result i belongs to ``wanted[i]``.
    """
    order = sorted(range(len(wanted)), key=lambda index: (wanted[index], index))
    places = list(wanted)
    edge = low
    for index in order:
        places[index] = max(places[index], edge)
        edge = places[index] + apart
    edge = high
    for index in reversed(order):
        places[index] = min(places[index], edge)
        edge = places[index] - apart
    return places


def round_up(value: float) -> int:
    """Return the first of 1, 2, 5, 10, 20, 50, … that is not below ``value``."""
    power = 10 ** max(0, math.floor(math.log10(value))) if value > 1 else 1
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= value)


def _y(size: Bytes, top: Bytes, height: int) -> float:
    return height * (1 - size / top) if top else float(height)


def _number(value: float) -> str:
    """One digit behind the point, none where it is zero."""
    return f"{value:.1f}".removesuffix(".0")


def _lines(lines: Mapping[str, tuple[str, Bytes]], top: Bytes, height: int) -> tuple[Mark, ...]:
    levels = [round(_y(size, top, height), 1) for _, size in lines.values()]
    places = spread(levels, LABEL, LABEL / 2, height - LABEL / 2)
    rows = zip(lines.items(), levels, places, strict=True)
    return tuple(
        Mark(name, at, f"{label} {format_bytes(size)}", round(place, 1)) for (name, (label, size)), at, place in rows
    )


def _stack(course: Course, columns: Columns, top: Bytes, height: int) -> Iterator[Shape]:
    """Yield one area per kind that has live bytes: first the sum of all kinds, then without the uppermost, and so on.

    Painted in this order, each covers the lower part of the one before.
    """
    present = [kind for kind in KINDS if course.by_kind[kind].any()]
    for count in range(len(present), 0, -1):
        total = np.sum([course.by_kind[kind] for kind in present[:count]], axis=0)[columns.fullest]
        yield Shape(present[count - 1], _area(columns.edges, [_y(int(size), top, height) for size in total], height))


def _area(edges: Int64s, heights: Sequence[float], height: int) -> str:
    """Return the SVG path of the area between the base and ``heights``, one y per column, in pixels from the top.

    Args:
        edges: int64[m + 1] steps at which the m columns begin and end.
        heights: y of each column; neighbours of the same y are drawn as one piece.
        height: y of the base.
    """
    parts, before = [f"M0 {height}"], ""
    for end, place in zip(edges[1:].tolist(), heights, strict=True):
        level = _number(place)
        if level == before:
            parts[-1] = f"H{end}"
        else:
            parts += [f"V{level}", f"H{end}"]
        before = level
    return "".join([*parts, f"V{height}Z"])


def _boxes(boxes: Iterable[Box], kind: str, top: Bytes, height: int) -> str:
    """All boxes of one kind as one path."""
    return "".join(_box(box, top, height) for box in boxes if box.storage.kind == kind)


def _names(boxes: Sequence[Box], steps: Step, top: Bytes, height: int) -> Iterator[Name]:
    """Yield the names of the largest boxes that have room for one, by bytes times steps, cut to the room.

    Args:
        boxes: the storages.
        steps: width of the plot in steps.
        top: bytes at the upper edge.
        height: height of the plot in pixels.
    """
    largest = sorted(boxes, key=lambda box: -box.storage.nbytes * (box.storage.dead - box.storage.born))
    for box in largest[:NAMED]:
        letters = int(WIDTH * (box.storage.dead - box.storage.born) / steps / LETTER) - 1
        upper, lower = _y(box.high, top, height), _y(box.low, top, height)
        if letters >= SHORTEST and lower - upper >= LINE:
            name = box.storage.name
            text = name if len(name) <= letters else f"{name[: letters - 1]}…"
            yield Name(round(WIDTH * box.storage.born / steps + LETTER / 2, 1), round((upper + lower) / 2, 1), text)


def _trims(trims: Sequence[Trimmed], top: Bytes, height: int) -> Iterator[Shape]:
    """Yield one shape with the rectangles of all trims; nothing where there are no trims."""
    if trims:
        yield Shape("trim", "".join(_rectangle(t.low, t.high, t.first, t.end, top, height) for t in trims))


def _box(box: Box, top: Bytes, height: int) -> str:
    return _rectangle(box.low, box.high, box.storage.born, box.storage.dead, top, height)


def _rectangle(low: Bytes, high: Bytes, first: Step, end: Step, top: Bytes, height: int) -> str:
    upper, lower = round(_y(high, top, height), 1), round(_y(low, top, height), 1)
    return f"M{first} {_number(upper)}h{end - first}v{_number(lower - upper)}h-{end - first}z"


def _phases(course: Course, columns: Columns) -> tuple[Shape, ...]:
    """For each phase the columns in which one of its steps runs; none for a phase that does not run."""
    phase = np.array([work.phase for work in course.work])
    shapes = []
    for name in Phase.__members__:
        runs = np.add.reduceat(phase == name, columns.edges[:-1], dtype=np.int64) > 0
        shapes.append(Shape(name, _runs(columns.edges, runs)))
    return tuple(shape for shape in shapes if shape.path)


def _runs(edges: Int64s, inside: npt.NDArray[np.bool_]) -> str:
    """Return the SVG path of rectangles of height 1 over the columns that are ``inside``, bool[m].

    ``edges`` are the int64[m + 1] steps at which the columns begin and end.
    """
    change = np.flatnonzero(np.diff(np.concatenate(([0], inside.astype(np.int8), [0]))))
    return "".join(f"M{edges[a]} 0h{edges[b] - edges[a]}v1h-{edges[b] - edges[a]}z" for a, b in change.reshape(-1, 2))

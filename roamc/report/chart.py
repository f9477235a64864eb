"""Turn a picture's numbers into shapes: areas, boxes, ticks and labels in the coordinates of an SVG plot.

A plot is a window of its own, as wide as its axis and ``height`` high, that the page stretches to its width: x is a
place on the axis and y a pixel, counted downwards. Shapes are SVG paths, one per kind and not one element per storage:
a page with thousands of storages then holds a few dozen elements, some 25 characters for each box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from roamc.graph import Phase
from roamc.graph.memory import Int64s
from roamc.report.axis import Axis, Mark, byte_ticks, byte_unit
from roamc.report.explain import KINDS
from roamc.report.picture import Course
from roamc.units import Bytes, format_bytes

COLUMNS = 1600
"""Maximum number of columns of a timeline, about two to a pixel; with more steps, neighbouring ones share a column."""

LABEL = 14.0
"""Least distance in pixels between two labels at the side."""

WIDTH = 784
"""Pixels to which a wide page stretches a plot."""


@dataclass(frozen=True)
class Shape:
    """One SVG path, in the coordinates of its plot, and the name of the kind or phase that decides its colour."""

    name: str
    path: str


@dataclass(frozen=True)
class Name:
    """What stands at a storage's rectangle.

    Attributes:
        x: left end of the text, in percent of the plot's width.
        y: middle of the text, in pixels from the upper edge.
        text: name of the storage, cut to the room; empty where there is none.
        number: place among the largest storages, from 1; 0 for the others.
    """

    x: float
    y: float
    text: str
    number: int = 0


@dataclass(frozen=True)
class Chart:
    """One plot with its axes.

    Attributes:
        name: name of the plot; with the name of its axis it is unique in the page.
        group: plots of one group share their steps and are magnified together.
        axis: the x axis.
        height: height in pixels.
        top: bytes at the upper edge.
        unit: of the numbers at ``y_ticks``, such as "MB".
        shapes: areas or rectangles; the first is painted first.
        y_ticks: ticks at bytes.
        lines: horizontal lines across the plot.
        phases: the steps in which each phase runs, as a row of height 1 for each, to be drawn below the plot.
        peak: x of the step to mark, the middle of that step.
        peak_at: y of its live bytes; None in a plot of rectangles.
        names: numbers of the largest storages, and names of those whose rectangles have room for one.
    """

    name: str
    group: str
    axis: Axis
    height: int
    top: Bytes
    unit: str
    shapes: tuple[Shape, ...]
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


def merge(live: Int64s, axis: Axis, most: int = COLUMNS) -> Columns:
    """Merge n steps into at most ``most`` columns of nearly the same width, or of the width of one wide step.

    ``live``, int64[n], has the live bytes at each step. The fullest step of each column is kept, and so is the peak.
    """
    count = min(axis.span, most)
    places = np.arange(count, dtype=np.int64) * axis.span // max(count, 1)
    edges = np.unique(np.append(np.searchsorted(axis.edges[:-1], places), len(live)))
    fullest = [a + int(np.argmax(live[a:b])) for a, b in pairwise(edges.tolist())]
    return Columns(edges, np.array(fullest, dtype=np.int64))


def timeline_chart(
    name: str,
    course: Course,
    axis: Axis,
    top: Bytes,
    height: int,
    lines: Mapping[str, tuple[str, Bytes]],
    held: Mapping[str, Bytes] = MappingProxyType({}),
) -> Chart:
    """Return the plot of bytes over the steps: what the caller holds as the base, live bytes by kind on top of it.

    Args:
        name: name of the plot, and of its group.
        course: live bytes by kind.
        axis: the x axis, over the steps of ``course``.
        top: bytes at the upper edge.
        height: height in pixels.
        lines: maps the style of each line across the plot to (label, bytes from 0).
        held: maps the style of each layer of the base to its bytes, the lowest first.
    """
    columns = merge(course.live, axis)
    base = sum(held.values())
    return Chart(
        name=name,
        group=name,
        axis=axis,
        height=height,
        top=top,
        unit=byte_unit(top)[1],
        shapes=(*_stack(course, columns, axis, base, top, height), *_base(held, axis, top, height)),
        y_ticks=byte_ticks(top, height),
        lines=_lines(lines, top, height),
        phases=phase_rows(course, columns, axis),
        peak=axis.middle(course.peak),
        peak_at=round(y_at(base + int(course.live[course.peak]), top, height), 1),
    )


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


def y_at(size: Bytes, top: Bytes, height: int) -> float:
    """Return the pixels from the upper edge, at ``top`` bytes, to ``size`` in a plot of ``height`` pixels."""
    return height * (1 - size / top) if top else float(height)


def digits(value: float) -> str:
    """Return ``value`` with one digit behind the point, none where it is zero."""
    return f"{value:.1f}".removesuffix(".0")


def _lines(lines: Mapping[str, tuple[str, Bytes]], top: Bytes, height: int) -> tuple[Mark, ...]:
    levels = [max(0.0, round(y_at(size, top, height), 1)) for _, size in lines.values()]
    places = spread(levels, LABEL, LABEL / 2, height - LABEL / 2)
    rows = zip(lines.items(), levels, places, strict=True)
    return tuple(
        Mark(name, at, f"{label} {format_bytes(size)}", round(place, 1)) for (name, (label, size)), at, place in rows
    )


def _stack(course: Course, columns: Columns, axis: Axis, base: Bytes, top: Bytes, height: int) -> Iterator[Shape]:
    """Yield one area per kind that has live bytes: first the sum of all kinds, then without the uppermost, and so on.

    Painted in this order, each covers the lower part of the one before.
    """
    present = [kind for kind in KINDS if course.by_kind[kind].any()]
    for count in range(len(present), 0, -1):
        total = np.sum([course.by_kind[kind] for kind in present[:count]], axis=0)[columns.fullest]
        levels = [y_at(base + int(size), top, height) for size in total]
        yield Shape(present[count - 1], _area(axis.edges[columns.edges], levels, height))


def _base(held: Mapping[str, Bytes], axis: Axis, top: Bytes, height: int) -> Iterator[Shape]:
    """Yield one area for each layer of ``held``, the uppermost first, as :func:`_stack` does."""
    sizes = list(held.values())
    for count in range(len(sizes), 0, -1):
        level = y_at(sum(sizes[:count]), top, height)
        yield Shape(list(held)[count - 1], _area(axis.edges[[0, -1]], [level], height))


def _area(edges: Int64s, heights: Sequence[float], height: int) -> str:
    """Return the SVG path of the area between the base and ``heights``, one y per column, in pixels from the top.

    Args:
        edges: int64[m + 1] x at which the m columns begin and end.
        heights: y of each column; neighbours of the same y are drawn as one piece.
        height: y of the base.
    """
    parts, before = [f"M0 {height}"], ""
    for end, place in zip(edges[1:].tolist(), heights, strict=True):
        level = digits(place)
        if level == before:
            parts[-1] = f"H{end}"
        else:
            parts += [f"V{level}", f"H{end}"]
        before = level
    return "".join([*parts, f"V{height}Z"])


def phase_rows(course: Course, columns: Columns, axis: Axis) -> tuple[Shape, ...]:
    """Return for each phase that runs the columns in which one of its steps runs, as rectangles of height 1."""
    phase = np.array([work.phase for work in course.work])
    shapes = []
    for name in Phase.__members__:
        runs = np.add.reduceat(phase == name, columns.edges[:-1], dtype=np.int64) > 0
        shapes.append(Shape(name, _runs(axis.edges[columns.edges], runs)))
    return tuple(shape for shape in shapes if shape.path)


def _runs(edges: Int64s, inside: npt.NDArray[np.bool_]) -> str:
    """Return the SVG path of rectangles of height 1 over the columns that are ``inside``, bool[m].

    ``edges`` are the int64[m + 1] x at which the columns begin and end.
    """
    change = np.flatnonzero(np.diff(np.concatenate(([0], inside.astype(np.int8), [0]))))
    return "".join(f"M{edges[a]} 0h{edges[b] - edges[a]}v1h-{edges[b] - edges[a]}z" for a, b in change.reshape(-1, 2))

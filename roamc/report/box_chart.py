"""The plot of storages as rectangles over steps and bytes, the largest of them with a number for the list beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from roamc.graph.memory import Int64s
from roamc.report.axis import Axis, byte_ticks, byte_unit
from roamc.report.chart import WIDTH, Chart, Name, Shape, digits, merge, phase_rows, y_at
from roamc.report.explain import KINDS
from roamc.report.picture import Box, Course, Trimmed
from roamc.units import Bytes

NUMBERED = 10
"""Number of the largest storages that have a number in the drawing, for the list beside it."""

APART = 60.0
"""Least distance in pixels of a wide page between two numbers of one height; on a narrow page it is a third of it."""

NAMED = 60
"""Maximum number of rectangles whose storage is named in the drawing, largest first."""

LINE, LETTER = 11.0, 6.2
"""Pixels of height and of width that a letter of a storage's name takes in the drawing."""

SHORTEST = 5
"""A rectangle with room for fewer letters than this has no name."""


def box_chart(
    name: str,
    group: str,
    boxes: Sequence[Box],
    course: Course,
    axis: Axis,
    top: Bytes,
    height: int,
    trims: Sequence[Trimmed] = (),
) -> Chart:
    """Return the plot of storages as rectangles over steps and bytes.

    Args:
        name: name of the plot.
        group: plots of one group are magnified together.
        boxes: the storages.
        course: the order in which they live.
        axis: the x axis, over the steps of ``course``.
        top: bytes at the upper edge.
        height: height in pixels.
        trims: trimmed ranges, drawn below the storages.
    """
    kinds = {box.storage.kind for box in boxes}
    return Chart(
        name=name,
        group=group,
        axis=axis,
        height=height,
        top=top,
        unit=byte_unit(top)[1],
        shapes=(
            *_trims(trims, axis, top, height),
            *(Shape(kind, _boxes(boxes, kind, axis, top, height)) for kind in KINDS if kind in kinds),
        ),
        y_ticks=byte_ticks(top, height),
        lines=(),
        phases=phase_rows(course, merge(course.live, axis), axis),
        peak=axis.middle(course.peak),
        names=(*_numbers(boxes, axis, top, height), *_names(boxes, axis, top, height)),
    )


def largest(boxes: Iterable[Box]) -> list[Box]:
    """Return the :data:`NUMBERED` storages of most bytes, the largest first; of equals the one that lives longer."""

    def size(box: Box) -> tuple[int, int, int]:
        return (-box.storage.nbytes, box.storage.born - box.storage.dead, box.storage.born)

    return sorted(boxes, key=size)[:NUMBERED]


def _boxes(boxes: Iterable[Box], kind: str, axis: Axis, top: Bytes, height: int) -> str:
    """All boxes of one kind as one path."""
    return "".join(_box(box, axis, top, height) for box in boxes if box.storage.kind == kind)


@dataclass(frozen=True)
class _Frame:
    """A rectangle in pixels of a wide page, from the upper left corner of the plot."""

    left: float
    right: float
    upper: float
    lower: float

    def text(self, name: str) -> str:
        """As much of ``name`` as there is room for; empty where that is too little."""
        letters = int((self.right - self.left) / LETTER) - 1
        if letters < SHORTEST or self.lower - self.upper < LINE:
            return ""
        return name if len(name) <= letters else f"{name[: letters - 1]}…"

    @property
    def middle(self) -> float:
        return (self.upper + self.lower) / 2


def _frame(box: Box, axis: Axis, top: Bytes, height: int) -> _Frame:
    left, right = (WIDTH * int(axis.edges[step]) / axis.span for step in (box.storage.born, box.storage.dead))
    return _Frame(left, right, y_at(box.high, top, height), y_at(box.low, top, height))


def _numbers(boxes: Sequence[Box], axis: Axis, top: Bytes, height: int) -> Iterator[Name]:
    """Yield the numbers of the largest boxes, inside them or, where another number is too near, beside."""
    taken: list[tuple[float, float]] = []
    for number, box in enumerate(largest(boxes), start=1):
        frame = _frame(box, axis, top, height)
        x, y = next(spot for spot in _spots(frame, height) if not any(_near(spot, other) for other in taken))
        taken.append((x, y))
        room = _Frame(x + 3 * LETTER, frame.right, frame.upper, frame.lower)
        text = room.text(box.storage.output or box.storage.name) if y == frame.middle else ""
        yield Name(round(100 * x / WIDTH, 2), round(y, 1), text, number)


def _spots(frame: _Frame, height: int) -> Iterator[tuple[float, float]]:
    """Yield places for a number: along the middle of ``frame``, then ever further above and below it."""
    start = min(frame.left + LETTER / 2, WIDTH - 3 * LETTER)
    for lines in range(2 * height):
        y = frame.middle + LINE * (lines // 2 + lines % 2) * (-1) ** lines
        for x in np.arange(start, max(frame.right - 3 * LETTER, start + 1), APART / 4).tolist():
            yield x, y


def _near(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return abs(one[0] - other[0]) < APART and abs(one[1] - other[1]) < LINE


def _names(boxes: Sequence[Box], axis: Axis, top: Bytes, height: int) -> Iterator[Name]:
    """Yield the names of the largest boxes without a number that have room for one, by bytes times steps.

    Args:
        boxes: the storages.
        axis: the x axis of the plot.
        top: bytes at the upper edge.
        height: height of the plot in pixels.
    """
    numbered = {box.storage.name for box in largest(boxes)}
    widest = sorted(boxes, key=lambda box: -box.storage.nbytes * (box.storage.dead - box.storage.born))
    for box in widest[:NAMED]:
        frame = _frame(box, axis, top, height)
        text = frame.text(box.storage.output or box.storage.name)
        if text and box.storage.name not in numbered:
            yield Name(round(100 * (frame.left + LETTER / 2) / WIDTH, 2), round(frame.middle, 1), text)


def _trims(trims: Sequence[Trimmed], axis: Axis, top: Bytes, height: int) -> Iterator[Shape]:
    """Yield one shape with the rectangles of all trims; nothing where there are no trims."""
    if trims:
        voids = [_rectangle(t.low, t.high, axis.edges[[t.first, t.end]], top, height) for t in trims]
        yield Shape("trim", "".join(voids))


def _box(box: Box, axis: Axis, top: Bytes, height: int) -> str:
    return _rectangle(box.low, box.high, axis.edges[[box.storage.born, box.storage.dead]], top, height)


def _rectangle(low: Bytes, high: Bytes, sides: Int64s, top: Bytes, height: int) -> str:
    left, right = sides.tolist()
    upper, lower = round(y_at(high, top, height), 1), round(y_at(low, top, height), 1)
    return f"M{left} {digits(upper)}h{right - left}v{digits(lower - upper)}h-{right - left}z"

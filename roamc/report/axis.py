"""Axes of plots: where steps lie along x, by predicted time or by number, and ticks at round numbers of one unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roamc.graph.memory import Int64s, Step
from roamc.units import Bytes, Seconds

SPAN = 100_000
"""x of the end of a time axis, in whole numbers that keep paths short: more than a hundred to a pixel."""

TICKS = 8
"""Maximum number of ticks of an x axis."""


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


@dataclass(frozen=True, eq=False)
class Axis:
    """The x axis of a plot over n steps.

    Attributes:
        name: "time" or "steps".
        title: what it counts, and in which unit.
        edges: int64[n + 1], x of the start of each step and of the end of the last; never falls.
        per: x of one unit.
        before: by how much of x a tick lies in front of its number.
    """

    name: str
    title: str
    edges: Int64s
    per: float
    before: float

    @property
    def span(self) -> int:
        """x of the end of the last step."""
        return int(self.edges[-1])

    @property
    def ticks(self) -> tuple[Mark, ...]:
        """At most :data:`TICKS` ticks at round numbers of the unit, without 0."""
        count = self.span / self.per
        apart = max(1, round_up(count / TICKS))
        numbers = range(apart, int(count) + 1, apart)
        places = [round(number * self.per - self.before, 1) for number in numbers]
        return tuple(Mark("", at, f"{number:,}", at) for number, at in zip(numbers, places, strict=True))

    def middle(self, step: Step) -> float:
        """x of the middle of ``step``."""
        return float(self.edges[step] + self.edges[step + 1]) / 2


def step_axis(steps: Step) -> Axis:
    """Return the axis on which all ``steps`` steps have the width 1; a tick lies in the middle of its step, from 1."""
    return Axis("steps", "steps", np.arange(steps + 1, dtype=np.int64), 1.0, 0.5)


def time_axis(seconds: Sequence[Seconds]) -> Axis:
    """Return the axis on which each step is as wide as its predicted time, given in ``seconds``.

    Where no step takes time, all are of the same width.
    """
    ends = np.cumsum([0.0, *seconds])
    total = float(ends[-1])
    if not total:
        ends, total = np.arange(len(ends), dtype=np.float64), float(len(seconds))
    power, unit = next((pair for pair in ((1.0, "s"), (1e-3, "ms")) if total >= 10 * pair[0]), (1e-6, "µs"))
    edges = np.rint(ends / total * SPAN).astype(np.int64)
    return Axis("time", f"predicted time, {unit}", edges, SPAN * power / total, 0.0)


def byte_ticks(top: Bytes, height: int) -> tuple[Mark, ...]:
    """Return ticks at round sizes from 0 to ``top`` bytes, at least 40 pixels apart in a plot of ``height`` pixels.

    Their texts are numbers of the unit that :func:`byte_unit` returns for ``top``.
    """
    apart = max(1, round_up(top * 40 / height))
    power, _ = byte_unit(top)
    marks = [(round(height * (1 - size / top) if top else height, 1), size) for size in range(0, top + 1, apart)]
    return tuple(Mark("", at, f"{size / power:g}", at) for at, size in marks)


def byte_unit(top: Bytes) -> tuple[int, str]:
    """Return the bytes of the unit for an axis that ends at ``top`` bytes, and its name."""
    units = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
    return next((unit for unit in units if top >= unit[0]), (1, "B"))


def round_up(value: float) -> int:
    """Return the first of 1, 2, 5, 10, 20, 50, … that is not below ``value``."""
    power = 10 ** max(0, math.floor(math.log10(value))) if value > 1 else 1
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= value)

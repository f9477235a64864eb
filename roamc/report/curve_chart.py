"""The curve of peak against added time as shapes in the coordinates of an SVG plot: x to the right, y downwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from roamc.report.axis import Mark, byte_unit, round_up
from roamc.report.chart import WIDTH
from roamc.report.curve import Curve, Spot
from roamc.units import Bytes, Seconds, format_bytes

HEIGHT = 240
"""Height of the plot in pixels."""

EDGE = 0.04
"""Margin around the dots, as a share of the range that they span."""

TICKS = 7
"""Number of intervals into which the ticks of an axis divide it, at most."""


@dataclass(frozen=True)
class Dot:
    """The dot of one plan.

    Attributes:
        x: pixels from the left edge.
        y: pixels from the upper edge.
        text: what is shown of the plan, in several lines.
        now: whether it is the plan that the page is about.
    """

    x: float
    y: float
    text: str
    now: bool


@dataclass(frozen=True)
class CurveChart:
    """The curve of peak against added time as shapes, in pixels from the upper left corner.

    Attributes:
        width: width of the plot in pixels.
        height: height of the plot in pixels.
        line: SVG path of what the plans reach: for a budget between two of them, the added time of that which fits.
        bound: SVG path of the area in which there is no plan.
        dots: one for each plan.
        x_ticks: bytes needed, in ``unit``.
        y_ticks: added time, in percent of the step's.
        unit: of the numbers at ``x_ticks``, such as "GB".
    """

    width: int
    height: int
    line: str
    bound: str
    dots: tuple[Dot, ...]
    x_ticks: tuple[Mark, ...]
    y_ticks: tuple[Mark, ...]
    unit: str


@dataclass(frozen=True)
class _Scale:
    """Maps bytes and seconds to pixels.

    low, high: bytes at the left and the right edge. most: seconds at the upper edge.
    """

    low: float
    high: float
    most: Seconds

    def x(self, peak: float) -> float:
        return round(WIDTH * (peak - self.low) / (self.high - self.low), 1)

    def y(self, seconds: Seconds) -> float:
        return round(HEIGHT * (1 - seconds / self.most), 1)


def curve_chart(curve: Curve, eager: Bytes) -> CurveChart:
    """Return ``curve`` as shapes; texts show bytes needed as shares of ``eager``, those that eager needs."""
    spots = sorted({*curve.spots, curve.now}, key=lambda spot: -spot.needed_bytes)
    low, high = spots[-1].needed_bytes, spots[0].needed_bytes
    air = EDGE * ((high - low) or high)
    # Where nothing costs time, one percent keeps the axis; where nothing takes any, anything does.
    most = max(spot.added_seconds for spot in spots) or curve.step_seconds / 100 or 1.0
    scale = _Scale(low - air, high + air, most * (1 + EDGE))
    reached = [(spot.needed_bytes, spot.added_seconds) for spot in curve.spots]
    return CurveChart(
        width=WIDTH,
        height=HEIGHT,
        line=_stairs(reached, scale),
        bound=f"{_stairs(curve.bounds, scale, early=False)}V{HEIGHT}H{WIDTH}Z",
        dots=tuple(
            Dot(scale.x(spot.needed_bytes), scale.y(spot.added_seconds), _text(spot, curve, eager), spot == curve.now)
            for spot in spots
        ),
        x_ticks=_peak_ticks(scale),
        y_ticks=_time_ticks(scale, curve.step_seconds),
        unit=byte_unit(int(scale.high))[1],
    )


def _stairs(steps: Iterable[tuple[Bytes, Seconds]], scale: _Scale, early: bool = True) -> str:
    """The path from the right edge to the lowest peak; ``early`` goes up at the higher peak of two, else at the lower.

    ```
    early:  __            else:  __
              |                 |
              |__           ____|
    ```
    """
    parts = []
    for number, (peak, seconds) in enumerate(steps):
        x, y = f"H{scale.x(peak)}", f"V{scale.y(seconds)}"
        if not number:
            parts += [f"M{WIDTH} {scale.y(seconds)}", x]
        else:
            parts += [y, x] if early else [x, y]
    return "".join(parts)


def _text(spot: Spot, curve: Curve, eager: Bytes) -> str:
    share, least = map(curve.share, (spot.added_seconds, spot.bound_seconds))
    lines = [
        f"needs {format_bytes(spot.needed_bytes)}, {spot.needed_bytes / eager:.3f} of eager's",
        f"added time {share:.2%}, {spot.added_seconds:.4g} s a step",
        f"no reruns at this peak add less than {least:.2%}",
    ]
    return "\n".join([*lines, *(["this plan"] if spot == curve.now else [])])


def _peak_ticks(scale: _Scale) -> tuple[Mark, ...]:
    apart = round_up((scale.high - scale.low) / TICKS)
    peaks = range(int(scale.low // apart + 1) * apart, int(scale.high) + 1, apart)
    power, _ = byte_unit(int(scale.high))
    return tuple(Mark("", scale.x(peak), f"{peak / power:g}", scale.x(peak)) for peak in peaks)


def _time_ticks(scale: _Scale, step: Seconds) -> tuple[Mark, ...]:
    """Ticks at round shares of the step, counted in hundredths of a percent, so that they are whole.

    There are none where the step takes no time.
    """
    if not step:
        return ()
    whole = 10_000 / step
    apart = round_up(scale.most * whole / TICKS)
    places = [(scale.y(number / whole), number) for number in range(0, int(scale.most * whole) + 1, apart)]
    return tuple(Mark("", at, f"{number / 100:g}", at) for at, number in places)

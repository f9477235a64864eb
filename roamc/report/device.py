"""A device profile as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator

from roamc.cost import DeviceProfile
from roamc.cost.profile import NODE
from roamc.operators.costs.kinds import KINDS
from roamc.units import format_bytes

Row = tuple[str, str, str]


def rows(profile: DeviceProfile) -> tuple[Row, ...]:
    """Return (what, speed, remark) rows, as text, for all that ``profile`` says of its device."""
    return tuple(_rows(profile))


def _rows(profile: DeviceProfile) -> Iterator[Row]:
    threads = f", {profile.threads} threads" if profile.threads else ""
    yield "device", profile.device, f"{profile.model}{threads}"
    yield "an operator", f"{profile.overhead * 1e6:.2f} µs", "whatever it does"
    yield "memory", f"{format_bytes(round(profile.bandwidth))}/s", "read or written"
    yield "caches", f"{format_bytes(round(profile.cache_bandwidth))}/s", f"up to {format_bytes(profile.cache_bytes)}"
    for unit, table in (("FLOP", profile.flops), ("elements", profile.elements)):
        for kind, rates in table.items():
            speeds = ", ".join(f"{dtype} {_short(rate)}" for dtype, rate in rates.items())
            yield (
                kind,
                f"{_short(next(iter(rates.values())))} {unit}/s",
                f"{speeds}: {KINDS.get(kind, '')}".rstrip(": "),
            )
    yield from _link_rows(profile)


def _link_rows(profile: DeviceProfile) -> Iterator[Row]:
    for link, numbers in profile.links.items():
        where = f"links in a node of {numbers['ranks']:.0f}" if link == NODE else "links between nodes"
        speed = f"{format_bytes(round(numbers['bandwidth']))}/s"
        yield where, speed, f"sent by each rank of a ring, and {numbers['latency'] * 1e6:.3g} µs for each of its turns"


def _short(rate: float) -> str:
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rate >= power:
            return f"{rate / power:.3g} {letter}"
    return f"{rate:.3g}"

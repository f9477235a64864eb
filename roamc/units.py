"""Units of bytes and seconds, and sizes as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from roamc.errors import OptionError

Bytes = int
Seconds = float

LARGEST = 2**63 - 1
"""Of any number: nothing has more bytes, steps or seconds."""

_POWERS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
           "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str | int, advice: str = "write for example 6GiB, 500MB or a number of bytes") -> Bytes:
    """Read a size such as ``"6GiB"``, ``"500 MB"`` or ``1048576``.

    Units are decimal (kB, MB, GB, TB) or binary (KiB, …), in any case, the B optional; fractions are rounded down.

    Args:
        text: the size.
        advice: what may be given, for the error message.

    Raises:
        OptionError: the text is not a non-negative size, or one above :data:`LARGEST`.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = _SIZE.fullmatch(str(text))
        if match is None:
            raise OptionError(f"{text!r} is not a size; {advice}")
        size = int(Fraction(match.group(1)) * _POWERS[(match.group(2) or "").lower()])
    if size < 0:
        raise OptionError(f"a size cannot be negative: {text}; {advice}")
    if size > LARGEST:
        raise OptionError(f"{text!r} is more than any memory has; {advice}")
    return size


def rounded_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``count``."""
    return -(-count // multiple) * multiple


def format_bytes(count: Bytes, digits: int = 4) -> str:
    """Write ``count`` bytes in decimal units with at most ``digits`` significant digits, e.g. ``"463.2 MB"``."""
    if abs(count) < 1000:
        return f"{count} B"
    for power, unit in ((10**3, "kB"), (10**6, "MB"), (10**9, "GB"), (10**12, "TB")):
        text = f"{count / power:.{digits}g}"
        if abs(float(text)) < 1000:
            return f"{text} {unit}"
    return f"{count / 10**12:.0f} TB"


def format_apart(one: Bytes, other: Bytes) -> tuple[str, str]:
    """Write two sizes as :func:`format_bytes` does, with as many digits as it takes to see that they differ."""
    digits = (count for count in range(4, 19) if format_bytes(one, count) != format_bytes(other, count))
    count = next(digits, 4)
    return format_bytes(one, count), format_bytes(other, count)


def format_seconds(value: Seconds) -> str:
    """Write ``value`` seconds with three significant digits, e.g. ``"61.3 ms"``."""
    for power, unit in ((1, "s"), (10**-3, "ms")):
        if value >= power:
            return f"{value / power:.3g} {unit}" if value < 1000 * power else f"{value:.0f} s"
    return f"{value * 1e6:.3g} µs"


def format_parts(parts: Mapping[str, Bytes]) -> str:
    """Write several sizes by name, e.g. ``"saved 7.574 MB, output 4 B"``."""
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())

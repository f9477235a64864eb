"""Read budgets as users write them, and turn them into bytes."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from roamc.errors import OptionError
from roamc.units import Bytes, parse_bytes

if TYPE_CHECKING:
    import torch

Budget = Bytes | str
"""A budget: bytes; a share of what eager holds, such as ``"80%"``; ``"min"`` for the lowest peak; ``"light"`` for the
lowest without heavy operators run again; ``"+1%"`` for the lowest of plans that add at most that share of the
step's time; ``"+0%"`` for plans that recompute only where that costs no time; ``"device"`` for what the device has
free; ``"total:40GB"`` for a size that is to hold parameters, states and the rest as well."""

NO_TIME = "+0%"
"""The budget that limits no bytes, and adds no time."""

DEFAULT = "+1%"
"""The budget of a step for which none is set, but for those that :class:`roamc.planning.search.PlanSearch` leaves."""

LIGHT = "light"
"""The budget for the lowest peak if only light operators run again, see :data:`roamc.operators.costs.kinds.LIGHT`."""

MARGIN = 0.9
"""Share of a device's free bytes that ``"device"`` plans with: operators need workspace, allocators lose some."""

BYTES = 1 << 20
"""Least float that counts as bytes, if it is whole, such as 6e9; a smaller one, such as 0.8, is refused."""

FEW = 1_000
"""A number of fewer bytes lacks its unit: no step takes so little."""

FEW_WRITTEN = 100_000
"""The same of a text, such as "6000", which stands for megabytes elsewhere."""

KINDS = (
    'give a size such as "6GiB", a share of what eager holds such as "80%", a share of time that may be added such as '
    '"+1%" or "+0%", a size in all such as "total:40GB", or "min", "light" or "device"'
)
"""What a budget may be, for messages."""

_SHARE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*%", re.ASCII)
_ADDED = re.compile(rf"\+\s*{_SHARE.pattern}", re.ASCII)
_TOTAL = "total:"
_FRACTION = re.compile(r"\d+\.\d+", re.ASCII)


def parse_budget(budget: object) -> Budget | None:
    """Check a budget, and turn a size such as ``"6GiB"`` into bytes; None, shares, totals and names stay as they are.

    ``"+0.0%"`` and the like become :data:`NO_TIME`.

    Raises:
        OptionError: it is no size, no percentage and none of ``"min"``, ``"light"`` and ``"device"``; or it is 0, a
            share above 100 %, or a number below :data:`FEW`, a text below :data:`FEW_WRITTEN`, without a unit.
    """
    budget = budget.strip() if isinstance(budget, str) else budget
    if budget is None or budget in ("min", LIGHT, "device"):
        return budget
    if isinstance(budget, str) and _ADDED.fullmatch(budget):
        return budget if added_share(budget) else NO_TIME
    if total_bytes(budget):
        return budget  # type: ignore[return-value]
    try:
        share = _SHARE.fullmatch(budget) if isinstance(budget, str) else None
        count = float(share.group(1)) if share else _bytes(budget)
        if not count:
            raise OptionError(f"{budget!r} is zero bytes; {KINDS}")
        if share and count > 100:
            raise OptionError(f"{budget!r} is above 100% of what eager needs; leave it out, or {NO_TIME!r}")
        if count < FEW and str(budget).isdecimal():
            percent = f" or '{count}%'" if count <= 100 else ""
            raise OptionError(f"{budget!r} is {count} bytes; did you mean '{count}GB'{percent}?")
        if count < FEW_WRITTEN and isinstance(budget, str) and budget.isdecimal():
            raise OptionError(f"{budget!r} is {count} bytes; did you mean '{count}MB'?")
    except OptionError as error:
        raise OptionError(f"memory_budget: {error}") from None
    return budget if share else count  # type: ignore[return-value]


def is_share(budget: Budget | None) -> bool:
    """Whether a budget is a share of what eager holds, such as ``"80%"``."""
    return isinstance(budget, str) and _SHARE.fullmatch(budget) is not None


def asks_for_fewer_bytes(budget: Budget | None) -> bool:
    """Whether the user has asked for fewer bytes than a plan without reruns takes, which a fallback would lose."""
    return budget is not None and budget != NO_TIME


def is_absolute(budget: Budget | None) -> bool:
    """Whether a budget does not grow with the step: bytes, on the total, or ``"device"``."""
    return isinstance(budget, int) or budget == "device" or total_bytes(budget) > 0


def total_bytes(budget: object) -> Bytes:
    """Return the bytes of a budget on the total such as ``"total:40GB"``; 0 for others.

    Raises:
        OptionError: what stands behind ``total:`` is no size, or one of fewer than :data:`FEW` bytes.
    """
    if not isinstance(budget, str) or not budget.startswith(_TOTAL):
        return 0
    try:
        count = parse_bytes(budget.removeprefix(_TOTAL), 'write for example "total:40GB"')
    except OptionError as error:
        raise OptionError(f"memory_budget: {error}") from None
    if count < FEW:
        raise OptionError(f"memory_budget: {budget!r} is {count} bytes; did you mean '{budget}GB'?")
    return count


def added_share(budget: Budget | None) -> float:
    """Return the share of the step's time that a budget such as ``"+1%"`` lets a plan add, here 0.01; 0 for others."""
    added = _ADDED.fullmatch(budget) if isinstance(budget, str) else None
    return float(added.group(1)) / 100 if added else 0.0


def _bytes(size: object) -> Bytes:
    """A size; one without a unit is whole."""
    if isinstance(size, str) and _FRACTION.fullmatch(size):
        size = float(size)
    if not isinstance(size, float):
        return parse_bytes(size, KINDS)  # type: ignore[arg-type]
    if size.is_integer() and size >= BYTES:
        return int(size)
    raise OptionError(f"{size!r} is not a number of bytes; {KINDS}")


def resolve(budget: Budget | None, baseline: Bytes, device: torch.device, state: Bytes) -> Bytes | None:
    """Return a budget in bytes; 0 for ``"min"``, ``"light"`` and shares of time, None for None and ``"+0%"``.

    Args:
        budget: as :func:`parse_budget` returns it, but not one on the total.
        baseline: bytes that eager holds at its worst step; shares are of these.
        device: the device whose free bytes ``"device"`` takes.
        state: bytes of optimizer state, taken off the free bytes: it may be allocated only after the plan was made.

    Raises:
        OptionError: a share of ``baseline`` is less than a byte, or ``"device"`` asks for a GPU that is not here.
    """
    if budget is None or budget == NO_TIME:
        return None
    if isinstance(budget, int):
        return budget
    if budget in ("min", LIGHT) or added_share(budget):
        return 0
    if budget == "device":
        return max(1, int((_free(device) - state) * MARGIN))
    count = int(baseline * float(budget.rstrip(" %")) / 100)
    if baseline and not count:
        raise OptionError(f"memory_budget: {budget} of the {baseline} bytes that eager holds is zero bytes; {KINDS}")
    return count


def _free(device: torch.device) -> Bytes:
    import torch

    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError('memory_budget: "device" asks a GPU for its free bytes, and none is here; give a size')
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

"""Peak against added time: what every budget would cost, with the least that any choice of reruns adds.

added  |*  the lowest peak
time   |#*
       |###**        * plans, layout and all
       |######*****  # no plan: the bound
       +------------> peak
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roamc.planning.plan import Plan
from roamc.planning.search import PlanSearch
from roamc.units import Bytes, Seconds

BETWEEN = 6
"""So many peaks are asked for between the plan without reruns and the lowest, each lower by the same share."""

SIMULATIONS = 2000
"""Work limit of the solver for each of these peaks, in simulations of the schedule; the lowest peak has the limit of a
plan of its own. The others begin with a plan for another peak."""

BOUNDS = 32
"""Peaks for which the bound is drawn."""


@dataclass(frozen=True)
class Spot:
    """One plan on the curve.

    Attributes:
        needed_bytes: what a budget is compared with: its peak, workspace included.
        added_seconds: predicted time of its reruns.
        bound_seconds: no choice of reruns with such a peak adds less.
    """

    needed_bytes: Bytes
    added_seconds: Seconds
    bound_seconds: Seconds


@dataclass(frozen=True)
class Curve:
    """What lower peaks cost.

    Attributes:
        spots: plans, highest peak first; each next one has a lower peak and adds more.
        now: the plan that the curve was drawn for; another may have a lower peak at the same time, or less time.
        bounds: (peak, least added seconds) for more peaks, highest first.
        step_seconds: predicted time of a step in which nothing runs again.
    """

    spots: tuple[Spot, ...]
    now: Spot
    bounds: tuple[tuple[Bytes, Seconds], ...]
    step_seconds: Seconds


def trace(trials: PlanSearch, now: Plan, say: Callable[[str], None] = lambda stage: None) -> Curve | None:
    """Plan for more peaks; None where nothing can be dropped.

    Args:
        trials: of the graph that ``now`` is a plan of; what they have found is on the curve too.
        now: the choice that was made.
        say: told what is being done.
    """
    if not trials.has_reruns:
        return None
    say("the lowest peak")
    lowest, highest = trials.lowest(together=True).plan.needed_bytes, trials.first.plan.needed_bytes
    for number, target in enumerate(targets(lowest, highest), start=1):
        say(f"peak {number} of {BETWEEN} above the lowest")
        trials.attempt(target, together=True, simulations=SIMULATIONS)
    plans = staircase(trials.plans)
    bound = _bounds(trials, [plan.needed_bytes for plan in (*plans, now)])
    return Curve(
        spots=tuple(_spot(plan, bound) for plan in plans),
        now=_spot(now, bound),
        bounds=tuple(sorted(bound.items(), reverse=True)),
        step_seconds=trials.alone,
    )


def targets(lowest: Bytes, highest: Bytes) -> tuple[Bytes, ...]:
    """Peaks between the two, highest first; none where they are the same."""
    if lowest >= highest:
        return ()
    share = (lowest / highest) ** (1 / (BETWEEN + 1))
    return tuple(int(highest * share**number) for number in range(1, BETWEEN + 1))


def staircase(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Those than which no other has both a lower peak and less added time, highest peak first."""
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.needed_bytes, plan.added_seconds)):
        if not found or plan.added_seconds < found[-1].added_seconds:
            found.append(plan)
    return tuple(reversed(found))


def _bounds(trials: PlanSearch, peaks: Sequence[Bytes]) -> dict[Bytes, Seconds]:
    """For these peaks and others between them; what holds for a higher peak holds for a lower one."""
    low, high = min(peaks), max(peaks)
    between = {low + (high - low) * number // BOUNDS for number in range(BOUNDS + 1)}
    found, least = {}, 0.0
    for peak in sorted({*between, *peaks}, reverse=True):
        bound = trials.choice.bounds.seconds(peak)
        least = max(least, bound) if math.isfinite(bound) else least
        found[peak] = least
    return found


def _spot(plan: Plan, bound: dict[Bytes, Seconds]) -> Spot:
    return Spot(plan.needed_bytes, plan.added_seconds, min(bound[plan.needed_bytes], plan.added_seconds))

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
"""Number of peaks that are asked for between the plan without reruns and the lowest, each lower by the same share."""

SIMULATIONS = 2000
"""Work limit of the solver for each peak above the lowest, in simulations of the schedule. The limit may be low, as
each search begins with a plan for another peak; the lowest peak has the usual limit."""

BOUNDS = 32
"""Number of equal parts of the range of peaks; the bound is drawn at their ends and at the peaks of all plans."""


@dataclass(frozen=True)
class Spot:
    """One plan on the curve.

    Attributes:
        needed_bytes: what a budget is compared with: the plan's peak, workspace included.
        added_seconds: predicted time of its reruns and codecs in a step.
        bound_seconds: lower bound on the added time of any plan with such a peak.
    """

    needed_bytes: Bytes
    added_seconds: Seconds
    bound_seconds: Seconds


@dataclass(frozen=True)
class Curve:
    """How much time lower peaks cost.

    Attributes:
        spots: plans, highest peak first; each next one has a lower peak and adds more time.
        now: the plan that the curve was made for; a spot may have a lower peak at the same time, or add less time.
        bounds: (peak in bytes, lower bound on the added seconds) for more peaks, highest first.
        step_seconds: predicted time of a step in which nothing runs again.
    """

    spots: tuple[Spot, ...]
    now: Spot
    bounds: tuple[tuple[Bytes, Seconds], ...]
    step_seconds: Seconds

    def share(self, seconds: Seconds) -> float:
        """Return ``seconds`` as a fraction of the step's; 0 where the step takes no time."""
        return seconds / self.step_seconds if self.step_seconds else 0.0


def trace(trials: PlanSearch, chosen: Plan, say: Callable[[str], None] = lambda stage: None) -> Curve | None:
    """Plan for the lowest peak and :data:`BETWEEN` others, and return the curve; None if pass ``retain`` is left out.

    Args:
        trials: the search that ``chosen`` came from; plans that it has made before are on the curve too.
        chosen: the plan that the curve is made for.
        say: called with a few words on what is being done.
    """
    if not trials.has_reruns:
        return None
    say("the lowest peak")
    lowest, highest = trials.lowest(together=True).plan.needed_bytes, trials.first.plan.needed_bytes
    for number, target in enumerate(targets(lowest, highest), start=1):
        say(f"peak {number} of {BETWEEN} above the lowest")
        trials.attempt(target, together=True, simulations=SIMULATIONS)
    chosen, plans = trials.counted(chosen), staircase([trials.counted(plan) for plan in trials.plans])
    bound = _bounds(trials, [plan.needed_bytes for plan in (*plans, chosen)])
    return Curve(
        spots=tuple(_spot(plan, bound) for plan in plans),
        now=_spot(chosen, bound),
        bounds=tuple(sorted(bound.items(), reverse=True)),
        step_seconds=trials.first.plan.step_seconds,
    )


def targets(lowest: Bytes, highest: Bytes) -> tuple[Bytes, ...]:
    """Return :data:`BETWEEN` peaks in bytes between ``lowest`` and ``highest``, highest first.

    Each is lower than the one before by the same share. There are none unless ``lowest < highest``.
    """
    if lowest >= highest:
        return ()
    share = (lowest / highest) ** (1 / (BETWEEN + 1))
    return tuple(int(highest * share**number) for number in range(1, BETWEEN + 1))


def staircase(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Return the plans that no other plan beats in bytes needed and added time together, most bytes first."""
    unbeaten: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.needed_bytes, plan.added_seconds)):
        if not unbeaten or plan.added_seconds < unbeaten[-1].added_seconds:
            unbeaten.append(plan)
    return tuple(reversed(unbeaten))


def _bounds(trials: PlanSearch, peaks: Sequence[Bytes]) -> dict[Bytes, Seconds]:
    """Return peak in bytes to lower bound on the added seconds, for ``peaks`` and others between them, highest first.

    A bound for one peak holds for lower ones, too.
    """
    low, high = min(peaks), max(peaks)
    between = {low + (high - low) * number // BOUNDS for number in range(BOUNDS + 1)}
    bounds, least = {}, 0.0
    for peak in sorted({*between, *peaks}, reverse=True):
        bound = trials.choice.search.bounds.seconds(peak)
        least = max(least, bound) if math.isfinite(bound) else least
        bounds[peak] = least
    return bounds


def _spot(plan: Plan, bound: dict[Bytes, Seconds]) -> Spot:
    return Spot(plan.needed_bytes, plan.added_seconds, min(bound[plan.needed_bytes], plan.added_seconds))

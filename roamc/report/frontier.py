"""One graph under several budgets: what each costs in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roamc.budget import Budget, best
from roamc.graph import TrainGraph, copied
from roamc.options import Options
from roamc.pipeline import Trials
from roamc.plan import Plan
from roamc.units import Bytes


@dataclass(frozen=True)
class Point:
    """The plan for one budget.

    Attributes:
        budget: as it was asked for.
        plan: the plan; the lowest one found where none keeps the budget.
        fits: whether it keeps the budget.
    """

    budget: Budget
    plan: Plan
    fits: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"budget": self.budget, "fits": self.fits, **self.plan.to_dict(seconds=True)}


def frontier(graph: TrainGraph, options: Options, budgets: Sequence[Budget]) -> tuple[Point, ...]:
    """One point for each budget, in their sequence; the graph stays as it is.

    The largest is planned first, and each begins with the one before. Any of the plans is taken for any budget that it
    is best for: a lower budget never has a higher peak or less added time.
    """
    trials = Trials(copied(graph), options, many=True)
    limits = [trials.limit(budget) for budget in budgets]
    for limit in sorted(set(limits), reverse=True):
        lowest = trials.fit(limit, together=True).plan.needed_bytes
        if lowest > limit > 0:  # nor is there a plan for less: one more, for the lowest peak
            trials.fit(0, together=True)
            break
    return tuple(_point(budget, limit, trials.found) for budget, limit in zip(budgets, limits, strict=True))


def _point(budget: Budget, limit: Bytes, found: Sequence[Plan]) -> Point:
    plan = dataclasses.replace(best(found, limit), budget_bytes=limit)
    return Point(budget, plan, plan.needed_bytes <= limit or not limit)

"""One graph under several budgets: what each costs in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roamc import pipeline
from roamc.budget import Budget
from roamc.errors import BudgetError
from roamc.graph import TrainGraph, copied
from roamc.options import Options
from roamc.plan import Plan


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
    """One point for each budget; the graph stays as it is."""
    return tuple(_point(graph, options, budget) for budget in budgets)


def _point(graph: TrainGraph, options: Options, budget: Budget) -> Point:
    asked = dataclasses.replace(options, memory_budget=budget)
    try:
        return Point(budget, pipeline.run(copied(graph), asked).plan, True)
    except BudgetError as error:
        if not isinstance(error.plan, Plan):
            raise
        return Point(budget, error.plan, False)

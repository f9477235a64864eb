"""One graph under several budgets: what each costs in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roamc.budget import Budget
from roamc.graph import TrainGraph, copied
from roamc.options import Options
from roamc.planning.plan import Plan
from roamc.planning.planned import Terms
from roamc.planning.search import PlanSearch


@dataclass(frozen=True)
class Point:
    """The plan for one budget.

    Attributes:
        budget: the budget, as it was asked for.
        plan: the plan; the lowest one found where none keeps the budget.
        fits: whether it keeps the budget.
    """

    budget: Budget
    plan: Plan
    fits: bool

    def to_dict(self) -> dict[str, Any]:
        """Return budget, ``fits`` and the report of the plan as plain data, ready for JSON."""
        return {**self.plan.report(), "budget": self.budget, "fits": self.fits}


def frontier(graph: TrainGraph, options: Options, budgets: Sequence[Budget]) -> tuple[Point, ...]:
    """Plan ``graph`` under each of ``budgets``; return a point for each, in their sequence.

    Each plan is the one that is made if its budget is the only one. A budget that no plan keeps raises no error: its
    point has the lowest plan found, and ``fits`` is false.

    Args:
        graph: the graph as it was captured; it is copied and not changed.
        options: what the user set; in the place of ``memory_budget`` stand ``budgets``.
        budgets: as :func:`roamc.budget.parse_budget` returns them, without None; they may repeat.

    Raises:
        OptionError: an option names a pass or codec that does not exist, or a share of eager's bytes is less than a
            byte.
        VerifyError: a pass left an invalid graph.
    """
    trials = PlanSearch(copied(graph), options, many=True)
    terms = {budget: trials.terms_of(budget) for budget in budgets}
    plans = {budget_terms: trials.fit(budget_terms).plan for budget_terms in dict.fromkeys(terms.values())}
    return tuple(_point(budget, terms[budget], plans[terms[budget]], options) for budget in budgets)


def _point(budget: Budget, terms: Terms, plan: Plan, options: Options) -> Point:
    room = dataclasses.replace(options, memory_budget=budget).room
    plan = dataclasses.replace(plan, room=room.title if room else "", room_bytes=room.capacity if room else 0)
    return Point(budget, plan, plan.fits is not False and terms.keeps(plan))

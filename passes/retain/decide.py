"""Decide on one graph for the peak that the options allow."""

from __future__ import annotations

from roamc import cost
from roamc.graph import TrainGraph, main_device
from roamc.graph.memory import build_memory
from roamc.options import Options
from roamc.passes.retain.decision import NOTHING, Decision
from roamc.passes.retain.search import Choice


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Choose what to recompute or encode so that live bytes keep the budget, at the least added time.

    ``graph`` stays as it is, and the decision is for its present order. Without a limit (``options.limit_bytes`` is
    None) the decision is ``NOTHING``; a budget of 0 asks for the lowest peak. If no choice keeps the budget, the
    decision has the lowest peak found and status "infeasible". Only live bytes are compared with the budget; what a
    plan needs in addition, such as gaps in the arena, is counted by :mod:`roamc.planning.search`, which asks a
    :class:`Choice` for one peak after another until a whole plan keeps the budget.

    Raises:
        VerifyError: the solver broke a rule of its problem.
    """
    limit = options.limit_bytes
    if limit is None:
        return NOTHING
    profile = cost.load_profile(main_device(graph), options.profile)
    order = tuple(operator.node.name for operator in build_memory(graph).operators)
    choice = Choice(graph, options, order, profile, cost.prices(graph, profile))
    return choice.decide(limit) if limit else choice.lowest()[0]

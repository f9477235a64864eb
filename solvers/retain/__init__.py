"""Choose the buffers to drop between two reads and make again, so that the peak fits a budget at few seconds more.

Read `problem.py` first (the question and the answer), then `reference.py` (the order to begin with), `simulate.py`
(what a decision costs) and `portfolio.py`; `effort.py` has the limits of all searches.
"""

from roamc.solvers.retain.bound import Bounds, Codes
from roamc.solvers.retain.effort import EFFORT, Effort
from roamc.solvers.retain.portfolio import Frontier, Ground, frontier, solve
from roamc.solvers.retain.problem import Rerun, RetainProblem, RetainSolution, make_problem, rank_of
from roamc.solvers.retain.reference import reference_order
from roamc.solvers.retain.validate import RetainReport, RetainVerdict, schedule, validate

__all__ = [
    "EFFORT",
    "Bounds",
    "Codes",
    "Effort",
    "Frontier",
    "Ground",
    "Rerun",
    "RetainProblem",
    "RetainReport",
    "RetainSolution",
    "RetainVerdict",
    "frontier",
    "make_problem",
    "rank_of",
    "reference_order",
    "schedule",
    "solve",
    "validate",
]

"""Choose the buffers to drop between two reads and make again, so that the peak fits a budget at few seconds more.

Read `problem.py` first (the question and the answer), then `reference.py` (the order to begin with), `simulate.py`
(what a decision costs) and `portfolio.py`; then `offers.py` (smaller forms in which buffers can wait) and `choice.py`,
which chooses them together with the reruns. `effort.py` has the limits of all searches.
"""

from roamc.solvers.retain.bound import Bounds
from roamc.solvers.retain.choice import Choice
from roamc.solvers.retain.effort import EFFORT, Effort
from roamc.solvers.retain.encoded import Encoded, encoded
from roamc.solvers.retain.offers import Extra, Offer, Part, Result
from roamc.solvers.retain.portfolio import Frontier, Ground, solve
from roamc.solvers.retain.problem import Rerun, RetainProblem, RetainSolution, make_problem, rank_of
from roamc.solvers.retain.reference import reference_order
from roamc.solvers.retain.validate import RetainReport, RetainVerdict, schedule, validate

__all__ = [
    "EFFORT",
    "Bounds",
    "Choice",
    "Effort",
    "Encoded",
    "Extra",
    "Frontier",
    "Ground",
    "Offer",
    "Part",
    "Rerun",
    "Result",
    "RetainProblem",
    "RetainReport",
    "RetainSolution",
    "RetainVerdict",
    "encoded",
    "make_problem",
    "rank_of",
    "reference_order",
    "schedule",
    "solve",
    "validate",
]

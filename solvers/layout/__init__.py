"""At which offset of one arena each storage lives, so that the arena is as low as it can be.

Read `problem.py` first (the question and the answer), then `portfolio.py` (the road), then one algorithm.
`trim.py` is apart from the algorithms: it finds ranges of a finished arena that may be given back for a time.
"""

from roamc.solvers.layout.effort import EFFORT, Effort
from roamc.solvers.layout.portfolio import ALGORITHMS, solve
from roamc.solvers.layout.problem import (
    Gap,
    LayoutProblem,
    LayoutSolution,
    live_bytes,
    lower_bound,
    make_problem,
    padded,
)
from roamc.solvers.layout.validate import LayoutReport, LayoutVerdict, validate

__all__ = [
    "ALGORITHMS",
    "EFFORT",
    "Effort",
    "Gap",
    "LayoutProblem",
    "LayoutReport",
    "LayoutSolution",
    "LayoutVerdict",
    "live_bytes",
    "lower_bound",
    "make_problem",
    "padded",
    "solve",
    "validate",
]

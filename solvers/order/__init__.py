"""In which order operators run, so that the peak of live bytes is as low as it can be.

Read `problem.py` first (the question and the answer), then `portfolio.py` (the road), then one algorithm. `overlap.py`
changes a finished order so that transfers run beside other operators.
"""

from roamc.solvers.order.effort import EFFORT, Effort
from roamc.solvers.order.evaluate import live_bytes, peak_bytes
from roamc.solvers.order.overlap import OverlapProblem, OverlapSolution, overlap
from roamc.solvers.order.portfolio import ALGORITHMS, Pieces, solve
from roamc.solvers.order.problem import OrderProblem, OrderSolution, make_problem, without_reuse
from roamc.solvers.order.validate import OrderReport, OrderVerdict, validate

__all__ = [
    "ALGORITHMS",
    "EFFORT",
    "Effort",
    "OrderProblem",
    "OrderReport",
    "OrderSolution",
    "OrderVerdict",
    "OverlapProblem",
    "OverlapSolution",
    "Pieces",
    "live_bytes",
    "make_problem",
    "overlap",
    "peak_bytes",
    "solve",
    "validate",
    "without_reuse",
]

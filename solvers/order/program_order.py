"""The order in which the graph was traced. The baseline, and legal by definition."""

import numpy as np

from roamc.solvers.arrays import IntArray
from roamc.solvers.order.problem import OrderProblem


def program_order(problem: OrderProblem) -> IntArray:
    """Return the operators as they are numbered: int32[n], 0..n-1."""
    return np.arange(problem.num_ops, dtype=np.int32)

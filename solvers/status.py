"""The claims that a solver may make about its answer."""

from enum import Enum


class Status(Enum):
    """How much is known about a solution. The value is the word that plans and reports print.

    OPTIMAL: the value equals the lower bound, or a completed search proved that nothing better exists.
    GAP: everything that was asked for has run, and the value is still above the lower bound.
    LIMIT: a limit on work stopped a search; the best answer found so far is returned.
    INFEASIBLE: no answer meets the request; in `retain`, none was found that does, though there may be one.
    """

    OPTIMAL = "optimal"
    GAP = "gap"
    LIMIT = "limit"
    INFEASIBLE = "infeasible"

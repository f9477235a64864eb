"""reorder: put the operators into the order with the lowest peak of live bytes that the solvers find.

    rewrite:  a = f(x); b = g(x); s = sum(a); t = sum(b)   -->  a = f(x); s = sum(a); b = g(x); t = sum(b)
    checks:   the order is a permutation of the graph's operators and keeps every constraint: data, writes after
              reads, random and collective operators among themselves, the boundary between forward and backward

Views and results picked out of tuples do no work: they move with the operator that they belong to. The constraints
come from :mod:`roamc.graph.memory`, the order from :mod:`roamc.solvers.order`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roamc import ticker
from roamc.errors import VerifyError
from roamc.graph import TrainGraph
from roamc.graph.memory import build_memory
from roamc.options import Options
from roamc.rewriting.arrange import arrange
from roamc.rewriting.in_place import wanted
from roamc.rewriting.order_problem import order_problem
from roamc.solvers.order import ALGORITHMS, EFFORT, solve, validate
from roamc.units import Bytes, format_bytes

NAME = "reorder"

TRIAL_WORK = 1_000_000
"""Work limit of the order solver under a budget, in operators and arcs looked at; lower than without a limit, because
the order is searched once for each of several plans."""

FULL_WORK_GAP: Bytes = 1 << 20
"""Bytes between peak and bound that are worth all work of the order solver without a limit; fewer are worth less."""


@dataclass(frozen=True)
class Decision:
    """The chosen order.

    Attributes:
        order: names of all operators (views and picks left out), first to last.
        peak_bytes: most live bytes at one step.
        bound_bytes: lower bound on the peak of any legal order of this graph.
        status: ``"optimal"`` if peak and bound meet, else ``"gap"``, or ``"limit"`` if the search reached its limit.
        algorithm: name of the algorithm that found the order.
        candidates: (algorithm, peak bytes) of every algorithm that ran.
        laid_out: (algorithm or name, peak bytes in the arena and outside of it) of every order that was laid out to
            choose among orders with no higher peak, the first one included. Empty if no other order was tried, because
            the arena of the first is hardly larger than what lives in it.
    """

    order: tuple[str, ...]
    peak_bytes: Bytes
    bound_bytes: Bytes
    status: str
    algorithm: str
    candidates: tuple[tuple[str, Bytes], ...]
    laid_out: tuple[tuple[str, Bytes], ...] = ()


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Search for an order of the operators with a low peak of live bytes; ``graph`` stays as it is.

    All algorithms run if ``options.order`` is "best", else the one of that name. With a budget, in
    ``options.limit_bytes``, the search stops after :data:`TRIAL_WORK`, else it works in proportion to the bytes that it
    may still win, see :data:`FULL_WORK_GAP`. Progress messages go to :mod:`roamc.ticker`.

    Raises:
        VerifyError: the solver's order breaks a constraint.
    """
    memory = build_memory(graph)
    chosen = tuple(ALGORITHMS) if options.order == "best" else (options.order,)
    problem, names = order_problem(graph, memory, wanted(memory, options))
    limit, gap = (None, FULL_WORK_GAP) if options.limit_bytes is None else (TRIAL_WORK, 0)
    effort = replace(EFFORT, full_work_gap_bytes=gap)
    solution = solve(problem, algorithms=chosen, work_limit=limit, progress=_tell, effort=effort)
    report = validate(problem, solution)
    if not report.good:
        raise VerifyError(f"pass 'reorder': {solution.algorithm} gave an order that is not legal: {report.detail}")
    return Decision(
        order=tuple(names[index] for index in solution.order.tolist() if names[index]),
        peak_bytes=int(solution.peak_bytes),
        bound_bytes=int(solution.bound_bytes),
        status=str(solution.status.value),
        algorithm=solution.algorithm,
        candidates=tuple((name, int(peak)) for name, peak in solution.candidates),
    )


def _tell(peak_bytes: Bytes, bound_bytes: Bytes) -> None:
    ticker.say(f"order: peak {format_bytes(peak_bytes)}, no order below {format_bytes(bound_bytes)}")


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Bring the operators into the decided order, in place; views and picks move with their operators.

    Raises:
        PlanError: the decision names other operators than the graph has, or one in front of an operator that it reads.
    """
    return arrange(graph, decision.order)

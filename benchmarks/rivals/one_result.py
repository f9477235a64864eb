"""Retention problems as the published formulations have them: one result per operator, no in-place reuse.

And what their answers become: reruns, counted and judged by ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from roamc.solvers.order import make_problem as make_order
from roamc.solvers.retain import Rerun, RetainProblem, RetainSolution, make_problem, validate
from roamc.solvers.retain.validate import RetainVerdict
from roamc.solvers.status import Status


@dataclass(frozen=True)
class Graph:
    """A problem by steps: operator t runs first at step t and makes result t.

    Attributes:
        size: bytes of each result.
        reads: which results each operator reads, sorted.
        seconds: of one more run.
        last: the last step in front of which each may run again; -1 if it must not.
        kept: results that are live to the end.
    """

    size: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    last: tuple[int, ...]
    kept: tuple[bool, ...]

    @property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Per result, who reads it."""
        readers: list[list[int]] = [[] for _ in self.size]
        for op, row in enumerate(self.reads):
            for result in row:
                readers[result].append(op)
        return tuple(map(tuple, readers))


def one_result(problem: RetainProblem) -> RetainProblem:
    """The same with operators in the sequence of their steps, one result each, no in-place reuse, no workspace.

    What has several results of which one must not be dropped runs only once.
    """
    order, steps = problem.order, problem.num_ops
    step_of = {op: step for step, op in enumerate(problem.sequence.tolist())}
    size, kept, fixed = [0] * steps, [False] * steps, [False] * steps
    readers: list[set[int]] = [set() for _ in range(steps)]
    start = order.consumer_start.tolist()
    for buffer, producer in enumerate(order.producer.tolist()):
        step = step_of[producer]
        size[step] += int(order.size[buffer])
        kept[step] |= bool(order.kept[buffer])
        fixed[step] |= not problem.droppable[buffer] and bool(order.size[buffer])
        readers[step].update(step_of[op] for op in order.consumer[start[buffer] : start[buffer + 1]].tolist())
    again = [bool(problem.repeatable[op]) and not fixed[step] for op, step in step_of.items()]
    droppable = [may and not keep for may, keep in zip(again, kept, strict=True)]
    buffers = [(size[step], step, sorted(readers[step]), kept[step]) for step in range(steps)]
    alone = make_order([0] * steps, [], buffers)
    seconds, expires = problem.seconds[problem.sequence], problem.expires[problem.sequence]
    return make_problem(alone, range(steps), seconds, droppable, droppable, expires)


def as_graph(problem: RetainProblem) -> Graph:
    """The lists of a problem that :func:`one_result` has made."""
    order, steps = problem.order, problem.num_ops
    reads: list[list[int]] = [[] for _ in range(steps)]
    start, consumer = order.consumer_start.tolist(), order.consumer.tolist()
    for result in range(steps):
        for reader in consumer[start[result] : start[result + 1]]:
            reads[reader].append(result)
    expires = problem.expires.tolist()
    last = [min(expires[op], steps) - 1 if problem.droppable[op] else -1 for op in range(steps)]
    return Graph(
        size=tuple(order.size.tolist()),
        reads=tuple(map(tuple, reads)),
        seconds=tuple(problem.seconds.tolist()),
        last=tuple(last),
        kept=tuple(order.kept.tolist()),
    )


def judged(problem: RetainProblem, budget: int, runs: Iterable[tuple[int, int]]) -> RetainSolution:
    """What these runs, (step in front of which, operator), come to; our judge counts the peak.

    Raises:
        ValueError: the runs break a rule, or the peak is above the budget.
    """
    reruns = tuple(Rerun(before, op, (op,)) for before, op in sorted(runs))
    seconds = sum(float(problem.seconds[rerun.operator]) for rerun in reruns)
    claimed = RetainSolution(reruns, -1, seconds, 0.0, -1, Status.GAP, 0)
    report = validate(problem, budget, claimed)
    if report.verdict is not RetainVerdict.WRONG_PEAK:
        raise ValueError(report.detail)
    peak = int(report.items[1])
    status = Status.GAP if seconds else Status.OPTIMAL
    solution = RetainSolution(reruns, peak, seconds, 0.0, peak, status, 0)
    report = validate(problem, budget, solution)
    if not report.good:
        raise ValueError(report.detail)
    return solution

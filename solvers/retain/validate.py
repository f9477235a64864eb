"""The judge of reruns: runs the schedule again, in plain loops, and shares no code with any algorithm.

Time is O(n + b + reads + reusable) of the schedule with its reruns. Everything follows from the list of reruns by the
rules in `problem.py`. The judge cannot see whether `bound_seconds` is a true lower bound, only that the solution does
not contradict it.
"""

from dataclasses import dataclass, field
from enum import Enum

from roamc.solvers.retain.problem import RetainProblem, RetainSolution
from roamc.solvers.status import Status

_SLACK = 1e-9
"""Relative difference that sums of seconds may have; not from `effort.py`, because the judge shares no code."""


class RetainVerdict(Enum):
    """What the judge found; each value says it in words, and only the first fault is reported.

    All reruns are checked for OUT_OF_RANGE and NOT_SORTED, one rerun after another. Then all are checked for the faults
    from NOT_REPEATABLE to NOT_DROPPABLE, again one by one. Then the claims of the solution are checked, as listed here.
    """

    GOOD = "good"
    OUT_OF_RANGE = "no such step, operator or buffer"
    NOT_SORTED = "reruns are not sorted"
    NOT_REPEATABLE = "operator must not run again"
    NOT_RUN_YET = "rerun before the operator's own step"
    EXPIRED = "rerun after an input was overwritten"
    INPUT_MISSING = "rerun reads what has not been made yet"
    NOT_A_RESULT = "renews a buffer that is no result of the operator"
    NOT_DROPPABLE = "renews a buffer that must not be dropped"
    WRONG_PEAK = "wrong peak"
    WRONG_SECONDS = "wrong seconds"
    OVER_BUDGET = "peak above the budget"
    BOUND_ABOVE_SECONDS = "bound above seconds"
    LEAST_ABOVE_PEAK = "lowest peak seen is above the peak"
    WRONG_STATUS = "wrong status"


@dataclass(frozen=True)
class RetainReport:
    """The verdict on a solution, with the place of the fault.

    verdict: GOOD, or the first fault.
    items: the numbers that the verdict is about. OUT_OF_RANGE, NOT_SORTED: the rerun's place in `reruns`.
        NOT_REPEATABLE, NOT_RUN_YET, EXPIRED: that place and the operator. INPUT_MISSING, NOT_A_RESULT, NOT_DROPPABLE:
        that place and the buffer. WRONG_PEAK, WRONG_SECONDS: claimed and counted. OVER_BUDGET, WRONG_STATUS: peak and
        budget. BOUND_ABOVE_SECONDS: bound and seconds. LEAST_ABOVE_PEAK: lowest peak and peak. Empty if GOOD.
    detail: the fault in one line of text; empty if GOOD.
    """

    verdict: RetainVerdict
    items: tuple[float, ...] = ()
    detail: str = ""

    @property
    def good(self) -> bool:
        """True if nothing is wrong."""
        return self.verdict is RetainVerdict.GOOD


def validate(problem: RetainProblem, budget: int, solution: RetainSolution, offer_seconds: float = 0.0) -> RetainReport:
    """Judge a solution of `problem` for a budget in bytes.

    Where the solution takes offers, `problem` is the schedule with their operators in it, which the judge takes as
    given, and `offer_seconds` are the seconds that they add.

    A bad solution raises nothing: the verdict of the report names its first fault. A solution with the status
    INFEASIBLE is good only if its peak is above the budget.
    """
    fault = _list_fault(problem, solution) or _rerun_fault(problem, solution)
    if fault is not None:
        return fault
    peak = max((live for _, live in schedule(problem, solution)), default=0)
    seconds = offer_seconds + sum(float(problem.seconds[rerun.operator]) for rerun in solution.reruns)
    return _claim_fault(solution, budget, peak, seconds) or RetainReport(RetainVerdict.GOOD)


def _list_fault(problem: RetainProblem, solution: RetainSolution) -> RetainReport | None:
    before = 0
    for number, rerun in enumerate(solution.reruns):
        in_range = all(0 <= buffer < problem.num_buffers for buffer in rerun.renews)
        if not (0 <= rerun.before < problem.num_ops and 0 <= rerun.operator < problem.num_ops and in_range):
            return RetainReport(RetainVerdict.OUT_OF_RANGE, (number,), f"rerun {number} is {rerun}")
        if rerun.before < before or list(rerun.renews) != sorted(set(rerun.renews)):
            return RetainReport(RetainVerdict.NOT_SORTED, (number,), f"rerun {number} is {rerun}, behind step {before}")
        before = rerun.before
    return None


def _rerun_fault(problem: RetainProblem, solution: RetainSolution) -> RetainReport | None:
    step_of = {op: step for step, op in enumerate(problem.sequence.tolist())}
    reads, makes = _reads_and_makes(problem)
    producer = problem.order.producer.tolist()
    for number, rerun in enumerate(solution.reruns):
        op, before = rerun.operator, rerun.before
        subject = f"rerun {number}, of op {op} before step {before}"
        if not problem.repeatable[op]:
            return RetainReport(RetainVerdict.NOT_REPEATABLE, (number, op), f"{subject}: may run only once")
        if before <= step_of[op]:
            return RetainReport(RetainVerdict.NOT_RUN_YET, (number, op), f"{subject}: its own step is {step_of[op]}")
        if before >= int(problem.expires[op]):
            return RetainReport(RetainVerdict.EXPIRED, (number, op), f"{subject}: only before {problem.expires[op]}")
        for buffer in reads[op]:
            if step_of[producer[buffer]] >= before:
                return RetainReport(RetainVerdict.INPUT_MISSING, (number, buffer), f"{subject}: reads buffer {buffer}")
        for buffer in rerun.renews:
            if buffer not in makes[op]:
                return RetainReport(RetainVerdict.NOT_A_RESULT, (number, buffer), f"{subject}: renews buffer {buffer}")
            if not problem.droppable[buffer]:
                return RetainReport(RetainVerdict.NOT_DROPPABLE, (number, buffer), f"{subject}: renews buffer {buffer}")
    return None


def _reads_and_makes(problem: RetainProblem) -> tuple[list[list[int]], list[list[int]]]:
    order = problem.order
    reads: list[list[int]] = [[] for _ in range(problem.num_ops)]
    makes: list[list[int]] = [[] for _ in range(problem.num_ops)]
    start, consumer = order.consumer_start.tolist(), order.consumer.tolist()
    for buffer, producer in enumerate(order.producer.tolist()):
        makes[producer].append(buffer)
        for reader in consumer[start[buffer] : start[buffer + 1]]:
            reads[reader].append(buffer)
    return reads, makes


@dataclass
class _Run:
    """One run of an operator. versions: the buffers of which it makes a version; all results if the run is no rerun.

    passing: the other results of a rerun, live during it only.  reads: the versions that it reads.
    """

    op: int
    versions: list[int]
    passing: list[int]
    reads: list["_Version"] = field(default_factory=list)


@dataclass
class _Version:
    """A version of a buffer, live on the runs [born, last], both included.

    reused: whether a result of run `last` takes over its bytes, so that they count for that result there.
    """

    buffer: int
    born: int
    last: int
    reused: bool = False


def _all_runs(problem: RetainProblem, solution: RetainSolution, makes: list[list[int]]) -> list[_Run]:
    waiting = list(reversed(solution.reruns))
    runs: list[_Run] = []
    for step, op in enumerate(problem.sequence.tolist()):
        while waiting and waiting[-1].before == step:
            rerun = waiting.pop()
            passing = [buffer for buffer in makes[rerun.operator] if buffer not in rerun.renews]
            runs.append(_Run(rerun.operator, list(rerun.renews), passing))
        runs.append(_Run(op, makes[op], []))
    return runs


def schedule(problem: RetainProblem, solution: RetainSolution) -> list[tuple[int, int]]:
    """Return all runs of the schedule, original ones and reruns, in the sequence in which they run.

    Each is (operator, live bytes while it runs, its workspace and what waits included). The reruns must be legal, see
    `validate`.
    """
    reads, makes = _reads_and_makes(problem)
    runs = _all_runs(problem, solution, makes)
    newest: dict[int, _Version] = {}
    versions: list[_Version] = []
    results: list[list[_Version]] = []
    for number, run in enumerate(runs):
        for buffer in reads[run.op]:
            newest[buffer].last = number
            run.reads.append(newest[buffer])
        fresh = [_Version(buffer, number, number) for buffer in run.versions]
        newest.update({version.buffer: version for version in fresh})
        versions += fresh
        results.append(fresh)
    for buffer, version in newest.items():
        if problem.order.kept[buffer]:
            version.last = len(runs)
    _mark_reused(runs, results, problem)
    born = [0] * (len(runs) + 2)
    for version in versions:
        size = int(problem.order.size[version.buffer])
        born[version.born] += size
        born[version.last if version.reused else version.last + 1] -= size
    others = problem.waiting * _waiting(problem, runs, versions)
    live, op_bytes = 0, []
    for number, run in enumerate(runs):
        live += born[number]
        passing = sum(int(problem.order.size[buffer]) for buffer in run.passing)
        op_bytes.append((run.op, live + passing + int(problem.order.workspace[run.op]) + others))
    return op_bytes


def _waiting(problem: RetainProblem, runs: list[_Run], versions: list[_Version]) -> int:
    """The bytes that are there both before and behind the boundary; 0 without one."""
    at = next((number for number, run in enumerate(runs) if run.op == problem.boundary), len(runs))
    across = [version.buffer for version in versions if version.born < at < version.last]
    return sum(int(problem.order.size[buffer]) for buffer in across if not problem.order.kept[buffer])


def _mark_reused(runs: list[_Run], results: list[list[_Version]], problem: RetainProblem) -> None:
    """Mark the versions whose bytes a result of the run that reads them last takes over."""
    start, reusable = problem.order.reusable_start.tolist(), problem.order.reusable.tolist()
    for number, run in enumerate(runs):
        for result in results[number]:
            for reused in reusable[start[result.buffer] : start[result.buffer + 1]]:
                version = next((version for version in run.reads if version.buffer == reused), None)
                if version is not None and version.last == number and not version.reused:
                    version.reused = True
                    break


def _claim_fault(solution: RetainSolution, budget: int, peak: int, seconds: float) -> RetainReport | None:
    if solution.peak_bytes != peak:
        detail = f"claims a peak of {solution.peak_bytes} bytes, counted {peak}"
        return RetainReport(RetainVerdict.WRONG_PEAK, (solution.peak_bytes, peak), detail)
    if abs(solution.seconds - seconds) > _SLACK * seconds:
        detail = f"claims {solution.seconds} seconds, counted {seconds}"
        return RetainReport(RetainVerdict.WRONG_SECONDS, (solution.seconds, seconds), detail)
    feasible = solution.status is not Status.INFEASIBLE
    if feasible and peak > budget:
        return RetainReport(RetainVerdict.OVER_BUDGET, (peak, budget), f"peak {peak} above the budget {budget}")
    bound = solution.bound_seconds
    if bound < 0 or bound != bound or (peak <= budget and bound > seconds * (1 + _SLACK)):
        return RetainReport(RetainVerdict.BOUND_ABOVE_SECONDS, (bound, seconds), f"bound {bound}, seconds {seconds}")
    if solution.least_peak_bytes > peak:
        detail = f"lowest peak seen {solution.least_peak_bytes} above the peak {peak}"
        return RetainReport(RetainVerdict.LEAST_ABOVE_PEAK, (solution.least_peak_bytes, peak), detail)
    closed = peak <= budget and seconds <= bound
    if (not feasible and peak <= budget) or (closed and solution.status is not Status.OPTIMAL):
        detail = f"status {solution.status.value} with peak {peak} and budget {budget}"
        return RetainReport(RetainVerdict.WRONG_STATUS, (peak, budget), detail)
    return None

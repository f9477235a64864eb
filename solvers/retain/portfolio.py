"""Several searches in turn, the best answer kept, and the bound beside it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from roamc.solvers.retain.bound import Bounds
from roamc.solvers.retain.greedy import keep, lower
from roamc.solvers.retain.neighbours import improve
from roamc.solvers.retain.problem import Bytes, RetainProblem, RetainSolution, Seconds
from roamc.solvers.retain.reruns import decisions, list_reruns
from roamc.solvers.retain.search import Search, State
from roamc.solvers.retain.starts import from_cut, possible
from roamc.solvers.status import Status

WALKS = 25_000
"""Unless told otherwise, the work is limited to that of so many walks through the schedule."""

_OPERATORS = 3
_MOST_STARTS = 6

_CLOSE = 1e-9


def solve(
    problem: RetainProblem, budget: Bytes, *, work_limit: int | None = None, start: RetainSolution | None = None
) -> RetainSolution:
    """Find reruns that bring the peak of live bytes under `budget` and add few seconds.

    work_limit: operators run in thought and arcs of networks, kept but for one round of moves; None for that of WALKS
    walks. start: a solution of this problem, for any budget, to improve on.
    The answer is never worse than a start within the budget. `RetainSolution` says what the status means.
    """
    search = Search(problem)
    return _Run(search, _bounds(search), budget, _limit(problem, work_limit)).solve(start)


def frontier(
    problem: RetainProblem, budgets: Sequence[Bytes], *, work_limit: int | None = None
) -> tuple[RetainSolution, ...]:
    """One solution for each budget, in their sequence; `work_limit` is for each of them.

    Each starts from the solution for the next larger budget, and takes that of another budget where it is better, so
    a lower budget never has a higher peak or fewer seconds.
    """
    search = Search(problem)
    bounds = _bounds(search)
    found: dict[Bytes, RetainSolution] = {}
    start = None
    for budget in sorted(set(budgets), reverse=True):
        start = found[budget] = _Run(search, bounds, budget, search.work + _limit(problem, work_limit)).solve(start)
    return tuple(_best_within(budget, found) for budget in budgets)


def _limit(problem: RetainProblem, work_limit: int | None) -> int:
    return WALKS * problem.num_ops if work_limit is None else work_limit


def _bounds(search: Search) -> Bounds:
    bounds = Bounds(search.problem)
    bounds.look_at(_OPERATORS)
    return bounds


def _best_within(budget: Bytes, found: dict[Bytes, RetainSolution]) -> RetainSolution:
    own = found[budget]
    least = min(solution.least_peak_bytes for solution in found.values())
    within = [solution for solution in found.values() if solution.peak_bytes <= budget]
    if within:
        best = min(within, key=lambda solution: (solution.seconds, solution.peak_bytes))
    else:
        best = min(found.values(), key=lambda solution: (solution.peak_bytes, solution.seconds))
    return _solution(best, own.bound_seconds, budget, least, own.status, own.work)


def _solution(
    best: RetainSolution, bound: Seconds, budget: Bytes, least: Bytes, status: Status, work: int
) -> RetainSolution:
    if best.peak_bytes > budget:
        status = Status.INFEASIBLE
    else:
        bound = best.seconds if best.seconds <= bound * (1 + _CLOSE) else bound
        if best.seconds == bound:
            status = Status.OPTIMAL
        elif status is Status.INFEASIBLE:
            status = Status.GAP
    return RetainSolution(best.reruns, best.peak_bytes, best.seconds, bound, least, status, work)


@dataclass(eq=False)
class _Run:
    """One call of `solve`: what has been found, and when to stop."""

    search: Search
    bounds: Bounds
    budget: Bytes
    limit: int
    bound: Seconds = 0.0
    best: State | None = None
    began: int = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.search.work

    def solve(self, start: RetainSolution | None) -> RetainSolution:
        """Run the searches until the bound is met or the work is done."""
        search = self.search
        plain = search.keep_everything()
        self.offer(plain)
        if not self.closed():
            arcs = self.bounds.work
            self.bound = self.bounds.seconds(self.budget)
            search.work += self.bounds.work - arcs
            if start is not None:
                state = search.state(*decisions(start.reruns, search.gaps, search.tables), self.budget)
                self.greedy(possible(search, state, self.budget))
            self.greedy(plain)
            self.from_cuts()
            self.improve()
        return self.answer()

    def greedy(self, state: State) -> None:
        """Lower the state, then keep what can stay."""
        if self.closed() or self.late():
            return
        state = lower(self.search, state, self.budget, self.limit)
        if state.score.peak <= self.budget:
            self.offer(keep(self.search, state, self.budget))

    def from_cuts(self) -> None:
        """Begin with what the cuts keep: those first whose peak is lowest above the budget, the cheapest of equals."""
        starts: dict[bytes, State] = {}
        for cut in self.bounds.cuts.values():
            state = from_cut(self.search, cut, self.budget)
            if state.score.seconds < math.inf:
                starts.setdefault(state.release.tobytes(), state)
        ranked = sorted(starts.values(), key=lambda state: (max(state.score.peak, self.budget), state.score.seconds))
        for state in ranked[:_MOST_STARTS]:
            self.greedy(state)

    def improve(self) -> None:
        """Search the neighbourhoods of the best."""
        if self.best is not None and not self.closed() and not self.late():
            self.offer(improve(self.search, self.best, self.budget, self.limit, self.bound))

    def offer(self, state: State) -> None:
        """Take the state if it is within the budget and the best so far: fewer seconds, then a lower peak."""
        self.search.note(state)
        if state.score.peak > self.budget:
            return
        rank = state.score.seconds, state.score.peak
        if self.best is None or rank < (self.best.score.seconds, self.best.score.peak):
            self.best = state.copy()

    def late(self) -> bool:
        """Whether the work is done."""
        return self.search.work >= self.limit

    def closed(self) -> bool:
        """Whether nothing better can be found."""
        return self.best is not None and self.best.score.seconds <= self.bound * (1 + _CLOSE)

    def answer(self) -> RetainSolution:
        """What was found."""
        search = self.search
        state = self.best if self.best is not None else search.lowest
        state = search.state(state.release, state.hold, self.budget)
        reruns = list_reruns(search.problem, state.score.runs, search.room)
        seconds = math.fsum(float(search.problem.seconds[rerun.operator]) for rerun in reruns)
        found = RetainSolution(reruns, state.score.peak, seconds, 0.0, 0, Status.GAP, 0)
        return _solution(
            found, self.bound, self.budget, search.lowest.score.peak, Status.LIMIT if self.late() else Status.GAP,
            search.work - self.began,
        )  # fmt: skip

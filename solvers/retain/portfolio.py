"""Several searches in turn, the best answer kept, and the bound beside it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from roamc.solvers.order.problem import Bytes
from roamc.solvers.retain.anneal import anneal, settle
from roamc.solvers.retain.bound import Bounds
from roamc.solvers.retain.descent import Descent
from roamc.solvers.retain.effort import CLOSE, EFFORT, FEWER, Effort
from roamc.solvers.retain.exact import affordable, exact
from roamc.solvers.retain.greedy import keep, lower
from roamc.solvers.retain.neighbours import above, improve, rank
from roamc.solvers.retain.problem import RetainProblem, RetainSolution, Seconds, rank_of
from roamc.solvers.retain.reruns import decisions, list_reruns
from roamc.solvers.retain.search import Search, State
from roamc.solvers.retain.starts import from_cut, possible
from roamc.solvers.status import Status

SIMULATIONS = EFFORT.simulations
"""Default work limit, in simulations of the whole schedule."""


def solve(
    problem: RetainProblem,
    budget: Bytes,
    *,
    work_limit: int | None = None,
    start: RetainSolution | None = None,
    effort: Effort = EFFORT,
) -> RetainSolution:
    """Find reruns that bring the peak of live bytes under `budget` and add few seconds.

    work_limit: operators run in thought and arcs of networks, kept but for one round of moves, once more where the
    budget is hard to meet, and for each time that annealing helps `effort.anneal_times` as much or
    `effort.anneal_work`, whichever is less; None for that of `effort.simulations`. start: a solution of this problem,
    for any budget, to improve. effort: what each search may take.
    The answer is never worse than a start within the budget. Without a start, the least peak that is found for a budget
    of 0 is, as a budget with the same limit, found again. `RetainSolution` says what the status means.
    """
    ground = Ground(problem, effort)
    return _Run(ground.search.anew(), ground.bounds.anew(), ground, budget, ground.limit(work_limit)).solve(start)


@dataclass(eq=False)
class Ground:
    """What searches in one problem have in common. No answer depends on those before that stood on it: it saves time.

    effort: of all these searches.  search, bounds: to begin others with, see `anew`.  descents: by their limit of work.
    """

    problem: RetainProblem
    effort: Effort = EFFORT
    search: Search = field(init=False)
    bounds: Bounds = field(init=False)
    descents: dict[int, Descent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.search = Search(self.problem, self.effort)
        self.bounds = Bounds(self.problem, effort=self.effort)
        self.bounds.look_at()

    def limit(self, work_limit: int | None) -> int:
        """The work limit; the default for None."""
        return self.effort.simulations * self.problem.num_ops if work_limit is None else work_limit

    def descent(self, work_limit: int) -> Descent:
        """The way to the lowest peak with so much work."""
        if work_limit not in self.descents:
            self.descents[work_limit] = Descent(self.search, work_limit)
        return self.descents[work_limit]


@dataclass(eq=False)
class Frontier:
    """Solutions of one problem for one budget after another: each search begins with the nearest.

    ground: what other frontiers of the problem may share.  found: all solutions so far.
    """

    ground: Ground
    found: list[RetainSolution] = field(default_factory=list)
    _search: Search = field(init=False)
    _bounds: Bounds = field(init=False)

    def __post_init__(self) -> None:
        self._search, self._bounds = self.ground.search.anew(), self.ground.bounds.anew()

    def solve(self, budget: Bytes, *, work_limit: int | None = None) -> RetainSolution:
        """As the function `solve`, and never worse than what was found for another budget."""
        limit = self._search.work + self.ground.limit(work_limit)
        own = _Run(self._search, self._bounds, self.ground, budget, limit).solve(self._start(budget))
        self.found.append(own)
        return self.best(budget, own)

    @property
    def lowest(self) -> float:
        """The lowest peak so far, in bytes; infinite if nothing was asked."""
        return min((solution.peak_bytes for solution in self.found), default=math.inf)

    def best(self, budget: Bytes, own: RetainSolution) -> RetainSolution:
        """The best for a budget of all that was found; `own` was found for it."""
        best = min(self.found, key=lambda solution: _rank(solution, budget))
        least = min(solution.least_peak_bytes for solution in self.found)
        return _solution(best, own.bound_seconds, budget, least, own.status, own.work)

    def bound(self, budget: Bytes) -> Seconds:
        """No reruns within the budget, in any order of the operators, add less; infinite if there are none."""
        found = self._bounds.seconds(budget)
        self._search.work += self._bounds.new_work()
        return found

    def _start(self, budget: Bytes) -> RetainSolution | None:
        """The nearest to the budget: something more is dropped in it, or kept."""
        nearest = min((abs(solution.peak_bytes - budget) for solution in self.found), default=0)
        near = [solution for solution in self.found if abs(solution.peak_bytes - budget) == nearest]
        return min(near, key=lambda solution: _rank(solution, budget), default=None)


def frontier(
    problem: RetainProblem, budgets: Sequence[Bytes], *, work_limit: int | None = None, effort: Effort = EFFORT
) -> tuple[RetainSolution, ...]:
    """One solution for each budget, in their sequence; `work_limit` is for each of them.

    Largest first, each to begin with the one before, and that of another budget where it is better: so a lower budget
    never has a higher peak or fewer seconds.
    """
    known = Frontier(Ground(problem, effort))
    own = {budget: known.solve(budget, work_limit=work_limit) for budget in sorted(set(budgets), reverse=True)}
    return tuple(known.best(budget, own[budget]) for budget in budgets)


def _rank(solution: RetainSolution, budget: Bytes) -> tuple[bool, float, float]:
    return rank_of(solution.peak_bytes, solution.seconds, budget)


def _solution(
    best: RetainSolution, bound: Seconds, budget: Bytes, least: Bytes, status: Status, work: int
) -> RetainSolution:
    if best.peak_bytes > budget:
        status = Status.INFEASIBLE
    else:
        bound = best.seconds if best.seconds <= bound * (1 + CLOSE) else bound
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
    ground: Ground
    budget: Bytes
    limit: int
    bound: Seconds = 0.0
    complete: bool = False
    best: State = field(init=False)
    began: int = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.search.work
        self.best = self.search.lowest

    def solve(self, start: RetainSolution | None) -> RetainSolution:
        """Run the searches until the bound is met or the work is done."""
        search = self.search
        plain = search.keep_everything()
        self.offer(plain)
        if not self.closed():
            self.bound = self.bounds.seconds(self.budget)
            search.work += self.bounds.new_work()
            if start is not None:
                state = search.state(*decisions(search.problem, start.reruns, search.gaps, search.tables), self.budget)
                self.greedy(possible(search, state, self.budget))
            self.complete = affordable(search, self.limit, True)
            if self.complete or affordable(search, self.limit, False):
                self.offer(exact(search, self.budget, self.complete))
            if self.bound < math.inf:
                self.greedy(plain)
            if not self.complete:
                self.from_cuts()
                if above(self.best, self.budget):
                    self.go_low()
                self.improve()
                self.anneal()
        found = self.answer()
        if start is not None and _rank(start, self.budget) < _rank(found, self.budget):
            least = min(start.peak_bytes, found.least_peak_bytes)
            found = _solution(start, self.bound, self.budget, least, found.status, found.work)
        return found

    def greedy(self, state: State) -> None:
        """Lower the state with a share of the work that is left, then keep what can stay."""
        if self.closed() or self.late():
            return
        share = self.search.work + (self.limit - self.search.work) // self.ground.effort.drops_divisor
        state = lower(self.search, state, self.budget, share)
        if state.score.peak <= self.budget:
            state = keep(self.search, state, self.budget)
        self.offer(state)

    def from_cuts(self) -> None:
        """Begin with what the cuts keep: those first whose peak is lowest above the budget, the cheapest of equals."""
        starts: dict[bytes, State] = {}
        if self.bound == math.inf:
            return
        for cut in self.bounds.cuts.values():
            state = from_cut(self.search, cut, self.budget)
            if state.score.seconds < math.inf:
                starts.setdefault(state.release.tobytes(), state)
        ranked = sorted(starts.values(), key=lambda state: (max(state.score.peak, self.budget), state.score.seconds))
        for state in ranked[: self.ground.effort.cut_starts]:
            self.greedy(state)

    def go_low(self) -> None:
        """Find the lowest peak, with as much work as for everything else, and stop where it is within the budget."""
        search, work = self.search, self.limit - self.began
        stop = self.ground.descent(work).to(self.budget)
        search.work += stop.work
        low = keep(search, stop.lowest, max(self.budget, stop.lowest.score.peak))
        if not above(low, self.budget):
            self.limit = max(self.limit, search.work + work // self.ground.effort.afterwards_divisor)
        search.lowest = min(stop.lowest, search.lowest, key=lambda state: state.score.peak)
        self.offer(low)

    def improve(self) -> None:
        """Search the neighbourhoods of the best, if it is within the budget."""
        if not self.closed() and not self.late() and not above(self.best, self.budget):
            self.offer(improve(self.search, self.best, self.budget, self.limit, self.bound))

    def anneal(self) -> None:
        """Anneal the best while that helps, for the longer the more seconds the bound leaves open."""
        search, effort = self.search, self.ground.effort
        most = min(effort.anneal_work, effort.anneal_times * max(self.limit - self.began, 0))
        in_vain = 0
        for seed in range(effort.anneal_rounds):
            before, begun = self.best.score.seconds, search.work
            if self.closed() or above(self.best, self.budget) or in_vain == effort.anneal_vain_rounds:
                break
            work = int(most * (1 - self.bound / before))
            found = anneal(search, self.best, self.budget, begun + work, seed)
            if found.score.seconds < before * FEWER:
                self.offer(settle(search, keep(search, found, self.budget), self.budget))
            in_vain = 0 if self.best.score.seconds < before * FEWER else in_vain + 1
            self.limit += search.work - begun

    def offer(self, state: State) -> None:
        """Take the state if it is the best so far."""
        self.search.note(state)
        for other in (state, self.search.lowest):
            if rank(other, self.budget) < rank(self.best, self.budget):
                self.best = other.copy()

    def late(self) -> bool:
        """Whether the work is done."""
        return self.search.work >= self.limit

    def closed(self) -> bool:
        """Whether nothing better can be found."""
        return not above(self.best, self.budget) and self.best.score.seconds <= self.bound * (1 + CLOSE)

    def answer(self) -> RetainSolution:
        """What was found."""
        search = self.search
        state = search.state(self.best.release, self.best.hold, self.budget)
        reruns = list_reruns(search.problem, state.score.runs, search.room)
        seconds = math.fsum(float(search.problem.seconds[rerun.operator]) for rerun in reruns)
        found = RetainSolution(reruns, state.score.peak, seconds, 0.0, 0, Status.GAP, 0)
        status = Status.OPTIMAL if self.complete else Status.LIMIT if self.late() else Status.GAP
        least = min(search.lowest.score.peak, state.score.peak)
        return _solution(found, self.bound, self.budget, least, status, search.work - self.began)

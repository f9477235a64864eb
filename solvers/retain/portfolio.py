"""Several searches in turn, the best answer kept, and a lower bound."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from roamc.solvers.order.problem import Bytes
from roamc.solvers.retain.anneal import anneal, settle
from roamc.solvers.retain.bound import Bounds
from roamc.solvers.retain.descent import Descent
from roamc.solvers.retain.effort import CLOSE, EFFORT, FEWER, Effort
from roamc.solvers.retain.exact import affordable, exact
from roamc.solvers.retain.greedy import keep, lower
from roamc.solvers.retain.neighbours import above, improve, rank
from roamc.solvers.retain.offers import Seconds
from roamc.solvers.retain.problem import RetainProblem, RetainSolution
from roamc.solvers.retain.reruns import decisions, list_reruns
from roamc.solvers.retain.search import Search, State
from roamc.solvers.retain.starts import from_cut, possible
from roamc.solvers.status import Status


def solve(
    problem: RetainProblem,
    budget: Bytes,
    *,
    work_limit: int | None = None,
    effort: Effort = EFFORT,
) -> RetainSolution:
    """Return reruns that bring the peak of live bytes within `budget` and add few seconds.

    budget: bytes. Where no reruns within it are found, the answer has the status INFEASIBLE and the lowest peak found.
    work_limit: operators that simulations run plus arcs of the bound's networks; None for `effort.simulations`
        simulations of the whole schedule. The search may pass it by one round of moves. Where nothing else
        meets the budget, it may spend as much again on the way to the lowest peak. Each round of annealing may add
        about `effort.anneal_times` times the limit or `effort.anneal_work`, whichever is less. All that holds for each
        way through the searches, see `_Run.explore`: at most eight, and one where the searches find nothing.
    effort: limits and thresholds of each search. No answer is worse than one with `exact_gaps`, `cut_starts`,
        `descent_steps`, `vain_changes` or `anneal_rounds` at 0 or empty, which leave a search out.

    The same call gives the same answer. `least_peak_bytes` of the answer for a budget of 0 is a budget
    that the same limit meets.
    """
    ground = Ground(problem, effort)
    return _Run(ground.search.anew(), ground.bounds.anew(), ground, budget, ground.limit(work_limit)).solve(None)


@dataclass(eq=False)
class Ground:
    """What several searches in one problem share, to save time: tables, networks of the bound, searches for low peaks.

    `Ground(problem, effort)` computes the rest. No answer depends on which searches have used the ground before.

    problem, effort: the problem, and the limits and thresholds of all searches in it.
    search, bounds: tables and bounds of the problem, from which each search gets its own by their method `anew`.
    descents: the searches for the lowest peak so far, by their limits of work.
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
        """Return `work_limit`, or for None the operators that `effort.simulations` runs of the whole schedule have."""
        return self.effort.simulations * self.problem.num_ops if work_limit is None else work_limit

    def descent(self, work_limit: int) -> Descent:
        """Return the search for the lowest peak that may take `work_limit` work, in operators that simulations run.

        Calls with the same limit return the same object.
        """
        if work_limit not in self.descents:
            self.descents[work_limit] = Descent(self.search, work_limit)
        return self.descents[work_limit]


@dataclass(eq=False)
class Frontier:
    """Solutions of one problem for one budget after another: each search begins with the nearest solution so far.

    `Frontier(Ground(problem))` makes an empty one.

    ground: the problem with what its searches share; several frontiers may stand on one ground.
    answers: what each call of `solve` found by its own search, in the sequence of the calls.
    """

    ground: Ground
    answers: list[RetainSolution] = field(default_factory=list)
    _search: Search = field(init=False)
    _bounds: Bounds = field(init=False)

    def __post_init__(self) -> None:
        self._search, self._bounds = self.ground.search.anew(), self.ground.bounds.anew()

    def solve(
        self, budget: Bytes, *, work_limit: int | None = None, enough: Seconds = 0.0, rival: Seconds = math.inf
    ) -> RetainSolution:
        """Search for reruns within `budget`, and return the best solution for it, by `rank_of`, found so far.

        The search begins with the solution whose peak is nearest to the budget. The answer may have been found for
        another budget; its bound, status and work are then those of this search, and its `least_peak_bytes` is the
        lowest of all. The status is INFEASIBLE in the same cases as in the function `solve`.

        budget: bytes.
        work_limit: of this call: operators that simulations run plus arcs of the bound's networks; None for
            `effort.simulations` simulations of the whole schedule.
        enough: the search ends with a solution within the budget that adds at most so many seconds.
        rival: seconds to beat, of an answer from elsewhere or the most allowed: little work is done for what adds more.
        """
        limit = self._search.work + self.ground.limit(work_limit)
        own = _Run(self._search, self._bounds, self.ground, budget, limit, enough, rival).solve(self._start(budget))
        self.answers.append(own)
        best = min(self.answers, key=lambda solution: solution.rank(budget))
        least = min(solution.least_peak_bytes for solution in self.answers)
        return _solution(best, own.bound_seconds, budget, least, own.status, own.work)

    @property
    def lowest(self) -> float:
        """The lowest peak of the solutions found so far, in bytes; infinite if there are none."""
        return min((solution.peak_bytes for solution in self.answers), default=math.inf)

    def bound(self, budget: Bytes) -> Seconds:
        """Return a lower bound in seconds: no reruns within the budget, in any order of the operators, add fewer.

        Infinite if it is proved that no reruns keep the budget.

        budget: bytes.
        """
        seconds = self._bounds.seconds(budget)
        self._search.work += self._bounds.new_work()
        return seconds

    def _start(self, budget: Bytes) -> RetainSolution | None:
        """Return the solution with the peak nearest to the budget, of equals the best; None if there is none."""
        nearest = min((abs(solution.peak_bytes - budget) for solution in self.answers), default=0)
        near = [solution for solution in self.answers if abs(solution.peak_bytes - budget) == nearest]
        return min(near, key=lambda solution: solution.rank(budget), default=None)


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
    """One call of `solve`: what has been found, and when to stop.

    limit: the value of `search.work` at which searches stop.  began: its value at the beginning.
    enough: seconds of a state within the budget at which they stop.
    rival: seconds to beat, see `loses`.
    bound: lower bound in seconds.  complete: whether all combinations are tried.  best: the best state so far.
    elsewhere: work of copies of this run, see `with_and_without`.  stopped: whether one of them reached the limit.
    shortcuts: see `lower`; copies of this run have the same list.
    """

    search: Search
    bounds: Bounds
    ground: Ground
    budget: Bytes
    limit: int
    enough: Seconds = 0.0
    rival: Seconds = math.inf
    bound: Seconds = 0.0
    complete: bool = False
    elsewhere: int = 0
    stopped: bool = False
    shortcuts: list[State] = field(default_factory=list)
    best: State = field(init=False)
    began: int = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.search.work
        self.best = self.search.lowest

    def solve(self, start: RetainSolution | None) -> RetainSolution:
        """Run the searches, one after another, until the bound is met or the work is done; return the best answer."""
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
            if self.complete:
                self.exact()
            elif start is None or not self.ends_at_start():
                self.explore(plain)
        answer = self.answer()
        if start is not None and start.rank(self.budget) < answer.rank(self.budget):
            least = min(start.peak_bytes, answer.least_peak_bytes)
            answer = _solution(start, self.bound, self.budget, least, answer.status, answer.work)
        return answer

    def explore(self, plain: State) -> None:
        """Run the searches in turn; each later one begins with what an earlier one found, and again without it.

        A better state to begin with may lead to a worse end. So what is found is never worse than with a search left
        out: that is one of the ways tried here, with the work it would have had.
        Shortcuts of the ways come last, for the same reason.
        """
        for tried in self.with_and_without(_Run.exact):
            if tried.bound < math.inf:
                tried.greedy(plain)
            for cut in tried.with_and_without(_Run.from_cuts):
                if above(cut.best, cut.budget):
                    cut.go_low()
                if cut.loses():
                    continue
                for near in cut.with_and_without(_Run.improve):
                    near.anneal()
        self.take_shortcuts()
        self.stopped = self.stopped or self.late()
        self.search.work += self.elsewhere

    def with_and_without(self, search: Callable[["_Run"], None]) -> Iterator["_Run"]:
        """Yield a copy of this run that has made the search, if that found a better state, and one that has not.

        What the caller finds in a copy is this run's as well when it asks for the next. Nothing more comes from a run
        that is `closed`.
        """
        beside, without = self.fork(), self.fork()
        search(beside)
        for copied in (beside, without):
            better = rank(beside.best, self.budget) < rank(without.best, self.budget)
            if not self.closed() and (copied is without or better):
                yield copied
            self.join(copied)

    def fork(self) -> "_Run":
        """Return a copy of this run that counts its own work, from here on, against the same limit."""
        forked = copy.copy(self)
        forked.search, forked.elsewhere, forked.stopped = copy.copy(self.search), 0, False
        return forked

    def join(self, forked: "_Run") -> None:
        """Take over what a copy of this run has found, and note its work, which does not count against the limit."""
        self.elsewhere += forked.search.work - self.search.work + forked.elsewhere
        self.stopped = self.stopped or forked.stopped or forked.late()
        self.search.note(forked.search.lowest)
        self.offer(forked.best)

    def exact(self) -> None:
        """Try all combinations, or those of a part of the decisions, if there is the work for that."""
        if self.complete or affordable(self.search, self.limit, False):
            self.offer(exact(self.search, self.budget, self.complete))

    def greedy(self, state: State) -> None:
        """Offer what greedy drops make of the state: its peak comes down to the budget, or as far as the work allows.

        Where it comes within the budget, the drops that are not needed for that are undone. Nothing happens if the best
        state is `closed` or the work limit is reached.

        state: where the drops begin; it is left unchanged.
        """
        if self.closed() or self.late():
            return
        state = lower(self.search, state, self.budget, self.limit, shortcuts=self.shortcuts)
        if state.score.peak <= self.budget:
            state = keep(self.search, state, self.budget)
        self.offer(state)

    def take_shortcuts(self) -> None:
        """Offer the shortcuts that greedy drops have passed by, without the drops that they do not need."""
        for state in self.shortcuts:
            if not self.closed():
                self.offer(keep(self.search, state, self.budget))

    def from_cuts(self) -> None:
        """Run greedy drops from the states of the bound's cuts: the least above the budget first, then the cheapest."""
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
        """Walk the way down to the lowest peak as far as to the budget, with as much work as for everything else."""
        search = self.search
        stop = self.ground.descent(self.limit - self.began).to(self.budget)
        search.work += stop.work
        low = keep(search, stop.lowest, max(self.budget, stop.lowest.score.peak))
        search.lowest = min(stop.lowest, search.lowest, key=lambda state: state.score.peak)
        self.offer(low)

    def improve(self, limit: int | None = None) -> None:
        """Search the neighbourhoods of the best state, if it is within the budget and something is left to do.

        limit: the value of `search.work` at which this search stops; None for that of the call.
        """
        if not self.closed() and not self.late() and not above(self.best, self.budget):
            limit, enough = self.limit if limit is None else limit, max(self.bound, self.enough)
            self.offer(improve(self.search, self.best, self.budget, limit, enough))

    def loses(self) -> bool:
        """Return whether what adds more seconds than the rival still does after a part of the work for improving it."""
        effort, left = self.ground.effort, self.limit - self.search.work
        part = max(left // effort.rival_divisor, effort.rival_work)
        if self.best.score.seconds <= self.rival or part >= left:
            return False
        self.improve(self.search.work + part)
        return self.best.score.seconds > self.rival

    def ends_at_start(self) -> bool:
        """Improve the solution that a large search began with; return whether it still adds more than is enough.

        Only for a search in which nothing else is asked for, and only where that solution keeps the budget: the ways
        that begin elsewhere take seconds, and seldom find less.
        """
        large = self.limit - self.began > self.ground.effort.large_work
        return large and self.rival <= self.enough and not above(self.best, self.budget) and self.loses()

    def anneal(self) -> None:
        """Anneal the best state in rounds, while that helps; the further its seconds are above the bound, the longer.

        Each round adds its work to the limit.
        """
        search, effort = self.search, self.ground.effort
        most = min(effort.anneal_work, effort.anneal_times * max(self.limit - self.began, 0))
        in_vain = 0
        for seed in range(effort.anneal_rounds):
            before, begun = self.best.score.seconds, search.work
            if self.closed() or above(self.best, self.budget) or in_vain == effort.anneal_vain_rounds:
                break
            work = int(most * (1 - self.bound / before))
            annealed = anneal(search, self.best, self.budget, begun + work, seed)
            if annealed.score.seconds < before * FEWER:
                self.offer(settle(search, keep(search, annealed, self.budget), self.budget))
            in_vain = 0 if self.best.score.seconds < before * FEWER else in_vain + 1
            self.limit += search.work - begun

    def offer(self, state: State) -> None:
        """Make the state, or the lowest one seen, the best if it ranks before it."""
        self.search.note(state)
        for other in (state, self.search.lowest):
            if rank(other, self.budget) < rank(self.best, self.budget):
                self.best = other.copy()

    def late(self) -> bool:
        """Return whether the work limit is reached."""
        return self.search.work >= self.limit

    def closed(self) -> bool:
        """Return whether the best state is within the budget and its seconds meet the bound, or are enough."""
        goal = max(self.bound * (1 + CLOSE), self.enough)
        return not above(self.best, self.budget) and self.best.score.seconds <= goal

    def answer(self) -> RetainSolution:
        """Return the best state as a solution, with its reruns, bound, status and work."""
        search = self.search
        state = search.state(self.best.release, self.best.hold, self.budget)
        reruns = list_reruns(search.problem, state.score.runs, search.room)
        seconds = math.fsum(float(search.problem.seconds[rerun.operator]) for rerun in reruns)
        solution = RetainSolution(reruns, state.score.peak, seconds, 0.0, 0, Status.GAP, 0)
        status = Status.OPTIMAL if self.complete else Status.LIMIT if self.stopped or self.late() else Status.GAP
        least = min(search.lowest.score.peak, state.score.peak)
        return _solution(solution, self.bound, self.budget, least, status, search.work - self.began)

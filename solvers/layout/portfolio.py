"""Several simple layouts, the lowest improved, the best searched, and a lower bound."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from roamc.solvers.arrays import LongArray, read_only
from roamc.solvers.compiled import interpreted_first
from roamc.solvers.layout import sequences
from roamc.solvers.layout.best_fit import best_fit
from roamc.solvers.layout.effort import EFFORT, Effort
from roamc.solvers.layout.first_fit import first_fit
from roamc.solvers.layout.improve import Improvement
from roamc.solvers.layout.problem import Bytes, LayoutProblem, LayoutSolution, arena_bytes, live_pairs, lower_bound
from roamc.solvers.layout.tree_search import tree_search
from roamc.solvers.status import Status

Algorithm = Callable[[LayoutProblem], LongArray]


def _by(sequence: sequences.Sequence) -> Algorithm:
    return lambda problem: first_fit(problem, sequence(problem))


ALGORITHMS: dict[str, Algorithm] = {
    "greedy_by_size": _by(sequences.by_size),
    "best_fit": best_fit,
    "long_lived_below": _by(sequences.long_lived_below),
    "greedy_by_pressure": _by(sequences.by_pressure),
    "greedy_by_area": _by(sequences.by_area),
    "greedy_by_lifetime": _by(sequences.by_lifetime),
    "greedy_by_birth": _by(sequences.by_birth),
    "greedy_by_total_width_area": _by(sequences.by_total_width_area),
    "greedy_by_size_and_birth": _by(sequences.by_size_and_birth),
    "outward_by_size": _by(sequences.outward_by_size),
    "outward_by_short_life": _by(sequences.outward_by_short_life),
}
"""Name of each heuristic, and the heuristic: a problem to offsets in bytes, int64[n]."""


def solve(
    problem: LayoutProblem,
    *,
    node_limit: int | None = None,
    capacity: Bytes | None = None,
    seconds: float | None = None,
    effort: Effort = EFFORT,
) -> LayoutSolution:
    """Find a layout with a low arena: run heuristics, improve their layouts, then search, until an arena is low enough.

    node_limit: number of storages that the search may place; 0 for no search; `effort.node_limit` if left out.
    capacity: bytes; an arena of this size is low enough. None asks for the lowest arena.
    seconds: stop at about this time, which makes the answer depend on the machine; None for no such limit.
    effort: what each part may spend.

    Ties go to the earlier candidate. `LayoutSolution` says what the status means.
    """
    limit = effort.node_limit if node_limit is None else node_limit
    return interpreted_first(problem.num_storages, lambda: _solved(problem, limit, capacity, seconds, effort))


def _solved(
    problem: LayoutProblem, node_limit: int, capacity: Bytes | None, seconds: float | None, effort: Effort
) -> LayoutSolution:
    run = _Run(problem, lower_bound(problem), capacity, seconds, effort)
    run.construct()
    run.improve()
    more = node_limit > 0 and not run.low_enough() and not run.late()
    status = run.search(node_limit) if more else run.status()
    best = run.best()
    return LayoutSolution(
        offset=read_only(best.offset),
        arena_bytes=best.arena_bytes,
        bound_bytes=run.bound,
        status=status,
        algorithm=best.name,
        work=run.work,
        candidates=tuple((candidate.name, candidate.arena_bytes) for candidate in run.tried),
        capacity=capacity,
    )


@dataclass(frozen=True, eq=False)
class _Candidate:
    name: str
    arena_bytes: Bytes
    offset: LongArray


@dataclass(eq=False)
class _Run:
    """One call of `solve`: what has been tried, and when to stop."""

    problem: LayoutProblem
    bound: Bytes
    capacity: Bytes | None
    seconds: float | None
    effort: Effort
    tried: list[_Candidate] = field(default_factory=list)
    work: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def target(self) -> Bytes:
        """Bytes of an arena that is low enough: the bound, or the capacity if that is larger."""
        return self.bound if self.capacity is None else max(self.bound, self.capacity)

    def best(self) -> _Candidate:
        """Return the candidate with the lowest arena, the first of equals."""
        return min(self.tried, key=lambda candidate: candidate.arena_bytes)

    def low_enough(self) -> bool:
        """Return whether the best arena is within the target, or the bound is above the capacity."""
        return self.best().arena_bytes <= self.target or (self.capacity is not None and self.target > self.capacity)

    def left(self) -> float | None:
        """Return the seconds that are left; None without a limit."""
        return None if self.seconds is None else self.seconds - (time.monotonic() - self.began)

    def late(self) -> bool:
        """Return whether no seconds are left; False without a limit."""
        left = self.left()
        return left is not None and left <= 0

    def add(self, name: str, offset: LongArray, work: int) -> None:
        """Add a layout, int64[n] bytes, to the candidates, and `work` placed storages to the work."""
        self.tried.append(_Candidate(name, arena_bytes(self.problem, offset), offset))
        self.work += work

    def construct(self) -> None:
        """Run the heuristics until one is low enough; at least one."""
        algorithms = dict(ALGORITHMS)
        if (self.problem.hint >= 0).any():
            algorithms = {"greedy_by_hint": _by(sequences.by_hint), **algorithms}
        if not self.problem.plain or (self.problem.own_alignment != self.problem.alignment).any():
            del algorithms["best_fit"]
        for name, algorithm in algorithms.items():
            if self.tried and (self.best().arena_bytes <= self.target or self.late()):
                return
            self.add(name, algorithm(self.problem), self.problem.num_storages)

    def improve(self) -> None:
        """Improve the lowest layouts in turns until one is low enough: the lowest is seldom the best to improve."""
        effort = self.effort
        start = sorted(self.tried, key=lambda candidate: candidate.arena_bytes)[: effort.improved_layouts]
        pairs = live_pairs(self.problem) * len(start)
        limit = min(effort.improve_rounds, effort.improve_pairs // max(pairs, 1) + 1)
        runs = [Improvement(self.problem, one.offset, self.target, effort) for one in start]
        for rounds in range(0, limit, effort.improve_turn):
            for run in runs:
                if self.late() or min(run.best_arena for run in runs) <= self.target:
                    break
                run.go_on(min(effort.improve_turn, limit - rounds))
        for candidate, run in zip(start, runs, strict=True):
            if run.rounds:
                self.add(candidate.name + "+improve", run.best, self.problem.num_storages * run.rounds)

    def search(self, node_limit: int) -> Status:
        """Search for an arena below the best, with up to `node_limit` placed storages, and return the status.

        Without a limit on seconds one search has all nodes; with one, several searches with rising limits.
        """
        if not self.problem.plain:
            return self._search_by_cp_sat(node_limit)
        share = node_limit if self.seconds is None else min(node_limit, self.effort.first_search_nodes)
        while True:
            result = tree_search(self.problem, self.best().offset, self.target, share, self.late, self.effort)
            self.add("tree_search", result.offset, result.nodes)
            node_limit -= max(result.nodes, 1)
            hopeless = result.refuted and self.capacity is not None
            if result.proved or hopeless or node_limit <= 0 or self.late():
                return self.status(searched=True, proved=result.proved, refuted=result.refuted)
            share = min(node_limit, self.effort.search_growth * share)

    def _search_by_cp_sat(self, node_limit: int) -> Status:
        from roamc.solvers.layout.cp_sat import cp_sat  # a second to import, and seldom needed

        if int((self.problem.size > 0).sum()) > self.effort.cp_sat_storages:
            return self.status()
        roof = self.best().arena_bytes - 1
        result = cp_sat(self.problem, self.bound, roof, node_limit, self.left(), self.effort)
        if result.offset is not None:
            self.add("cp_sat", result.offset, node_limit)
        above = self.capacity is not None and self.best().arena_bytes > self.capacity
        return self.status(searched=True, proved=result.proved, refuted=result.proved and above)

    def status(self, *, searched: bool = False, proved: bool = False, refuted: bool = False) -> Status:
        """Return the status of the best candidate.

        searched: a search ran.
        proved: no arena is lower than the best, or than the target if the best is within the target.
        refuted: no arena is within the target.
        """
        arena = self.best().arena_bytes
        if self.capacity is not None and (self.bound > self.capacity or (refuted and arena > self.capacity)):
            return Status.INFEASIBLE
        if arena == self.bound or (proved and arena > self.target):
            return Status.OPTIMAL
        if self.capacity is not None and arena <= self.capacity:
            return Status.GAP
        return Status.LIMIT if searched or self.late() else Status.GAP

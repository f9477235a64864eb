"""Several simple layouts, the best of them improved and searched, and the bound beside it."""

from collections.abc import Callable
from dataclasses import dataclass

from roamc.solvers.arrays import LongArray, read_only
from roamc.solvers.layout import greedy_by_size
from roamc.solvers.layout.best_fit import best_fit
from roamc.solvers.layout.first_fit import first_fit
from roamc.solvers.layout.improve import improve
from roamc.solvers.layout.problem import Bytes, LayoutProblem, LayoutSolution, arena_bytes, lower_bound
from roamc.solvers.layout.tree_search import tree_search
from roamc.solvers.status import Status

Algorithm = Callable[[LayoutProblem], LongArray]

ALGORITHMS: dict[str, Algorithm] = {
    "greedy_by_size": greedy_by_size.greedy_by_size,
    "best_fit": best_fit,
    "greedy_by_pressure": lambda problem: first_fit(problem, greedy_by_size.by_pressure(problem)),
    "greedy_by_area": lambda problem: first_fit(problem, greedy_by_size.by_area(problem)),
    "greedy_by_lifetime": lambda problem: first_fit(problem, greedy_by_size.by_lifetime(problem)),
    "greedy_by_birth": lambda problem: first_fit(problem, greedy_by_size.by_birth(problem)),
}
"""Name of each heuristic, and the heuristic: a problem to offsets in bytes, int64[n]."""

IMPROVE_ROUNDS = 24
IMPROVE_PATIENCE = 8


def solve(problem: LayoutProblem, *, node_limit: int = 20_000) -> LayoutSolution:
    """Run the heuristics, improve the best, then search; stop as soon as the arena meets the bound.

    node_limit: how many storages the tree search may place, 0 for no search. Ties go to the earlier
    candidate. The status is OPTIMAL if the arena meets the bound or is proved lowest, LIMIT if the node limit
    (or the largest piece that is searched) stopped the search, GAP if there was no search.
    """
    bound = lower_bound(problem)
    tried: list[_Candidate] = []
    for name, algorithm in ALGORITHMS.items():
        tried.append(_candidate(name, problem, algorithm(problem)))
        if tried[-1].arena_bytes == bound:
            break
    work = problem.num_storages * len(tried)
    best = min(tried, key=_arena)
    if best.arena_bytes > bound:
        offset, rounds = improve(problem, best.offset, bound, IMPROVE_ROUNDS, IMPROVE_PATIENCE)
        tried.append(_candidate(best.name + "+improve", problem, offset))
        work += problem.num_storages * rounds
        best = min(tried, key=_arena)
    status = Status.OPTIMAL if best.arena_bytes == bound else Status.GAP
    if status is Status.GAP and node_limit > 0:
        found = tree_search(problem, best.offset, bound, node_limit)
        tried.append(_candidate("tree_search", problem, found.offset))
        work += found.nodes
        best = min(tried, key=_arena)
        status = Status.OPTIMAL if found.proved else Status.LIMIT
    return LayoutSolution(
        offset=read_only(best.offset),
        arena_bytes=best.arena_bytes,
        bound_bytes=bound,
        status=status,
        algorithm=best.name,
        work=work,
        candidates=tuple((candidate.name, candidate.arena_bytes) for candidate in tried),
    )


@dataclass(frozen=True, eq=False)
class _Candidate:
    name: str
    arena_bytes: Bytes
    offset: LongArray


def _candidate(name: str, problem: LayoutProblem, offset: LongArray) -> _Candidate:
    return _Candidate(name, arena_bytes(problem, offset), offset)


def _arena(candidate: _Candidate) -> Bytes:
    return candidate.arena_bytes

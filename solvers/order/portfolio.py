"""Several simple orders, the best of them, a lower bound, and a search where peak and bound do not meet."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from roamc.solvers.arrays import IntArray, read_only
from roamc.solvers.compiled import interpreted_first
from roamc.solvers.order.bound import lower_bound
from roamc.solvers.order.branches import place_branches
from roamc.solvers.order.contract import contract
from roamc.solvers.order.cut_guided import cut_guided
from roamc.solvers.order.disjunction import disjunctive_bound
from roamc.solvers.order.effort import EFFORT, Effort
from roamc.solvers.order.evaluate import peak_bytes
from roamc.solvers.order.exact import Bracket, narrow
from roamc.solvers.order.list_schedule import (
    allocate_last,
    lescea,
    list_schedule,
    list_schedule_backward,
    lpmf,
    polish,
    release_first,
)
from roamc.solvers.order.min_cut import min_cut_bound
from roamc.solvers.order.problem import MOST_BYTES, Bytes, OrderProblem, OrderSolution
from roamc.solvers.order.program_order import program_order
from roamc.solvers.order.reuse import reuses
from roamc.solvers.order.segments import narrow_by_segment
from roamc.solvers.order.stages import one_stage
from roamc.solvers.order.subgraphs import improve_by_subgraphs
from roamc.solvers.order.torch_orders import breadth_first, depth_first
from roamc.solvers.status import Status

Progress = Callable[[Bytes, Bytes], None]
"""A function that is called with the best peak and the best lower bound so far, in bytes."""

Algorithm = Callable[[OrderProblem, Bytes], IntArray]
"""A function from a problem with one stage and a lower bound on its peak, in bytes, to a legal order: int32[n]."""

ALGORITHMS: dict[str, Algorithm] = {
    "program": lambda problem, bound: program_order(problem),
    "lpmf": lambda problem, bound: lpmf(problem),
    "lescea": lambda problem, bound: lescea(problem),
    "list_from_bound": list_schedule,
    "release_first": lambda problem, bound: release_first(problem),
    "allocate_last": lambda problem, bound: allocate_last(problem),
    "list_backward": lambda problem, bound: list_schedule_backward(problem),
    "bfs": lambda problem, bound: breadth_first(problem),
    "dfs": lambda problem, bound: depth_first(problem),
}
"""The algorithms by name, in the sequence in which `solve` runs them."""

DEFAULT_ALGORITHMS = tuple(ALGORITHMS)
"""The names of all algorithms."""


@dataclass(frozen=True)
class Pieces:
    """Switches for the pieces that `solve` runs after the algorithms, while peak and bound differ.

    polish: put off allocations and bring releases forward in the best order.
    branches: move update branches, small groups on which no operator waits, to where they cost least.
    min_cut: raise the bound by minimum cuts.
    disjunction: raise the bound by minimum cuts under either-or of two operators that no dependency relates.
    cuts: repeat list scheduling, each time with the order at one more operator settled by its minimum cut.
    contract: join memory-insensitive operators to groups before the exact search, which then orders the groups.
    segments: let the exact search treat one by one the segments between narrow points, operators that every other must
        run before or after.
    search: search exactly for a lower peak or a proof that there is none.
    subgraphs: search parts of the best order exactly, then ever larger ones, where the search of the whole found no
        proof.
    """

    polish: bool = True
    branches: bool = True
    min_cut: bool = True
    disjunction: bool = True
    cuts: bool = True
    contract: bool = True
    segments: bool = True
    search: bool = True
    subgraphs: bool = True


NO_PIECES = Pieces(**{field.name: False for field in fields(Pieces)})
"""All pieces switched off: `solve` then only compares the orders of the algorithms."""


def solve(
    problem: OrderProblem,
    algorithms: tuple[str, ...] = DEFAULT_ALGORITHMS,
    pieces: Pieces | None = None,
    work_limit: int | None = None,
    progress: Progress | None = None,
    effort: Effort = EFFORT,
) -> OrderSolution:
    """Find a legal order with a low peak, and a lower bound on every peak; stop as soon as the two meet.

    The named algorithms run in turn, then the pieces. Ties go to the earlier order, and program order comes first by
    default, so an order is changed only if that lowers the peak. `OrderSolution` says what the status means.

    algorithms: keys of `ALGORITHMS`.
    pieces: what follows the algorithms; if left out, all pieces after several algorithms and none after one.
    work_limit: operators and arcs that algorithms and pieces may look at, kept within a factor of two;
        `effort.work_limit` if left out. The algorithms run even with a limit of 0.
    progress: called with the best peak and the bound, in bytes, after each order that was compared. A small problem may
        be solved twice; the calls then begin anew.
    effort: what each piece may spend of the work.

    Raises ValueError for an unknown algorithm, or if none is named.
    """
    unknown = [name for name in algorithms if name not in ALGORITHMS]
    if unknown or not algorithms:
        raise ValueError(f"unknown order algorithms {unknown}; there are {', '.join(ALGORITHMS)}")
    if pieces is None:
        pieces = Pieces() if len(algorithms) > 1 else NO_PIECES
    chosen = pieces
    limit = effort.work_limit if work_limit is None else work_limit
    return interpreted_first(problem.num_ops, lambda: _solved(problem, algorithms, chosen, limit, progress, effort))


def _solved(
    problem: OrderProblem,
    algorithms: tuple[str, ...],
    pieces: Pieces,
    work_limit: int,
    progress: Progress | None,
    effort: Effort,
) -> OrderSolution:
    staged = one_stage(problem)
    run = _Run(staged.problem, work_limit, progress, effort)
    for name in algorithms:
        if not run.closed:
            run.offer(name, ALGORITHMS[name](run.problem, run.bound))
    run.close_gap(pieces)
    order = staged.order_of(run.order)
    return OrderSolution(
        order=read_only(order),
        peak_bytes=run.peak,
        bound_bytes=run.bound,
        status=run.status,
        algorithm=run.algorithm,
        work=run.work,
        candidates=tuple(run.candidates),
        reuses=reuses(problem, order),
    )


class _Run:
    """The best order and the best bound so far, and what was done to find them."""

    def __init__(self, problem: OrderProblem, work_limit: int, progress: Progress | None, effort: Effort) -> None:
        self.problem = problem
        self.order = program_order(problem)
        self.peak: Bytes = MOST_BYTES
        self.bound = lower_bound(problem, self.order, effort)
        self.algorithm = ""
        self.candidates: list[tuple[str, Bytes]] = []
        self.work = 0
        self._work_limit = work_limit
        self._effort = effort
        self._stopped = False
        self._progress = progress

    @property
    def closed(self) -> bool:
        """Whether the peak meets the bound, so that no order has a lower peak."""
        return self.peak <= self.bound

    @property
    def status(self) -> Status:
        """OPTIMAL if the peak meets the bound, LIMIT if the last search was stopped, else GAP."""
        if self.closed:
            return Status.OPTIMAL
        return Status.LIMIT if self._stopped else Status.GAP

    def offer(self, name: str, order: IntArray) -> None:
        """Count the peak of `order` as candidate `name`, and make the order the best one if its peak is the lowest."""
        peak = peak_bytes(self.problem, order)
        self.candidates.append((name, peak))
        self.work += self.problem.num_ops
        if peak < self.peak:
            self.peak, self.order, self.algorithm = peak, order, name
        self._report()

    def close_gap(self, pieces: Pieces) -> None:
        """Run the pieces that are switched on, one after another, until peak and bound meet."""
        effort = self._effort
        if pieces.polish and not self.closed:
            self.offer(f"{self.algorithm}+polish", polish(self.problem, self.order))
        if pieces.branches and not self.closed:
            placed, work = place_branches(self.problem, self.order, self._left(), effort)
            self.work += work
            self.offer(f"{self.algorithm}+branches", placed)
        if pieces.min_cut and not self.closed:
            self.bound, work = min_cut_bound(self.problem, self.order, self.bound, self._left(), effort)
            self.work += work
        if pieces.search and not self.closed:
            self._search(pieces, effort.quick_search_work)
        if pieces.disjunction and not self.closed:
            limit = self._left() // effort.disjunction_share
            self.bound, work = disjunctive_bound(self.problem, self.order, self.bound, limit, effort)
            self.work += work
        if pieces.cuts and not self.closed:
            limit = self._left() // effort.cuts_share
            order, work = cut_guided(self.problem, self.order, self.bound, limit, effort)
            self.work += work
            self.offer("cuts", order)
        if pieces.search and not self.closed:
            self._search(pieces, self._worth() // effort.search_share if pieces.subgraphs else self._worth())
        if pieces.subgraphs and not self.closed:
            start = Bracket(self.order, self.peak, self.bound)
            self._learn("subgraphs", improve_by_subgraphs(self.problem, start, self._worth(), effort))

    def _search(self, pieces: Pieces, limit: int) -> None:
        """Run the exact search, over groups instead of operators and segment by segment where `pieces` says so."""
        contracted = contract(self.problem) if pieces.contract else None
        problem = contracted.problem if contracted else self.problem
        order = contracted.groups_in(self.order) if contracted else self.order
        start = Bracket(order, peak_bytes(problem, order), self.bound)
        limit = min(limit, self._left())
        if pieces.segments:
            bracket = narrow_by_segment(problem, start, limit, self._effort)
        else:
            bracket = narrow(problem, start, limit, self._effort)
        expanded = contracted.order_of(bracket.order) if contracted else bracket.order
        self._learn("search", Bracket(expanded, bracket.peak_bytes, bracket.bound_bytes, bracket.work))

    def _learn(self, name: str, bracket: Bracket) -> None:
        self._stopped = not bracket.closed
        self.bound = max(self.bound, bracket.bound_bytes)
        self.work += bracket.work
        if bracket.peak_bytes < self.peak:
            self.offer(name, bracket.order)

    def _left(self) -> int:
        return max(0, self._work_limit - self.work)

    def _worth(self) -> int:
        """Return the work that a search may spend: all that is left for a wide gap, in proportion to a small one."""
        gap, effort = self.peak - self.bound, self._effort
        share = self._left() * gap * effort.full_work_gap_share // max(self.peak, 1)
        if gap < effort.full_work_gap_bytes:
            share = min(share, max(effort.quick_search_work, self._left() * gap // effort.full_work_gap_bytes))
        return min(self._left(), share)

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self.peak, self.bound)

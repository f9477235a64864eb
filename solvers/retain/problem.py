"""The retention problem and its answer, as data: which buffers are dropped between two reads and made again.

A schedule is given: operators in a legal order, the reference order. A buffer may be dropped between two of its
reads and rebuilt by running its operator once more, a rerun: right before the next read, or earlier, while what the
rerun needs is there. What a rerun reads must itself be live or rebuilt, so chains are seen; an operator may run any
number of times, and nothing distinguishes forward from backward. Asked for are reruns that bring the peak of live bytes
under a budget and add the fewest seconds. This is rematerialisation on a fixed order with retention intervals
(Moccasin, arXiv 2304.14463).

What a list of reruns means. Walk the reference order, running the reruns in front of the steps they name. Each run
makes a version of its results, and each read of a buffer reads its newest version:

    buffer k   made    read                        rerun   read       without the rerun:  |==================|
               |=======|                           |=======|
               version 0                           version 1

- A version is live from its run to its last read before the next version of the same buffer: one step if it has no
  reader, to the end if it is the last version of a kept buffer.
- A rerun renews some of its results; the others are live during that step only, and have no readers.
- In-place reuse as in `solvers/order/problem.py`, for versions: those of a run, in the sequence of their buffers'
  numbers, take over the bytes of the first of their reusable buffers whose version this run reads last and whose bytes
  no other version has taken over. Results that are not renewed take nothing over.
- Live bytes of a step, original or rerun, are the sizes of the versions live there and the operator's workspace.
- Where other micro-batches wait at the boundary, what waits of each is added at every step: the sizes of the versions
  of buffers that are not kept, made before the boundary and live there or later. It has the reruns of this schedule.

Buffers may also wait for late readers in a smaller form: the problem lists offers (`offers.py`), and a solution names
those that it takes. All of the above is then said of the schedule with their operators (`encoded.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roamc.solvers.arrays import BoolArray, FloatArray, IntArray, LongArray, read_only
from roamc.solvers.order.problem import BufferIndex, Bytes, OpIndex, OrderProblem, Step
from roamc.solvers.retain.offers import Offer, Seconds, check_offers
from roamc.solvers.status import Status


@dataclass(frozen=True, eq=False)
class RetainProblem:
    """A schedule of n operators over b buffers; build it with `make_problem`, which checks it.

    order: the operators, buffers, edges and reusable buffers; its stages play no role, `sequence` is legal already.
    sequence: int32[n], the reference order: sequence[t] is the operator at step t.
    seconds: float64[n], what one more run of operator v takes, at least 0.
    repeatable: bool[n], whether operator v may run again.
    droppable: bool[b], whether buffer k may be dropped and rebuilt: not kept, and its producer is repeatable.
    expires: int64[n], steps: operator v may run again only in front of a step before `expires[v]`; n sets no limit.
    idle: bool[n], whether operator v is left out of the schedule where offers leave none of its results a reader.
    offers: smaller forms in which buffers may wait for their late readers.
    waiting: how many other micro-batches wait at the boundary, as in a pipeline; 0 for none.
    boundary: the operator at which they wait, which reads nothing; what it makes comes when the wait ends; -1 for none.
    All arrays are read-only.
    """

    order: OrderProblem
    sequence: IntArray
    seconds: FloatArray
    repeatable: BoolArray
    droppable: BoolArray
    expires: LongArray
    idle: BoolArray
    offers: tuple[Offer, ...] = ()
    waiting: int = 0
    boundary: OpIndex = -1

    @property
    def num_ops(self) -> int:
        """Number of operators, n."""
        return self.order.num_ops

    @property
    def num_buffers(self) -> int:
        """Number of buffers, b."""
        return self.order.num_buffers


@dataclass(frozen=True)
class Rerun:
    """One more run of an operator.

    before: the step of the reference order in front of which it runs; it must be after the operator's own step.
    operator: the operator that runs, as numbered in the problem's `order`, not a step.
    renews: results of the operator, sorted, of which this run makes a new version for later reads; the other results
        are live during this run only.
    """

    before: Step
    operator: OpIndex
    renews: tuple[BufferIndex, ...]


@dataclass(frozen=True)
class RetainSolution:
    """Reruns and smaller forms, and what is known about them.

    Where offers are taken, operators, buffers and steps are numbered as in the problem that `encoded` returns for them.

    reruns: sorted by `before`; those with the same `before` in the sequence in which they run.
    peak_bytes: peak of live bytes of the schedule with the reruns, in-place reuse included.
    seconds: seconds that the reruns, and the operators of the taken offers, add.
    bound_seconds: a lower bound: no reruns and offers within the budget, in any order of the operators, add fewer
        seconds. Infinite if it is proved that none are within the budget.
    least_peak_bytes: the lowest peak that the search has come to, at most `peak_bytes`.
    status: OPTIMAL if `seconds` equal the bound, or if all combinations of a small problem were tried (each gap with a
        step in it kept, dropped once, dropped after every rerun, or brought back in front of any of its steps that
        read something; `exact.py`). INFEASIBLE if the search found no reruns within the budget, though there may be
        some; the reruns are then those with the lowest peak found. LIMIT and GAP as in `Status`.
    work: operators that simulations ran, plus arcs of the bound's networks.
    taken: the offers that are taken, by their places in `RetainProblem.offers`, sorted; no two of them clash.
    """

    reruns: tuple[Rerun, ...]
    peak_bytes: Bytes
    seconds: Seconds
    bound_seconds: Seconds
    least_peak_bytes: Bytes
    status: Status
    work: int
    taken: tuple[int, ...] = ()

    def rank(self, budget: Bytes) -> tuple[bool, float, float]:
        """Return the solution's key for comparison with others under `budget`, see `rank_of`."""
        return rank_of(self.peak_bytes, self.seconds, budget)


def rank_of(peak_bytes: Bytes, seconds: Seconds, budget: Bytes) -> tuple[bool, float, float]:
    """Return a key that compares reruns for a budget: the smaller tuple is better, and any peak within it comes first.

    The key is (False, seconds, peak) if the peak is within the budget, else (True, peak, seconds).
    """
    peak = float(peak_bytes)
    return (True, peak, seconds) if peak > budget else (False, seconds, peak)


def make_problem(
    order: OrderProblem,
    sequence: Sequence[int] | IntArray,
    seconds: Sequence[float] | FloatArray,
    repeatable: Sequence[bool] | BoolArray,
    droppable: Sequence[bool] | BoolArray,
    expires: Sequence[int] | LongArray | None = None,
    idle: Sequence[bool] | BoolArray | None = None,
    offers: Sequence[Offer] = (),
    waiting: int = 0,
    boundary: OpIndex = -1,
) -> RetainProblem:
    """Check the parts of a retention problem of n operators and b buffers, and pack them into a `RetainProblem`.

    order: the operators, buffers, edges and reusable buffers.
    sequence: length n, a legal order of the operators; sequence[t] is the operator at step t.
    seconds: length n, what one more run of each operator takes.
    repeatable: length n, whether each operator may run again.
    droppable: length b, whether each buffer may be dropped and made again.
    expires: length n, the first step in front of which each operator must not run again; None for no limit.
    idle: length n, whether each operator is left out where offers leave it no reader; None for none.
    offers: smaller forms of buffers.
    waiting, boundary: how many micro-batches wait, and at which operator.

    Raises ValueError, naming the item, for a part of the wrong length, a sequence that is no legal order, seconds that
    are negative or not finite, a droppable buffer that is kept or whose producer is not repeatable, an offer that
    names an operator or a buffer which does not exist, and a boundary that is missing or reads a buffer.
    """
    num_ops, num_buffers = order.num_ops, order.num_buffers
    latest = np.full(num_ops, num_ops) if expires is None else np.asarray(expires)
    unread = np.zeros(num_ops, dtype=np.bool_) if idle is None else np.asarray(idle)
    parts = {
        "sequence": (np.asarray(sequence), num_ops),
        "seconds": (np.asarray(seconds), num_ops),
        "repeatable": (np.asarray(repeatable), num_ops),
        "droppable": (np.asarray(droppable), num_buffers),
        "expires": (latest, num_ops),
        "idle": (unread, num_ops),
    }
    for name, (part, length) in parts.items():
        if part.shape != (length,):
            raise ValueError(f"{name} has shape {part.shape}, not ({length},)")
    problem = RetainProblem(
        order=order,
        sequence=read_only(np.asarray(sequence).astype(np.int32)),
        seconds=read_only(np.asarray(seconds).astype(np.float64)),
        repeatable=read_only(np.asarray(repeatable).astype(np.bool_)),
        droppable=read_only(np.asarray(droppable).astype(np.bool_)),
        expires=read_only(np.minimum(latest, num_ops).astype(np.int64)),
        idle=read_only(unread.astype(np.bool_)),
        offers=tuple(offers),
        waiting=waiting,
        boundary=boundary,
    )
    _check_boundary(problem)
    check_offers(problem.offers, num_ops, num_buffers)
    _check_sequence(problem)
    _check_seconds(problem)
    _check_droppable(problem)
    return problem


def _check_boundary(problem: RetainProblem) -> None:
    order, at = problem.order, problem.boundary
    if problem.waiting < 0 or (problem.waiting > 0) != (0 <= at < order.num_ops):
        raise ValueError(f"{problem.waiting} micro-batches wait at op {at}")
    if at >= 0 and at in order.consumer:
        raise ValueError(f"op {at}, at which micro-batches wait, reads a buffer")


def _check_sequence(problem: RetainProblem) -> None:
    order, num_ops = problem.order, problem.num_ops
    sorted_ops = np.sort(problem.sequence)
    odd = np.flatnonzero(sorted_ops != np.arange(num_ops))
    if len(odd):
        raise ValueError(f"sequence is no permutation of 0..{num_ops - 1}: see op {sorted_ops[odd[0]]}")
    position = np.empty(num_ops, dtype=np.int64)
    position[problem.sequence] = np.arange(num_ops)
    for before, after in order.edges[position[order.edges[:, 0]] >= position[order.edges[:, 1]]][:1].tolist():
        raise ValueError(f"sequence runs op {after} before op {before}, against an edge")
    buffer = np.repeat(np.arange(order.num_buffers), np.diff(order.consumer_start))
    early = np.flatnonzero(position[order.producer[buffer]] >= position[order.consumer])
    if len(early):
        row = early[0]
        raise ValueError(f"sequence runs op {order.consumer[row]} before buffer {buffer[row]}, which it reads, is made")


def _check_seconds(problem: RetainProblem) -> None:
    odd = np.flatnonzero(~(problem.seconds >= 0) | ~np.isfinite(problem.seconds))
    if len(odd):
        raise ValueError(f"seconds of op {odd[0]} are {problem.seconds[odd[0]]}")


def _check_droppable(problem: RetainProblem) -> None:
    kept = np.flatnonzero(problem.droppable & problem.order.kept)
    if len(kept):
        raise ValueError(f"buffer {kept[0]} is droppable and kept")
    fixed = np.flatnonzero(problem.droppable & ~problem.repeatable[problem.order.producer])
    if len(fixed):
        raise ValueError(
            f"buffer {fixed[0]} is droppable, but its op {problem.order.producer[fixed[0]]} is not repeatable"
        )

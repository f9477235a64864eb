"""Is there an order whose live bytes never exceed a capacity? Depth-first search over sets of operators.

What has run is a set, and only the set matters for the rest. Let f be the live bytes between two operators. f
is submodular, and what an operator adds while it runs falls as the set grows (see `schedule.py`). So some
extensions of a set lose nothing, whatever comes later, and are taken without asking (the exchange argument:
let D' be the extended set and X_1, X_2, ... the sets of any continuation within the capacity; then the sets
X_i + D' are one as well, since f(X_i + D') <= f(X_i) + f(D') - f(X_i and D') <= f(X_i)):

1. one operator that fits and leaves no more than there was;
2. an excursion: a chain of operators that goes up and comes down to no more than there was at its start.

        live      __
             |  __|  |__
             |_|        |__     where it ends, nothing is lost

   For 2 to hold, f(D') must be the least f of any set between D and D'. It is if each operator that goes up is
   the only one that its predecessor on the way up made ready, and whatever else is on the way leaves no more
   than it finds: then each set in between can be completed downwards to a point of the way.

The search branches where neither applies, remembers the sets from which it failed (two sums of 64 random bits
each stand for a set), and ends with an order, with the proof that there is none, or at its limit. A proof comes
with the least live bytes that it had to refuse: every capacity below that is proved as well.

Minimising over sets instead of orders is Held and Karp (SIAM 1962), for memory SERENITY (Ahn et al., MLSys 2020);
committing at valleys generalises Liu's hills and valleys (SIAM 1987) from trees to graphs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.compiled import compiled_uncounted
from roamc.solvers.order.flow import Flow
from roamc.solvers.order.problem import MOST_BYTES, Bytes, OpIndex
from roamc.solvers.order.schedule import (
    DONE,
    LIVE,
    READY,
    WORK,
    Schedule,
    cost,
    finished_order,
    new_schedule,
    run,
    undo,
)

_NONE, _FOUND, _LIMIT = range(3)
"""How a search ends: no order is within the capacity, one was found, or the limit was reached."""

_REFUSED, _POOL, _FRAMES = range(3)
"""Indices into `_Search.value`."""

_REMEMBERED = 1 << 18
"""Sets in the table of those that failed: 4 MiB, new for each search. A smaller table has more sets searched twice."""

_PROBES = 32
"""Places of the table that are looked at for one set. More keep more sets in a full table and make looks longer."""

_CANDIDATES_PER_OP, _FEWEST_CANDIDATES = 64, 4096
"""Room for the candidates of all open frames, for each operator and besides: 512 bytes an operator and 32 KiB. A search
that needs more ends as at its limit."""


@dataclass(frozen=True, eq=False)
class CapacityAnswer:
    """The outcome of a search for an order within a capacity: an order, a proof that there is none, or neither.

    order: int32[n], an order whose live bytes never exceed the capacity, first operator first; None if none was found.
    proved_bytes: no order has a peak below this, which is above the capacity; None if nothing is proved.
    work: operators looked at.

    Both `order` and `proved_bytes` are None if the search ended at its limit of work or memory.
    """

    order: IntArray | None
    proved_bytes: Bytes | None
    work: int


class _Search(NamedTuple):
    """The open branchings of a search and the sets from which it failed.

    value: int64[3]. value[_REFUSED] is the least live bytes that were refused, value[_POOL] and value[_FRAMES] how many
        entries of `pool` and how many frames are in use.
    frame_done, frame_pool, frame_key: frame f branches at the set of the first frame_done[f] operators, with key
        frame_key[f] and the candidates pool[frame_pool[f]:frame_pool[f + 1]].
    failed: uint64[_REMEMBERED, 2], a hash table of the keys of sets from which nothing was found.
    fresh: operators that became ready on an excursion.
    """

    value: LongArray
    frame_done: LongArray
    frame_pool: LongArray
    frame_key: NDArray[np.uint64]
    pool: LongArray
    failed: NDArray[np.uint64]
    fresh: LongArray


def search_within(flow: Flow, capacity: Bytes, work_limit: int) -> CapacityAnswer:
    """Search for an order of `flow` whose live bytes never exceed `capacity`, in bytes, depth first.

    The answer has an order, a proof that there is none, or neither if a limit of work or memory ended the search. The
    order runs from the problem's first operator to its last, also if the flow runs backward.

    flow: a problem with one stage, from `forward_flow` or `backward_flow`.
    work_limit: operators to look at; the search stops after that many, with at most one step more.
    """
    schedule = new_schedule(flow)
    num_ops = len(flow.waits)
    search = _Search(
        value=np.array([MOST_BYTES, 0, 0], dtype=np.int64),
        frame_done=np.zeros(num_ops + 1, dtype=np.int64),
        frame_pool=np.zeros(num_ops + 2, dtype=np.int64),
        frame_key=np.zeros((num_ops + 1, 2), dtype=np.uint64),
        pool=np.zeros(_CANDIDATES_PER_OP * num_ops + _FEWEST_CANDIDATES, dtype=np.int64),
        failed=np.zeros((_REMEMBERED, 2), dtype=np.uint64),
        fresh=np.zeros(num_ops, dtype=np.int64),
    )
    verdict = _search(flow, schedule, search, capacity, work_limit)
    work = int(schedule.tally[WORK])
    if verdict == _FOUND:
        return CapacityAnswer(finished_order(flow, schedule), None, work)
    return CapacityAnswer(None, int(search.value[_REFUSED]) if verdict == _NONE else None, work)


@compiled_uncounted
def _search(flow: Flow, schedule: Schedule, search: _Search, capacity: Bytes, work_limit: int) -> int:
    if schedule.tally[LIVE] > capacity:
        search.value[_REFUSED] = schedule.tally[LIVE]
        return _NONE
    while True:
        _commit(flow, schedule, search, capacity, work_limit)
        if schedule.tally[DONE] == len(flow.waits):
            return _FOUND
        if schedule.tally[WORK] > work_limit:
            return _LIMIT
        if not _has_failed(search, schedule.key) and not _branch(flow, schedule, search, capacity):
            return _LIMIT
        if not _next_candidate(flow, schedule, search):
            return _NONE


@compiled_uncounted
def _fits(flow: Flow, schedule: Schedule, search: _Search, capacity: Bytes, op: OpIndex) -> bool:
    live = cost(flow, schedule, op)
    if live > capacity:
        search.value[_REFUSED] = min(search.value[_REFUSED], live)
    return live <= capacity


@compiled_uncounted
def _commit(flow: Flow, schedule: Schedule, search: _Search, capacity: Bytes, work_limit: int) -> None:
    """Take every extension that loses nothing, or as many as the limit allows."""
    going_on = True
    while going_on and schedule.tally[WORK] <= work_limit:
        _release(flow, schedule, search, capacity)
        going_on = False
        place = 0
        while place < schedule.tally[READY] and schedule.tally[WORK] <= work_limit:
            if _excursion(flow, schedule, search, capacity, schedule.ready[place]):
                going_on = True
            else:
                place += 1


@compiled_uncounted
def _release(flow: Flow, schedule: Schedule, search: _Search, capacity: Bytes) -> None:
    """Run what fits and leaves no more than there was, until nothing does."""
    going_on = True
    while going_on:
        going_on = False
        place = 0
        while place < schedule.tally[READY]:
            op = schedule.ready[place]
            if schedule.net[op] <= 0 and _fits(flow, schedule, search, capacity, op):
                run(flow, schedule, op)
                going_on = True
            else:
                place += 1


@compiled_uncounted
def _excursion(flow: Flow, schedule: Schedule, search: _Search, capacity: Bytes, first: OpIndex) -> bool:
    """Go up from `first`, and stay if the way comes down to no more than there was; else come back."""
    start_done, start_live = schedule.tally[DONE], schedule.tally[LIVE]
    op, count = first, 0
    while _fits(flow, schedule, search, capacity, op):
        count = _run_and_release(flow, schedule, search, capacity, op)
        if schedule.tally[LIVE] <= start_live:
            return True
        if count != 1:
            break
        op = search.fresh[0]
    while schedule.tally[DONE] > start_done:
        undo(flow, schedule)
    return False


@compiled_uncounted
def _run_and_release(flow: Flow, schedule: Schedule, search: _Search, capacity: Bytes, first: OpIndex) -> int:
    """Run `first` and then all that it made ready, directly or not, and that fits and leaves no more than it
    finds. Returns how many that it made ready are left, in `search.fresh`.
    """
    run(flow, schedule, first)
    count = _add_ready_after(flow, schedule, search, first, 0)
    place = 0
    while place < count:
        op = search.fresh[place]
        if schedule.net[op] <= 0 and _fits(flow, schedule, search, capacity, op):
            run(flow, schedule, op)
            count -= 1
            search.fresh[place] = search.fresh[count]
            count = _add_ready_after(flow, schedule, search, op, count)
            place = 0
        else:
            place += 1
    return count


@compiled_uncounted
def _add_ready_after(flow: Flow, schedule: Schedule, search: _Search, op: OpIndex, count: int) -> int:
    for row in range(flow.after_start[op], flow.after_start[op + 1]):
        if schedule.waits[flow.after[row]] == 0:
            search.fresh[count] = flow.after[row]
            count += 1
    return count


@compiled_uncounted
def _branch(flow: Flow, schedule: Schedule, search: _Search, capacity: Bytes) -> bool:
    """Open a frame with all ready operators that fit, the lowest net last. False if there is no room for it."""
    frame, first = search.value[_FRAMES], search.value[_POOL]
    if first + schedule.tally[READY] > len(search.pool):
        return False
    end = first
    for place in range(schedule.tally[READY]):
        op = schedule.ready[place]
        if _fits(flow, schedule, search, capacity, op):
            at = end
            while at > first and _is_worse(schedule, op, search.pool[at - 1]):
                search.pool[at] = search.pool[at - 1]
                at -= 1
            search.pool[at] = op
            end += 1
    search.frame_done[frame] = schedule.tally[DONE]
    search.frame_pool[frame], search.frame_pool[frame + 1] = first, end
    search.frame_key[frame, 0], search.frame_key[frame, 1] = schedule.key[0], schedule.key[1]
    search.value[_FRAMES], search.value[_POOL] = frame + 1, end
    return True


@compiled_uncounted
def _is_worse(schedule: Schedule, op: OpIndex, other: OpIndex) -> bool:
    net, other_net = int(schedule.net[op]), int(schedule.net[other])
    return net > other_net or (net == other_net and op > other)


@compiled_uncounted
def _next_candidate(flow: Flow, schedule: Schedule, search: _Search) -> bool:
    """Go back to the last frame with a candidate left and run that. False if there is none."""
    while search.value[_FRAMES] > 0:
        frame = search.value[_FRAMES] - 1
        while schedule.tally[DONE] > search.frame_done[frame]:
            undo(flow, schedule)
        if search.value[_POOL] > search.frame_pool[frame]:
            search.value[_POOL] -= 1
            run(flow, schedule, search.pool[search.value[_POOL]])
            return True
        _remember(search, search.frame_key[frame])
        search.value[_FRAMES] = frame
    return False


@compiled_uncounted
def _has_failed(search: _Search, key: NDArray[np.uint64]) -> bool:
    place = _place_of(search.failed, key)
    return bool(place >= 0 and search.failed[place, 0] == key[0] and search.failed[place, 1] == key[1])


@compiled_uncounted
def _remember(search: _Search, key: NDArray[np.uint64]) -> None:
    """Note a set from which nothing was found. A full neighbourhood forgets: that costs time, not truth."""
    place = _place_of(search.failed, key)
    if place >= 0:
        search.failed[place, 0], search.failed[place, 1] = key[0], key[1]


@compiled_uncounted
def _place_of(table: NDArray[np.uint64], key: NDArray[np.uint64]) -> int:
    """Where the key stands or may be put; -1 if others are wherever it is looked for."""
    slot = np.int64(key[0] % np.uint64(_REMEMBERED))
    for probe in range(_PROBES):
        place = (slot + probe) % _REMEMBERED
        is_free = table[place, 0] == 0 and table[place, 1] == 0
        if is_free or (table[place, 0] == key[0] and table[place, 1] == key[1]):
            return int(place)
    return -1

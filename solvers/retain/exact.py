"""Small problems: every combination of decisions, through the same walk as the searches.

The decisions are those of the gaps in which there is a choice (`Gaps.free`): keep through the gap, drop once (what a
rerun brings back stays until the next read), or drop after every rerun. The best of all 3^gaps combinations is optimal
among schedules of this kind, which rerun right before a step that needs it and in the reference order.
"""

import numpy as np

from roamc.solvers.arrays import LongArray
from roamc.solvers.compiled import compiled_uncounted
from roamc.solvers.retain.search import Search, State
from roamc.solvers.retain.tables import Tables
from roamc.solvers.retain.walk import Room, walk_and_measure

MOST_GAPS = 14
_MOST_WORK = 20_000_000


def candidates(search: Search) -> LongArray:
    """The gaps in which there is something to decide: int64[...]."""
    return np.flatnonzero(search.gaps.free)


def affordable(search: Search, work_limit: int) -> bool:
    """Whether all combinations can be tried: MOST_GAPS at most, and within the work that is left."""
    gaps = len(candidates(search))
    cost = 3**gaps * max(search.steps, 1) if gaps <= MOST_GAPS else work_limit
    return cost < min(work_limit - search.work, _MOST_WORK)


def exact(search: Search, budget: int) -> State:
    """The combination within the budget with the fewest seconds, of equals the lowest peak, of those the first.

    Where none is within the budget, that with the lowest peak, of equals the fewest seconds.
    """
    gap = candidates(search)
    plain = search.keep_everything()
    release, hold = plain.release.copy(), plain.hold.copy()
    best, work = _enumerate(search.tables, release, hold, gap, budget, search.room)
    search.work += work
    _decide(release, hold, gap, best, search.steps)
    return search.note(search.state(release, hold, budget))


@compiled_uncounted
def _enumerate(
    tables: Tables, release: LongArray, hold: LongArray, gap: LongArray, budget: int, room: Room
) -> tuple[int, int]:
    """The number of the best combination, read in base three, and the work."""
    best, best_within, best_first, best_second, work = 0, False, np.inf, np.inf, 0
    for number in range(3 ** len(gap)):
        _decide(release, hold, gap, number, len(tables.scratch))
        seconds, peak, _, runs = walk_and_measure(tables, release, hold, budget, room)
        work += runs
        if seconds == np.inf:
            continue
        within = peak <= budget
        first, second = (seconds, float(peak)) if within else (float(peak), seconds)
        better = first < best_first or (first == best_first and second < best_second)
        if (within and not best_within) or (within == best_within and better):
            best, best_within, best_first, best_second = number, within, first, second
    return best, work


@compiled_uncounted
def _decide(release: LongArray, hold: LongArray, gap: LongArray, number: int, steps: int) -> None:
    """Digit i of `number` in base three decides gap[i]: 0 keep, 1 drop once, 2 drop after every rerun."""
    for at in gap:
        choice = number % 3
        number //= 3
        release[at] = steps if choice == 0 else 0
        hold[at] = steps if choice == 2 else 0

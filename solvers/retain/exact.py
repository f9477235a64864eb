"""Small problems: every combination of decisions, through the same simulation as the searches.

The decisions are those of the gaps in which there is a choice (`Gaps.free`): keep through the gap, drop once (what a
rerun brings back stays until the next read), drop after every rerun, or drop and bring back in front of one of the
steps in the gap that read something. The best of all combinations is optimal among schedules of this kind, which rerun
in the reference order. Without the last of the choices there are 3^gaps, which are a start where all are too many.
"""

import math

import numpy as np

from roamc.solvers.arrays import LongArray
from roamc.solvers.compiled import compiled_uncounted
from roamc.solvers.retain.search import Search, State
from roamc.solvers.retain.simulate import Room, bring_at, simulate_and_measure
from roamc.solvers.retain.tables import Tables


def candidates(search: Search) -> LongArray:
    """The gaps in which there is something to decide: int64[...]."""
    return np.flatnonzero(search.gaps.free)


def affordable(search: Search, work_limit: int, brings: bool) -> bool:
    """Whether all combinations can be tried: `Effort.exact_gaps` at most, and within the work that is left."""
    gap = candidates(search)
    if len(gap) > search.effort.exact_gaps:
        return False
    cost = math.prod(len(row) for row in _choices(search, gap, brings)) * max(search.steps, 1)
    return cost < min(work_limit - search.work, search.effort.exact_work)


def exact(search: Search, budget: int, brings: bool) -> State:
    """The combination within the budget with the fewest seconds, of equals the lowest peak, of those the first.

    Where none is within the budget, that with the lowest peak, of equals the fewest seconds.
    """
    gap = candidates(search)
    rows = _choices(search, gap, brings)
    start = np.cumsum([0, *map(len, rows)])
    choice = np.array([hold for row in rows for hold in row], dtype=np.int64)
    plain = search.keep_everything()
    release, hold = plain.release.copy(), plain.hold.copy()
    best, work = _enumerate(
        search.tables, release, hold, (gap, start, choice), math.prod(map(len, rows)), budget, search.room
    )
    search.work += work
    _decide(release, hold, (gap, start, choice), best, search.steps)
    return search.note(search.state(release, hold, budget))


_KEEP = -1
"""Stands for a gap that is kept; other choices are a `hold`, at least 0."""


def _choices(search: Search, gap: LongArray, brings: bool) -> list[list[int]]:
    """What can be decided in each gap: _KEEP, or the `hold` with which the buffer is dropped."""
    reads = np.flatnonzero(np.diff(search.tables.read_start) > 0)
    found = []
    for begin, end in zip(search.gaps.begin[gap].tolist(), search.gaps.end[gap].tolist(), strict=True):
        stops = reads[(reads > begin) & (reads < end)].tolist() if brings else []
        found.append([_KEEP, 0, search.steps, *(bring_at(step, search.steps) for step in stops)])
    return found


Choices = tuple[LongArray, LongArray, LongArray]
"""The gaps; where the choices of each begin, and end; and all choices."""


@compiled_uncounted
def _enumerate(
    tables: Tables,
    release: LongArray,
    hold: LongArray,
    choices: Choices,
    count: int,
    budget: int,
    room: Room,
) -> tuple[int, int]:
    """The number of the best of `count` combinations, and the work."""
    best, best_within, best_first, best_second, work = 0, False, np.inf, np.inf, 0
    for number in range(count):
        _decide(release, hold, choices, number, len(tables.workspace))
        seconds, peak, _, runs = simulate_and_measure(tables, release, hold, budget, room)
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
def _decide(release: LongArray, hold: LongArray, choices: Choices, number: int, steps: int) -> None:
    """The digits of `number`, the first the fastest, are the gaps' choices."""
    gap, start, choice = choices
    for row in range(len(gap)):
        width = start[row + 1] - start[row]
        chosen = choice[start[row] + number % width]
        number //= width
        release[gap[row]] = steps if chosen == _KEEP else 0
        hold[gap[row]] = max(chosen, 0)

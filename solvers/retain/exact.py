"""Small problems: every combination of decisions, through the same simulation as the searches.

The decisions are those of the gaps in which there is a choice (`Gaps.free`): keep through the gap, drop once (what a
rerun brings back stays until the next read), drop after every rerun, or drop and bring back in front of one of the
steps in the gap that read something. The best of all combinations is optimal among schedules of this kind, which rerun
in the reference order. Without the last choice, bringing back, there are 3^gaps combinations. Where all combinations
are too many, the best of the 3^gaps combinations is a state to begin other searches with.
"""

import math

import numpy as np

from roamc.solvers.arrays import LongArray
from roamc.solvers.compiled import compiled_uncounted
from roamc.solvers.retain.search import Search, State
from roamc.solvers.retain.simulate import Room, bring_at, simulate_and_measure
from roamc.solvers.retain.tables import Tables


def candidates(search: Search) -> LongArray:
    """Return the gaps in which there is a choice (`Gaps.free`), by number and sorted: int64[...].

    A gap is the time between two reads of a buffer (`tables.py`). There is a choice if the buffer is droppable and has
    bytes, and a step lies inside.
    """
    return np.flatnonzero(search.gaps.free)


def affordable(search: Search, work_limit: int, brings: bool) -> bool:
    """Return whether the combinations that `exact` tries are few enough.

    True with at most `effort.exact_gaps` gaps to decide, if all simulations together take less work than
    `effort.exact_work` and than is left up to `work_limit`.

    work_limit: a value of `search.work`, not an amount on top of it.
    brings: whether bringing a buffer back early is among the choices.
    """
    gap = candidates(search)
    if len(gap) > search.effort.exact_gaps:
        return False
    cost = math.prod(len(row) for row in _choices(search, gap, brings)) * max(search.steps, 1)
    return cost < min(work_limit - search.work, search.effort.exact_work)


def exact(search: Search, budget: int, brings: bool) -> State:
    """Try all decisions for all free gaps, and return the best: fewest seconds within the budget, then lowest peak.

    If no combination is within the budget, the result is the one with the lowest peak, of equals the fewest seconds.
    Nothing limits the work: ask `affordable` first. `search.work` grows, and the room ends with the schedule of the
    result.

    budget: bytes.
    brings: whether bringing a buffer back early is among the choices; without it the best may be missed.
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
"""The choice that keeps a gap; every other choice is the `hold`, at least 0, of a gap whose buffer is dropped."""


def _choices(search: Search, gap: LongArray, brings: bool) -> list[list[int]]:
    """Return the choices of each gap: `_KEEP`, or the `hold` with which its buffer is dropped.

    brings: whether bringing it back in front of a step inside the gap is among them.
    """
    reads = np.flatnonzero(np.diff(search.tables.read_start) > 0)
    choices = []
    for begin, end in zip(search.gaps.begin[gap].tolist(), search.gaps.end[gap].tolist(), strict=True):
        stops = reads[(reads > begin) & (reads < end)].tolist() if brings else []
        choices.append([_KEEP, 0, search.steps, *(bring_at(step, search.steps) for step in stops)])
    return choices


Choices = tuple[LongArray, LongArray, LongArray]
"""(gap, start, choice): the choices of `gap[i]` are `choice[start[i]:start[i + 1]]`."""


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
    """Simulate combinations 0 to count - 1; return (number of the best, work)."""
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
    """Set `release` and `hold` to combination `number`, whose digits, the lowest first, choose for one gap each."""
    gap, start, choice = choices
    for row in range(len(gap)):
        width = start[row + 1] - start[row]
        chosen = choice[start[row] + number % width]
        number //= width
        release[gap[row]] = steps if chosen == _KEEP else 0
        hold[gap[row]] = max(chosen, 0)

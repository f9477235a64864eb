"""Greedy search: drop what frees most bytes above the budget per second, until the peak fits; then undo needless drops.

Candidates are the buffers that are live at the peak, are not read there and are read later. A drop frees the buffer's
bytes up to that read (up to its next rerun, if that comes sooner) and costs the seconds of all operators that run again
for it. A drop is measured by the area, the bytes above the budget summed over all runs, not by the peak: where several
steps tie, a single drop does not lower the peak.

Drops that free most per second may end a little above the budget, where one dearer drop would have been enough for all
of them. So the cheapest drop that would end the way is noted at each step, as in heuristics for the minimum knapsack
problem.
"""

from collections.abc import Iterator

import numpy as np

from roamc.solvers.arrays import FloatArray
from roamc.solvers.retain.drops import Drops, best_drop, list_drops, make_drop
from roamc.solvers.retain.search import Search, State, keep_more


def lower(
    search: Search,
    state: State,
    budget: int,
    work_limit: int,
    worth: FloatArray | None = None,
    shortcuts: list[State] | None = None,
) -> State:
    """Return `state` with further drops, which bring its peak within the budget or as far down as they can.

    Drops end where the peak is within the budget, where no drop frees anything, or where `search.work` reaches
    `work_limit`; the peak of the result may still be above the budget. The first target is the budget. If no drop
    helps, further targets fall slowly from the peak, so that only the highest steps count.

    search: its `work` grows, its `room` ends with the schedule of the result, and its `lowest` is kept up to date.
    state: is left unchanged; one with infinite seconds is returned itself.
    budget: bytes.
    work_limit: a value of `search.work`, not an amount on top of it.
    worth: float64[gaps], by gap what the last measured drop in it freed of the area, per second and per byte of
        `Drops.reach`; infinite where unknown. It is changed in place, so that a next call goes on from these guesses.
        None begins with all unknown.
    shortcuts: states within the budget, each with fewer seconds than those before it; None to look for none. The states
        of this way are added, each with one more drop that was measured and would have ended the way.
    """
    if state.score.seconds == np.inf:
        return state
    state = _drop_until(search, state, budget, work_limit, worth, shortcuts)
    in_vain = 0
    while state.score.peak > budget and search.work < work_limit and in_vain < search.effort.stuck_targets:
        peak = state.score.peak
        state = _drop_until(search, state, max(budget, int(peak * search.effort.stuck_target)), work_limit, None)
        in_vain = 0 if state.score.peak < peak else in_vain + 1
    return search.note(search.state(state.release, state.hold, budget))


def _drop_until(
    search: Search,
    state: State,
    budget: int,
    work_limit: int,
    worth: FloatArray | None,
    shortcuts: list[State] | None = None,
) -> State:
    state = search.note(search.state(state.release.copy(), state.hold.copy(), budget))
    worth = np.full(len(search.gaps.begin), np.inf) if worth is None else worth
    effort, count = search.effort, 0
    while state.score.peak > budget and search.work < work_limit:
        drops = list_drops(search, state, budget)
        least = -np.inf if shortcuts is None else min((one.score.seconds for one in shortcuts), default=np.inf)
        best, way, ends = best_drop(search, state, drops, budget, worth, least)
        if shortcuts is not None:
            shortcuts += [_dropped(search, state.copy(), drops, *end, budget) for end in ends]
        if best < 0:
            break
        state = search.note(_dropped(search, state, drops, best, way, budget))
        count += 1
        if count % max(effort.refresh_drops, len(drops.gap) // effort.refresh_divisor) == 0:
            worth[:] = np.where(worth > 0, worth * effort.hope, np.inf)
    return state


def _dropped(search: Search, state: State, drops: Drops, number: int, way: int, budget: int) -> State:
    """Return the state after a drop; the arrays of the given one are changed and taken over."""
    search.work += make_drop(search, state, drops, number, way)
    return search.state(state.release, state.hold, budget)


def descend(search: Search, work_limit: int, step: float) -> Iterator[State]:
    """Lower the peak in stages from `search.lowest`, each to the share `step` of the peak; undo needless drops in each.

    Stages end where one does not lower the peak, or where `search.work` reaches `work_limit`. Yields `search.lowest` in
    front of every stage; after the last stage its result is in `search.lowest` if it has the lowest peak.

    step: the target of a stage, as a share of the peak before it, below 1.
    work_limit: a value of `search.work`, not an amount on top of it.
    """
    state = search.lowest.copy()
    while search.work < work_limit:
        yield search.lowest
        target = int(state.score.peak * step)
        lowered = lower(search, state, target, work_limit)
        if lowered.score.peak <= target:
            lowered = search.note(keep(search, lowered, target))
        elif lowered.score.peak >= state.score.peak:
            break
        state = lowered


def keep(search: Search, state: State, budget: int) -> State:
    """Return `state` without the drops whose undoing saves seconds and leaves the peak within the budget.

    Buffers with the most seconds of reruns per byte come first. A round tries to keep each buffer through its gap, then
    tries to hold each buffer that is still rebuilt more than once in a gap from its first rerun there. There are at
    most `effort.keep_rounds` rounds over all drops.

    search: its `work` grows, and its `room` ends with the schedule of the result.
    state: a state with finite seconds; it is left unchanged.
    budget: bytes.
    """
    state = search.state(state.release.copy(), state.hold.copy(), budget)
    for _ in range(search.effort.keep_rounds):
        before = state.score.seconds
        for whole in (True, False):
            rebuilt = search.room.rebuilt
            gap = np.flatnonzero(rebuilt > (0 if whole else 1))
            producer = search.tables.producer[search.gaps.buffer[gap]]
            value = search.tables.seconds[producer] * rebuilt[gap] / search.tables.size[search.gaps.buffer[gap]]
            gap = gap[np.argsort(-value, kind="stable")]
            release = np.full(len(gap), search.steps) if whole else state.release[gap]
            hold = state.hold[gap] if whole else np.zeros(len(gap), dtype=np.int64)
            _, work = keep_more(
                search.tables,
                state.release,
                state.hold,
                (gap, search.gaps.begin[gap], search.gaps.end[gap], release, hold),
                np.empty(len(gap), dtype=np.bool_),
                budget,
                search.room,
                state.score.seconds,
            )
            search.work += work
            state = search.state(state.release, state.hold, budget)
        if state.score.seconds >= before:
            break
    return state

"""Simulated annealing over single decisions, reruns ahead of their reads among them, where the bound leaves room.

A buffer may be brought back before it is read, while what its operator reads is still there, and then waits:

    input      =====================|
    buffer     =====| dropped       |===== waits =====| read

Greedy drops at the peak never try this, nor a drop in a gap without a step inside, to free bytes for reruns in front of
its end. So each move gives one or two gaps new decisions at random, mostly gaps over steps above the budget. It may
also keep or drop what their reruns read, behind its last original read. Moves are taken by Metropolis' rule (1953). The
cost is the seconds plus a price for the area above the budget. The price rises while the state is above the budget and
falls while it is within, so that the search sees both sides (strategic oscillation: Glover 1977).
"""

from typing import NamedTuple

import numpy as np

from roamc.solvers.arrays import FloatArray, LongArray
from roamc.solvers.compiled import compiled_uncounted
from roamc.solvers.retain.effort import FEWER
from roamc.solvers.retain.search import Search, State
from roamc.solvers.retain.simulate import Room, bring_at, simulate_and_measure
from roamc.solvers.retain.tables import Tables
from roamc.solvers.retain.ways import Trail, go_back, make_trail, set_gap

_MOVES = 256
"""Moves at one temperature, in one call of the loop: more cool in larger steps, fewer make more calls from Python."""

_RISE = 1.002
"""Factor by which a move raises the price of area above the budget, or lowers it within; larger ones swing faster."""

_IN_FOCUS = 0.7
"""Share of moves on gaps over steps above the budget, where drops count; the others may choose any gap."""

_TWO = 0.3
"""Share of moves on two gaps: they find exchanges of which neither half alone would be taken."""

_KEEP, _DROP, _BRING, _RELEASE = 0.35, 0.6, 0.85, 0.95
"""Chances of the decisions on a gap, added up.

35 % keep, 25 % drop once, 25 % bring back early, 10 % keep for reruns up to a step, 5 % drop after every rerun.
"""

_FOLLOW = 0.5
"""Share of drops and brings after which the inputs of their rerun are decided too: they are often gone by then."""

_KEEP_INPUT, _DROP_INPUT = 0.3, 0.6
"""Chances for what a rerun reads, added up: 30 % keep it behind its last read, 30 % drop it there, 40 % leave it."""


class Places(NamedTuple):
    """The gaps and steps that moves may choose. All arrays are int64.

    focus: the gaps in `Gaps.free` with a step inside whose live bytes, without reruns, are above the budget; equal to
        `free` if there are none.
    free: all gaps of droppable buffers that have bytes, even without a step inside, except gaps that begin at the last
        step.
    begin, end: int64[gaps], the steps of each gap, as in `Gaps`.
    stop: int64[steps], for each step the first from it on whose operator reads something; the number of steps if none
        does. Buffers are brought back in front of such steps only: the others may stand for something that the caller
        does not run as an operator.
    """

    focus: LongArray
    free: LongArray
    begin: LongArray
    end: LongArray
    stop: LongArray


def anneal(search: Search, best: State, budget: int, work_limit: int, seed: int) -> State:
    """Return the state with the fewest seconds within the budget that annealing finds, or the decisions of `best`.

    search: its `work` grows, and `search.room` holds another schedule than before.
    best: a state within the budget; it is left unchanged.
    budget: bytes.
    work_limit: a value of `search.work`, not an amount on top of it; the temperature falls to its last value there.
    seed: start of the random numbers; the same search, state and seed give the same answer.
    """
    begun, seconds, effort = search.work, search.tables.seconds, search.effort
    plain = search.keep_everything()
    area = search.state(plain.release, plain.hold, budget).score.area
    places = _places(search, budget)
    if best.score.seconds == 0 or area == 0:
        return best
    hot = effort.anneal_hot * float(seconds[seconds > 0].mean())
    state, fewest = best.copy(), best.copy()
    price = effort.area_price * best.score.seconds / area
    scores = np.array([best.score.seconds, best.score.area, price, best.score.seconds])
    trail = make_trail(effort.move_changes)
    dice = np.array([seed], dtype=np.int64)
    while search.work < work_limit:
        share = (search.work - begun) / (work_limit - begun)
        search.work += _anneal(
            search.tables, (state.release, state.hold), (fewest.release, fewest.hold), places, scores,
            hot * effort.anneal_cold**share, FEWER, budget, search.room, trail, dice,
        )  # fmt: skip
    return search.state(fewest.release, fewest.hold, budget)


def settle(search: Search, state: State, budget: int) -> State:
    """Return the state without those early rebuilds that save nothing: the buffer is then rebuilt at its next read.

    An early rebuild (a `hold` made by `bring_at`) is taken out if the peak stays within the budget and the seconds do
    not grow. `state` is left unchanged, `search.work` grows, and `search.room` ends with the schedule of the result.
    What `hold` and `bring_at` are says `simulate.py`.

    budget: bytes.
    """
    state = search.state(state.release.copy(), state.hold.copy(), budget)
    for gap in np.flatnonzero(state.hold > search.steps).tolist():
        hold = state.hold.copy()
        hold[gap] = 0
        tried = search.state(state.release, hold, budget)
        if tried.score.peak <= budget and tried.score.seconds <= state.score.seconds:
            state = tried
    return search.state(state.release, state.hold, budget)


def _places(search: Search, budget: int) -> Places:
    """Return the places for moves. The room must hold the schedule of `Search.keep_everything`."""
    gaps, steps, tables = search.gaps, search.steps, search.tables
    above = np.concatenate([[0], np.cumsum(search.room.live[:steps] > budget)])
    free = tables.droppable[gaps.buffer] & (tables.size[gaps.buffer] > 0) & (gaps.begin < steps - 1)
    over = above[np.minimum(gaps.end, steps)] > above[np.minimum(gaps.begin + 1, steps)]
    focus = gaps.free & over if (gaps.free & over).any() else free
    reads = np.flatnonzero(np.diff(tables.read_start) > 0)
    stop = np.append(reads, steps)[np.searchsorted(reads, np.arange(steps))]
    return Places(np.flatnonzero(focus), np.flatnonzero(free), gaps.begin, gaps.end, stop.astype(np.int64))


@compiled_uncounted
def _anneal(
    tables: Tables,
    state: tuple[LongArray, LongArray],
    fewest: tuple[LongArray, LongArray],
    places: Places,
    scores: FloatArray,
    temperature: float,
    fewer: float,
    budget: int,
    room: Room,
    trail: Trail,
    dice: LongArray,
) -> int:
    """Make `_MOVES` moves at one temperature, and return the work done.

    state, fewest: (release, hold) of the state, and of the best state within the budget; both are changed in place.
    scores: float64[4], seconds and area of the state, the price of area, and the seconds of `fewest`; changed in place.
    fewer: seconds below this share of the fewest count as fewer.
    dice: int64[1], the state of the random numbers.
    """
    release, hold = state
    work = 0
    for _ in range(_MOVES):
        count = _change(tables, release, hold, places, dice, trail, 0)
        if _roll(dice) < _TWO:
            count = _change(tables, release, hold, places, dice, trail, count)
        seconds, peak, area, runs = simulate_and_measure(tables, release, hold, budget, room)
        work += runs + 1
        scores[2] = scores[2] * _RISE if scores[1] > 0 else scores[2] / _RISE
        worse = seconds - scores[0] + scores[2] * (area - scores[1])
        if not (worse <= 0 or np.exp(-worse / temperature) > _roll(dice)):
            go_back(release, hold, trail, count)
            continue
        scores[0], scores[1] = seconds, area
        if peak <= budget and seconds < scores[3] * fewer:
            scores[3] = seconds
            for gap in range(len(release)):
                fewest[0][gap], fewest[1][gap] = release[gap], hold[gap]
    return work


@compiled_uncounted
def _roll(dice: LongArray) -> float:
    """Return a random number in [0, 1), by Knuth's linear congruential generator; overflow wraps around."""
    dice[0] = dice[0] * 6364136223846793005 + 1442695040888963407
    return float((dice[0] >> 33) & 0x7FFFFFFF) / 2147483648.0


@compiled_uncounted
def _change(
    tables: Tables, release: LongArray, hold: LongArray, places: Places, dice: LongArray, trail: Trail, count: int
) -> int:
    """Give a random gap a new decision, and return the number of entries on the trail."""
    gaps = places.focus if _roll(dice) < _IN_FOCUS else places.free
    gap = gaps[int(_roll(dice) * len(gaps))]
    steps, begin, end = len(tables.workspace), places.begin[gap], places.end[gap]
    if end == begin + 1:
        return set_gap(release, hold, gap, 0 if release[gap] > 0 else steps, 0, trail, count)
    at = places.stop[begin + 1 + int(_roll(dice) * (min(end, steps) - begin - 1))]
    kind = _roll(dice)
    if kind < _KEEP:
        return set_gap(release, hold, gap, steps, 0, trail, count)
    if kind < _DROP or (kind < _BRING and at >= end):
        at, count = end, set_gap(release, hold, gap, 0, 0, trail, count)
    elif kind < _BRING:
        earlier = release[gap] if release[gap] < at else 0
        count = set_gap(release, hold, gap, earlier, bring_at(at, steps), trail, count)
    elif kind < _RELEASE:
        return set_gap(release, hold, gap, at, hold[gap], trail, count)
    else:
        at, count = end, set_gap(release, hold, gap, 0, steps, trail, count)
    if at < steps and _roll(dice) < _FOLLOW:
        count = _follow(tables, release, hold, gap, at, places, dice, trail, count)
    return count


@compiled_uncounted
def _follow(
    tables: Tables,
    release: LongArray,
    hold: LongArray,
    gap: int,
    at: int,
    places: Places,
    dice: LongArray,
    trail: Trail,
    count: int,
) -> int:
    """Keep or drop, behind its last read, what the rerun of `gap` at step `at` reads; go on so with what is dropped.

    Returns the number of entries on the trail.
    """
    steps, next_one = len(tables.workspace), count
    op = tables.producer[tables.gap_buffer[gap]]
    while True:
        for row in range(tables.read_start[op], tables.read_start[op + 1]):
            buffer = tables.read[row]
            final = tables.gap_start[buffer + 1] - 1
            if places.begin[final] >= at or not tables.droppable[buffer] or count + 2 >= len(trail.gap):
                continue
            roll = _roll(dice)
            if roll < _KEEP_INPUT:
                count = set_gap(release, hold, final, steps, hold[final], trail, count)
            elif roll < _DROP_INPUT:
                count = set_gap(release, hold, final, 0, 0, trail, count)
        while next_one < count and release[trail.gap[next_one]] > 0:
            next_one += 1
        if next_one == count:
            return count
        op = tables.producer[tables.gap_buffer[trail.gap[next_one]]]
        next_one += 1

"""What every algorithm here works on: states, moves on one gap, and a count of the work.

A move sets `release` and `hold` of a gap, sometimes of other gaps with it. One compiled loop tries many moves, each by
a simulation of the whole schedule. Unlike an estimate, a simulation sees chains of reruns, in-place reuse and ties. It
takes about twenty nanoseconds per run of an operator.
"""

import copy
from dataclasses import dataclass, field

import numpy as np

from roamc.solvers.arrays import BoolArray, LongArray
from roamc.solvers.compiled import compiled_uncounted
from roamc.solvers.retain.effort import EFFORT, Effort
from roamc.solvers.retain.problem import RetainProblem
from roamc.solvers.retain.simulate import Room, Score, evaluate, make_room, measure, simulate, simulate_and_measure
from roamc.solvers.retain.tables import Gaps, Tables, make_gaps, make_tables

_LOOK_AHEAD = 16
"""The moves to keep more for which one schedule says whether they are hopeful. With more, more are looked at in vain
where a move is made; with fewer, the schedule is simulated more often."""


@dataclass(frozen=True, eq=False)
class State:
    """Decisions for all gaps, and what they cost.

    release, hold: int64[gaps], two steps for each gap (the time between two reads of a buffer). In front of step
        `release` the buffer is kept; a rerun from step `hold` on is kept until the next read. `simulate.py` has all
        cases.
    score: cost of the schedule when it was simulated; later changes of the arrays do not change it.
    """

    release: LongArray
    hold: LongArray
    score: Score

    def copy(self) -> "State":
        """Return the same state with its own copies of the arrays."""
        return State(self.release.copy(), self.hold.copy(), self.score)


@dataclass(eq=False)
class Search:
    """What a search in one problem works on: tables, room to simulate in, the work done, the lowest state so far.

    `Search(problem, effort)` makes the other fields, and simulates the schedule without drops once.

    problem, effort: the problem, and the limits and thresholds of all searches in it.
    tables, gaps: the problem as arrays, and its gaps.
    room: arrays that hold the schedule simulated last; the next simulation overwrites them.
    work: operators that simulations have run so far, and what callers add; limits of work are values of this count.
    lowest: the state with the lowest peak of those given to `note`, at first that of `keep_everything`.
    """

    problem: RetainProblem
    effort: Effort = EFFORT
    tables: Tables = field(init=False)
    gaps: Gaps = field(init=False)
    room: Room = field(init=False)
    work: int = 0
    lowest: State = field(init=False)

    def __post_init__(self) -> None:
        self.tables = make_tables(self.problem)
        self.gaps = make_gaps(self.problem)
        self.room = make_room(self.tables, self.effort.room_runs * self.problem.num_ops + self.effort.room_spare)
        self.lowest = self.keep_everything()

    def anew(self) -> "Search":
        """Return a new search in the same problem: `lowest` is `keep_everything`, `work` its one simulation.

        The two searches share tables and room, so a simulation in either overwrites the schedule of the other.
        """
        fresh = copy.copy(self)
        fresh.work = 0
        fresh.lowest = fresh.keep_everything()
        return fresh

    @property
    def steps(self) -> int:
        """Number of steps of the reference order."""
        return self.problem.num_ops

    def state(self, release: LongArray, hold: LongArray, budget: int) -> State:
        """Simulate decisions, and return them with their score.

        The arrays are taken over, not copied. If the seconds are finite, the room then holds the schedule; its runs are
        added to `work`.

        release, hold: int64[gaps].
        budget: bytes; the area of the score counts what is above.
        """
        state = State(release, hold, evaluate(self.tables, release, hold, budget, self.room))
        self.work += state.score.runs
        return state

    def note(self, state: State) -> State:
        """Make a copy of `state` the new `lowest` if its peak is lower than that of `lowest`; return `state` itself."""
        if state.score.peak < self.lowest.score.peak:
            self.lowest = state.copy()
        return state

    def keep_everything(self) -> State:
        """Simulate and return the state that drops nothing between two reads, so that nothing runs again.

        Behind its last read a buffer with a choice (`Gaps.free`) is not kept for reruns. The area of the score is for a
        budget of 0. `work` grows, and the room holds the schedule.
        """
        release = np.full(len(self.gaps.begin), self.steps, dtype=np.int64)
        release[self.gaps.last & self.gaps.free] = 0
        return self.state(release, np.zeros_like(release), 0)


@compiled_uncounted
def keep_more(
    tables: Tables,
    release: LongArray,
    hold: LongArray,
    moves: tuple[LongArray, LongArray, LongArray, LongArray, LongArray],
    hopeful: BoolArray,
    budget: int,
    room: Room,
    seconds: float,
) -> tuple[float, int]:
    """Try the given moves in turn, and make each that lowers the seconds and leaves the peak within the budget.

    tables: the problem.
    release, hold: int64[gaps], the decisions as in `State`, changed in place.
    moves: int64[moves] each: for each move its gap, the steps at which that begins and ends, and its new decision: one
        that keeps the buffer all through the gap, or from its first rerun there.
    hopeful: bool[moves], overwritten.
    budget: bytes.
    room: holds the schedule of the decisions; ends with that of the last move tried, also if that was not made.
    seconds: seconds that the reruns of the given decisions add.

    Returns (seconds, work): seconds of the final decisions, and the runs that were simulated. Moves that surely exceed
    the budget count as much as others, but are not simulated.
    """
    gap, _, _, new_release, new_hold = moves
    work, runs, is_current = 0, room.runs[0], True
    judged = tables.waiting == 0  # and nothing is brought back
    for each in range(len(hold)):
        judged = judged and hold[each] <= len(tables.workspace)
    looked_at = 0 if judged else len(gap)
    hopeful[:] = True
    for move in range(len(gap)):
        at = gap[move]
        if move >= looked_at:
            if not is_current:
                simulate_and_measure(tables, release, hold, budget, room)
            looked_at, is_current = min(move + _LOOK_AHEAD, len(gap)), True
            _mark_hopeful(tables, moves, move, looked_at, hopeful, budget, room)
        work += runs
        if not hopeful[move]:
            continue
        old_release, old_hold = release[at], hold[at]
        release[at], hold[at] = new_release[move], new_hold[move]
        new_runs, new_seconds = simulate(tables, release, hold, room)
        is_current = new_seconds < seconds and measure(tables, new_runs, room) <= budget
        if is_current:
            seconds, runs = new_seconds, new_runs
            if judged:
                _mark_hopeful(tables, moves, move + 1, looked_at, hopeful, budget, room)
        else:
            release[at], hold[at] = old_release, old_hold
    return seconds, work


@compiled_uncounted
def _mark_hopeful(
    tables: Tables,
    moves: tuple[LongArray, LongArray, LongArray, LongArray, LongArray],
    first: int,
    behind: int,
    hopeful: BoolArray,
    budget: int,
    room: Room,
) -> None:
    """Fill `hopeful` for the moves from `first` up to `behind`: False where the buffer surely has no room.

    Call it where no buffers are brought back and no micro-batches wait. The room must hold the schedule. Where a buffer
    is kept all through a gap, its reruns there do not run, and what they read need not wait for them; whatever else
    changes comes later, or needs more bytes. So until the first of these reruns there are the buffer's bytes more than
    now, and at most the bytes less of what waits for such reruns.
    """
    gap, begin, end, release, _ = moves
    for move in range(first, behind):
        whole = release[move] == len(tables.workspace)
        hopeful[move] = not whole or _may_have_room(tables, gap[move], begin[move], end[move], budget, room)


@compiled_uncounted
def _may_have_room(tables: Tables, gap: int, begin: int, end: int, budget: int, room: Room) -> bool:
    """Return False where a buffer surely has no room to be kept through a gap, see `_mark_hopeful`.

    begin, end: the steps at which the gap begins and ends.
    room: its `live` is changed and set back.
    """
    buffer, runs = tables.gap_buffer[gap], room.runs[0]
    first = int(np.searchsorted(room.step[:runs], begin, "right"))
    last = int(np.searchsorted(room.step[:runs], end, "right")) - 1
    rerun = _add_waiting(tables, buffer, first, last, -1, room)
    away, most = first, 0
    for version in range(room.first_made[first]):
        if room.buffer[version] == buffer:
            away = max(away, room.last[version] + 1)  # what took over its bytes may take others'
    for run in range(away, rerun):
        most = max(most, room.live[run])
    _add_waiting(tables, buffer, first, last, 1, room)
    return bool(most + tables.size[buffer] <= budget)


@compiled_uncounted
def _add_waiting(tables: Tables, buffer: int, first: int, last: int, sign: int, room: Room) -> int:
    """Add to `room.live`, times `sign`, the bytes of what waits for steps that rebuild `buffer`.

    That is what reruns in front of such a step read for the last time; there it counts from run `first` on.
    first, last: the runs between which such steps are looked for.

    Returns the first rerun in front of the first such step whose new version is read, 0 if there is none.
    """
    earliest = 0
    for version in range(room.first_made[first], room.first_made[last]):
        if room.buffer[version] != buffer or not room.again[version]:
            continue
        rerun = room.born[version]
        step = room.step[rerun]
        while rerun > first and room.step[rerun - 1] == step:
            rerun -= 1
        if earliest == 0 and room.last[version] > room.born[version]:
            earliest = rerun
        while room.op[rerun] != step:
            for row in range(room.first_read[rerun], room.first_read[rerun + 1]):
                read = room.seen[row]
                if room.step[room.last[read]] == step and room.op[room.last[read]] != step:
                    for run in range(max(first, room.born[read]), room.dead[read]):
                        room.live[run] += sign * tables.size[room.buffer[read]]
            rerun += 1
    return earliest

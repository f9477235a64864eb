"""What every algorithm here works on: states, moves on one gap, and a count of the work.

A move sets `release` and `hold` of a gap, sometimes of other gaps with it. One compiled loop tries many moves, each by
a simulation of the whole schedule. Unlike an estimate, a simulation sees chains of reruns, in-place reuse and ties. It
takes about twenty nanoseconds per run of an operator.
"""

import copy
from dataclasses import dataclass, field

import numpy as np

from roamc.solvers.arrays import LongArray
from roamc.solvers.compiled import compiled_uncounted
from roamc.solvers.retain.effort import EFFORT, Effort
from roamc.solvers.retain.problem import RetainProblem
from roamc.solvers.retain.simulate import Room, Score, evaluate, make_room, simulate_and_measure
from roamc.solvers.retain.tables import Gaps, Tables, make_gaps, make_tables


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
    gap: LongArray,
    new_release: LongArray,
    new_hold: LongArray,
    budget: int,
    room: Room,
    seconds: float,
) -> tuple[float, int]:
    """Try the given moves in turn, and make each that lowers the seconds and leaves the peak within the budget.

    tables: the problem.
    release, hold: int64[gaps], the decisions as in `State`, changed in place.
    gap, new_release, new_hold: int64[moves], for each move the gap and its new decision.
    budget: bytes.
    room: ends with the schedule of the last move tried, also if that was not made.
    seconds: seconds that the reruns of the given decisions add.

    Returns (seconds, work): seconds of the final decisions, and the runs that were simulated.
    """
    work = 0
    for move in range(len(gap)):
        at = gap[move]
        old_release, old_hold = release[at], hold[at]
        release[at], hold[at] = new_release[move], new_hold[move]
        new_seconds, peak, _, runs = simulate_and_measure(tables, release, hold, budget, room)
        work += runs
        if peak <= budget and new_seconds < seconds:
            seconds = new_seconds
        else:
            release[at], hold[at] = old_release, old_hold
    return seconds, work

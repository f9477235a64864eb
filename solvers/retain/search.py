"""What every algorithm here works on: a state, moves on one gap, and a count of the work.

A move sets `release` and `hold` of a gap, sometimes of others with it. Many are tried in one compiled loop, each by a
whole simulation: it sees chains, in-place reuse and ties, which estimates do not, and takes about twenty nanoseconds
per run.
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
    """Decisions for all gaps, and what they cost. release, hold: int64[gaps]; see `simulate.py`."""

    release: LongArray
    hold: LongArray
    score: Score

    def copy(self) -> "State":
        """The same decisions in arrays of their own."""
        return State(self.release.copy(), self.hold.copy(), self.score)


@dataclass(eq=False)
class Search:
    """One problem, laid out for simulation, what may be spent on it, the work done, and the lowest peak seen."""

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
        """A search in the same tables and the same room, before which nothing was seen."""
        fresh = copy.copy(self)
        fresh.work = 0
        fresh.lowest = fresh.keep_everything()
        return fresh

    @property
    def steps(self) -> int:
        """Number of steps of the reference order."""
        return self.problem.num_ops

    def state(self, release: LongArray, hold: LongArray, budget: int) -> State:
        """Simulate: the room then holds the schedule of these decisions."""
        made = State(release, hold, evaluate(self.tables, release, hold, budget, self.room))
        self.work += made.score.runs
        return made

    def note(self, state: State) -> State:
        """Remember the state if no other had so low a peak."""
        if state.score.peak < self.lowest.score.peak:
            self.lowest = state.copy()
        return state

    def keep_everything(self) -> State:
        """Nothing is dropped between two reads; behind the last read a rerun that needs a buffer rebuilds it."""
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
    """Make each move in turn that stays within the budget and takes fewer seconds: (seconds, work)."""
    work = 0
    for move in range(len(gap)):
        at = gap[move]
        old_release, old_hold = release[at], hold[at]
        release[at], hold[at] = new_release[move], new_hold[move]
        now, peak, _, runs = simulate_and_measure(tables, release, hold, budget, room)
        work += runs
        if peak <= budget and now < seconds:
            seconds = now
        else:
            release[at], hold[at] = old_release, old_hold
    return seconds, work

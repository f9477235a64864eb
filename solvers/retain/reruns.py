"""Between the schedule of a walk and the list of reruns that a solution holds."""

import numpy as np

from roamc.solvers.arrays import LongArray
from roamc.solvers.retain.problem import Rerun, RetainProblem
from roamc.solvers.retain.tables import Gaps, Tables
from roamc.solvers.retain.walk import Room


def list_reruns(problem: RetainProblem, runs: int, room: Room) -> tuple[Rerun, ...]:
    """The reruns of the walk in the room; a result is renewed if somebody reads it."""
    found = []
    for run in range(runs):
        op, step = int(room.op[run]), int(room.step[run])
        versions = range(room.first_made[run], room.first_made[run + 1])
        if op != step:
            renews = tuple(sorted(int(room.buffer[v]) for v in versions if room.last[v] > run))
            found.append(Rerun(step, int(problem.sequence[op]), renews))
    return tuple(found)


def decisions(reruns: tuple[Rerun, ...], gaps: Gaps, tables: Tables) -> tuple[LongArray, LongArray]:
    """(release, hold) whose walk makes about these reruns: dropped at the first in a gap, held from the last."""
    steps = len(tables.scratch)
    release = np.full(len(gaps.begin), steps, dtype=np.int64)
    hold = np.zeros(len(gaps.begin), dtype=np.int64)
    release[gaps.last & gaps.free] = 0
    for rerun in reruns:
        for buffer in rerun.renews:
            rows = slice(int(tables.gap_start[buffer]), int(tables.gap_start[buffer + 1]))
            gap = rows.start + int(np.searchsorted(gaps.end[rows], rerun.before))
            gap = min(gap, rows.stop - 1)
            if tables.droppable[buffer]:
                release[gap] = min(int(release[gap]), rerun.before) if hold[gap] else rerun.before
                hold[gap] = rerun.before
    return release, hold

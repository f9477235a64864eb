"""Between a simulated schedule and the list of reruns that a solution holds."""

import numpy as np

from roamc.solvers.arrays import LongArray
from roamc.solvers.order.problem import BufferIndex, Step
from roamc.solvers.retain.problem import Rerun, RetainProblem
from roamc.solvers.retain.simulate import Room, bring_at
from roamc.solvers.retain.tables import Gaps, Tables


def list_reruns(problem: RetainProblem, runs: int, room: Room) -> tuple[Rerun, ...]:
    """Return the reruns of the schedule in the room, as `RetainSolution` holds them; a rerun renews what is read later.

    runs: number of runs of the schedule, originals included, as in its `Score`.
    room: the arrays of a search (`Search.room`); they hold the schedule, because it was simulated last.
    """
    reruns = []
    for run in range(runs):
        op, step = int(room.op[run]), int(room.step[run])
        versions = range(room.first_made[run], room.first_made[run + 1])
        if op != step:
            renews = tuple(sorted(int(room.buffer[v]) for v in versions if room.last[v] > run))
            reruns.append(Rerun(step, int(problem.sequence[op]), renews))
    return tuple(reruns)


def decisions(
    problem: RetainProblem, reruns: tuple[Rerun, ...], gaps: Gaps, tables: Tables
) -> tuple[LongArray, LongArray]:
    """Return decisions (release, hold), int64[gaps] each, as in `State`, whose simulation makes about these reruns.

    In a gap in which reruns renew the buffer, `release` is the step of the first of them and `hold` that of the last,
    which brings the buffer back (`bring_at`) if nothing at its step reads it. A buffer that reruns read behind its last
    original read is kept for them, if none of them renews it there.

    reruns: those of a solution of `problem`.
    gaps, tables: made from the same problem.
    """
    steps = len(tables.workspace)
    release = np.full(len(gaps.begin), steps, dtype=np.int64)
    hold = np.zeros(len(gaps.begin), dtype=np.int64)
    release[gaps.last & gaps.free] = 0
    read = _read_at(problem, reruns, tables)
    for step, buffers in read.items():
        for buffer in buffers:
            if tables.last_read[buffer] < step:
                release[_gap_at(buffer, step, gaps, tables)] = steps
    for rerun in reruns:
        for buffer in rerun.renews:
            gap = _gap_at(buffer, rerun.before, gaps, tables)
            if tables.droppable[buffer]:
                release[gap] = min(int(release[gap]), rerun.before) if hold[gap] else rerun.before
                brings = buffer not in read[rerun.before]
                hold[gap] = bring_at(rerun.before, steps) if brings else rerun.before
    return release, hold


def _read_at(problem: RetainProblem, reruns: tuple[Rerun, ...], tables: Tables) -> dict[Step, set[BufferIndex]]:
    """Return, for each step with reruns in front of it, the buffers that the step and these reruns read."""
    step_of = {op: step for step, op in enumerate(problem.sequence.tolist())}
    read_at: dict[Step, set[BufferIndex]] = {}
    for rerun in reruns:
        for step in (rerun.before, step_of[rerun.operator]):
            row = tables.read[tables.read_start[step] : tables.read_start[step + 1]]
            read_at.setdefault(rerun.before, set()).update(row.tolist())
    return read_at


def _gap_at(buffer: BufferIndex, step: Step, gaps: Gaps, tables: Tables) -> int:
    """Return the gap of the buffer in which a rerun in front of the step lies."""
    rows = slice(int(tables.gap_start[buffer]), int(tables.gap_start[buffer + 1]))
    return min(rows.start + int(np.searchsorted(gaps.end[rows], step)), rows.stop - 1)

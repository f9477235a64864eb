"""The judge of layouts: compares every pair of storages, and shares no code with any algorithm. O(n^2)."""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from roamc.solvers.layout.problem import Bytes, LayoutProblem, LayoutSolution
from roamc.solvers.status import Status


class LayoutVerdict(Enum):
    """What the judge found; the first fault in this sequence is the one reported."""

    GOOD = "good"
    WRONG_LENGTH = "wrong number of offsets"
    NEGATIVE_OFFSET = "negative offset"
    MISALIGNED = "misaligned offset"
    OUT_OF_ARENA = "storage reaches above the arena"
    OVERLAP = "two live storages overlap"
    WRONG_ARENA = "arena larger than its contents"
    WRONG_BOUND = "bound is not the peak of live bytes"
    CANDIDATE_BELOW_ARENA = "a candidate is better than the solution"
    WRONG_STATUS = "wrong status"


@dataclass(frozen=True)
class LayoutReport:
    """A verdict, the numbers it is about (for OVERLAP the two storages), and one line for people."""

    verdict: LayoutVerdict
    items: tuple[int, ...] = ()
    detail: str = ""

    @property
    def good(self) -> bool:
        """True if nothing is wrong."""
        return self.verdict is LayoutVerdict.GOOD


def validate(problem: LayoutProblem, solution: LayoutSolution) -> LayoutReport:
    """Judge a solution. Never raises for a bad one: the verdict names the first fault and where it is."""
    if len(solution.offset) != len(problem.size):
        detail = f"{len(solution.offset)} offsets for {len(problem.size)} storages"
        return LayoutReport(LayoutVerdict.WRONG_LENGTH, (len(solution.offset), len(problem.size)), detail)
    return (
        _offset_fault(problem, solution)
        or _overlap_fault(problem, solution)
        or _claim_fault(problem, solution)
        or LayoutReport(LayoutVerdict.GOOD)
    )


def _round_up(num_bytes: Bytes, alignment: Bytes) -> Bytes:
    return (num_bytes + alignment - 1) // alignment * alignment


def _offset_fault(problem: LayoutProblem, solution: LayoutSolution) -> LayoutReport | None:
    pairs = zip(solution.offset.tolist(), problem.size.tolist(), strict=True)
    for storage, (offset, size) in enumerate(pairs):
        if offset < 0:
            detail = f"storage {storage} at {offset}"
            return LayoutReport(LayoutVerdict.NEGATIVE_OFFSET, (storage,), detail)
        if offset % problem.alignment != 0:
            detail = f"storage {storage} at {offset}, alignment {problem.alignment}"
            return LayoutReport(LayoutVerdict.MISALIGNED, (storage,), detail)
        if size > 0 and offset + size > solution.arena_bytes:
            detail = f"storage {storage} ends at {offset + size} of {solution.arena_bytes}"
            return LayoutReport(LayoutVerdict.OUT_OF_ARENA, (storage,), detail)
    return None


def _overlap_fault(problem: LayoutProblem, solution: LayoutSolution) -> LayoutReport | None:
    """Row by row: storage i against every later one, in time and in space."""
    born, dead, size = problem.born, problem.dead, problem.size
    low = solution.offset
    high = solution.offset + problem.size
    for i in range(len(size)):
        if size[i] == 0:
            continue
        same_time = (born[i + 1 :] < dead[i]) & (born[i] < dead[i + 1 :])
        same_space = (low[i + 1 :] < high[i]) & (low[i] < high[i + 1 :])
        clash = same_time & same_space & (size[i + 1 :] > 0)
        if clash.any():
            j = i + 1 + int(np.flatnonzero(clash)[0])
            detail = f"storages {i} and {j} at bytes {low[i]}:{high[i]} and {low[j]}:{high[j]}"
            return LayoutReport(LayoutVerdict.OVERLAP, (i, j), detail)
    return None


def _recount_bound(problem: LayoutProblem) -> Bytes:
    """Walk through births and deaths in time, deaths first, and remember the most padded bytes."""
    events: list[tuple[int, int, Bytes]] = []
    rows = zip(problem.size.tolist(), problem.born.tolist(), problem.dead.tolist(), strict=True)
    for size, born, dead in rows:
        room = _round_up(size, problem.alignment)
        events.append((born, 1, room))
        events.append((dead, 0, -room))
    live = 0
    peak = 0
    for _, _, change in sorted(events):
        live += change
        peak = max(peak, live)
    return peak


def _claim_fault(problem: LayoutProblem, solution: LayoutSolution) -> LayoutReport | None:
    arena, bound = solution.arena_bytes, solution.bound_bytes
    height = 0
    for offset, size in zip(solution.offset.tolist(), problem.size.tolist(), strict=True):
        if size > 0:
            height = max(height, offset + _round_up(size, problem.alignment))
    if arena != height:
        return LayoutReport(LayoutVerdict.WRONG_ARENA, (arena, height), f"arena {arena}, contents {height}")
    peak = _recount_bound(problem)
    if bound != peak:
        return LayoutReport(LayoutVerdict.WRONG_BOUND, (bound, peak), f"bound {bound}, live peak {peak}")
    for name, candidate in solution.candidates:
        if candidate < arena:
            detail = f"candidate {name} has {candidate} bytes, the solution {arena}"
            return LayoutReport(LayoutVerdict.CANDIDATE_BELOW_ARENA, (candidate, arena), detail)
    closed_but_not_said = arena == bound and solution.status is not Status.OPTIMAL
    if closed_but_not_said or solution.status is Status.INFEASIBLE:
        detail = f"status {solution.status.value} with bound {bound} and arena {arena}"
        return LayoutReport(LayoutVerdict.WRONG_STATUS, (bound, arena), detail)
    return None

"""The judge of layouts: looks at every storage and every step, and shares no code with any algorithm."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from enum import Enum

from roamc.solvers.layout.problem import Bytes, LayoutProblem, LayoutSolution, Step, StorageIndex
from roamc.solvers.status import Status


class LayoutVerdict(Enum):
    """The verdict on a layout: GOOD, or the first fault in the sequence of the members; each value says it in words."""

    GOOD = "good"
    WRONG_LENGTH = "wrong number of offsets"
    NEGATIVE_OFFSET = "negative offset"
    MISALIGNED = "misaligned offset"
    MOVED = "fixed storage is not in its place"
    OUT_OF_ARENA = "storage reaches above the arena"
    OVERLAP = "two live storages overlap"
    WRONG_ARENA = "arena larger than its contents"
    WRONG_BOUND = "bound is not the peak of live bytes"
    CANDIDATE_BELOW_ARENA = "a candidate is better than the solution"
    WRONG_STATUS = "wrong status"


@dataclass(frozen=True)
class LayoutReport:
    """The judgement of a layout.

    verdict: GOOD, or the first fault.
    items: the numbers of the storages at fault, or the claimed and the counted value; empty if GOOD.
    detail: the fault in one line of text; empty if GOOD.
    """

    verdict: LayoutVerdict
    items: tuple[int, ...] = ()
    detail: str = ""

    @property
    def good(self) -> bool:
        """True if nothing is wrong."""
        return self.verdict is LayoutVerdict.GOOD


def validate(problem: LayoutProblem, solution: LayoutSolution) -> LayoutReport:
    """Judge a solution of `problem` by counting everything again; a bad solution raises nothing.

    The report names the first fault and its place.
    """
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
    rows = zip(
        solution.offset.tolist(),
        problem.size.tolist(),
        problem.own_alignment.tolist(),
        problem.fixed.tolist(),
        strict=True,
    )
    for storage, (offset, size, alignment, fixed) in enumerate(rows):
        if offset < 0:
            detail = f"storage {storage} at {offset}"
            return LayoutReport(LayoutVerdict.NEGATIVE_OFFSET, (storage,), detail)
        if offset % alignment != 0:
            detail = f"storage {storage} at {offset}, alignment {alignment}"
            return LayoutReport(LayoutVerdict.MISALIGNED, (storage,), detail)
        if fixed >= 0 and offset != fixed:
            detail = f"storage {storage} at {offset}, fixed at {fixed}"
            return LayoutReport(LayoutVerdict.MOVED, (storage,), detail)
        if size > 0 and offset + size > solution.arena_bytes:
            detail = f"storage {storage} ends at {offset + size} of {solution.arena_bytes}"
            return LayoutReport(LayoutVerdict.OUT_OF_ARENA, (storage,), detail)
    return None


def _uses(problem: LayoutProblem, room: list[Bytes]) -> list[tuple[Step, Step, Bytes, Bytes, StorageIndex]]:
    """Which bytes of itself each storage uses from which step to which, `room` bytes outside of its gaps."""
    gaps: dict[StorageIndex, list[tuple[Step, Step, Bytes, Bytes]]] = {}
    for gap in problem.gaps:
        gaps.setdefault(gap.storage, []).append((gap.born, gap.dead, gap.low, gap.high))
    uses = []
    for storage, (born, dead) in enumerate(zip(problem.born.tolist(), problem.dead.tolist(), strict=True)):
        step = born
        for first, end, low, high in sorted(gaps.get(storage, [])):
            uses.append((step, first, 0, room[storage], storage))
            uses.append((first, end, low, high, storage))
            step = end
        uses.append((step, dead, 0, room[storage], storage))
    return [use for use in uses if use[0] < use[1] and use[2] < use[3]]


def _overlap_fault(problem: LayoutProblem, solution: LayoutSolution) -> LayoutReport | None:
    """Walk through time, deaths first, with what is live sorted by its bytes; neighbours must not overlap."""
    events: list[tuple[Step, int, Bytes, Bytes, StorageIndex]] = []
    offset = solution.offset.tolist()
    for born, dead, low, high, storage in _uses(problem, problem.size.tolist()):
        events.append((born, 1, offset[storage] + low, offset[storage] + high, storage))
        events.append((dead, 0, offset[storage] + low, offset[storage] + high, storage))
    live: list[tuple[Bytes, Bytes, StorageIndex]] = []
    for _, birth, low, high, storage in sorted(events):
        if not birth:
            del live[bisect_left(live, (low, high, storage))]
            continue
        insort(live, (low, high, storage))
        place = bisect_left(live, (low, high, storage))
        for below, above in ((place - 1, place), (place, place + 1)):
            if below >= 0 and above < len(live) and live[below][1] > live[above][0]:
                i, j = sorted((live[below][2], live[above][2]))
                where = {at[2]: f"{at[0]}:{at[1]}" for at in (live[below], live[above])}
                detail = f"storages {i} and {j} at bytes {where[i]} and {where[j]}"
                return LayoutReport(LayoutVerdict.OVERLAP, (i, j), detail)
    return None


def _recount_bound(problem: LayoutProblem) -> Bytes:
    """Walk through births and deaths in time, deaths first, and remember the most padded bytes; see what is fixed."""
    events: list[tuple[Step, int, Bytes]] = []
    room = [_round_up(size, problem.alignment) for size in problem.size.tolist()]
    for born, dead, low, high, _ in _uses(problem, room):
        events.append((born, 1, high - low))
        events.append((dead, 0, low - high))
    live = 0
    peak = 0
    for _, _, change in sorted(events):
        live += change
        peak = max(peak, live)
    for fixed, size in zip(problem.fixed.tolist(), room, strict=True):
        if fixed >= 0 and size > 0:
            peak = max(peak, fixed + size)
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
    return _status_fault(solution)


def _status_fault(solution: LayoutSolution) -> LayoutReport | None:
    arena, bound, capacity = solution.arena_bytes, solution.bound_bytes, solution.capacity
    above = capacity is not None and arena > capacity
    hopeless = capacity is not None and bound > capacity
    wrong = {
        Status.OPTIMAL: above and hopeless,
        Status.GAP: arena == bound or hopeless,
        Status.LIMIT: arena == bound or (capacity is not None and not above) or hopeless,
        Status.INFEASIBLE: not above,
    }
    if not wrong[solution.status]:
        return None
    detail = f"status {solution.status.value} with bound {bound}, arena {arena} and capacity {capacity}"
    return LayoutReport(LayoutVerdict.WRONG_STATUS, (bound, arena), detail)

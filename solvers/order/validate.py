"""The judge of orders: counts everything again, in plain loops, and shares no code with any algorithm.

O(n + m + reads + reusable). It judges what can be judged from problem and solution alone; that `bound_bytes` is a true
lower bound it cannot see, only that the bound does not contradict the peak.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from roamc.solvers.order.problem import Bytes, OrderProblem, OrderSolution
from roamc.solvers.status import Status


class OrderVerdict(Enum):
    """The verdict on a solution: GOOD, or the first fault in the sequence of the members; each value names it."""

    GOOD = "good"
    NOT_A_PERMUTATION = "not a permutation"
    EDGE_BROKEN = "edge broken"
    DATA_BROKEN = "buffer read before it is produced"
    STAGE_BROKEN = "stage broken"
    WRONG_REUSE = "wrong reuse"
    WRONG_PEAK = "wrong peak"
    BOUND_ABOVE_PEAK = "bound above peak"
    CANDIDATE_BELOW_PEAK = "a candidate is better than the solution"
    WRONG_STATUS = "wrong status"


@dataclass(frozen=True)
class OrderReport:
    """The judgement of a solution.

    verdict: GOOD, or the first fault.
    items: the numbers of the operators and buffers at fault, or the claimed and the counted value; `detail` says which
        is which. Empty if nothing is wrong.
    detail: one line for people; empty if nothing is wrong.
    """

    verdict: OrderVerdict
    items: tuple[int, ...] = ()
    detail: str = ""

    @property
    def good(self) -> bool:
        """True if nothing is wrong."""
        return self.verdict is OrderVerdict.GOOD


def validate(problem: OrderProblem, solution: OrderSolution) -> OrderReport:
    """Judge a solution of `problem` by counting everything again; a bad solution never raises.

    The report names the first fault. That `bound_bytes` is a true lower bound is not checked, only that it is no higher
    than the peak.
    """
    order = [int(op) for op in solution.order]
    fault = _permutation_fault(problem.num_ops, order)
    if fault is not None:
        return fault
    position = [0] * problem.num_ops
    for step, op in enumerate(order):
        position[op] = step
    fault = _dependency_fault(problem, position) or _stage_fault(problem, order)
    if fault is not None:
        return fault
    reuse = _recount_reuses(problem, position)
    fault = _reuse_fault(solution, reuse)
    if fault is not None:
        return fault
    return _claim_fault(solution, _recount_peak(problem, order, position, reuse)) or OrderReport(OrderVerdict.GOOD)


def _permutation_fault(num_ops: int, order: Sequence[int]) -> OrderReport | None:
    if len(order) != num_ops:
        detail = f"{len(order)} steps for {num_ops} operators"
        return OrderReport(OrderVerdict.NOT_A_PERMUTATION, (len(order), num_ops), detail)
    seen = [False] * num_ops
    for op in order:
        if op < 0 or op >= num_ops or seen[op]:
            return OrderReport(OrderVerdict.NOT_A_PERMUTATION, (op,), f"op {op} is out of range or runs twice")
        seen[op] = True
    return None


def _dependency_fault(problem: OrderProblem, position: Sequence[int]) -> OrderReport | None:
    for before, after in problem.edges.tolist():
        if position[before] >= position[after]:
            detail = f"op {after} runs before op {before} against an edge"
            return OrderReport(OrderVerdict.EDGE_BROKEN, (before, after), detail)
    start = problem.consumer_start.tolist()
    consumer = problem.consumer.tolist()
    for buffer, producer in enumerate(problem.producer.tolist()):
        for reader in consumer[start[buffer] : start[buffer + 1]]:
            if position[producer] >= position[reader]:
                detail = f"op {reader} reads buffer {buffer} before op {producer} produces it"
                return OrderReport(OrderVerdict.DATA_BROKEN, (buffer, producer, reader), detail)
    return None


def _stage_fault(problem: OrderProblem, order: Sequence[int]) -> OrderReport | None:
    stage = problem.stage.tolist()
    for step in range(1, len(order)):
        earlier, later = order[step - 1], order[step]
        if stage[earlier] > stage[later]:
            detail = f"op {earlier} of stage {stage[earlier]} runs before op {later} of stage {stage[later]}"
            return OrderReport(OrderVerdict.STAGE_BROKEN, (earlier, later), detail)
    return None


def _recount_reuses(problem: OrderProblem, position: Sequence[int]) -> dict[int, int]:
    """Return result to reused buffer, for every result that takes over another's bytes by the rule in `problem.py`."""
    start = problem.consumer_start.tolist()
    consumer = problem.consumer.tolist()
    reusable_start = problem.reusable_start.tolist()
    reusable = problem.reusable.tolist()
    last = [max((position[op] for op in consumer[a:b]), default=-1) for a, b in itertools.pairwise(start)]
    reuse: dict[int, int] = {}
    taken_over: set[int] = set()
    for result, producer in enumerate(problem.producer.tolist()):
        for reused in reusable[reusable_start[result] : reusable_start[result + 1]]:
            if last[reused] == position[producer] and reused not in taken_over:
                reuse[result] = reused
                taken_over.add(reused)
                break
    return reuse


def _reuse_fault(solution: OrderSolution, reuse: dict[int, int]) -> OrderReport | None:
    for reused, result in solution.reuses:
        if reuse.get(result) != reused:
            detail = f"buffer {result} cannot take the bytes of buffer {reused} in this order"
            return OrderReport(OrderVerdict.WRONG_REUSE, (reused, result), detail)
    claimed = [result for _, result in solution.reuses]
    if claimed != sorted(reuse):
        odd = next((result for result in reuse if claimed.count(result) != 1), -1)
        detail = f"reuses are not listed once each, sorted by result; see buffer {odd}"
        return OrderReport(OrderVerdict.WRONG_REUSE, (odd,), detail)
    return None


def _recount_peak(problem: OrderProblem, order: Sequence[int], position: Sequence[int], reuse: dict[int, int]) -> Bytes:
    """Allocate results, sample live bytes, free dead buffers; a reused buffer is freed one step earlier."""
    reused = set(reuse.values())
    start = problem.consumer_start.tolist()
    consumer = problem.consumer.tolist()
    kept = problem.kept.tolist()
    born_bytes = [0] * len(order)
    dying_bytes = [0] * len(order)
    for buffer, (size, producer) in enumerate(zip(problem.size.tolist(), problem.producer.tolist(), strict=True)):
        born_bytes[position[producer]] += size
        if not kept[buffer]:
            last = position[producer]
            for reader in consumer[start[buffer] : start[buffer + 1]]:
                last = max(last, position[reader])
            dying_bytes[last - 1 if buffer in reused else last] += size
    workspace = problem.workspace.tolist()
    live = 0
    peak = 0
    for step, op in enumerate(order):
        live += born_bytes[step]
        peak = max(peak, live + workspace[op])
        live -= dying_bytes[step]
    return peak


def _claim_fault(solution: OrderSolution, peak: Bytes) -> OrderReport | None:
    bound = solution.bound_bytes
    if solution.peak_bytes != peak:
        detail = f"claims a peak of {solution.peak_bytes} bytes, counted {peak}"
        return OrderReport(OrderVerdict.WRONG_PEAK, (solution.peak_bytes, peak), detail)
    if bound > peak:
        return OrderReport(OrderVerdict.BOUND_ABOVE_PEAK, (bound, peak), f"bound {bound} above peak {peak}")
    for name, candidate in solution.candidates:
        if candidate < peak:
            detail = f"candidate {name} has {candidate} bytes, the solution {peak}"
            return OrderReport(OrderVerdict.CANDIDATE_BELOW_PEAK, (candidate, peak), detail)
    closed = bound == peak
    if closed != (solution.status is Status.OPTIMAL) or solution.status is Status.INFEASIBLE:
        detail = f"status {solution.status.value} with bound {bound} and peak {peak}"
        return OrderReport(OrderVerdict.WRONG_STATUS, (bound, peak), detail)
    return None

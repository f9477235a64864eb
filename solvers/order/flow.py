"""One greedy engine for both directions: a problem seen from one end, and the state of its schedule.

Read from its end, an order gives birth to a buffer at its last reader and buries it at its producer:

    forward     producer |======= live =======| last reader
    backward    last reader |===== live ======| producer        (a kept buffer is live from the start)
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roamc.solvers.arrays import Csr, IntArray, group_by
from roamc.solvers.order.problem import Bytes, OpIndex, OrderProblem, consumers, predecessors, successors
from roamc.solvers.order.ready_tree import ReadyTree

Preference = Callable[[Bytes, Bytes], tuple[Bytes, Bytes]]
"""(need, net) of an operator in bytes to the (need, rank) that decide: of what fits, the lowest rank."""


@dataclass(frozen=True)
class Flow:
    """An ordering problem seen from one end: which operators give birth to a buffer, and which can bury it.

    A buffer is born with the first of `starters` to run and dies with the last of `enders`; no starters: live
    from the start; no enders: never dies. `starts` and `ends` are the same seen from the operators.
    """

    stage: list[int]
    successors: list[list[OpIndex]]
    waits_for: list[int]
    starters: list[list[OpIndex]]
    enders: list[list[OpIndex]]
    starts: list[list[int]]
    ends: list[list[int]]
    size: list[Bytes]
    scratch: list[Bytes]


def forward_flow(problem: OrderProblem) -> Flow:
    """The problem as it stands."""
    producers = _single(problem.producer)
    enders = _unless(consumers(problem), problem.producer, problem.kept.tolist())
    return _flow(problem.stage, successors(problem), producers, enders, problem)


def backward_flow(problem: OrderProblem) -> Flow:
    """The problem with its arrows turned round, operator v renamed n - 1 - v so that they point upwards."""
    last = problem.num_ops - 1
    before = predecessors(problem)
    flipped = Csr(start=before.start, index=(last - before.index).astype(np.int32))
    turned = group_by(
        (last - np.repeat(np.arange(problem.num_ops), np.diff(before.start))).astype(np.int32),
        flipped.index,
        problem.num_ops,
    )
    producer = (last - problem.producer).astype(np.int32)
    readers = Csr(start=problem.consumer_start, index=(last - problem.consumer).astype(np.int32))
    starters = _unless(readers, producer, problem.kept.tolist())
    return _flow(-problem.stage[::-1], turned, starters, _single(producer), problem, flip=True)


def from_backward(order: IntArray) -> IntArray:
    """An order in the numbering of `backward_flow`, as an order of the problem: int32[n]."""
    return (len(order) - 1 - order)[::-1].astype(np.int32)


def _single(producer: IntArray) -> list[list[OpIndex]]:
    return [[op] for op in producer.tolist()]


def _unless(readers: Csr, producer: IntArray, kept: list[bool]) -> list[list[OpIndex]]:
    """The readers of each buffer; its producer if it has none; nobody if it is kept."""
    rows = zip(readers.lists(), producer.tolist(), kept, strict=True)
    return [[] if stays else (ops or [source]) for ops, source, stays in rows]


def _flow(
    stage: IntArray,
    after: Csr,
    starters: list[list[OpIndex]],
    enders: list[list[OpIndex]],
    problem: OrderProblem,
    flip: bool = False,
) -> Flow:
    num_ops = problem.num_ops
    return Flow(
        stage=stage.tolist(),
        successors=after.lists(),
        waits_for=np.bincount(after.index, minlength=num_ops).tolist(),
        starters=starters,
        enders=enders,
        starts=_invert(starters, num_ops),
        ends=_invert(enders, num_ops),
        size=problem.size.tolist(),
        scratch=(problem.scratch[::-1] if flip else problem.scratch).tolist(),
    )


def _invert(ops_of: list[list[OpIndex]], num_ops: int) -> list[list[int]]:
    buffers_of: list[list[int]] = [[] for _ in range(num_ops)]
    for buffer, ops in enumerate(ops_of):
        for op in ops:
            buffers_of[op].append(buffer)
    return buffers_of


def run_greedy(flow: Flow, floor_bytes: Bytes, preference: Preference) -> IntArray:
    """Run ready operators one by one, int32[n] in the numbering of `flow`.

    Of those whose preferred need fits under the highest peak so far (at the start: floor_bytes), the lowest
    rank; if none fits, the lowest need; ties to the lower operator. About O((n + reads) log n).
    """
    schedule = _Schedule(flow, preference)
    peak = floor_bytes
    live = sum(size for size, starters in zip(flow.size, flow.starters, strict=True) if not starters)
    order: list[OpIndex] = []
    for members in _by_stage(flow.stage):
        schedule.open(members)
        for _ in members:
            op = schedule.ready.best(peak - live)
            peak = max(peak, live + schedule.need[op])
            live += schedule.net[op]
            schedule.finish(op)
            order.append(op)
    return np.array(order, dtype=np.int32)


def _by_stage(stage: list[int]) -> list[list[OpIndex]]:
    groups: list[list[OpIndex]] = []
    for op, number in enumerate(stage):
        if op == 0 or number != stage[op - 1]:
            groups.append([])
        groups[-1].append(op)
    return groups


class _Schedule:
    """What changes while the greedy runs: who is ready, and what each operator would allocate and leave."""

    def __init__(self, flow: Flow, preference: Preference) -> None:
        self._flow = flow
        self._preference = preference
        self._waits_for = list(flow.waits_for)
        self._unborn = [bool(ops) for ops in flow.starters]
        self._enders_left = [len(ops) for ops in flow.enders]
        self._enders_sum = [sum(ops) for ops in flow.enders]
        self._is_open = [False] * len(flow.stage)
        self._is_done = [False] * len(flow.stage)
        self.net = [sum(flow.size[buffer] for buffer in buffers) for buffers in flow.starts]
        self.need = [net + scratch for net, scratch in zip(self.net, flow.scratch, strict=True)]
        for buffer, ops in enumerate(flow.enders):
            if len(ops) == 1:
                self.net[ops[0]] -= flow.size[buffer]
        self.ready = ReadyTree([preference(need, 0)[0] for need in self.need])

    def open(self, members: list[OpIndex]) -> None:
        """Let the operators of the next stage begin."""
        for op in members:
            self._is_open[op] = True
            self._offer(op)

    def finish(self, op: OpIndex) -> None:
        """`op` has run: births and deaths change what others would cost, and successors may become ready."""
        flow = self._flow
        self._is_done[op] = True
        self.ready.remove(op)
        touched: dict[OpIndex, None] = {}
        for buffer in flow.starts[op]:
            if self._unborn[buffer]:
                self._unborn[buffer] = False
                self._charge(buffer, flow.starters[buffer], touched)
        for buffer in flow.ends[op]:
            self._enders_left[buffer] -= 1
            self._enders_sum[buffer] -= op
            if self._enders_left[buffer] == 1:
                self.net[self._enders_sum[buffer]] -= flow.size[buffer]
                touched[self._enders_sum[buffer]] = None
        for successor in flow.successors[op]:
            self._waits_for[successor] -= 1
            touched[successor] = None
        for other in touched:
            self._offer(other)

    def _charge(self, buffer: int, starters: list[OpIndex], touched: dict[OpIndex, None]) -> None:
        """The buffer is live now: the other operators that would have given birth to it no longer do."""
        if len(starters) == 1:
            return
        size = self._flow.size[buffer]
        for op in starters:
            if not self._is_done[op]:
                self.need[op] -= size
                self.net[op] -= size
                touched[op] = None

    def _offer(self, op: OpIndex) -> None:
        if self._is_open[op] and self._waits_for[op] == 0 and not self._is_done[op]:
            self.ready.put(op, *self._preference(self.need[op], self.net[op]))

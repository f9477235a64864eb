"""Transfers that run beside other operators: where each begins and where the order waits for it.

A transfer, such as a collective, is two operators: one starts it, one waits for its end. It takes its seconds on its
channel, where transfers run one after the other, while the device runs what stands between start and wait. Seconds in
which the device waits are *exposed*:

    device    | a | start | b |      c      | wait ..... | d |        exposed: the dots
    channel             |=========================|

Two moves lower the exposed seconds, and are kept where the peak of live bytes stays within a limit:

    slide     the start to right behind the last operator that it waits for, the wait to right in front of the first
              that waits for it
    fill      independent operators from behind the wait, or from in front of the start, into the span

Hidden transfers are left as they are, so that buffers live no longer than they must.
"""

from dataclasses import dataclass

import numpy as np

from roamc.solvers.arrays import BoolArray, FloatArray, IntArray, LongArray
from roamc.solvers.compiled import compiled, interpreted_first
from roamc.solvers.order.problem import Bytes, OpIndex, OrderProblem, Step, predecessors, successors
from roamc.solvers.status import Status

Seconds = float

NEGLIGIBLE = 1e-9
"""Seconds of the device, as a share, that count as none when orders are compared."""


@dataclass(frozen=True, slots=True)
class OverlapEffort:
    """How much the search may do.

    Attributes:
        work_limit: operators looked at; a trial of a move looks at each operator once or twice.
        window: operators, from a span on, that may be moved into it. More hide more and take more trials.
        rounds: how often all spans are looked at; the search ends earlier where a round finds no move.
        halvings: how often a slide that would exceed the limit is tried again at half its length.
    """

    work_limit: int = 60_000_000
    window: int = 48
    rounds: int = 3
    halvings: int = 4


EFFORT = OverlapEffort()
"""What the search spends unless it is told otherwise."""


@dataclass(frozen=True, eq=False)
class OverlapProblem:
    """Operators with transfers; program order, to begin with, has the wait of each transfer right behind its start.

    operators: what must keep which order, and the buffers with their lives; n operators. The workspace of one that
        starts a transfer is there up to the wait, whose own workspace counts it already.
    seconds: float64[n], what each operator takes on the device; 0 for starts and waits.
    wait: int32[n], for an operator that starts a transfer the operator that waits for it; -1 for others.
    channel: int32[n], for an operator that starts a transfer the channel that it runs on, from 0; -1 for others.
    sent: float64[n], for an operator that starts a transfer the seconds that this takes on the channel; 0 for others.
    live_limit: no order may have more live bytes at a step, without workspaces.
    need_limit: the same with workspaces.
    """

    operators: OrderProblem
    seconds: FloatArray
    wait: IntArray
    channel: IntArray
    sent: FloatArray
    live_limit: Bytes
    need_limit: Bytes


@dataclass(frozen=True, eq=False)
class OverlapSolution:
    """An order and the seconds in which its device waits.

    order: int32[n]; order[t] is the operator at step t.
    exposed: seconds of transfers that no other operator hides.
    bound: no order, whatever its peak, exposes fewer seconds.
    status: OPTIMAL where the two meet, LIMIT if the work ran out, else GAP.
    live_bytes: most live bytes at a step, without workspaces; need_bytes with them.
    work: operators looked at.
    """

    order: IntArray
    exposed: Seconds
    bound: Seconds
    status: Status
    live_bytes: Bytes
    need_bytes: Bytes
    work: int


def overlap(problem: OverlapProblem, effort: OverlapEffort = EFFORT) -> OverlapSolution:
    """Search for an order within the limits that exposes few seconds, from program order on.

    Where program order itself is above a limit, it is returned.
    """
    return interpreted_first(problem.operators.num_ops, lambda: _Search(problem, effort).run())


def lower_bound(problem: OverlapProblem) -> Seconds:
    """Return seconds that any order exposes: those of the longest chain of operators and transfers, or of a channel.

    What the device has to do is taken off, since that hides transfers at best. Each stage counts for itself, as no
    transfer lasts from one into the next.
    """
    before = predecessors(problem.operators).lists()
    stage = problem.operators.stage
    longest = [0.0] * problem.operators.num_ops
    seconds, sent = problem.seconds.tolist(), problem.sent.tolist()
    starts = {wait: start for start, wait in enumerate(problem.wait.tolist()) if wait >= 0}
    for op, others in enumerate(before):
        begin = max((longest[other] for other in others if stage[other] == stage[op]), default=0.0)
        end = longest[starts[op]] + sent[starts[op]] if op in starts else 0.0
        longest[op] = max(begin + seconds[op], end)
    total = 0.0
    for number in np.unique(stage).tolist():
        mine = stage == number
        used = np.bincount(problem.channel[mine] + 1, problem.sent[mine])[1:]  # of each channel
        chain = max(longest[op] for op in np.flatnonzero(mine).tolist())
        total += max(0.0, max(chain, used.max(initial=0.0)) - float(problem.seconds[mine].sum()))
    return total


class _Search:
    """An order under change, its exposed seconds, and what was spent."""

    def __init__(self, problem: OverlapProblem, effort: OverlapEffort) -> None:
        operators = problem.operators
        self.problem, self.effort = problem, effort
        self.order: IntArray = np.arange(operators.num_ops, dtype=np.int32)
        self.position: list[Step] = list(range(operators.num_ops))
        self.before = predecessors(operators).lists()
        self.behind = successors(operators).lists()
        self.stage = operators.stage.tolist()
        self.starts = np.flatnonzero(problem.channel >= 0).tolist()
        self.wait = problem.wait.tolist()
        self.waits = {self.wait[start] for start in self.starts}
        self.channels = int(problem.channel.max(initial=-1)) + 1
        self.device = float(problem.seconds.sum())
        self.least = self.device * NEGLIGIBLE
        self.work = 0
        self.bound = lower_bound(problem)
        self.exposed = self._exposed()

    def run(self) -> OverlapSolution:
        if self._fits():
            for _ in range(self.effort.rounds):
                if not self._round() or self._is_done():
                    break
        live, need = self._peaks()
        closed = self.exposed <= self.bound + self.least
        ended = self.work >= self.effort.work_limit
        status = Status.OPTIMAL if closed else Status.LIMIT if ended else Status.GAP
        return OverlapSolution(self.order, self.exposed, self.bound, status, live, need, self.work)

    def _is_done(self) -> bool:
        return self.exposed <= self.bound + self.least or self.work >= self.effort.work_limit

    def _round(self) -> bool:
        """Look at every transfer once; whether anything changed."""
        before = self.exposed
        for start in self.starts:
            if self._is_done():
                break
            self._slide(start)
            self._fill_from_behind(self.wait[start])
            self._fill_from_front(start)
        return self.exposed < before - self.least

    def _slide(self, start: OpIndex) -> None:
        """Move the start forward and the wait back, as far as they can, or half as far, and so on."""
        wait = self.wait[start]
        first = 1 + max((self.position[op] for op in self.before[start]), default=-1)
        last = -1 + min((self.position[op] for op in self.behind[wait]), default=len(self.order))
        for op, limit in ((start, first), (wait, last)):
            origin = self.position[op]
            step = limit - origin
            step = self._within_stage(op, step)
            for _ in range(self.effort.halvings):
                if step == 0 or self._move(op, origin + step):
                    break
                step = int(step / 2)

    def _within_stage(self, op: OpIndex, step: int) -> int:
        """``step``, shortened so that ``op`` stays among operators of its stage."""
        origin, sign = self.position[op], 1 if step > 0 else -1
        while step and self.stage[self.order[origin + step]] != self.stage[op]:
            step -= sign
        return step

    def _fill_from_behind(self, wait: OpIndex) -> None:
        """Run independent operators that stand behind a wait in front of it, while seconds are exposed there."""
        at = self.position[wait] + 1
        end = min(at + self.effort.window, len(self.order))
        for step in range(at, end):
            op, place = int(self.order[step]), self.position[wait]
            if self._is_done() or self.stage[op] != self.stage[wait]:
                return
            if op not in self.waits and all(self.position[other] < place for other in self.before[op]):
                self._move(op, place)

    def _fill_from_front(self, start: OpIndex) -> None:
        """Run operators that stand in front of a start, and that it does not need, right behind it."""
        at = self.position[start] - 1
        for step in range(at, max(at - self.effort.window, -1), -1):
            op, place = int(self.order[step]), self.position[start]
            if self._is_done() or self.stage[op] != self.stage[start]:
                return
            if self.wait[op] < 0 and all(self.position[other] > place for other in self.behind[op]):
                self._move(op, place)

    def _move(self, op: OpIndex, to: Step) -> bool:
        """Let ``op`` run at step ``to`` if that exposes fewer seconds and keeps the limits; whether it does."""
        origin = self.position[op]
        self._shift(origin, to)
        exposed = self._exposed()
        if exposed < self.exposed - self.least and self._fits():
            self.exposed = exposed
            return True
        self._shift(to, origin)
        return False

    def _shift(self, origin: Step, to: Step) -> None:
        """Move the operator at step ``origin`` to step ``to``; those in between move up or down."""
        low, high = min(origin, to), max(origin, to) + 1
        self.order[low:high] = np.roll(self.order[low:high], -1 if to > origin else 1)
        for step in range(low, high):
            self.position[self.order[step]] = step

    def _exposed(self) -> Seconds:
        problem = self.problem
        self.work += len(self.order)
        end = _elapsed(self.order, problem.seconds, problem.wait, problem.channel, problem.sent, self.channels)
        return max(0.0, end - self.device)

    def _fits(self) -> bool:
        live, need = self._peaks()
        return live <= self.problem.live_limit and need <= self.problem.need_limit

    def _peaks(self) -> tuple[Bytes, Bytes]:
        self.work += len(self.order)
        o = self.problem.operators
        read = o.consumer_start, o.consumer, o.reusable_start, o.reusable
        live, need = _peaks(self.order, o.size, o.producer, *read, o.kept, o.workspace, self.problem.wait)
        return int(live), int(need)


@compiled
def _elapsed(
    order: IntArray, seconds: FloatArray, wait: IntArray, channel: IntArray, sent: FloatArray, channels: int
) -> float:
    """Return the second at which the last operator of `order` ends."""
    clock = 0.0
    free = np.zeros(channels, dtype=np.float64)
    end = np.zeros(len(order), dtype=np.float64)
    for op in order:
        if channel[op] >= 0:
            end[wait[op]] = free[channel[op]] = max(clock, free[channel[op]]) + sent[op]
        else:
            clock = max(clock, end[op]) + seconds[op]
    return clock


@compiled
def _peaks(
    order: IntArray,
    size: LongArray,
    producer: IntArray,
    consumer_start: LongArray,
    consumer: IntArray,
    reusable_start: LongArray,
    reusable: IntArray,
    kept: BoolArray,
    workspace: LongArray,
    wait: IntArray,
) -> tuple[int, int]:
    """Return the most live bytes at a step of `order`, without and with workspaces.

    A result is written over a reusable buffer that no operator reads later, but for the one that waits for the end of
    what makes the result.
    """
    count = len(order)
    position = np.zeros(count, dtype=np.int64)
    for step in range(count):
        position[order[step]] = step
    last = np.zeros(len(size), dtype=np.int64)
    for buffer in range(len(size)):
        last[buffer] = count - 1 if kept[buffer] else position[producer[buffer]]
        for row in range(consumer_start[buffer], consumer_start[buffer + 1]):
            last[buffer] = max(last[buffer], position[consumer[row]])
    is_reused = np.zeros(len(size), dtype=np.bool_)
    for result in range(len(size)):
        maker = producer[result]
        for row in range(reusable_start[result], reusable_start[result + 1]):
            candidate = reusable[row]
            free = not is_reused[candidate]
            for reader in consumer[consumer_start[candidate] : consumer_start[candidate + 1]]:
                free = free and (position[reader] <= position[maker] or reader == wait[maker])
            if free:
                is_reused[candidate] = True
                last[candidate] = position[maker] - 1
                break
    ending = np.zeros(count, dtype=np.int64)
    change = np.zeros(count + 1, dtype=np.int64)
    for buffer in range(len(size)):
        change[position[producer[buffer]]] += size[buffer]
        change[last[buffer] + 1] -= size[buffer]
    current, peak, peak_with_workspace, in_flight = 0, 0, 0, 0
    for step in range(count):
        op = order[step]
        current += change[step]
        peak = max(peak, current)
        in_flight -= ending[op]
        peak_with_workspace = max(peak_with_workspace, current + in_flight + workspace[op])
        if wait[op] >= 0:
            in_flight += workspace[op]
            ending[wait[op]] = workspace[op]
    return peak, peak_with_workspace

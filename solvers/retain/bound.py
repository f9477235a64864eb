"""How many seconds any reruns must add, whatever the order: minimum cuts at one operator, priced by Lagrange.

When operator v runs for the first time, all that must come before it has run and nothing that must come after it. Every
buffer k that some operator behind v reads and one before v makes is then live (x_k = 1), or its producer runs again
behind v (r = 1); and so is every buffer that an operator which runs again reads. So at least

    min  sum seconds[u] r_u   subject to   fixed + sum size[k] x_k <= budget,
         x_k or r_producer(k)  for k that is needed: read behind v, or by an operator that runs again,

where fixed is what is live in any case: what v reads and makes, less what it may take over, its workspace, and kept
buffers. With a price of `rate` seconds per byte on the x, the rest is a minimum cut (a closure, Picard 1976):

    source --endless--> needed k --rate * size--> operator that makes k --seconds--> sink
                        needed k --rate * size--> sink           (k that must not be dropped)
                        operator --endless--> each buffer that it reads

(what is on the side of the source is needed, or runs again)

and for every rate, cut(rate) - rate * (budget - fixed) is a lower bound (weak duality). The best rate is found by
cutting planes, a handful of cuts. The sets of buffers that the cuts keep are good solutions to begin with.

Where offers let buffer k wait in a smaller form, late readers find it made from that form, and x_k costs the least of
rate * size[k] and, for each offer, rate * nbytes + seconds. Other operators read k itself, also when they run again;
for them there is a second node:

    needed as it is --rate * size - the least--> operator that makes k
                    --endless--> needed k

An offer may serve readers of other buffers too. What they need is then a form of no bytes, for the seconds of those
operators of the offer that are for this buffer alone: the parts are at most what the offer costs. An operator that is
left out because offers of k serve the readers of its results reads what these readers do, k in some form.

The bound then holds for every choice of reruns and offers.

Where w other micro-batches wait at the boundary, each kept byte counts 1 + w times at that operator.
"""

import copy
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from ortools.graph.python import max_flow

from roamc.solvers.arrays import BoolArray, FloatArray, IntArray, LongArray
from roamc.solvers.compiled import compiled
from roamc.solvers.order.bound import most_reused, operator_bound, reachability_bound
from roamc.solvers.order.evaluate import live_bytes
from roamc.solvers.order.problem import BufferIndex, Bytes, OrderProblem, Step, dependencies, renumber
from roamc.solvers.retain.effort import CLOSE, EFFORT, Effort
from roamc.solvers.retain.offers import Seconds
from roamc.solvers.retain.problem import RetainProblem

_ENDLESS = 2**61
"""Capacity of the arcs that no cut may hold: far above all others together, and within 64 bits."""

_WHOLE = 2.0**50
"""Sum of the other capacities, which the flow takes as whole numbers: a double holds every one of them exactly."""

_SOURCE, _SINK = 0, 1
"""Nodes of every network."""


class _Forms(NamedTuple):
    """The forms that the problem's offers have, m of them: one for each buffer whose readers an offer serves.

    buffer: int64[m].  nbytes: int64[m].  seconds: float64[m].
    decoded: by form, the steps of the readers that read what is made of it.
    moved: by read, as the order lists them: whether some offer lets this reader read something else.
    offers: by read, the buffers of these offers.
    less: int64, by read: by how much smaller that may be.
    """

    buffer: LongArray
    nbytes: LongArray
    seconds: FloatArray
    decoded: tuple[list[Step], ...]
    moved: BoolArray
    offers: dict[int, set[BufferIndex]]
    less: LongArray


@dataclass(frozen=True, eq=False)
class Cut:
    """The minimum cut at one operator for one rate.

    step: the operator, by its step in the reference order.
    rate: price of a kept byte, in seconds; infinite for the cut that keeps the fewest bytes, whatever the seconds.
    value: capacity of the cut, rounded down: its seconds and the price of its bytes, or bytes if the rate is infinite.
    seconds: seconds of the operators that the cut runs again, and of the offers that it takes.
    kept_bytes: bytes of the buffers that the cut keeps, in the forms it uses, without those that are live in any case.
    kept: bool[b], the buffers that the cut keeps, with those made before that are live in any case.
    """

    step: Step
    rate: float
    value: Seconds
    seconds: Seconds
    kept_bytes: Bytes
    kept: BoolArray


@dataclass(frozen=True, eq=False)
class _Network:
    """The network at one operator v, for any rate.

    The arcs are sorted: first those with a price of bytes, then the endless ones, then those of seconds.

    step: v, by its step.  tail, head: int64[arcs], the nodes that each arc connects.
    fixed: bytes that are live in any case.  free: bool[b], the buffers among them that are made before v.
    priced: int64[p], the buffers with an arc that costs what they cost in their cheaper form.
    whole: int64[w], those of them with a smaller form, and with a second arc for readers of the buffer itself.
    timed: int64[t], the operators with arcs of seconds.
    needed: bytes of the buffers made before v and read behind it, without `free`: the most that can be kept.
    waits: bool[forms], whether what is made of each is read behind v.
    """

    step: Step
    fixed: Bytes
    free: BoolArray
    tail: LongArray
    head: LongArray
    priced: LongArray
    whole: LongArray
    timed: LongArray
    needed: Bytes
    waits: BoolArray


@dataclass(eq=False)
class Bounds:
    """Lower bounds on the seconds that reruns and offers add, for any budget of one problem; cuts are kept.

    Make it by `Bounds(problem, effort=…)`, then call `look_at`: until then every finite bound is 0.

    problem: the problem that the bounds hold for; if it has offers, for reruns and offers together.
    effort: limits the number of operators looked at, and of cuts at each.
    order: the problem's operators, buffers and edges with each operator named by its step.
    pairs: int32[k, 2], the steps (before, after) that depend on each other.
    alone: bytes below which no budget can be met: the most that must be live while some operator runs, in any order.
    networks: one for each operator that `look_at` has chosen.
    cuts: the cuts used since the beginning or `anew`, by (step, rate).
    work: arcs of their networks since `new_work` was last called.
    """

    problem: RetainProblem
    effort: Effort = EFFORT
    order: OrderProblem = field(init=False)
    pairs: IntArray = field(init=False)
    alone: Bytes = field(init=False)
    networks: list[_Network] = field(init=False)
    cuts: dict[tuple[Step, float], Cut] = field(default_factory=dict)
    work: int = 0
    _smaller: BoolArray = field(init=False)
    _forms: _Forms = field(init=False)
    _idle: BoolArray = field(init=False)
    _coded: BoolArray = field(init=False)
    _made: dict[tuple[Step, float], Cut] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = renumber(self.problem.order, self.problem.sequence)
        self.pairs = dependencies(self.order)
        self._forms = _forms_of(self.problem, self.order)
        self._smaller = np.zeros(self.order.num_buffers, dtype=np.bool_)
        self._smaller[self._forms.buffer[self._forms.nbytes < self.order.size[self._forms.buffer]]] = True
        self._idle = _left_out(self.problem, self.order, self._forms)
        self._coded = _through_offers(self.order, self._forms, self._idle)
        alone = operator_bound(self.order) - self._read_smaller()
        self.alone = int(alone[~self._idle].max(initial=0))
        self.networks = []

    def _read_smaller(self) -> LongArray:
        """int64[n]: by how much smaller each operator may find what it reads, at most."""
        less = np.zeros(self.order.num_ops, dtype=np.int64)
        np.add.at(less, self.order.consumer, self._forms.less)
        return less

    def look_at(self, count: int | None = None) -> None:
        """Choose up to `count` operators, and build the networks at which bounds are computed; replaces earlier ones.

        Candidates are every `effort.bound_spacing`-th operator by live bytes in the reference order. The candidates
        with the most bytes that are live in any order are chosen. If `count` is None, it is `effort.bound_operators`.
        """
        spacing = self.effort.bound_spacing
        live = live_bytes(self.order, np.arange(self.order.num_ops, dtype=np.int32))
        steps = np.argsort(-live, kind="stable")
        boundary = np.flatnonzero(self.problem.sequence == self.problem.boundary)  # none, or one step
        hottest = steps[~self._idle[steps]][: spacing * self.effort.bound_candidates : spacing]
        sure = reachability_bound(self.order, hottest.astype(np.int32))
        most = self.effort.bound_operators if count is None else count
        chosen = hottest[np.argsort(-sure, kind="stable")[:most]]
        chosen = np.append(boundary, chosen[~np.isin(chosen, boundary)])
        self.networks = [self._network(int(step)) for step in chosen]

    def anew(self) -> "Bounds":
        """Return bounds that share the networks of these, with no cuts and no work counted.

        A cut that one of the two has computed costs the other no time. It still counts as work when the other first
        uses it, so that the count does not depend on who came first.
        """
        fresh = copy.copy(self)
        fresh.cuts, fresh.work = {}, 0
        return fresh

    def seconds(self, budget: Bytes) -> Seconds:
        """Return a lower bound in seconds: no reruns within `budget` bytes, in any order, add fewer.

        The result is the highest bound of the operators chosen by `look_at`; infinite if it is proved that no reruns
        keep the budget.
        """
        if self.alone > budget:
            return math.inf
        return max((self._at(network, budget)[0] for network in self.networks), default=0.0)

    def price(self, budget: Bytes) -> float:
        """Return the seconds that a byte of budget is worth, at the operator with the highest bound.

        0 if the chosen operators need no reruns; infinite if it is proved that no reruns are within `budget` bytes.
        """
        if self.alone > budget:
            return math.inf
        return max((self._at(network, budget) for network in self.networks), default=(0.0, 0.0))[1]

    def new_work(self) -> int:
        """Return the work since the last call, in arcs of networks, and set the count back to 0."""
        work, self.work = self.work, 0
        return work

    def _at(self, network: _Network, budget: Bytes) -> tuple[Seconds, float]:
        """Return the bound at one operator in seconds, and the rate that gives it; both infinite if no reruns fit."""
        room = self._room(network, budget)
        if network.needed <= room:
            return 0.0, 0.0
        least = self._cut(network, math.inf)
        if room < 0 or least.kept_bytes > room:
            return math.inf, math.inf
        above, below = (0.0, network.needed), (least.seconds, least.kept_bytes)
        best = 0.0, 0.0
        for _ in range(self.effort.bound_cuts):
            if above[1] <= below[1]:
                break
            rate = max(below[0] - above[0], 0.0) / (above[1] - below[1])
            if rate <= 0:
                break
            cut = self._cut(network, rate)
            best = max(best, (cut.value - rate * room, rate))
            if cut.seconds + rate * cut.kept_bytes >= (above[0] + rate * above[1]) * (1 - CLOSE):
                break
            if cut.kept_bytes > room:
                above = cut.seconds, cut.kept_bytes
            else:
                below = cut.seconds, cut.kept_bytes
        return max(best[0] * (1 - CLOSE), 0.0), best[1]

    def _room(self, network: _Network, budget: Bytes) -> Bytes:
        """Return the bytes that the buffers which the cut keeps may have at most."""
        room = budget - network.fixed
        waits = self.problem.waiting and self.problem.sequence[network.step] == self.problem.boundary
        return room // (1 + self.problem.waiting) if waits else room

    def _network(self, step: Step) -> _Network:
        """Build the network at `step`, of the operators before it and the buffers they make; buffer k is node 2 + k."""
        order, problem = self.order, self.problem
        place = np.zeros(order.num_ops, dtype=np.int32)
        place[order.stage < order.stage[step]] = -1
        place[order.stage > order.stage[step]] = 1
        _mark(place, step, self.pairs)
        buffer = np.repeat(np.arange(order.num_buffers), np.diff(order.consumer_start))
        before = place[order.producer] == -1
        read_here, read_later = np.zeros_like(order.kept), np.zeros_like(order.kept)
        read_here[buffer[order.consumer == step]] = True
        behind_here = (place[order.consumer] == 1) & (~self._idle[order.consumer] | self._coded)
        read_later[buffer[behind_here]] = True
        free = before & (read_here | order.kept)
        present = free | (order.producer == step)
        fixed = int(order.size[present].sum() + order.workspace[step] - most_reused(order)[step])
        fixed -= int(self._read_smaller()[step])
        again = problem.repeatable[problem.sequence] & (place == -1)
        node_of_op = 2 + order.num_buffers + np.arange(order.num_ops)
        priced = np.flatnonzero(before & ~free)
        whole = priced[self._smaller[priced]]
        dropped = problem.droppable & again[order.producer]
        end = np.where(dropped, node_of_op[order.producer], _SINK)
        needed = before & ~free & read_later
        reads = again[order.consumer] & before[buffer] & ~free[buffer]
        behind = behind_here & needed[buffer]
        timed = np.flatnonzero(again)
        as_read = self._as_read(buffer)
        tail = [2 + priced, self._whole(whole), self._whole(whole), np.full(int(behind.sum()), _SOURCE)]
        head = [end[priced], end[whole], 2 + whole, as_read[behind]]
        tail += [node_of_op[order.consumer[reads]], node_of_op[timed]]
        head += [as_read[reads], np.full(len(timed), _SINK)]
        return _Network(
            step=step,
            fixed=fixed,
            free=free,
            tail=np.concatenate(tail),
            head=np.concatenate(head),
            priced=priced,
            whole=whole,
            timed=timed,
            needed=int(order.size[needed].sum()),
            waits=np.array([(place[steps] == 1).any() for steps in self._forms.decoded], dtype=np.bool_),
        )

    def _whole(self, buffer: LongArray) -> LongArray:
        """Return the second node of each buffer, for readers of the buffer itself."""
        return 2 + self.order.num_buffers + self.order.num_ops + buffer

    def _as_read(self, buffer: LongArray) -> LongArray:
        """Return for each read the node of what is read: int64[reads]. buffer: which buffer each read reads."""
        itself = self._smaller[buffer] & ~self._forms.moved & ~self._coded
        return np.where(itself, self._whole(buffer), 2 + buffer)

    def _cut(self, network: _Network, rate: float) -> Cut:
        """Return the minimum cut for a rate, made before or now; an infinite rate asks for the fewest bytes."""
        key = network.step, rate
        if key not in self.cuts:
            if key not in self._made:
                self._made[key] = self._new_cut(network, rate)
            self.work += len(network.tail)
            self.cuts[key] = self._made[key]
        return self.cuts[key]

    def _new_cut(self, network: _Network, rate: float) -> Cut:
        order = self.order
        seconds = self.problem.seconds[self.problem.sequence]
        per_byte, per_second = (1.0, self._tiny(seconds)) if rate == math.inf else (rate, 1.0)
        size, extra = self._cheapest(network, per_byte, per_second)
        least = size * per_byte + extra * per_second
        price = np.concatenate([least[network.priced], (order.size * per_byte - least)[network.whole]])
        time = seconds[network.timed] * per_second
        total = float(price.sum() + time.sum())
        scale = _WHOLE / total if total > 0 else 1.0
        endless = np.full(len(network.tail) - len(price) - len(time), _ENDLESS)
        capacity = np.concatenate([np.floor(price * scale).astype(np.int64), endless])
        capacity = np.concatenate([capacity, np.floor(time * scale).astype(np.int64)])
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(network.tail, network.head, capacity)
        source_side = np.zeros(2 + 2 * order.num_buffers + order.num_ops, dtype=np.bool_)
        value = 0.0
        if flow.num_nodes() > _SINK and (network.tail == _SOURCE).any():
            flow.solve(_SOURCE, _SINK)
            value = flow.optimal_flow() / scale
            source_side[flow.get_source_side_min_cut()] = True
        needed, rerun, whole = np.split(source_side[2:], np.cumsum([order.num_buffers, order.num_ops]))
        kept = needed & ~network.free & ~(rerun[order.producer] & self.problem.droppable)
        size, extra = np.where(whole, order.size, size), np.where(whole, 0.0, extra)
        return Cut(
            network.step,
            rate,
            value,
            float(seconds[network.timed][rerun[network.timed]].sum() + extra[kept].sum()),
            int(size[kept].sum()),
            kept | network.free,
        )

    def _cheapest(self, network: _Network, per_byte: float, per_second: float) -> tuple[LongArray, FloatArray]:
        """Return the bytes, and the seconds of its offer, of every buffer in the form that costs least."""
        size, extra, forms = self.order.size.copy(), np.zeros(self.order.num_buffers), self._forms
        nbytes = np.where(network.waits, forms.nbytes, 0)
        costs = nbytes * per_byte + forms.seconds * per_second
        dearest = np.argsort(-costs, kind="stable")
        for row in dearest[(costs < size[forms.buffer] * per_byte)[dearest]]:  # the cheapest of a buffer comes last
            size[forms.buffer[row]], extra[forms.buffer[row]] = nbytes[row], forms.seconds[row]
        return size, extra

    def _tiny(self, seconds: FloatArray) -> float:
        """A price of a second in bytes so low that all seconds together cost less than a byte."""
        total = float(seconds.sum()) + float(self._forms.seconds.sum())
        return 0.5 / max(total, 1e-300)


def _forms_of(problem: RetainProblem, order: OrderProblem) -> _Forms:
    """Return the offers as arrays; reads are numbered as in `order`, which names operators by their steps."""
    step = np.empty(problem.num_ops, dtype=np.int64)
    step[problem.sequence] = np.arange(problem.num_ops)
    moved, less = np.zeros(len(order.consumer), dtype=np.bool_), np.zeros(len(order.consumer), dtype=np.int64)
    offers: dict[int, set[BufferIndex]] = {}
    forms: list[tuple[BufferIndex, Bytes, Seconds, list[Step]]] = []
    for offer in problem.offers:
        for (reader, buffer), nbytes in offer.read_instead.items():
            begin, end = order.consumer_start[buffer : buffer + 2].tolist()
            row = begin + int(np.searchsorted(order.consumer[begin:end], step[reader]))
            moved[row] = True
            offers.setdefault(row, set()).add(offer.buffer)
            less[row] = max(less[row], order.size[buffer] - nbytes)
        decoded = [int(step[reader]) for reader in offer.decoded_for]
        forms += [(k, offer.least_bytes * (k == offer.buffer), seconds, decoded) for k, seconds in offer.shares.items()]
    return _Forms(
        buffer=np.array([buffer for buffer, *_ in forms], dtype=np.int64),
        nbytes=np.array([nbytes for _, nbytes, *_ in forms], dtype=np.int64),
        seconds=np.array([seconds for *_, seconds, _ in forms], dtype=np.float64),
        decoded=tuple(decoded for *_, decoded in forms),
        moved=moved,
        offers=offers,
        less=less,
    )


def _left_out(problem: RetainProblem, order: OrderProblem, forms: _Forms) -> BoolArray:
    """Return for each step whether its operator may be left out: offers may take all readers of its results away."""
    idle = problem.idle[problem.sequence] & bool(problem.offers)
    buffer = np.repeat(np.arange(order.num_buffers), np.diff(order.consumer_start))
    makes = np.zeros(order.num_ops, dtype=np.bool_)
    makes[order.producer] = True
    idle &= makes
    while True:
        stays = order.kept.copy()
        stays[buffer[~forms.moved & ~idle[order.consumer]]] = True
        left = idle.copy()
        left[order.producer[stays]] = False
        if (left == idle).all():
            return idle
        idle = left


def _through_offers(order: OrderProblem, forms: _Forms, idle: BoolArray) -> BoolArray:
    """Return for each read whether its operator is left out only if an offer of what it reads is taken.

    That is where offers of one buffer alone serve a reader that stays of a result of the operator.
    """
    coded = np.zeros(len(order.consumer), dtype=np.bool_)
    maker = np.repeat(order.producer, np.diff(order.consumer_start))
    staying = {row: of for row, of in forms.offers.items() if len(of) == 1 and not idle[order.consumer[row]]}
    for op, buffer in {(int(maker[row]), *of) for row, of in staying.items() if idle[maker[row]]}:
        begin, end = order.consumer_start[buffer : buffer + 2].tolist()
        coded[begin:end] |= order.consumer[begin:end] == op
    return coded


@compiled
def _mark(place: IntArray, step: int, pairs: IntArray) -> None:
    """Set `place` of all that must run before `step` to -1 and of all that must run after it to 1.

    `pairs` is sorted by the operator that runs before, so one sweep each way reaches everything.
    """
    place[step] = 2
    for row in range(len(pairs)):
        if place[pairs[row, 0]] > 0:
            place[pairs[row, 1]] = 1
    for row in range(len(pairs) - 1, -1, -1):
        if place[pairs[row, 1]] == -1 or pairs[row, 1] == step:
            place[pairs[row, 0]] = -1
    place[step] = 0

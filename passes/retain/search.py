"""Choose between three ways for a value that backward reads: keep it, keep a smaller form of it, or make it again.

The solver of :mod:`roamc.solvers.retain` decides on reruns in a graph whose codecs are given: ``encode`` and ``decode``
are operators like others to it, and their results may be dropped and made again. Which storages get a codec is
decided here, by a few sets of them; each is one question to the solver, until an answer is close to the bound, and the
least added time wins:

    none                            the reruns alone; first where the bound is no lower with codecs
    those worth the price           seconds for a byte less below what a byte is worth at the worst step of the bound
    twice that price, all of them   where the peak is what is missing, whatever the time
    of each, those needed           without what fits as it is

The bound is that of :class:`roamc.solvers.retain.Bounds` over all choices, codecs included.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roamc import cost
from roamc.cost import DeviceProfile
from roamc.errors import VerifyError
from roamc.graph import Phase, TrainGraph, copied, operators
from roamc.graph.memory import MemoryModel, build_memory
from roamc.options import Options
from roamc.passes.retain.compress import MARK, Code, Mark, best_codec, compress, values, written
from roamc.passes.retain.decision import Decision
from roamc.passes.retain.problem import Question, question
from roamc.passes.retain.prune import not_needed
from roamc.solvers.retain import SIMULATIONS, Bounds, Codes, Frontier, RetainSolution, rank_of, schedule, validate
from roamc.units import Bytes, Seconds

WORTH = 1_000
"""A storage of less than one part in so many of all that is saved is kept as it is: too little to be worth planning."""

GENEROUS = 2.0
"""The second set takes what costs up to so many times the price."""

NEAR = 0.02
"""What was best for a peak that differs by no more than this share is tried first and alone."""

DESCENTS = 6
"""For the lowest peak, one lower than the lowest so far is asked for at most so often,"""

LOWER = 0.02
"""by this share, and twice that after each time that it was found."""

LITTLE = 0.001
"""A peak that is lower by no more than this share is not worth another question,"""

ENOUGH = 0.002
"""nor is this share of the step's time: prices are rougher."""

_CLOSE = 1e-9


@dataclass(frozen=True)
class Candidate:
    """A storage that can be kept smaller.

    Attributes:
        code: the storage and its codec.
        before: bytes of the storage.
        after: bytes of the smaller form.
        decoded: the fewest bytes that a late reader is given instead.
        seconds: predicted time of writing and reading it.
    """

    code: Code
    before: Bytes
    after: Bytes
    decoded: Bytes
    seconds: Seconds

    @property
    def rate(self) -> float:
        """Seconds for every byte less."""
        return self.seconds / (self.before - self.after)


Known = dict[tuple[Candidate, ...], Frontier]
"""What was found for each set of codecs."""


class Choice:
    """All that can be chosen for one graph, and the least added time for any peak."""

    def __init__(
        self,
        graph: TrainGraph,
        options: Options,
        order: Sequence[str],
        profile: DeviceProfile,
        prices: Mapping[str, Seconds],
        allowed: str = "all",
    ) -> None:
        """Ask about ``graph`` with its operators in ``order``, priced by ``profile``: its own at ``prices``.

        With ``"light"`` for ``allowed`` only operators run again that are light on any device.
        """
        self.allowed = allowed
        self.graph = graph
        self.options = options
        self.order = tuple(order)
        self.profile = profile
        self.prices = prices
        self._alone = math.fsum(prices.values())
        self.memory = build_memory(graph)
        self._asked: dict[tuple[Candidate, ...], tuple[Question, Mapping[str, Mark]]] = {}
        self._known: Known = {}
        self._won: tuple[Bytes, tuple[Candidate, ...]]
        self.forget()

    def decide(self, target: Bytes, *, together: bool = False, simulations: int = SIMULATIONS) -> Decision:
        """Choose so that no step has more than ``target`` live bytes, at the least added time.

        Args:
            target: live bytes.
            together: begin with what was found for other targets. The decision then depends on those.
            simulations: limit of the solver's work for each question, as of :data:`roamc.solvers.retain.SIMULATIONS`.

        Raises:
            VerifyError: the solver broke a rule of its problem.
        """
        return self._decide(target, self._known if together else {}, simulations)

    def _decide(
        self, target: Bytes, known: Known, simulations: int = SIMULATIONS, sets: Sequence[tuple[Candidate, ...]] = ()
    ) -> Decision:
        """As :meth:`decide`, to begin with what is ``known``; what is found goes there too.

        With ``sets`` only these sets of codecs are tried.
        """
        ask = functools.partial(self._ask, target=target, known=known, simulations=simulations)
        bound = self.bounds.seconds(target) if self.candidates else 0.0
        found = list[Decision]()
        for codes in sets or self._sets(target, bound, known):
            solution = ask(codes)
            found.append(self._decision(codes, solution))
            fewer = self._fewer(codes, solution, target)
            least = float(solution.seconds) + math.fsum(c.seconds for c in fewer)  # fewer codecs save no reruns
            if fewer and least < min(one.added_seconds for one in found if one.peak_bytes <= target):
                found.append(self._decision(fewer, ask(fewer)))
            if self._good(min(found, key=lambda one: _rank(one, target)), target, bound):
                break
        if not self.candidates:
            return found[0]
        best = min(found, key=lambda one: _rank(one, target))
        names = {code[0] for code in best.codes}
        self._won = target, tuple(c for c in self.candidates if c.code.storage in names)
        return _bounded(best, target, bound)

    def forget(self) -> None:
        """Begin anew: what won for another peak says nothing about the next."""
        self._won = 0, ()

    def lowest(self, *, together: bool = False) -> tuple[Decision, ...]:
        """The lowest peak that is found, and the same or less again, mostly at less added time.

        The solver's searches need a peak to aim at: first that of the operator that needs most, then a little less than
        the lowest so far, to begin with that. Which of the answers needs fewer bytes in the end is for order and layout
        to say.

        Raises:
            VerifyError: the solver broke a rule of its problem.
        """
        known = self._known if together else {}
        least = int(self.bounds.alone * (1 + LITTLE))
        self.forget()
        found = self._decide(least, known)
        for number in range(DESCENTS):
            if found.peak_bytes <= least:
                break
            lower = self._decide(max(least, int(found.peak_bytes * (1 - LOWER * 2**number))), known)
            little = found.peak_bytes - lower.peak_bytes <= LITTLE * found.peak_bytes
            if lower.peak_bytes < found.peak_bytes:
                found = lower
            if little:
                break
        as_low = [codes for codes, frontier in known.items() if frontier.lowest <= found.peak_bytes]
        again = self._decide(found.peak_bytes, known, sets=as_low)
        same = (again.reruns, again.codes) == (found.reruns, found.codes)
        return tuple(self._least(one) for one in ((again,) if same else (again, found)))

    def _least(self, decision: Decision) -> Decision:
        """The decision, for as few bytes as it takes."""
        if decision.status == "infeasible":  # for less than this
            decision = dataclasses.replace(decision, status="gap")
        return _bounded(decision, decision.peak_bytes, self.bounds.seconds(decision.peak_bytes))

    @functools.cached_property
    def plain(self) -> Question:
        """The question without codecs."""
        return question(self.graph, self.options, self.order, self.prices, self.allowed)

    @functools.cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """What can be kept smaller, in the graph's order."""
        least = sum(storage.nbytes for storage in self.memory.saved) // WORTH
        lossy = self.options.codecs
        fitting = [(value, best) for value in values(self.memory) if (best := best_codec(value, lossy)) is not None]
        large = [(value, best) for value, best in fitting if value.storage.nbytes > least]
        return tuple(
            Candidate(
                code=Code(value.storage.name, name),
                before=value.storage.nbytes,
                after=coding.nbytes if coding is not None else 0,
                decoded=0 if value.shapes else value.storage.nbytes,
                seconds=math.fsum(cost.seconds(node, self.profile) for node in written(value, coding)),
            )
            for value, (name, coding) in large
        )

    @functools.cached_property
    def bounds(self) -> Bounds:
        """The bound on the seconds of all choices, codecs included."""
        storages = self.plain.storages
        size = np.array([storage.nbytes for storage in storages], dtype=np.int64)
        late = {op.node.name for op in self.memory.operators if op.phase is not Phase.FORWARD}
        decoding = np.array([name in late for name in self.plain.operators], dtype=np.bool_)
        codes = Codes(size.copy(), np.zeros(len(size)), size.copy(), decoding)
        number = {storage.name: index for index, storage in enumerate(storages)}
        for candidate in self.candidates:
            at = number[candidate.code.storage]
            codes.code[at], codes.extra[at] = candidate.after, candidate.seconds
            codes.decoded[at] = candidate.decoded
        bounds = Bounds(self.plain.problem, codes)
        bounds.look_at()
        return bounds

    def _sets(self, target: Bytes, bound: Seconds, known: Known) -> list[tuple[Candidate, ...]]:
        """The sets of storages to try, each once, the most likely first: that which won for nearly the same peak."""
        asked, won = self._won
        if won and abs(asked - target) <= NEAR * target:
            return [won, ()]
        price = self.bounds.price(target) if self.candidates else 0.0
        rates = (price, GENEROUS * price, math.inf) if bound < math.inf else (math.inf,)
        first, *others = [tuple(c for c in self.candidates if c.rate < rate) for rate in rates]
        helps = self._frontier((), known).bound(target) > bound * (1 + _CLOSE)
        return list(dict.fromkeys([first, (), *others] if helps else [(), first, *others]))

    def _good(self, decision: Decision, target: Bytes, bound: Seconds) -> bool:
        """Whether the best choice would not be worth looking for."""
        step = self._alone + decision.added_seconds
        return decision.peak_bytes <= target and decision.added_seconds <= bound + ENOUGH * step

    def _fewer(self, codes: tuple[Candidate, ...], solution: RetainSolution, target: Bytes) -> tuple[Candidate, ...]:
        """Those that the solution needs, if these are not all."""
        if not codes or solution.peak_bytes > target:
            return ()
        asked, marks = self._coded(codes)
        runs = [(asked.operators[op], nbytes) for op, nbytes in schedule(asked.problem, solution)]
        dearest = sorted(codes, key=lambda candidate: -candidate.seconds)
        idle = not_needed(runs, marks, [(c.code.storage, c.before - c.after) for c in dearest], target)
        return tuple(c for c in codes if c.code.storage not in idle) if idle else ()

    def _coded(self, codes: tuple[Candidate, ...]) -> tuple[Question, Mapping[str, Mark]]:
        """The question with these codecs in the graph, and which operators are theirs."""
        if not codes:
            return self.plain, {}
        if codes not in self._asked:
            graph = compress(copied(self.graph), [candidate.code for candidate in codes])
            marked = [node for node in operators(graph.graph) if MARK in node.meta]
            prices = {**self.prices, **{node.name: cost.seconds(node, self.profile) for node in marked}}
            order = coded_order(self.memory, build_memory(graph), self.order)
            asked = question(graph, self.options, order, prices, self.allowed)
            self._asked[codes] = asked, {node.name: node.meta[MARK] for node in marked}
        return self._asked[codes]

    def _ask(self, codes: tuple[Candidate, ...], target: Bytes, known: Known, simulations: int) -> RetainSolution:
        """The solver's reruns where these are kept smaller."""
        return choose(self._coded(codes)[0], target, self._frontier(codes, known), simulations)

    def _frontier(self, codes: tuple[Candidate, ...], known: Known) -> Frontier:
        if codes not in known:
            known[codes] = Frontier(self._coded(codes)[0].ground)
        return known[codes]

    def _decision(self, codes: tuple[Candidate, ...], solution: RetainSolution) -> Decision:
        """The reruns by names, and the codecs with them."""
        made = decision(self._coded(codes)[0], solution)
        if not codes:
            return made
        rows = tuple((*c.code, c.before, c.after, c.seconds) for c in codes)
        added = math.fsum(c.seconds for c in codes)
        return dataclasses.replace(made, codes=rows, added_seconds=made.added_seconds + added)


def _rank(decision: Decision, target: Bytes) -> tuple[bool, float, float]:
    return rank_of(decision.peak_bytes, decision.added_seconds, target)


def _closed(decision: Decision, target: Bytes, bound: Seconds) -> bool:
    """Whether nothing adds less."""
    return decision.peak_bytes <= target and decision.added_seconds <= bound * (1 + _CLOSE)


def _bounded(decision: Decision, target: Bytes, bound: Seconds) -> Decision:
    """The decision with the bound over all choices; the solver knew only those with the same codecs."""
    if decision.peak_bytes > target:
        return dataclasses.replace(decision, bound_seconds=0.0)
    status = "gap" if decision.status == "optimal" else decision.status
    if _closed(decision, target, bound):
        bound, status = decision.added_seconds, "optimal"
    return dataclasses.replace(decision, bound_seconds=bound, status=status)


def coded_order(plain: MemoryModel, coded: MemoryModel, order: Sequence[str]) -> tuple[str, ...]:
    """``order``, with the operators of codecs where they take the fewest bytes.

    A value is written in its smaller form behind its last reader in front of the first that reads it decoded, and
    decoded in front of that one.

    Args:
        plain: of the graph without codecs.
        coded: of the graph with them.
        order: names of all operators of ``plain``, first to last.
    """
    position = {name: step for step, name in enumerate(order)}
    behind: dict[int, list[str]] = {}
    front: dict[int, list[str]] = {}
    marks = {op.node.name: op.node.meta[MARK] for op in coded.operators if MARK in op.node.meta}
    places = _places(plain, position, {mark.storage for mark in marks.values()})
    for name, mark in marks.items():
        last, first, shape = places[mark.storage]
        if mark.role == "encode":
            behind.setdefault(last, []).append(name)
        else:
            front.setdefault(first if mark.role == "decode" else shape, []).append(name)
    there = {op.node.name for op in coded.operators}
    found = [n for step, name in enumerate(order) for n in (*front.get(step, ()), name, *behind.get(step, ()))]
    return tuple(name for name in found if name in there)


def _places(memory: MemoryModel, position: Mapping[str, int], names: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """Per storage three steps: behind which it can be written smaller, of its first late reader, and of a shape's."""
    wanted, found = set(names), {}
    for value in values(memory):
        if value.storage.name in wanted:
            last = [position[memory.operators[value.storage.producer].node.name]]
            late = min((position[read.reader.name] for read in value.saved.late), default=len(position))
            early = [position[read.reader.name] for read in value.saved.early]
            shape = min((position[read.reader.name] for read in value.shapes), default=len(position))
            found[value.storage.name] = max(last + [step for step in early if step < late]), late, shape
    return found


def choose(
    asked: Question, target: Bytes, known: Frontier | None = None, simulations: int = SIMULATIONS
) -> RetainSolution:
    """Choose reruns so that no step has more than ``target`` live bytes, at the least added time; judged.

    Args:
        asked: the graph as a problem.
        target: live bytes.
        known: what was found for other targets, to begin with; this answer goes there too. None to begin anew.
        simulations: limit of the solver's work, as of :data:`roamc.solvers.retain.SIMULATIONS`.

    Raises:
        VerifyError: the solver broke a rule of its problem.
    """
    known = known or Frontier(asked.ground)
    solution = known.solve(target, work_limit=simulations * asked.problem.num_ops)
    report = validate(asked.problem, target, solution)
    if not report.good:
        raise VerifyError(f"pass 'retain': the solver gave reruns that are not legal: {report.detail}")
    return solution


def decision(asked: Question, solution: RetainSolution) -> Decision:
    """What the solver chose, by names."""
    names = [asked.operators[v] for v in asked.problem.sequence.tolist()]
    return Decision(
        order=tuple(name for name in names if name),
        reruns=tuple(
            (
                names[again.before],
                asked.operators[again.operator],
                tuple(asked.storages[k].name for k in again.renews),
                float(asked.problem.seconds[again.operator]),
            )
            for again in solution.reruns
        ),
        peak_bytes=int(solution.peak_bytes),
        added_seconds=float(solution.seconds),
        bound_seconds=float(solution.bound_seconds) if math.isfinite(solution.bound_seconds) else 0.0,
        status=str(solution.status.value),
        allowed=asked.allowed,
    )

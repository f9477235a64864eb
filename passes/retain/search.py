"""Choose between three ways for a value that backward reads: keep it, keep a smaller form of it, or make it again.

The solver of :mod:`roamc.solvers.retain` decides on reruns in a graph whose codecs are given: ``encode`` and ``decode``
are operators like others to it, and their results may be dropped and made again. Which storages get a codec is
decided here. A few sets of codecs are tried, each as one question to the solver, until an answer is close to the
bound; the answer with the least added time wins:

    none                            reruns alone; tried first where codecs do not lower the bound
    those worth the price           a codec whose seconds per saved byte are below what the bound pays for a byte
    twice that price, all of them   larger sets, for peaks that the set before does not reach
    of each, those needed           a set again, without codecs of storages that have room to stay whole

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
from roamc.passes.retain.effort import EFFORT, Effort
from roamc.passes.retain.problem import Question, question
from roamc.passes.retain.prune import not_needed
from roamc.solvers.retain import EFFORT as SOLVER
from roamc.solvers.retain import Bounds, Codes, Frontier, RetainSolution, rank_of, schedule, validate
from roamc.units import Bytes, Seconds

_CLOSE = 1e-9


@dataclass(frozen=True)
class Candidate:
    """A saved storage that a codec can keep smaller, and what that saves and costs.

    Attributes:
        code: the storage and its codec.
        before: bytes of the storage.
        after: bytes of the smaller form; 0 if readers behind forward need only the shape.
        decoded: the fewest bytes that a reader behind forward reads in its place: ``before``, or 0 if some of them need
            only the shape.
        seconds: predicted time of the operators that encode and decode it, or that make a stand-in of its shape.
    """

    code: Code
    before: Bytes
    after: Bytes
    decoded: Bytes
    seconds: Seconds

    @property
    def rate(self) -> float:
        """Added seconds for each byte that the codec saves."""
        return self.seconds / (self.before - self.after)


Known = dict[tuple[Candidate, ...], Frontier]
"""Maps a set of codecs to the solutions found for the graph with these codecs."""


class Choice:
    """A choice decides which values of one graph are recomputed or encoded, for one peak of live bytes after another.

    A choice stores what calls have in common (the graph as a problem, codecs, bounds, earlier solutions), remembers
    which codecs won last (see :meth:`forget`), and does not change the graph.

    Attributes:
        graph, options, order, profile, prices, allowed, effort: as given to the constructor.
        memory: the memory model of ``graph``.
    """

    def __init__(
        self,
        graph: TrainGraph,
        options: Options,
        order: Sequence[str],
        profile: DeviceProfile,
        prices: Mapping[str, Seconds],
        allowed: str = "all",
        effort: Effort = EFFORT,
    ) -> None:
        """Prepare questions about ``graph``.

        Args:
            graph: the graph without codecs and reruns.
            options: ``codecs`` names codecs with an error that may be used; ``disable`` may turn in-place reuse off.
            order: names of all operators, in the order in which they are to run.
            profile: the device profile that predicts the time of codecs.
            prices: predicted seconds of every operator of ``graph``, by name.
            allowed: ``"all"``, or ``"light"`` to recompute only operators that are light on any device.
            effort: how many questions to ask, and which differences to ignore.
        """
        self.allowed = allowed
        self.effort = effort
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

    def decide(self, target: Bytes, *, together: bool = False, simulations: int = SOLVER.simulations) -> Decision:
        """Choose reruns and codecs so that no step has more than ``target`` live bytes, at the least added time.

        Args:
            target: live bytes.
            together: begin with solutions of earlier calls with ``together``. The decision then depends on these
                calls; without ``together`` it depends on earlier calls only by the codecs that won last, until
                :meth:`forget` is called.
            simulations: work limit for each set of codecs, in simulations of the whole schedule.

        Returns:
            The decision. If none within ``target`` is found, the one with the lowest peak, status ``"infeasible"``.

        Raises:
            VerifyError: the solver broke a rule of its problem.
        """
        return self._decide(target, self._known if together else {}, simulations)

    def _decide(
        self,
        target: Bytes,
        known: Known,
        simulations: int = SOLVER.simulations,
        sets: Sequence[tuple[Candidate, ...]] = (),
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
        """Forget which codecs won last, so that the next call tries all sets even if its target is nearly the same.

        Solutions that :meth:`decide` and :meth:`lowest` have found with ``together=True`` stay.
        """
        self._won = 0, ()

    def lowest(self, *, together: bool = False) -> tuple[Decision, ...]:
        """Search for the lowest peak of live bytes, then for less added time at that peak.

        The first target is a little above the bytes that the largest operator needs alone; each further target is below
        the lowest peak so far. Which of the returned decisions needs fewer bytes in the end depends on order and
        layout, which later passes choose.

        Args:
            together: begin with solutions of earlier calls with ``together``; the decisions then depend on those calls.

        Returns:
            (cheap, low), or (cheap,) if both have the same reruns and codecs. low: the decision with the lowest peak
            that the search reached. cheap: the decision for that peak as target; mostly with less added time.

        Raises:
            VerifyError: the solver broke a rule of its problem.
        """
        known, effort = self._known if together else {}, self.effort
        least = int(self.bounds.alone * (1 + effort.little_share))
        self.forget()
        found = self._decide(least, known)
        for number in range(effort.descents):
            if found.peak_bytes <= least:
                break
            lower = self._decide(max(least, int(found.peak_bytes * (1 - effort.lower_share * 2**number))), known)
            little = found.peak_bytes - lower.peak_bytes <= effort.little_share * found.peak_bytes
            if lower.peak_bytes < found.peak_bytes:
                found = lower
            if little:
                break
        as_low = [codes for codes, frontier in known.items() if frontier.lowest <= found.peak_bytes]
        again = self._decide(found.peak_bytes, known, sets=as_low)
        same = (again.reruns, again.codes) == (found.reruns, found.codes)
        return tuple(self._least(one) for one in ((again,) if same else (again, found)))

    def _least(self, decision: Decision) -> Decision:
        """The decision with status and bound as if its own peak had been asked for."""
        if decision.status == "infeasible":  # for less than this
            decision = dataclasses.replace(decision, status="gap")
        return _bounded(decision, decision.peak_bytes, self.bounds.seconds(decision.peak_bytes))

    @functools.cached_property
    def plain(self) -> Question:
        """The graph without codecs as a problem for the solver; made on first access."""
        return question(self.graph, self.options, self.order, self.prices, self.allowed)

    @functools.cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """A candidate for each saved storage that a codec makes smaller, in the graph's order.

        Storages of no more than 1 / ``effort.worth_share`` of all saved bytes are left out.
        """
        least = sum(storage.nbytes for storage in self.memory.saved) // self.effort.worth_share
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
        """The solver's lower bound on the added seconds within a budget, over all reruns and codecs together."""
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
        """The sets of codecs to try, each once, the most likely first; () stands for no codecs."""
        asked, won = self._won
        if won and abs(asked - target) <= self.effort.near_share * target:
            return [won, ()]
        price = self.bounds.price(target) if self.candidates else 0.0
        rates = (price, self.effort.generous_factor * price, math.inf) if bound < math.inf else (math.inf,)
        first, *others = [tuple(c for c in self.candidates if c.rate < rate) for rate in rates]
        helps = self._frontier((), known).bound(target) > bound * (1 + _CLOSE)
        return list(dict.fromkeys([first, (), *others] if helps else [(), first, *others]))

    def _good(self, decision: Decision, target: Bytes, bound: Seconds) -> bool:
        """Whether the best choice would not be worth looking for."""
        step = self._alone + decision.added_seconds
        return decision.peak_bytes <= target and decision.added_seconds <= bound + self.effort.enough_share * step

    def _fewer(self, codes: tuple[Candidate, ...], solution: RetainSolution, target: Bytes) -> tuple[Candidate, ...]:
        """Those of ``codes`` that the solution needs; () if it needs all of them or misses ``target``."""
        if not codes or solution.peak_bytes > target:
            return ()
        asked, marks = self._coded(codes)
        runs = [(asked.operators[op], nbytes) for op, nbytes in schedule(asked.problem, solution)]
        dearest = sorted(codes, key=lambda candidate: -candidate.seconds)
        idle = not_needed(runs, marks, [(c.code.storage, c.before - c.after) for c in dearest], target)
        return tuple(c for c in codes if c.code.storage not in idle) if idle else ()

    def _coded(self, codes: tuple[Candidate, ...]) -> tuple[Question, Mapping[str, Mark]]:
        """The graph with these codecs as a problem, and the marks of the codecs' operators by name."""
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
        """The solver's reruns for the graph with these codecs."""
        return choose(self._coded(codes)[0], target, self._frontier(codes, known), simulations)

    def _frontier(self, codes: tuple[Candidate, ...], known: Known) -> Frontier:
        if codes not in known:
            known[codes] = Frontier(self._coded(codes)[0].ground)
        return known[codes]

    def _decision(self, codes: tuple[Candidate, ...], solution: RetainSolution) -> Decision:
        """The solver's answer as a decision, with the codecs and their seconds added."""
        made = decision(self._coded(codes)[0], solution)
        if not codes:
            return made
        rows = tuple((*c.code, c.before, c.after, c.seconds) for c in codes)
        added = math.fsum(c.seconds for c in codes)
        return dataclasses.replace(made, codes=rows, added_seconds=made.added_seconds + added)


def _rank(decision: Decision, target: Bytes) -> tuple[bool, float, float]:
    return rank_of(decision.peak_bytes, decision.added_seconds, target)


def _closed(decision: Decision, target: Bytes, bound: Seconds) -> bool:
    """Whether the decision is within ``target`` and meets the bound: nothing adds less."""
    return decision.peak_bytes <= target and decision.added_seconds <= bound * (1 + _CLOSE)


def _bounded(decision: Decision, target: Bytes, bound: Seconds) -> Decision:
    """The decision with the bound over all codecs, and the status that follows; the solver knew one set of codecs."""
    if decision.peak_bytes > target:
        return dataclasses.replace(decision, bound_seconds=0.0)
    status = "gap" if decision.status == "optimal" else decision.status
    if _closed(decision, target, bound):
        bound, status = decision.added_seconds, "optimal"
    return dataclasses.replace(decision, bound_seconds=bound, status=status)


def coded_order(plain: MemoryModel, coded: MemoryModel, order: Sequence[str]) -> tuple[str, ...]:
    """Insert the codecs' operators into ``order`` where live bytes are fewest.

    ``encode`` runs behind the last reader in forward that runs before the first decoded read; ``decode`` runs right in
    front of that first read, a stand-in for the shape right in front of the first reader of the shape.

    Args:
        plain: the memory model of the graph without codecs.
        coded: that of the same graph with codecs.
        order: names of all operators of ``plain``, first to last.

    Returns:
        Names of all operators of ``coded``, first to last.
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
    """Per storage three steps: of its last reader before it is decoded, its first decoded read, and of its shape."""
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
    asked: Question, target: Bytes, known: Frontier | None = None, simulations: int = SOLVER.simulations
) -> RetainSolution:
    """Choose reruns so that no step has more than ``target`` live bytes, at the least added time, and verify them.

    Args:
        asked: the graph as a problem.
        target: live bytes.
        known: solutions of ``asked`` for other targets, from which the search begins; the new solution is added. None
            to begin without any.
        simulations: the solver's work limit, in simulations of the whole schedule.

    Returns:
        The solution; with status INFEASIBLE and the lowest peak seen if none within ``target`` was found.

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
    """Return ``solution``, the solver's answer to ``asked``, as a :class:`Decision` with names for its numbers.

    ``codes`` is empty, also if the graph of ``asked`` has codecs; an infinite bound becomes 0.
    """
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

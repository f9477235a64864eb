"""Choose between three ways for a value that backward reads: keep it, keep a smaller form of it, or make it again.

The graph and what codecs can do for it are one problem of :mod:`roamc.solvers.retain`, which chooses reruns and codecs
together. Its answer is written into a copy of the graph and judged there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from roamc.budget import LIGHT
from roamc.cost import DeviceProfile
from roamc.errors import VerifyError
from roamc.graph import TrainGraph, copied
from roamc.graph.memory import build_memory
from roamc.options import Options
from roamc.passes.retain import kernels
from roamc.passes.retain.compress import compress
from roamc.passes.retain.decision import Decision
from roamc.passes.retain.offers import may_cost_more, offered
from roamc.passes.retain.problem import SAFE, Question, question
from roamc.rewriting.arrange import keeps_order
from roamc.rewriting.expiry import guarded
from roamc.rewriting.gathers import gathered_once, gathered_twice
from roamc.rewriting.order_problem import HANDOVER, operator_names
from roamc.rewriting.rerun_readers import Run, with_readers
from roamc.solvers import retain as solver
from roamc.solvers.retain import RetainSolution, validate
from roamc.solvers.status import Status
from roamc.units import LARGEST, Bytes, Seconds


def once(graph: TrainGraph, allowed: str) -> tuple[tuple[str, str], ...]:
    """Return the gathers that do not run under a budget unless the choice runs those of forward again.

    They are as in :attr:`Decision.once`. There are none where only light operators may run again: gathers are not.

    Args:
        graph: the graph in front of the pass; stays as it is.
        allowed: which operators may run again.
    """
    return () if allowed == LIGHT else gathered_twice(graph)


class Choice:
    """A choice decides which values of one graph are recomputed or encoded, for one peak of live bytes after another.

    A choice stores what calls have in common (the graph as a problem, bounds, earlier solutions), remembers which
    codecs won last, and does not change the graph.

    Attributes:
        graph: the graph without codecs and reruns, and without gathers that repeat those of forward.
        once: these gathers, see :attr:`Decision.once`.
        options: what the user set.
        prices: predicted seconds of every operator of ``graph``, by name.
        allowed: which operators may run again, one of :data:`roamc.passes.retain.problem.ALLOWED`.
        asked: the graph as a problem for the solver, with what codecs offer.
        codes: for each of the problem's offers, in its sequence, the storage, its codec and what is made again of it.
        search: the solver's search in that problem.
    """

    def __init__(
        self,
        graph: TrainGraph,
        options: Options,
        order: Sequence[str],
        profile: DeviceProfile,
        prices: Mapping[str, Seconds],
        allowed: str = "all",
    ) -> None:
        """Prepare questions about ``graph``.

        Args:
            graph: the graph without codecs and reruns; stays as it is.
            options: ``codecs`` names codecs with an error that may be used; ``disable`` may turn in-place reuse off.
            order: names of all operators, in the order in which they are to run; those of gathers that repeat others
                may be left out.
            profile: the device profile that predicts the time of codecs.
            prices: predicted seconds of every operator of ``graph``, by name.
            allowed: one of :data:`roamc.passes.retain.problem.ALLOWED`.
        """
        self.once = once(graph, allowed)
        graph = guarded(graph, inputs=allowed == SAFE)
        self.graph = gathered_once(copied(graph), self.once) if self.once else graph
        self.options, self.prices, self.allowed, self._profile = options, prices, allowed, profile
        order = [name for name in order if name not in dict(self.once)]
        plain = question(self.graph, options, order, prices, allowed, as_given=keeps_order(options))
        rows = offered(plain, options, profile)
        self.codes = tuple(code for code, _ in rows)
        offers = tuple(offer for _, offer in rows)
        self.asked = dataclasses.replace(plain, problem=dataclasses.replace(plain.problem, offers=offers))
        first = sum(not may_cost_more(code.codec, options) for code in self.codes)
        self._fits = tuple((name, sum(code.codec == name for code in self.codes)) for name in options.codecs)
        self.search = solver.Choice(self.asked.problem, first=first)
        self._written: dict[tuple[int, ...], Question] = {(): plain}

    def decide(self, target: Bytes) -> Decision:
        """Choose reruns and codecs so that no step has more than ``target`` live bytes, at the least added time.

        Returns:
            The decision. If none within ``target`` is found, the one with the lowest peak, status ``"infeasible"``. It
            depends on earlier calls only by the codecs that won last, until ``search.forget()`` is called.

        Raises:
            VerifyError: the solver broke a rule of its problem.
        """
        return self.decision(self.search.solve(target), target)

    @functools.cached_property
    def most_bytes(self) -> Bytes:
        """The peak of live bytes, workspaces and what waits for other micro-batches included, if nothing runs again."""
        return int(self.search.solve(LARGEST).peak_bytes)

    def lowest(self) -> tuple[Decision, ...]:
        """Search for the lowest peak of live bytes, then for less added time at that peak.

        Which of the returned decisions needs fewer bytes in the end depends on order and layout, which later passes
        choose.

        Returns:
            (cheap, low), or (cheap,) if both have the same reruns and codecs. low: the decision with the lowest peak
            that the search reached. cheap: the decision for that peak as target; mostly with less added time.

        Raises:
            VerifyError: the solver broke a rule of its problem.
        """
        return tuple(self.decision(one, one.peak_bytes) for one in self.search.lowest())

    def least_bytes(self, seconds: Seconds, needed_bytes: Bytes, tolerance: Bytes) -> Bytes:
        """Return a lower bound on the live bytes, workspace included, of any choice that adds at most ``seconds``.

        Args:
            seconds: most added time.
            needed_bytes: what a choice needs that adds no more; the bound is at most that.
            tolerance: bytes by which the bound may be below the best that the search's bounds prove.
        """
        beyond, within = -1, needed_bytes
        while within - beyond > 1 + tolerance:
            peak = (beyond + within) // 2
            beyond, within = (peak, within) if self.search.bounds.seconds(peak) > seconds else (beyond, peak)
        return beyond + 1

    def written(self, taken: tuple[int, ...]) -> Question:
        """Return the graph with some codecs written into it, as a problem in the solver's order; made once.

        Args:
            taken: the offers that are taken, by their places in :attr:`codes`.
        """
        if taken not in self._written:
            graph = compress(copied(self.graph), [self.codes[place] for place in taken])
            names = operator_names(graph, build_memory(graph))
            sequence = self.search.encoded(taken).problem.sequence.tolist()
            order = [names[op] for op in sequence if names[op] != HANDOVER]
            prices = kernels.prices(graph, self._profile)
            self._written[taken] = question(graph, self.options, order, prices, self.allowed, as_given=True)
        return self._written[taken]

    def decision(self, solution: RetainSolution, target: Bytes) -> Decision:
        """Return an answer of :attr:`search` with names for its numbers.

        Args:
            solution: the answer; it is counted on the graph with its codecs first.
            target: the live bytes that it was asked for.

        Raises:
            VerifyError: the solver broke a rule of its problem.
        """
        encoded = self.written(solution.taken)
        self._judge(solution, encoded, target)
        names = [encoded.operators[v] for v in encoded.problem.sequence.tolist()]
        runs = [
            Run(again.before, encoded.operators[again.operator], tuple(encoded.storages[k].index for k in again.renews))
            for again in solution.reruns
        ]
        reruns, sequence = with_readers(encoded.graph, names, runs, dict(self.once))
        seconds = dict(zip(encoded.operators, encoded.problem.seconds.tolist(), strict=True))
        unread = math.fsum(seconds[run.operator] for run in runs) - math.fsum(seconds[run.operator] for run in reruns)
        offers = [self.asked.problem.offers[place] for place in solution.taken]
        sizes = self.asked.problem.order.size
        return Decision(
            reruns=tuple((*run, seconds[run.operator]) for run in reruns),
            peak_bytes=int(solution.peak_bytes),
            added_seconds=float(solution.seconds) - unread,
            bound_seconds=float(solution.bound_seconds) if solution.status is not Status.INFEASIBLE else 0.0,
            status=str(solution.status.value),
            allowed=self.allowed,
            codes=tuple(
                (code.storage, code.codec, int(sizes[offer.buffer]), offer.nbytes, offer.seconds, code.again)
                for code, offer in zip((self.codes[place] for place in solution.taken), offers, strict=True)
            ),
            once=self.once,
            sequence=() if keeps_order(self.options) else tuple(sequence),
            offered=self._fits,
        )

    def _judge(self, solution: RetainSolution, written: Question, target: Bytes) -> None:
        """Raise VerifyError unless the answer is legal, and has its peak and seconds, in the graph with its codecs."""
        added = math.fsum(self.asked.problem.offers[place].seconds for place in solution.taken)
        report = validate(written.problem, target, solution, added)
        if not report.good:
            raise VerifyError(f"pass 'retain': the solver gave reruns that are not legal: {report.detail}")

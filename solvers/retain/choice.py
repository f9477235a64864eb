"""Choose reruns and offers together: sets of offers, each a problem of reruns, until an answer is close to the bound.

    none                            reruns alone; tried first where offers do not lower the bound
    those worth the price           an offer whose seconds per saved byte are below what the bound pays for a byte
    twice that price, all of them   larger sets, for budgets that the set before does not keep
    of each, those needed           a set again, without offers of buffers that have room to stay whole
    those needed and one more       where that is the best so far; of offers with equal sizes and seconds, the first

A price per byte takes or leaves all offers of one rate together; where the budget needs only some of them, the last
two kinds of sets find which. The bound is that of `Bounds` over all reruns and offers. A set is left out if its own
bound says that no part of it adds less than the best answer so far, or than what would be enough.

More offers make other sets, and so may hide a better answer. Where offers that a user allows stand behind others, both
all offers and the others alone are asked, and the better answer is given: to allow more never costs seconds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from roamc.solvers.order.problem import Bytes
from roamc.solvers.retain.bound import Bounds
from roamc.solvers.retain.effort import CLOSE, EFFORT, Effort
from roamc.solvers.retain.encoded import Encoded, encoded
from roamc.solvers.retain.offers import Seconds, cheapest
from roamc.solvers.retain.portfolio import Frontier, Ground
from roamc.solvers.retain.problem import RetainProblem, RetainSolution
from roamc.solvers.retain.validate import schedule
from roamc.solvers.status import Status

Taken = tuple[int, ...]
"""Offers by their places in the problem, sorted."""

MORE = 4
"""Most offers that are tried in addition to those needed. Which are needed depends on the reruns that were found beside
all of a set; others may need fewer reruns beside one offer more."""

Known = dict[Taken, Frontier]
"""Maps a set of offers to the solutions found for the schedule in which these are taken."""


class Choice:
    """Chooses reruns and offers of one problem, for one budget after another.

    An offer is a smaller form in which a buffer may wait for its readers (`offers.py`). Calls share schedules, bounds
    and earlier solutions; which offers won last is remembered until `forget`.

    problem: the problem, with its offers.
    effort: limits and thresholds of all searches.
    first: number of its first offers that are asked alone as well; None for all of them.
    refused: bytes, the largest budget that `lowest` has asked for in vain, with and without the other offers; 0 if
        there is none.
    """

    def __init__(self, problem: RetainProblem, effort: Effort = EFFORT, first: int | None = None) -> None:
        self.problem, self.effort = problem, effort
        fewer = problem.offers[:first]
        self._first = Choice(replace(problem, offers=fewer), effort) if len(fewer) < len(problem.offers) else None
        self._alone = math.fsum(problem.seconds.tolist())
        self._encoded: dict[Taken, Encoded] = {}
        self._grounds: dict[Taken, Ground] = {}
        self._known: Known = {}
        self.refused: Bytes = 0
        self._won: tuple[Bytes, Taken]
        self.forget()

    def solve(
        self,
        budget: Bytes,
        *,
        together: bool = False,
        simulations: int | None = None,
        first: bool = False,
        enough: Seconds = 0.0,
    ) -> RetainSolution:
        """Return reruns and offers that bring the peak of live bytes within `budget` and add few seconds.

        budget: bytes. Where nothing within it is found, the answer has the status INFEASIBLE and the lowest peak found.
        together: begin with solutions of earlier calls with `together`. The answer then depends on these calls; without
            it, it depends on earlier calls only by the offers that won last.
        simulations: work limit for each set of offers, in simulations of its schedule; None for `effort.simulations`.
        first: ask those offers alone that are asked alone as well; the bound is that of all.
        enough: the search ends with an answer within `budget` that adds at most so many seconds. Above 0, little work
            is done for what adds more: such an answer only says that none was found.
        """
        answers = list[RetainSolution]()
        if self._first is not None:
            answers.append(self._first.solve(budget, together=together, simulations=simulations, enough=enough))
        if not answers or (not first and answers[0].rank(budget) > (False, enough, math.inf)):
            answers.append(self._solve(budget, self._known if together else {}, simulations, enough=enough))
        best = min(answers, key=lambda one: one.rank(budget))
        return best if self._first is None else _bounded(best, budget, self.bounds.seconds(budget))

    def forget(self, *, solutions: bool = False) -> None:
        """Forget which offers won last, so that the next call tries all sets even if its budget is nearly the same.

        solutions: whether to forget those that were found with `together` as well.
        """
        self._won = 0, ()
        if solutions:
            self._known = {}
        if self._first is not None:
            self._first.forget(solutions=solutions)

    def lowest(self, *, together: bool = False) -> tuple[RetainSolution, ...]:
        """Search for the lowest peak of live bytes, then for fewer seconds at that peak.

        The first budget is a little above the bytes that the largest operator needs alone; each further one is below
        the lowest peak so far. together: as for `solve`.

        Returns (cheap, low), or (cheap,) if both are the same. low: the lowest peak that the search reached. cheap: the
        answer for that peak as budget; mostly with fewer seconds.
        """
        answers = [] if self._first is None else [self._first.lowest(together=together)]
        answers.append(self._lowest(together=together))
        self.refused = self.refused if self._first is None else min(self.refused, self._first.refused)
        best = min(answers, key=lambda pair: pair[-1].rank(0))
        return tuple(self._least(solution) for solution in best)

    def _lowest(self, *, together: bool) -> tuple[RetainSolution, ...]:
        """As `lowest`, with all offers, each answer with the bound of the budget that it is for."""
        frontiers, effort = self._known if together else {}, self.effort
        least = int(self.bounds.alone * (1 + effort.little_share))
        self.forget()
        low, asked = self._solve(least, frontiers), [least]
        for number in range(effort.descents):
            if low.peak_bytes <= least:
                break
            asked.append(max(least, int(low.peak_bytes * (1 - effort.lower_share * 2**number))))
            lower = self._solve(asked[-1], frontiers)
            is_little_lower = low.peak_bytes - lower.peak_bytes <= effort.little_share * low.peak_bytes
            if lower.peak_bytes < low.peak_bytes:
                low = lower
            if is_little_lower:
                break
        self.refused = max((budget for budget in asked if budget < low.peak_bytes), default=0)
        as_low = [taken for taken, frontier in frontiers.items() if frontier.lowest <= low.peak_bytes]
        cheap = self._solve(low.peak_bytes, frontiers, sets=as_low)
        same = (cheap.reruns, cheap.taken) == (low.reruns, low.taken)
        return (cheap,) if same else (cheap, low)

    @functools.cached_property
    def bounds(self) -> Bounds:
        """Lower bounds on the seconds of reruns and offers together: ``bounds.seconds(budget)`` is that of one budget.

        They are computed on first access, with as many minimum cuts as ``look_at`` takes by default.
        """
        bounds = Bounds(self.problem, effort=self.effort)
        bounds.look_at()
        return bounds

    def encoded(self, taken: Taken) -> Encoded:
        """Return the problem of the schedule in which these offers are taken; made once for all equal sets.

        taken: places in `problem.offers`, sorted. Raises ValueError if two of them clash, see `offers.clash`.
        """
        if taken not in self._encoded:
            self._encoded[taken] = encoded(self.problem, taken)
        return self._encoded[taken]

    def _solve(
        self,
        budget: Bytes,
        frontiers: Known,
        simulations: int | None = None,
        sets: Sequence[Taken] = (),
        enough: Seconds = 0.0,
    ) -> RetainSolution:
        """As `solve`, to begin with `frontiers`; what is found goes there too. Only `sets` are tried, if given."""
        offers = self.problem.offers
        bound = self.bounds.seconds(budget) if offers else 0.0
        answers: list[RetainSolution] = []
        for taken in sets or self._sets(budget, bound, frontiers):
            if answers and self._surely_more(taken, budget, frontiers, _fewest(answers, budget, enough)):
                continue
            for answer in self._with_parts(taken, budget, frontiers, simulations, enough, answers):
                answers.append(answer)
                if answer.peak_bytes <= budget and answer.seconds <= enough:
                    break
            if self._good(min(answers, key=lambda one: one.rank(budget)), budget, bound, enough):
                break
        if not offers:
            return answers[0]
        best = min(answers, key=lambda one: one.rank(budget))
        self._won = budget, best.taken
        return _bounded(best, budget, bound)

    def _with_parts(
        self,
        taken: Taken,
        budget: Bytes,
        frontiers: Known,
        simulations: int | None,
        enough: Seconds,
        answers: Sequence[RetainSolution],
    ) -> Iterator[RetainSolution]:
        """Yield the answer with these offers, with those of them that it needs, and with these and one more.

        answers: those so far; the caller adds each that is yielded.
        """
        ask = functools.partial(self._ask, budget=budget, frontiers=frontiers, simulations=simulations, enough=enough)
        answer = ask(taken, rival=_fewest(answers, budget, enough))
        yield answer
        fewer = self._fewer(answer, budget)
        least = answer.seconds - self._seconds(taken) + self._seconds(fewer)  # fewer offers save no reruns
        if not fewer or least >= _fewest(answers, budget):
            return
        part = ask(fewer, rival=_fewest(answers, budget, enough))
        yield part
        if part.taken == min(answers, key=lambda one: one.rank(budget)).taken:
            for place in self._unlike(set(taken).difference(fewer)):
                if enough > 0 and part.seconds - abs(self.problem.offers[place].seconds) > enough:
                    continue  # an offer seldom saves, net, more than its own seconds
                yield ask(tuple(sorted((*fewer, place))), rival=_fewest([part], budget, enough))

    def _least(self, solution: RetainSolution) -> RetainSolution:
        """The solution with status and bound as if its own peak had been asked for."""
        if solution.status is Status.INFEASIBLE:  # for less than this
            solution = replace(solution, status=Status.GAP)
        return _bounded(solution, solution.peak_bytes, self.bounds.seconds(solution.peak_bytes))

    def _sets(self, budget: Bytes, bound: Seconds, frontiers: Known) -> list[Taken]:
        """The sets of offers to try, each once, the most likely first; () stands for no offers."""
        won_budget, won = self._won
        if won and abs(won_budget - budget) <= self.effort.near_share * budget:
            return [won, ()]
        price = self.bounds.price(budget) if self.problem.offers else 0.0
        rates = (price, self.effort.generous_factor * price, math.inf) if bound < math.inf else (math.inf,)
        sizes = self.problem.order.size.tolist()
        first, *others = [cheapest(self.problem.offers, sizes, rate) for rate in rates]
        helps = self._frontier((), frontiers).bound(budget) > bound * (1 + CLOSE)
        return list(dict.fromkeys([first, (), *others] if helps else [(), first, *others]))

    def _good(self, solution: RetainSolution, budget: Bytes, bound: Seconds, enough: Seconds) -> bool:
        """Whether the best choice would not be worth looking for."""
        most = bound + self.effort.enough_share * (self._alone + solution.seconds)
        return solution.peak_bytes <= budget and solution.seconds <= max(most, enough)

    def _fewer(self, solution: RetainSolution, budget: Bytes) -> Taken:
        """Those of its offers that the solution needs; () if it needs all of them or none, or misses the budget."""
        if not solution.taken or solution.peak_bytes > budget:
            return ()
        needless = self._needless(solution, budget)
        return tuple(place for place in solution.taken if place not in needless) if needless else ()

    def _needless(self, solution: RetainSolution, budget: Bytes) -> set[int]:
        """The offers whose buffers can stay whole without a run above the budget, those that take most time first.

        One that stays whole adds its bytes to the runs during which its smaller form waits, before the next is tried.
        """
        form, offers, order = self.encoded(solution.taken), self.problem.offers, self.problem.order
        runs = schedule(form.problem, replace(solution, taken=()))
        live = np.array([nbytes for _, nbytes in runs], dtype=np.int64)
        boundary = next((at for at, (op, _) in enumerate(runs) if op == form.problem.boundary), len(runs))
        rows = sorted(range(len(solution.taken)), key=lambda row: -offers[solution.taken[row]].seconds)
        needless = set()
        for row in rows:
            offer = offers[solution.taken[row]]
            begin, end = _wait([op for op, _ in runs], form.encodes[row], form.decodes[row])
            more = int(order.size[offer.buffer]) - offer.nbytes
            grown = live + self.problem.waiting * more * (begin <= boundary < end)
            grown[begin:end] += more
            if grown.max(initial=0) <= budget:
                live = grown
                needless.add(solution.taken[row])
        return needless

    def _unlike(self, places: Iterable[int]) -> list[int]:
        """The first of these offers of each size and time, at most :data:`MORE`: those of alike layers are equal."""
        offers, size = self.problem.offers, self.problem.order.size
        kinds: dict[tuple[Bytes, Bytes, Seconds], int] = {}
        for place in sorted(places):
            offer = offers[place]
            kinds.setdefault((int(size[offer.buffer]), offer.nbytes, offer.seconds), place)
        return list(kinds.values())[:MORE]

    def _surely_more(self, taken: Taken, budget: Bytes, frontiers: Known, rival: Seconds) -> bool:
        """Whether neither these offers nor a part of them can keep the budget and add less than `rival`.

        The bound on reruns is that beside all of them: fewer offers save no reruns.
        """
        if rival == math.inf:
            return False
        saved = math.fsum(min(0.0, self.problem.offers[place].seconds) for place in taken)
        return self._frontier(taken, frontiers).bound(budget) + saved > rival

    def _ask(
        self,
        taken: Taken,
        budget: Bytes,
        frontiers: Known,
        simulations: int | None,
        enough: Seconds = 0.0,
        rival: Seconds = math.inf,
    ) -> RetainSolution:
        """The solver's reruns for the schedule with these offers, with the seconds of the offers added."""
        frontier = self._frontier(taken, frontiers)
        limit = None if simulations is None else simulations * self.encoded(taken).problem.num_ops
        own = self._seconds(taken)
        answer = frontier.solve(budget, work_limit=limit, enough=enough - own, rival=rival - own)
        return replace(answer, taken=taken, seconds=answer.seconds + own) if taken else answer

    def _frontier(self, taken: Taken, frontiers: Known) -> Frontier:
        if taken not in frontiers:
            if taken not in self._grounds:
                self._grounds[taken] = Ground(self.encoded(taken).problem, self.effort)
            frontiers[taken] = Frontier(self._grounds[taken])
        return frontiers[taken]

    def _seconds(self, taken: Taken) -> Seconds:
        return math.fsum(self.problem.offers[place].seconds for place in taken)


def _fewest(answers: Sequence[RetainSolution], budget: Bytes, enough: Seconds = 0.0) -> Seconds:
    """The fewest seconds of the answers within the budget, and at most `enough` if that is above 0."""
    seconds = [one.seconds for one in answers if one.peak_bytes <= budget]
    return min((*seconds, enough if enough > 0 else math.inf))


def _bounded(solution: RetainSolution, budget: Bytes, bound: Seconds) -> RetainSolution:
    """The solution with the bound over all offers, and the status that follows; its search knew one set of offers."""
    if solution.peak_bytes > budget:
        return replace(solution, bound_seconds=bound)
    if solution.seconds <= bound * (1 + CLOSE):  # nothing adds less
        return replace(solution, bound_seconds=solution.seconds, status=Status.OPTIMAL)
    status = Status.GAP if solution.status is Status.OPTIMAL else solution.status
    return replace(solution, bound_seconds=bound, status=status)


def _wait(runs: Sequence[int], encodes: Sequence[int], decodes: Sequence[int]) -> tuple[int, int]:
    """The runs in which a smaller form waits: behind the last that writes it, up to the first that reads it."""
    begin, end = 0, len(runs)
    for at, op in enumerate(runs):
        if op in encodes:
            begin, end = at, len(runs)
        elif op in decodes:
            end = min(end, at)
    return (begin, end) if begin < end else (0, len(runs))

"""The search: plans of one graph for one memory budget after another.

:class:`PlanSearch` asks pass retain for several peaks of live bytes until a plan, its layout and workspaces included,
keeps the budget; :mod:`roamc.planning.budget_search` says which peak to ask for next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from roamc import cost, ticker
from roamc.budget import DEFAULT, LIGHT, Budget
from roamc.cost import collectives, utilisation
from roamc.errors import REQUIRED, OptionError, nearest
from roamc.graph import TrainGraph, main_device
from roamc.graph.fingerprint import fingerprint
from roamc.graph.memory import build_memory
from roamc.options import Options, parse_options
from roamc.passes import reorder, retain
from roamc.passes.retain.codecs import lossy_names
from roamc.planning import budget_search, other_orders, pipeline, plan_files
from roamc.planning.attempt import Attempt
from roamc.planning.collector import older_objects_left_alone
from roamc.planning.effort import EFFORT, Effort
from roamc.planning.pipeline import State
from roamc.planning.plan import Plan
from roamc.planning.plan_check import check_numbers, check_options, check_origin, for_threads
from roamc.planning.plan_maker import PlanMaker, above_eager, fresh, left_by, prepared, terms_of
from roamc.planning.planned import Planned, Terms, check_budget
from roamc.planning.stopwatch import Stopwatch
from roamc.rewriting.split import splittable
from roamc.solvers.retain import EFFORT as RETAIN_EFFORT
from roamc.solvers.retain import RetainSolution
from roamc.units import LARGEST, Bytes, Seconds, format_bytes

FEW_RERUNS = 0.01
"""Reruns are few if they add at most this share of a step's time. The order of pass reorder is chosen for the peak
without reruns. It may make the largest results last, where a value that runs again is made beside them and lowers
nothing. Where it gives few reruns, they are looked for in program order, too."""

PREPARE, OTHER_PLANS = "prepare", "other plans"
"""Stages in ``Plan.seconds`` beside the passes: what comes before them, and what was decided for plans not taken."""

Order = tuple[str, ...]
"""Names of all operators, first to last."""

log = logging.getLogger(__name__)


@older_objects_left_alone()
def run(
    graph: TrainGraph, options: Options, plan: Plan | None = None, *, deep: bool = False, quick: bool = False
) -> Planned:
    """Plan a captured graph: decide, apply and verify every pass in turn.

    Under a budget the passes behind those that are the same for all budgets run again, until a plan keeps it.

    Args:
        graph: the graph as it was captured; its nodes are moved and erased in place.
        options: what the user set.
        plan: a plan whose decisions are used instead of deciding; every ``apply`` and every check still runs. If torch
            uses more threads than the plan is made for, what it needs is counted again.
        deep: also derive the metadata of all nodes again after every pass (slow; for tests).
        quick: refuse a budget that is far out of reach at once, without looking for the smallest budget that can be
            kept; the error then names what the lowest plan so far needs.

    Returns:
        The graph behind all passes, ready to be emitted, and its plan.

    Raises:
        OptionError: an option names a pass or codec that does not exist, or a budget of less than one byte.
        PlanError: a file of ``options.plan`` cannot be read, or none is for the graph and ``options.strict`` is set;
            ``plan`` was made for another graph, is incomplete, what it says is not so, or ``options`` do not allow the
            last bits that it may give.
        VerifyError: a pass left an invalid graph.
        BudgetError: no plan was found that keeps ``options.memory_budget``, or that of a file does not.
    """
    begun = time.perf_counter()
    options = _checked(options)
    watch, mark, file = Stopwatch(), fingerprint(graph), ""
    if plan is None and options.plan:
        graph, plan, file = plan_files.plan_for(graph, options, mark)
    if plan is None:
        return PlanSearch(graph, options, deep=deep, mark=mark).run(quick=quick)
    with pipeline.errors_name(file) if file else contextlib.nullcontext():
        check_origin(plan, graph, mark)
        applied_plan = plan.with_light_reruns() if options.memory_budget == LIGHT else plan
        maker, start = _prepared(watch, graph, options, applied_plan, mark, deep)
        planned = maker.make(start, None, plan.step_seconds)
        check_options(planned, options)
        check_numbers(plan, planned)
    planned = for_threads(planned, torch.get_num_threads())
    if file:
        counted = dataclasses.replace(plan, needed_bytes=planned.plan.needed_bytes)
        plan_files.check_kept(counted, maker.terms, options.memory_budget, file)
    planned = dataclasses.replace(planned, plan=plan_files.under_terms(planned.plan, plan, maker.terms))
    return _finished(planned, maker, begun, watch.seconds)


def _prepared(
    watch: Stopwatch, graph: TrainGraph, options: Options, plan: Plan | None, mark: str, deep: bool
) -> tuple[PlanMaker, State]:
    """As :func:`prepared`; ``watch`` counts what is beside the passes, which have their own times."""
    with watch.of(PREPARE):
        maker, start = prepared(graph, options, plan, mark, deep=deep)
    watch.seconds[PREPARE] -= sum(start.seconds.values())
    return maker, start


class PlanSearch:
    """Makes plans of one graph for one budget after another; what does not depend on the budget is done once.

    No plan depends on plans made before it, except where one is asked for with ``together``.

    Attributes:
        options: the user's options, with the budget in bytes.
        terms: the terms that the options ask for.
        plans: all plans that were made so far, those for other targets and refused ones included, in that order.
    """

    def __init__(
        self,
        graph: TrainGraph,
        options: Options,
        *,
        deep: bool = False,
        many: bool = False,
        effort: Effort = EFFORT,
        mark: str = "",
    ) -> None:
        """Run the passes that decide the same for every budget.

        Args:
            graph: the graph as it was captured; it is changed in place.
            options: what the user set.
            deep: also derive the metadata of all nodes again after every pass.
            many: more plans than that of :meth:`run` will be asked for. Without it, :meth:`run` and :meth:`fit` may use
                up the graph, after which nothing more can be asked for.
            effort: limits of the search for a plan, and which differences it ignores.
            mark: the fingerprint of ``graph``; "" to compute it.

        Raises:
            OptionError: an option names a pass or codec that does not exist, or a budget of less than one byte.
            VerifyError: a pass left an invalid graph.
        """
        self._begun, self._watch = time.perf_counter(), Stopwatch()
        options = _checked(options)
        maker, self._start = _prepared(self._watch, graph, options, None, mark or fingerprint(graph), deep)
        self._maker = dataclasses.replace(maker, effort=effort)
        self.options, self._allowed = self._maker.options, self._maker.terms.allowed
        self.plans, self._many = list[Plan](), many
        self._decided: dict[tuple[bool, str], reorder.Decision] = {}
        self._firsts: dict[Terms, Planned] = {}
        self._orders: dict[str, tuple[Order, ...]] = {}
        self._choices: dict[tuple[str, Order], retain.Choice] = {}
        self._minimum: dict[str, Planned] = {}
        self._gathers: dict[str, tuple[tuple[str, str], ...]] = {}
        if options.memory_budget is None and self._is_worth_default:
            allowed = retain.SAFE if self._start.graph.boundary else "all"
            self._maker = self._maker.under(dataclasses.replace(self.terms_of(DEFAULT), allowed=allowed))
        elif self._maker.terms.added_share and not self.has_reruns:
            self._maker = self._maker.under(Terms(None, self._allowed))
        self.terms = self._maker.terms

    @property
    def _is_worth_default(self) -> bool:
        """Whether a step for which no budget is set is planned for :data:`roamc.budget.DEFAULT`, not for no added time.

        Not where eager holds so little that nobody lacks the bytes, nor where sequence parallelism gathers in backward
        what forward has gathered: a share of time is that of a step without these gathers.
        """
        large = (self._start.graph.eager_bytes or 0) >= self._maker.effort.default_from
        return large and self.has_reruns and not self._once("all")

    def terms_of(self, asked: Budget) -> Terms:
        """Return the terms that a budget asks for on this graph, with its bytes.

        Raises:
            OptionError: a share of eager's bytes is less than one byte.
        """
        return terms_of(self._start.graph, asked, self._maker.eager_needs, self._maker.room)

    def terms_of_total(self, total: Bytes) -> Terms:
        """Return the terms that a number of bytes for the whole process asks for on this graph."""
        return Terms(left_by(self._start.graph, total), total=True)

    @property
    def fingerprint(self) -> str:
        """The hash of the captured graph that is that of the plans."""
        return self._maker.fingerprint

    @property
    def has_reruns(self) -> bool:
        """Whether operators may run again, and values be encoded: pass retain is not disabled."""
        return retain.NAME not in self.options.disable

    @property
    def has_lowest(self) -> bool:
        """Whether no later run makes a lower plan: that of ``"min"`` is made, as a quick run does for a near budget."""
        return not self.has_reruns or self.terms.allowed in self._minimum

    def run(self, *, quick: bool = False) -> Planned:
        """Return the plan for the budget of the options, and log it; ``quick`` as for :func:`run`.

        Raises:
            VerifyError: a pass left an invalid graph.
            BudgetError: no plan was found that keeps the budget.
        """
        planned = self.fit(self.terms, quick=quick)
        return _finished(planned, self._maker, self._begun, self._spent(planned.plan))

    def _spent(self, plan: Plan) -> Mapping[str, Seconds]:
        """Return what the search has taken beside the passes of ``plan``, by stage."""
        own = sum(plan.seconds.values()) - sum(self._start.seconds.values())
        spent = dict(self._watch.seconds)
        return {**spent, OTHER_PLANS: max(0.0, spent.get(OTHER_PLANS, 0.0) - own)}

    def fit(self, terms: Terms, *, quick: bool = False) -> Planned:
        """Return a plan within the limit at the least added time; that of the smallest budget if there is none.

        Without a limit, or with pass retain disabled, it is the plan in which nothing runs again, whatever it needs. If
        the terms limit the added time, it is the lowest plan that keeps to it.

        Args:
            terms: the terms that the plan is made for.
            quick: as for :func:`roamc.planning.budget_search.fit`.

        Returns:
            A graph and its plan, which may need more than the limit: nothing is refused here.
        """
        if terms.limit is None or not self.has_reruns:
            if not self._many:
                step = self._alone(terms.allowed) + self._spared(terms.allowed)
                make = functools.partial(PlanMaker.make, kept=None, step_seconds=step)
                with self._watch.of(OTHER_PLANS):
                    planned = self._below_eager(self._maker, lambda maker: make(maker, self._copy_if_needed))
                return self._noted(planned)
            planned = self._first(terms)
            step = planned.plan.step_seconds + self._spared(terms.allowed)
            return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, step_seconds=step))

        if terms.added_share:
            return self._lowest_within(terms)

        def lowest() -> Attempt:
            return _made_already(self.minimum(terms.allowed), terms)

        ask = functools.partial(self._search, terms)
        planned = budget_search.fit(ask, lowest, terms.limit, quick=quick, effort=self._maker.effort).planned
        return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, budget_bytes=terms.limit))

    def _lowest_within(self, terms: Terms) -> Planned:
        """Return the plan that needs least of those that add at most a share of the step's time.

        If none of these needs less than the plan without a limit, it is that one; but a plan under a limit where that
        one gathers twice and takes more than the share for it. It is made only where no bound says that it needs more.
        The plan has a lower bound on what any choice of reruns and codecs that keeps to the share needs. Layouts are
        those for a budget that all of them keep: for one of 0, the last bytes would be bought with calls of the
        allocator, whose time is not predicted.
        """
        share, choice, effort = terms.added_share, self._choice(terms.allowed), self._maker.effort
        plain = None if self._is_plain_bounded(terms) else self._plain_within(terms)
        seconds = share * (self._alone(terms.allowed) if plain is None else plain.plan.step_seconds)
        # Collectives that are split are put together again where the limit is not kept.
        layouts = Terms(LARGEST if plain is None else plain.plan.needed_bytes, terms.allowed)
        best, highest = plain, choice.most_bytes if plain is None else plain.plan.needed_bytes
        bound = choice.least_bytes(seconds, highest, effort.aligned(highest))
        # With codecs that have an error the search goes other ways, at the end of which may stand more bytes.
        for first in (False, True) if self.options.codecs else (False,):
            attempt = self._attempts(layouts, choice, first=first, enough=seconds)
            for tried in budget_search.within(attempt, bound, highest, seconds, effort, choice.search.bounds.seconds):
                least = tried.asked_bytes + cost.objects(tried.asked_bytes)
                if best is not None and least >= best.plan.needed_bytes:
                    break  # this one and those behind it can hardly need less
                keeps = tried.planned.plan.adds_at_most(share)  # overlap may differ
                if keeps and (best is None or tried.needed_bytes < best.plan.needed_bytes):
                    best = tried.planned
        if best is None or (plain is None and best.plan.needed_bytes >= self._least(layouts)):
            plain = self._plain_within(terms)
            best = plain if best is None else min(plain, best, key=lambda one: one.plan.needed_bytes)
        lowest = best.plan.needed_bytes
        least = choice.least_bytes(share * self._alone(terms.allowed), lowest, effort.aligned(lowest))
        return dataclasses.replace(
            best, plan=dataclasses.replace(best.plan, budget_bytes=0, budget_added=share, least_bytes=least)
        )

    def _plain_within(self, terms: Terms) -> Planned:
        """Return the plan without a limit; that under a limit if gathers of that one exceed the terms' share."""
        plain = self._first(Terms(None, terms.allowed))
        keeps = self.counted(plain.plan).adds_at_most(terms.added_share)
        return plain if keeps else self._first(Terms(LARGEST, terms.allowed))

    def _is_plain_bounded(self, terms: Terms) -> bool:
        """Whether a bound on the bytes of the plan without a limit is likely to do in place of that plan.

        There is none without pass reorder. In small graphs layouts and tensor objects decide. Where ranks gather twice,
        or collectives wait beside other operators, only the plan says what time a step takes.
        """
        graph, bounded = self._start.graph, self._least(Terms(0, terms.allowed)) > 0
        return bounded and not graph.eager_floor and not self._once(terms.allowed) and not splittable(graph)

    def minimum(self, allowed: str = "all") -> Planned:
        """Return the plan of the smallest budget, as :mod:`roamc.planning.budget_search` defines it; made once.

        Args:
            allowed: the operators that may run again, "all" or "light", see :class:`Terms`.
        """
        if allowed not in self._minimum:
            terms, choices = Terms(0, allowed), [self._choice(allowed)]
            candidates = [self.lowest(terms)]
            if candidates[0].plan.needed_bytes > self._least(terms):
                candidates.append(self._first(terms))
            if candidates[0].plan.adds_at_most(FEW_RERUNS):
                choices = [self._choice(allowed, order) for order in self._orders_of(allowed)]
                candidates += [self._lowest(choice, terms) for choice in choices[1:]]
            plans = [_made_already(planned, terms) for planned in candidates]
            for choice in choices:
                attempt = self._attempts(terms, choice)
                plans = [budget_search.lower(plans, attempt, self._maker.effort, choice.search.refused)]
            self._minimum[allowed] = plans[0].planned
        return self._minimum[allowed]

    def _search(self, terms: Terms, limit: Bytes) -> list[Attempt]:
        """Return the plans made in search of one within ``limit`` bytes, which is not 0."""

        def first() -> Attempt:
            return _made_already(self._first(terms), terms)

        plans, effort = list[Attempt](), self._maker.effort
        for order in self._orders_of(terms.allowed):
            if all(one.needed_bytes > limit and one.planned.plan.adds_at_most(FEW_RERUNS) for one in plans):
                attempt = self._attempts(terms, self._choice(terms.allowed, order))
                plans += budget_search.search(first, self._least(terms), attempt, limit, effort)
        return plans

    def _attempts(
        self, terms: Terms, choice: retain.Choice, *, first: bool = False, enough: Seconds = 0.0
    ) -> Callable[[Bytes], Attempt]:
        """Return a function that asks ``choice`` for a number of live bytes, whatever it was asked before this call.

        Where some seconds are ``enough``, each question begins with the answers since: what keeps to the seconds for
        one peak is often a few drops away from what does for another.
        """
        choice.search.forget(solutions=enough > 0)

        def attempt(target: Bytes) -> Attempt:
            ticker.say(f"{retain.NAME}: what runs again for a peak of {format_bytes(target)}")
            with self._watch.of(retain.NAME):
                solution = choice.search.solve(target, together=enough > 0, first=first, enough=enough)
            make = functools.partial(self._made, choice, solution, target, terms)
            return Attempt(solution.peak_bytes, solution.peak_bytes > target, make, solution.seconds, terms)

        return attempt

    def attempt(
        self,
        target: Bytes,
        *,
        together: bool = False,
        simulations: int = RETAIN_EFFORT.simulations,
    ) -> Planned:
        """Make a plan with a peak of ``target`` live bytes asked of ``retain``, which may not reach it.

        Args:
            target: live bytes.
            together: begin the choice with what was found for other targets. The plan then depends on those before.
            simulations: limit of the solver's work, in simulations of the schedule.
        """
        terms = Terms(0, self._allowed)
        choice = self._choice(terms.allowed)
        with self._watch.of(retain.NAME):
            answer = choice.search.solve(target, together=together, simulations=simulations)
        return self._made(choice, answer, target, terms)

    def lowest(self, terms: Terms | None = None, *, together: bool = False) -> Planned:
        """Make plans for the lowest peaks of live bytes that ``retain`` finds, and return the one that needs least.

        Of plans that need at most 1/1000 more bytes than that, the one with the least added time is returned.

        Args:
            terms: the terms that the plans are made for; None for a budget of 0 and the operators of this search.
            together: begin the choice with what was found for other targets. The plan then depends on those before.
        """
        terms = terms or Terms(0, self._allowed)
        return self._lowest(self._choice(terms.allowed), terms, together=together)

    def _lowest(self, choice: retain.Choice, terms: Terms, *, together: bool = False) -> Planned:
        plans = list[Planned]()
        ticker.say(f"{retain.NAME}: what runs again for the lowest peak")
        with self._watch.of(retain.NAME):
            lowest = choice.search.lowest(together=together)
        for one in lowest:
            close = (one.peak_bytes + cost.objects(one.peak_bytes)) * (1 + self._maker.effort.padding_share)
            if not plans or plans[0].plan.needed_bytes > close:  # else this one can hardly need less
                plans.append(self._made(choice, one, one.peak_bytes, terms))
        least = min(planned.plan.needed_bytes for planned in plans)
        low = [planned for planned in plans if planned.plan.needed_bytes <= least + self._maker.effort.aligned(least)]
        return min(low, key=lambda planned: planned.plan.added_seconds)

    def _made(self, choice: retain.Choice, solution: RetainSolution, target: Bytes, terms: Terms) -> Planned:
        """Make the plan for an answer of the search of ``choice``."""
        with self._watch.of(retain.NAME):
            decision = choice.decision(solution, target)
        with self._watch.of(OTHER_PLANS):
            planned = self._maker.under(terms).make(fresh(self._start), decision, self._alone(terms.allowed))
        return self._noted(planned)

    @property
    def first(self) -> Planned:
        """The plan in which nothing runs again, for the terms of the options; made once."""
        return self._first(self.terms)

    def _first(self, terms: Terms) -> Planned:
        """Return the plan in which nothing runs again; made once for all equal terms."""
        if terms not in self._firsts:
            ours = self._maker.under(terms)

            def make(maker: PlanMaker) -> Planned:
                order = self._reordered(terms) if maker is ours else None
                ordered = maker.order(fresh(self._start), self._nothing(terms), order)
                return maker.place(ordered, self._alone(terms.allowed))

            with self._watch.of(OTHER_PLANS):
                planned = self._below_eager(ours, make)
            self._firsts[terms] = self._noted(planned)
        return self._firsts[terms]

    @property
    def choice(self) -> retain.Choice:
        """The choice of pass retain: what can be encoded, or dropped and run again as far as the options let it."""
        return self._choice(self._allowed)

    def _choice(self, allowed: str, order: Order | None = None) -> retain.Choice:
        """Return the choice of pass retain for what may run again, by default in the first of :meth:`_orders_of`."""
        order = self._orders_of(allowed)[0] if order is None else order
        if (allowed, order) not in self._choices:
            with self._watch.of(retain.NAME):
                choice = retain.Choice(self._start.graph, self.options, order, self._profile, self._prices, allowed)
            self._choices[allowed, order] = choice
        return self._choices[allowed, order]

    def _orders_of(self, allowed: str) -> tuple[Order, ...]:
        """Return the orders in which reruns are looked for, the later ones where the first gives few of them.

        The first is that of pass reorder. Program order follows if it is another one, see :data:`FEW_RERUNS`; it stands
        alone without that pass.
        """
        if allowed not in self._orders:
            ordered = self._reordered(Terms(0, allowed))
            orders: tuple[Order, ...] = (ordered.order,) if ordered else ()
            if not orders or other_orders.may_look_again(self.options):
                names = (operator.node.name for operator in build_memory(self._start.graph).operators)
                repeated = dict(self._once(allowed))
                orders = (*orders, tuple(name for name in names if name not in repeated))
            self._orders[allowed] = tuple(dict.fromkeys(orders))
        return self._orders[allowed]

    def _least(self, terms: Terms) -> Bytes:
        """Return a lower bound of the live bytes for any order in which nothing runs again; 0 without reorder."""
        ordered = self._reordered(terms)
        return ordered.bound_bytes if ordered else 0

    def least_bytes(self, limit: Bytes) -> Bytes:
        """Return a lower bound of what any plan for the terms of the options needs, to within 1/10000 of ``limit``.

        It proves at once that a budget is out of reach; plans need about 1.00 to 1.05 times as much.
        """
        if self.terms.limit is None or not self.has_reruns:
            return self._least(self.terms)
        return self.choice.least_bytes(sys.float_info.max, self._maker.eager_needs, limit // 10_000)

    def _reordered(self, terms: Terms) -> reorder.Decision | None:
        """Return the decision of pass reorder where nothing runs again, the same for all limits; None without it."""
        key = terms.limit is None, terms.allowed
        if key not in self._decided and reorder.NAME not in self.options.disable:
            with self._watch.of(OTHER_PLANS):
                nothing = self._nothing(terms)
                graph = retain.apply(fresh(self._start).graph, nothing) if nothing.once else self._start.graph
                self._decided[key] = reorder.decide(graph, self._maker.under(terms).options)
        return self._decided.get(key)

    def _nothing(self, terms: Terms) -> retain.Decision:
        """Return the decision of pass retain by which nothing runs again; under a limit, no gather either."""
        once = () if terms.limit is None or not self.has_reruns else self._once(terms.allowed)
        return dataclasses.replace(retain.NOTHING, allowed=terms.allowed, once=once)

    def _below_eager(self, maker: PlanMaker, make: Callable[[PlanMaker], Planned]) -> Planned:
        """Return the plan that ``make`` makes; one in program order if that is less above eager's bytes."""
        planned = make(maker)
        over = above_eager(planned, maker)
        if not over or not other_orders.may_look_again(maker.options):
            return planned
        other = make(maker.in_program_order)
        return other if above_eager(other, maker) < over else planned

    @property
    def _copy_if_needed(self) -> State:
        """The state that the shared passes left; with a copy of the graph if a second plan may begin there."""
        return fresh(self._start) if other_orders.may_look_again(self._maker.options) else self._start

    @property
    def alone(self) -> Seconds:
        """Predicted seconds of a step in which nothing runs again, and nothing is gathered twice that need not be."""
        return self._alone(self._allowed)

    def counted(self, plan: Plan) -> Plan:
        """Return ``plan``, one of :attr:`plans`, with its added seconds counted from :attr:`alone`.

        A plan that is made without a limit gathers in backward again, and does not count that as added.
        """
        decision = plan.decisions.get(retain.NAME, {})
        if decision.get("once") or not self._once(self._allowed):
            return plan
        spared = self._spared(self._allowed)
        return dataclasses.replace(plan, added_seconds=plan.added_seconds + spared)

    def _alone(self, allowed: str) -> Seconds:
        return sum(self._prices.values()) - self._spared(allowed)

    def _spared(self, allowed: str) -> Seconds:
        """Return the seconds of the gathers of :meth:`_once`."""
        return sum((self._prices[second] for second, _ in self._once(allowed)), 0.0)

    def _once(self, allowed: str) -> tuple[tuple[str, str], ...]:
        """Return the gathers that no plan under a limit repeats unasked, see :func:`retain.once`; looked for once."""
        if allowed not in self._gathers:
            self._gathers[allowed] = retain.once(self._start.graph, allowed)
        return self._gathers[allowed]

    @functools.cached_property
    def _prices(self) -> Mapping[str, Seconds]:
        return cost.prices(self._start.graph, self._profile)

    @functools.cached_property
    def _profile(self) -> cost.DeviceProfile:
        return cost.load_profile(main_device(self._start.graph), self.options.profile)

    def _noted(self, planned: Planned) -> Planned:
        """Add the plan to :attr:`plans`."""
        self.plans.append(planned.plan)
        return planned


def _finished(planned: Planned, maker: PlanMaker, begun: Seconds, spent: Mapping[str, Seconds]) -> Planned:
    """Add notes, the times ``spent`` by stage and the rest since ``begun`` as "other"; check the budget, log the plan.

    The notes say what ranks send, and the utilisation of the device.
    """
    notes = collectives.note(planned.graph, functools.partial(cost.prices, planned.graph), maker.options.profile)
    if maker.products:
        profile = cost.load_profile(main_device(planned.graph), maker.options.profile)
        used = utilisation.utilisation(planned.graph, maker.products, profile)
        notes += () if used is None else (str(used),)
    plan = dataclasses.replace(planned.plan, notes=(*planned.plan.notes, *notes))
    planned = dataclasses.replace(planned, plan=plan)
    for stage, seconds in spent.items():
        plan.seconds[stage] = plan.seconds.get(stage, 0.0) + seconds  # type: ignore[index]
    plan.seconds["other"] = time.perf_counter() - begun - sum(plan.seconds.values())  # type: ignore[index]
    check_budget(planned, maker.terms, gpu=maker.room is not None and bool(maker.room.name))
    log.info("%s", plan)
    return planned


def _made_already(planned: Planned, terms: Terms) -> Attempt:
    """Return a plan that exists already in the form of an attempt that was not strained."""
    asked = int(planned.plan.decisions[retain.NAME]["peak_bytes"])
    return Attempt(asked, False, lambda: planned, planned.plan.added_seconds, terms)


def options_of(settings: Mapping[str, Any] | None) -> Options:
    """Return what a user set, checked at once: names, types, ranges, and the names of passes and codecs.

    Args:
        settings: names of :class:`roamc.options.Options` and their values; None gives the defaults.

    Raises:
        OptionError: says which name or value, and what may stand there.
        ProfileError: there is no such profile, or the file is none.
    """
    return _checked(parse_options(settings))


def _checked(options: Options) -> Options:
    """The options with all settings of their codecs, once names of passes and codecs are checked."""
    optional = [step.name for step in pipeline.PIPELINE if step.name not in REQUIRED]
    for name in options.disable:
        if name not in optional:
            left, near = ", ".join(optional), nearest(name, optional)
            raise OptionError(f"disable: cannot leave out pass {name!r}{near} Passes that can be left out: {left}")
    return dataclasses.replace(options, codecs=lossy_names(options.codecs))

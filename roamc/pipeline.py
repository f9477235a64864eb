"""The road: an ordered tuple of passes, and the runner that checks the graph after each.

Where the last of them, the layout, falls short of what lives in its arena, the runner goes back to reorder once, with
an order from :mod:`roamc.passes.joint`.

Read this file top to bottom, then one pass, then one solver.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roamc import budget, cost, news, typed, value_flow, verify
from roamc.errors import REQUIRED, BudgetError, PlanError
from roamc.fingerprint import fingerprint
from roamc.graph import Role, TrainGraph, copied, main_device
from roamc.memory import (
    build_memory,
    eager_lifetimes,
    eager_live_bytes,
    input_bytes,
    lifetimes,
    most_alive,
    sizes,
    timeline,
)
from roamc.options import Options
from roamc.passes import checkpoint, donate, joint, layout, normalize, reorder, retain
from roamc.passes.retain.codecs import check_lossy
from roamc.plan import Plan
from roamc.solvers.retain import WALKS
from roamc.units import Bytes, Seconds, format_bytes
from roamc.value_flow import Flow
from roamc.version import __version__

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pass:
    """One pass: its name on the command line and in messages, and its two functions."""

    name: str
    decision: type
    decide: Callable[[TrainGraph, Options], Any]
    apply: Callable[[TrainGraph, Any], TrainGraph]


PIPELINE = (
    Pass(normalize.NAME, normalize.Decision, normalize.decide, normalize.apply),
    Pass(checkpoint.NAME, checkpoint.Decision, checkpoint.decide, checkpoint.apply),
    Pass(retain.NAME, retain.Decision, retain.decide, retain.apply),
    Pass(reorder.NAME, reorder.Decision, reorder.decide, reorder.apply),
    Pass(donate.NAME, donate.Decision, donate.decide, donate.apply),
    Pass(layout.NAME, layout.Decision, layout.decide, layout.apply),
)

SHARED = 2
"""So many passes at the head are the same whatever the budget; those behind are tried several times."""

ORDERED = 4
"""Behind so many the operators are in their order."""

PADDING = 0.001
"""A peak is still optimal above the bound of live bytes by this share: sizes are rounded up to the alignment."""


@dataclass(frozen=True)
class Planned:
    """A graph with every decision applied, and the plan that did it."""

    graph: TrainGraph
    plan: Plan


@dataclass(frozen=True)
class Stop:
    """A graph part of the way, with what was decided until there.

    Attributes:
        graph: what the last pass left.
        decisions: by pass.
        seconds: wall time by pass.
        flow: the values of the graph, for the next pass to keep.
    """

    graph: TrainGraph
    decisions: Mapping[str, Any]
    seconds: Mapping[str, float]
    flow: Flow


def run(
    graph: TrainGraph, options: Options, plan: Plan | None = None, *, deep: bool = False, quick: bool = False
) -> Planned:
    """Decide, apply and verify every pass in turn; under a budget the later ones again until it is kept.

    Args:
        graph: straight from capture; its nodes are moved and erased in place.
        options: what the user set.
        plan: decisions to use instead of deciding; every apply and every check still runs.
        deep: also derive all metadata again after every pass (slow; for tests).
        quick: refuse a budget that is far out of reach without looking for the smallest that is not.

    Raises:
        PlanError: ``plan`` was made for another graph.
        VerifyError: a pass left an invalid graph.
        BudgetError: no plan was found that keeps ``options.memory_budget``.
    """
    if plan is None:
        return Trials(graph, options, deep=deep).run(quick=quick)
    begun = time.perf_counter()
    _check_names(options)
    mark = fingerprint(graph)
    _check_plan(plan, graph, mark)
    road, clean = _set_out(graph, options, plan, deep, mark)
    limit = road.options.limit_bytes
    planned = road.arrive(clean, alone=plan.step_seconds)
    asked = dataclasses.replace(planned.plan, budget_bytes=limit or plan.budget_bytes)
    return _finished(dataclasses.replace(planned, plan=asked), limit, begun)


@dataclass(frozen=True)
class Terms:
    """What a plan is made for.

    Attributes:
        limit: bytes; 0 for the lowest peak, None to run nothing again, whatever the peak.
        allowed: what may run again, see :data:`roamc.passes.retain.decide.ALLOWED`.
    """

    limit: Bytes | None
    allowed: str = "all"


class Trials:
    """Plans of one graph for one budget after another; what does not depend on the budget is done once.

    No plan depends on those made before it, but for those that are asked for ``together``.

    Attributes:
        options: the user's, with the budget in bytes.
        terms: those of the options.
        found: the plans so far, in the sequence in which they were made.
    """

    def __init__(self, graph: TrainGraph, options: Options, *, deep: bool = False, many: bool = False) -> None:
        """Take the shared passes.

        Args:
            graph: straight from capture; it is changed in place.
            options: what the user set.
            deep: also derive all metadata again after every pass.
            many: more plans than that of :meth:`run` will be asked for.

        Raises:
            VerifyError: a pass left an invalid graph.
        """
        self._begun = time.perf_counter()
        _check_names(options)
        self._road, self._clean = _set_out(graph, options, None, deep, fingerprint(graph))
        self.options, self.terms = self._road.options, self._road.terms
        self.found, self._many = list[Plan](), many
        self._ordered: dict[tuple[bool, str], Stop] = {}
        self._firsts: dict[Terms, Planned] = {}
        self._choices: dict[str, retain.Choice] = {}
        self._minimum: dict[str, Planned] = {}

    def terms_of(self, asked: budget.Budget) -> Terms:
        """What a budget asks for."""
        return _terms(self._clean.graph, asked, self._road.eager_needs)

    @property
    def has_reruns(self) -> bool:
        """Whether anything may run again."""
        return retain.NAME not in self.options.disable

    def run(self, *, quick: bool = False) -> Planned:
        """The plan for the budget of the options; ``quick`` as for :func:`run`.

        Raises:
            VerifyError: a pass left an invalid graph.
            BudgetError: no plan was found that keeps the budget.
        """
        return _finished(self.fit(self.terms, quick=quick), self.terms.limit, self._begun)

    def fit(self, terms: Terms, *, quick: bool = False) -> Planned:
        """A plan within the limit at the least added time; that of the lowest peak if there is none.

        Args:
            terms: what it is made for.
            quick: as for :func:`roamc.budget.fit`.
        """
        if terms.limit is None or not self.has_reruns:
            if not self._many:
                return self._noted(self._below_eager(self._road, lambda road: road.arrive(self._start)))
            planned = self._first(terms)
            return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, step_seconds=0.0))

        def lowest() -> _Attempt:
            return _made_already(self.minimum(terms.allowed))

        ask = functools.partial(self._search, terms)
        planned = budget.fit(ask, lowest, terms.limit, quick=quick).planned
        return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, budget_bytes=terms.limit))

    def minimum(self, allowed: str = "all") -> Planned:
        """The plan of the smallest budget, as :mod:`roamc.budget` defines it; made once."""
        if allowed not in self._minimum:
            terms = Terms(0, allowed)
            found = [self.lowest(terms)]
            if found[0].plan.needed_bytes > self._least(terms):
                found.append(self._first(terms))
            self._choice(allowed).forget()
            attempt = functools.partial(self._attempt, terms)
            self._minimum[allowed] = budget.lower([_made_already(planned) for planned in found], attempt).planned
        return self._minimum[allowed]

    def _search(self, terms: Terms, limit: Bytes) -> list[_Attempt]:
        """The plans made in search of one within ``limit``, which is not 0."""
        self._choice(terms.allowed).forget()

        def first() -> _Attempt:
            return _made_already(self._first(terms))

        return budget.search(first, self._least(terms), functools.partial(self._attempt, terms), limit)

    def _attempt(self, terms: Terms, target: Bytes) -> _Attempt:
        kept = self._choice(terms.allowed).decide(target)
        return _Attempt(kept.peak_bytes, kept.peak_bytes > target, lambda: self._made(kept, terms))

    def attempt(
        self, target: Bytes, terms: Terms | None = None, *, together: bool = False, walks: int = WALKS
    ) -> Planned:
        """A plan with ``target`` live bytes asked of ``retain``.

        Args:
            target: live bytes.
            terms: what it is made for; None for the lowest peak.
            together: begin the choice with one for more bytes. The plan then depends on those made together before.
            walks: the solver's work is limited to that of so many walks.
        """
        terms = terms or Terms(0, self.terms.allowed)
        return self._made(self._choice(terms.allowed).decide(target, together=together, walks=walks), terms)

    def lowest(self, terms: Terms | None = None, *, together: bool = False) -> Planned:
        """The plan that needs the fewest bytes of those with as few live ones as ``retain`` finds.

        Of two that hardly differ, the one with less added time. ``terms`` and ``together`` as for :meth:`attempt`.
        """
        terms = terms or Terms(0, self.terms.allowed)
        made = list[Planned]()
        for kept in self._choice(terms.allowed).lowest(together=together):
            close = (kept.peak_bytes + cost.objects(kept.peak_bytes)) * (1 + PADDING)
            if not made or made[0].plan.needed_bytes > close:  # else this one can hardly need less
                made.append(self._made(kept, terms))
        least = min(planned.plan.needed_bytes for planned in made)
        low = [planned for planned in made if planned.plan.needed_bytes <= least + least // budget.ALIGNED]
        return min(low, key=lambda planned: planned.plan.added_seconds)

    def _made(self, kept: retain.Decision, terms: Terms) -> Planned:
        return self._noted(self._road.under(terms).arrive(_fresh(self._clean), kept, self.alone))

    @property
    def first(self) -> Planned:
        """The plan in which nothing runs again."""
        return self._first(self.terms)

    def _first(self, terms: Terms) -> Planned:
        if terms not in self._firsts:
            ours = self._road.under(terms)

            def make(road: _Road) -> Planned:
                nothing = dataclasses.replace(retain.NOTHING, allowed=terms.allowed)
                ordered = self._in_order(terms) if road is ours else road.order(_fresh(self._clean), nothing)
                return road.place(_fresh(ordered), self.alone)

            self._firsts[terms] = self._noted(self._below_eager(ours, make))
        return self._firsts[terms]

    @property
    def choice(self) -> retain.Choice:
        """What can be dropped or kept smaller."""
        return self._choice(self.terms.allowed)

    def _choice(self, allowed: str) -> retain.Choice:
        if allowed not in self._choices:
            graph, ordered = self._clean.graph, self._in_order(Terms(0, allowed)).decisions.get(reorder.NAME)
            order = ordered.order if ordered else tuple(op.node.name for op in build_memory(graph).operators)
            self._choices[allowed] = retain.Choice(graph, self.options, order, self._profile, self._prices, allowed)
        return self._choices[allowed]

    def _least(self, terms: Terms) -> Bytes:
        """No order has fewer live bytes if nothing runs again."""
        ordered = self._in_order(terms).decisions.get(reorder.NAME)
        return ordered.bound_bytes if ordered else 0

    def _in_order(self, terms: Terms) -> Stop:
        """Nothing runs again, and the operators are in their order, which is the same for all limits."""
        key = terms.limit is None, terms.allowed
        if key not in self._ordered:
            nothing = dataclasses.replace(retain.NOTHING, allowed=terms.allowed)
            self._ordered[key] = self._road.under(terms).order(_fresh(self._clean), nothing)
        return self._ordered[key]

    def _below_eager(self, road: _Road, make: Callable[[_Road], Planned]) -> Planned:
        """A plan; that of the program's order where the one of ours could take more than eager does."""
        planned = make(road)
        over = layout.above_eager(planned.graph, road.options)
        if not over or not joint.may_look_again(road.options):
            return planned
        other = make(road.in_program_order)
        return other if layout.above_eager(other.graph, road.options) < over else planned

    @property
    def _start(self) -> Stop:
        """What the shared passes left; a copy where it may be needed twice."""
        return _fresh(self._clean) if self._clean.graph.eager_floor else self._clean

    @functools.cached_property
    def alone(self) -> Seconds:
        """Predicted time of a step in which nothing runs again."""
        return sum(self._prices.values())

    @functools.cached_property
    def _prices(self) -> Mapping[str, Seconds]:
        return cost.prices(self._clean.graph, self._profile)

    @functools.cached_property
    def _profile(self) -> cost.DeviceProfile:
        return cost.load_profile(main_device(self._clean.graph), self.options.profile)

    def _noted(self, planned: Planned) -> Planned:
        self.found.append(planned.plan)
        return planned


def _set_out(graph: TrainGraph, options: Options, plan: Plan | None, deep: bool, mark: str) -> tuple[_Road, Stop]:
    """Check the graph, read the budget, and take the passes that are the same whatever the budget."""
    verify.check_graph(graph, "capture", deep=deep)
    memory = build_memory(graph)
    live = eager_live_bytes(memory)
    peak = int(live.max(initial=0))
    graph = graph.replace(eager_bytes=peak, eager_floor=joint.eager_floor(graph, memory) if peak < layout.SMALL else {})
    most = int((live + cost.workspaces(memory.operators, eager=True)).max(initial=0))
    needs = most + cost.objects(most, most_alive(*eager_lifetimes(memory), len(memory.operators)))
    road = _Road(options, plan, deep, mark, needs).under(_terms(graph, options.memory_budget, needs))
    flow = value_flow.read(graph, value_flow.Numbers())
    return road, road.travel(Stop(graph, {}, {}, flow), PIPELINE[:SHARED])


def _finished(planned: Planned, limit: Bytes | None, begun: Seconds) -> Planned:
    """Note what else took time since ``begun``, check the budget and log."""
    made = planned.plan
    made.seconds["other"] = time.perf_counter() - begun - sum(made.seconds.values())  # type: ignore[index]
    _check_budget(planned, limit)
    log.info("%s", made)
    return planned


def _terms(graph: TrainGraph, asked: budget.Budget | None, eager_needs: Bytes) -> Terms:
    """What a budget asks for; shares are of ``eager_needs``."""
    state = input_bytes(graph).get(Role.OPTIMIZER_STATE.value, 0)
    limit = budget.resolve(asked, eager_needs, main_device(graph), state)
    return Terms(limit, "light" if asked == budget.LIGHT else "all")


@dataclass(frozen=True)
class _Road:
    """What stays the same however often the passes run.

    Attributes:
        options: of the user, the budget in bytes.
        plan: decisions to use, if there are any.
        deep: derive all metadata again.
        mark: fingerprint of the graph.
        eager_needs: what eager PyTorch takes at its worst step, operators' own memory and objects included.
        allowed: see :class:`Terms`.
    """

    options: Options
    plan: Plan | None
    deep: bool
    mark: str
    eager_needs: Bytes = 0
    allowed: str = "all"

    @property
    def terms(self) -> Terms:
        """What plans are made for."""
        return Terms(self.options.limit_bytes, self.allowed)

    def under(self, terms: Terms) -> _Road:
        """The same for other terms."""
        options = dataclasses.replace(self.options, memory_budget=terms.limit)
        return dataclasses.replace(self, options=options, allowed=terms.allowed)

    def arrive(self, clean: Stop, kept: retain.Decision | None = None, alone: Seconds = 0.0) -> Planned:
        """Run the passes behind the shared ones, check the layout and write the plan.

        Args:
            clean: where the shared passes ended.
            kept: what retain has decided; None for its own decision, or that of the plan.
            alone: predicted time of the step without reruns.
        """
        return self.place(self.order(clean, kept), alone)

    def order(self, clean: Stop, kept: retain.Decision | None) -> Stop:
        """The part of the road up to the order of the operators."""
        return self.travel(clean, PIPELINE[SHARED:ORDERED], {retain.NAME: kept})

    @property
    def in_program_order(self) -> _Road:
        """The same, but operators run as they were traced."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, order="program"))

    def place(self, ordered: Stop, alone: Seconds) -> Planned:
        """The rest of it."""
        again = self.plan is None and joint.may_look_again(self.options)
        first = dataclasses.replace(self, options=joint.first_look(self.options)) if again else self
        values = joint.values_of(ordered.graph)
        end = first.travel(ordered, PIPELINE[ORDERED:])
        if again and joint.falls_short(end.decisions[layout.NAME]):
            end = self._look_again(end, values)
        begun = time.perf_counter()
        verify.check_layout(end.graph)
        made = _plan(end, self.mark, self.options.limit_bytes, alone)
        made.seconds["verify"] = time.perf_counter() - begun  # type: ignore[index]
        return Planned(end.graph, made)

    def _look_again(self, end: Stop, values: joint.Values) -> Stop:
        """The layout falls short: take the best of the orders with no higher peak."""
        begun = time.perf_counter()
        first = joint.Found(end.decisions[reorder.NAME], end.decisions[layout.NAME])
        donated, bare = joint.values_of(end.graph), joint.without_donation(end.graph, values)
        found = joint.decide(bare, first, self.options)
        known = {reorder.NAME: found.ordered, layout.NAME: found.placed}
        anew: tuple[str, ...] = (*known, donate.NAME)
        if found.ordered.order == first.ordered.order:
            joint.put_back(end.graph, donated)
            bare, anew = end.graph, (layout.NAME,)
        seconds = {**end.seconds, joint.NAME: time.perf_counter() - begun}
        stop = Stop(bare, {**end.decisions, reorder.NAME: found.ordered}, seconds, end.flow)
        return self.travel(stop, [step for step in PIPELINE if step.name in anew], known)

    def travel(self, start: Stop, passes: Sequence[Pass], known: Mapping[str, Any] | None = None) -> Stop:
        """Decide, unless the decision is given here or in the plan, apply and check ``passes``."""
        stop = start
        for step in passes:
            if step.name in self.options.disable or (self.plan is not None and step.name not in self.plan.decisions):
                continue
            stop = self._take(step, stop, (known or {}).get(step.name))
        return stop

    def _take(self, step: Pass, stop: Stop, decision: Any) -> Stop:
        begun = time.perf_counter()
        news.say(step.name)
        kept = verify.constraints(stop.graph)
        if decision is None:
            decision = _decision(step, stop.graph, self.options, self.plan)
        graph = step.apply(stop.graph, decision)
        verify.check_graph(graph, step.name, kept, deep=self.deep)
        flow = stop.flow
        if graph is not stop.graph:
            flow = value_flow.check(graph, flow, step.name, self.options.codecs)
        seconds = stop.seconds.get(step.name, 0.0) + time.perf_counter() - begun
        return Stop(graph, {**stop.decisions, step.name: decision}, {**stop.seconds, step.name: seconds}, flow)


@dataclass(frozen=True)
class _Attempt:
    """A plan as the search for a budget sees it; it is made when more is asked than what retain has foreseen.

    Attributes:
        asked_bytes: live bytes that retain foresaw.
        strained: whether these are more than were asked of it.
        make: the rest of the road.
    """

    asked_bytes: Bytes
    strained: bool
    make: Callable[[], Planned]

    @functools.cached_property
    def planned(self) -> Planned:
        """The plan."""
        return self.make()

    @property
    def needed_bytes(self) -> Bytes:
        return self.planned.plan.needed_bytes

    @property
    def added_seconds(self) -> Seconds:
        return self.planned.plan.added_seconds


def _made_already(planned: Planned) -> _Attempt:
    """A plan that was not made for live bytes, in the same form."""
    return _Attempt(int(planned.plan.decisions[retain.NAME]["peak_bytes"]), False, lambda: planned)


def _fresh(stop: Stop) -> Stop:
    """The same with a graph of its own, for passes to change."""
    return dataclasses.replace(stop, graph=copied(stop.graph))


def _decision(step: Pass, graph: TrainGraph, options: Options, plan: Plan | None) -> Any:
    if plan is None:
        return step.decide(graph, options)
    return typed.read(step.decision, plan.decisions[step.name], f"the plan's decision of pass {step.name!r}")


def _check_plan(plan: Plan, graph: TrainGraph, mark: str) -> None:
    if plan.fingerprint != mark:
        raise PlanError(f"the plan of {plan.name!r} was made for another graph than this {graph.name!r}: plan again")
    missing = REQUIRED.difference(plan.decisions)
    if missing:
        raise PlanError(f"the plan has no decision of pass {', '.join(sorted(missing))}: plan again")


def _check_names(options: Options) -> None:
    known = [step.name for step in PIPELINE if step.name not in REQUIRED]
    for name in options.disable:
        if name not in known:
            raise PlanError(f"cannot leave out pass {name!r}; passes that can be left out: {', '.join(known)}")
    check_lossy(options.codecs)


def _plan(end: Stop, mark: str, limit: Bytes | None, alone: Seconds) -> Plan:
    graph, decisions = end.graph, end.decisions
    placed: layout.Decision = decisions[layout.NAME]
    ordered: reorder.Decision | None = decisions.get(reorder.NAME)
    kept: retain.Decision = decisions.get(retain.NAME, retain.NOTHING)
    peak_bytes, bound_bytes = placed.peak_bytes, ordered.bound_bytes if ordered else 0
    statuses = {placed.status, ordered.status if ordered else "gap"}
    if peak_bytes > bound_bytes * (1 + PADDING):
        statuses.add("gap")
    return Plan(
        name=graph.name,
        fingerprint=mark,
        versions={"roamc": __version__, "torch": torch.__version__},
        budget_bytes=limit or 0,
        peak_bytes=peak_bytes,
        needed_bytes=placed.needed_bytes,
        arena_bytes=placed.arena_bytes,
        live_bytes=placed.live_bytes,
        bound_bytes=bound_bytes,
        baseline_bytes=graph.eager_bytes or 0,
        step_seconds=alone,
        added_seconds=kept.added_seconds,
        added_bound_seconds=kept.bound_seconds,
        status="optimal" if statuses == {"optimal"} else "limit" if "limit" in statuses else "gap",
        fixed_bytes=input_bytes(graph),
        decisions={name: dataclasses.asdict(decision) for name, decision in decisions.items()},
        notes=(*graph.notes, *joint.note(ordered, placed)),
        seconds=dict(end.seconds),
    )


def _check_budget(planned: Planned, limit: Bytes | None) -> None:
    plan = planned.plan
    if not limit or plan.needed_bytes <= limit:
        return
    again = "all that can be dropped and made again dropped" if plan.step_seconds else "nothing dropped"
    raise BudgetError(
        f"{plan.name} needs {format_bytes(plan.needed_bytes)} ({plan.needed_bytes} bytes) at its peak, above "
        f"memory_budget={format_bytes(limit)}, with {again}; most of it at that step: {_largest(planned.graph)}. "
        + RAISE,
        plan,
    )


SMALLER = ", or use a smaller batch"
"""End of :data:`RAISE`; ``max_batch`` cuts it off, where no batch is smaller."""

RAISE = f"Raise the budget{SMALLER}"
"""End of the error for a budget that no plan keeps; the backend replaces it where other advice helps."""


def _largest(graph: TrainGraph, count: int = 3) -> str:
    """The largest storages at the worst step, for a message."""
    memory = build_memory(graph)
    born, dead = lifetimes(memory)
    step = int(timeline(sizes(memory.counted), born, dead, len(memory.operators)).argmax())
    alive = [s for s, first, end in zip(memory.counted, born, dead, strict=True) if first <= step < end]
    alive.sort(key=lambda storage: -storage.nbytes)
    return ", ".join(f"{storage.name} {format_bytes(storage.nbytes)}" for storage in alive[:count])

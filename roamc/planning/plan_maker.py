"""One plan: the pipeline run on one graph for given terms, its layout checked, its numbers written down.

Passes that decide the same for every budget run once, in :func:`prepared`. Where the arena is larger than what lives in
it, :mod:`roamc.planning.other_orders` lays out other orders with no higher peak, and the best of them is taken.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from roamc import budget, cost
from roamc.graph import Role, TrainGraph, copied, main_device, value_flow, verify
from roamc.graph.memory import build_memory, eager_lifetimes, eager_live_bytes, input_bytes, most_alive
from roamc.graph.value_numbers import Numbers
from roamc.options import Options
from roamc.passes import layout, reorder, retain, reuse
from roamc.planning import layout_judge, other_orders, pipeline
from roamc.planning.pipeline import Runner, State
from roamc.planning.plan import Plan
from roamc.planning.planned import Planned, plan_of
from roamc.units import Bytes, Seconds


@dataclass(frozen=True)
class Terms:
    """What a plan is made for.

    Attributes:
        limit: bytes; 0 for the lowest peak, None to recompute nothing, whatever the peak.
        allowed: what may be recomputed, see :data:`roamc.passes.retain.problem.ALLOWED`.
    """

    limit: Bytes | None
    allowed: str = "all"


def prepared(
    graph: TrainGraph, options: Options, plan: Plan | None, fingerprint: str, *, deep: bool = False
) -> tuple[PlanMaker, State]:
    """Check a captured graph, resolve the budget, and run the passes that decide the same for every budget.

    Args:
        graph: straight from capture; its nodes are moved and erased in place.
        options: what the user set.
        plan: decisions to use instead of deciding, if there is one.
        fingerprint: of the graph.
        deep: also derive all metadata again after every pass.

    Raises:
        VerifyError: the graph, or what a pass left of it, is invalid.
    """
    verify.check_graph(graph, "capture", deep=deep)
    memory = build_memory(graph)
    live = eager_live_bytes(memory)
    peak = int(live.max(initial=0))
    floor = other_orders.eager_floor(graph, memory) if peak < layout.SMALL else {}
    graph = graph.replace(eager_bytes=peak, eager_floor=floor)
    most = int((live + cost.workspaces(memory.operators, eager=True)).max(initial=0))
    needs = most + cost.objects(most, most_alive(*eager_lifetimes(memory), len(memory.operators)))
    maker = PlanMaker(Runner(options, plan, deep), fingerprint, needs)
    maker = maker.under(terms_of(graph, options.memory_budget, needs))
    state = State(graph, {}, {}, value_flow.read(graph, Numbers()))
    return maker, maker.runner.run(state, pipeline.same_for_all_budgets(pipeline.PIPELINE))


def terms_of(graph: TrainGraph, asked: budget.Budget | None, eager_needs: Bytes) -> Terms:
    """What a budget asks for; shares are of ``eager_needs``."""
    state = input_bytes(graph).get(Role.OPTIMIZER_STATE.value, 0)
    limit = budget.resolve(asked, eager_needs, main_device(graph), state)
    return Terms(limit, "light" if asked == budget.LIGHT else "all")


@dataclass(frozen=True)
class PlanMaker:
    """Runs the pipeline behind the passes that decide the same for every budget.

    Attributes:
        runner: with the user's options, the budget in bytes.
        fingerprint: of the captured graph.
        eager_needs: bytes that eager PyTorch takes at its worst step, workspaces and tensor objects included.
        allowed: see :class:`Terms`.
    """

    runner: Runner
    fingerprint: str
    eager_needs: Bytes = 0
    allowed: str = "all"

    @property
    def options(self) -> Options:
        """The user's, with the budget in bytes."""
        return self.runner.options

    @property
    def terms(self) -> Terms:
        """What plans are made for."""
        return Terms(self.options.limit_bytes, self.allowed)

    def under(self, terms: Terms) -> PlanMaker:
        """The same for other terms."""
        changed = self._with(dataclasses.replace(self.options, memory_budget=terms.limit))
        return dataclasses.replace(changed, allowed=terms.allowed)

    @property
    def in_program_order(self) -> PlanMaker:
        """The same, but operators run in the order in which they were traced."""
        return self._with(dataclasses.replace(self.options, order="program"))

    def _with(self, options: Options) -> PlanMaker:
        return dataclasses.replace(self, runner=dataclasses.replace(self.runner, options=options))

    def make(self, start: State, kept: retain.Decision | None = None, step_seconds: Seconds = 0.0) -> Planned:
        """The graph behind all passes, and its plan.

        Args:
            start: what :func:`prepared` gave.
            kept: the decision of retain; None for its own, or that of the plan.
            step_seconds: predicted time of the step without recomputation.
        """
        return self.place(self.order(start, kept), step_seconds)

    def order(self, start: State, kept: retain.Decision | None) -> State:
        """Run the passes up to the order of the operators."""
        passes = pipeline.until(pipeline.ORDER, pipeline.PIPELINE)
        shared = pipeline.same_for_all_budgets(passes)
        return self.runner.run(start, passes[len(shared) :], {retain.NAME: kept})

    def place(self, ordered: State, step_seconds: Seconds) -> Planned:
        """Run the passes behind the order, check the layout and write the plan."""
        again = self.runner.plan is None and other_orders.may_look_again(self.options)
        first = self._with(other_orders.first_look(self.options)) if again else self
        passes = pipeline.PIPELINE[len(pipeline.until(pipeline.ORDER, pipeline.PIPELINE)) :]
        end = first.runner.run(ordered, passes)
        if again and other_orders.falls_short(end.decisions[layout.NAME]):
            end = self._other_orders(end)
        begun = time.perf_counter()
        layout_judge.check_layout(end.graph)
        plan = plan_of(end, self.fingerprint, self.options.limit_bytes, step_seconds)
        plan.seconds["verify"] = time.perf_counter() - begun  # type: ignore[index]
        return Planned(end.graph, plan)

    def _other_orders(self, end: State) -> State:
        """The layout falls short: take the best of the orders with no higher peak."""
        begun = time.perf_counter()
        first = other_orders.Found(end.decisions[reorder.NAME], end.decisions[layout.NAME])
        graph = end.graph.replace(reuse={}, layout=None)
        best = other_orders.decide(graph, first, self.options)
        decisions = {reorder.NAME: best.ordered, layout.NAME: best.placed}
        anew: tuple[str, ...] = (*decisions, reuse.NAME)
        if best.ordered.order == first.ordered.order:
            graph, anew = end.graph, (layout.NAME,)
        seconds = {**end.seconds, other_orders.NAME: time.perf_counter() - begun}
        state = State(graph, {**end.decisions, reorder.NAME: best.ordered}, seconds, end.flow)
        return self.runner.run(state, [each for each in pipeline.PIPELINE if each.name in anew], decisions)


def fresh(state: State) -> State:
    """The same state with a graph of its own, which passes may change."""
    return dataclasses.replace(state, graph=copied(state.graph))

"""The pipeline: an ordered tuple of passes, and a runner that checks the graph after each.

Read this file top to bottom, then one pass, then one solver. :mod:`roamc.planning.search` runs the pipeline for one
memory budget after another.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roamc import decode, ticker
from roamc.errors import PlanError
from roamc.graph import TrainGraph, mask_judge, projection_judge, shard_judge, value_flow, verify
from roamc.graph.memory import build_memory, kept_memory
from roamc.graph.train_graph import differ_in_layout_only
from roamc.graph.value_numbers import Flow, Numbers
from roamc.options import Options
from roamc.passes import (
    async_tp,
    checkpoint,
    count,
    fuse,
    layout,
    masks,
    normalize,
    overlap,
    padding,
    products,
    project,
    reorder,
    retain,
    reuse,
    scores,
    shard,
)
from roamc.planning.plan import Plan
from roamc.units import Seconds

Facts = frozenset[str]
"""Names of what passes establish about a graph, such as "normal form"; see :data:`PIPELINE`."""

Judge = Callable[[TrainGraph, TrainGraph, str], None]
"""Function of the graphs before and behind a pass, and the pass's name."""

ORDER = "order"
"""The fact that operators are in the order in which they run. Passes in front of the one that provides it choose what
runs, passes behind it where tensors lie."""


@dataclass(frozen=True)
class Pass:
    """One pass of the pipeline.

    A fact about the graph is a word for what a pass has settled, such as "layout". Facts say which orders of passes are
    legal.

    Attributes:
        name: its name on the command line, in messages and in plans.
        decision: the dataclass that ``decide`` returns, ``apply`` takes, and a plan holds as JSON.
        decide: takes the graph and the options, and returns the decision; it changes nothing.
        apply: takes the graph and the decision, and returns the rewritten graph; it may change the given one in place.
        per_budget: whether the decision may depend on the memory budget.
        judge: compares the graphs before and behind a pass that makes other values, such as rows of them; raises a
            VerifyError. None for passes that keep the values, which :mod:`roamc.graph.value_flow` compares.
        requires: facts about the graph that must hold in front of the pass.
        provides: facts that hold behind it, also where the user leaves it out.
        invalidates: facts that no longer hold behind it.
    """

    name: str
    decision: type
    decide: Callable[[TrainGraph, Options], Any]
    apply: Callable[[TrainGraph, Any], TrainGraph]
    per_budget: bool = True
    judge: Judge | None = None
    requires: Facts = frozenset()
    provides: Facts = frozenset()
    invalidates: Facts = frozenset()

    @staticmethod
    def of(module: Any, *, per_budget: bool = True, judge: Judge | None = None, **facts: Iterable[str]) -> Pass:
        """Make a pass of a module with the names NAME, Decision, decide and apply.

        Args:
            module: the module.
            per_budget: whether the decision may depend on the memory budget.
            judge: as for the class.
            facts: ``requires``, ``provides`` and ``invalidates`` as for the class.
        """
        contract = {key: frozenset(names) for key, names in facts.items()}
        return Pass(module.NAME, module.Decision, module.decide, module.apply, per_budget, judge, **contract)


def checked(*passes: Pass) -> tuple[Pass, ...]:
    """Return the passes as they are, if each finds the facts that it requires.

    Raises:
        ValueError: no pass in front of one provides a fact that it requires, or a pass in between invalidates it.
    """
    facts: Facts = frozenset()
    for each in passes:
        missing = sorted(each.requires - facts)
        if missing:
            raise ValueError(
                f"pass {each.name} requires {', '.join(missing)}, which no pass in front of it leaves valid"
            )
        facts = facts - each.invalidates | each.provides
    return passes


PIPELINE = checked(
    Pass.of(normalize, per_budget=False, provides={"normal form"}),
    Pass.of(checkpoint, per_budget=False, requires={"normal form"}, provides={"user's recomputation"}),
    Pass.of(shard, per_budget=False, requires={"normal form", "user's recomputation"}, judge=shard_judge.check),
    Pass.of(masks, per_budget=False, requires={"normal form", "user's recomputation"}, judge=mask_judge.check),
    Pass.of(scores, per_budget=False, requires={"normal form", "user's recomputation"}),
    Pass.of(project, per_budget=False, requires={"normal form"}, judge=projection_judge.check),
    Pass.of(async_tp, per_budget=False, requires={"normal form"}),
    Pass.of(padding, per_budget=False, requires={"normal form"}),
    Pass.of(products, per_budget=False, requires={"normal form"}),
    Pass.of(count, per_budget=False, requires={"normal form"}),
    Pass.of(fuse, per_budget=False, requires={"normal form", "user's recomputation"}),
    Pass.of(retain, requires={"normal form", "user's recomputation"}, provides={"saved values"}, invalidates={ORDER}),
    Pass.of(reorder, requires={"saved values"}, provides={ORDER}, invalidates={"in-place reuse"}),
    Pass.of(overlap, requires={ORDER}, invalidates={"in-place reuse"}),
    Pass.of(reuse, requires={ORDER}, provides={"in-place reuse"}, invalidates={"layout"}),
    Pass.of(layout, requires={ORDER, "in-place reuse"}, provides={"layout"}),
)


def same_for_all_budgets(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """Return the leading passes whose decisions do not depend on the memory budget, up to the first whose does."""
    return tuple(itertools.takewhile(lambda each: not each.per_budget, passes))


def until(fact: str, passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """Return the leading passes up to and with the last that provides ``fact``, which one of them must."""
    return passes[: max(at for at, each in enumerate(passes) if fact in each.provides) + 1]


@contextlib.contextmanager
def errors_name(name: str) -> Iterator[None]:
    """Put the name of the pass in front of the message of a PlanError that is raised within.

    Passes share the code of :mod:`roamc.rewriting`, which does not know on behalf of which pass it runs.

    Args:
        name: of the pass.

    Raises:
        PlanError: what was raised, as "name: message".
    """
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{name}: {error}") from error


@dataclass(frozen=True)
class State:
    """A graph between two passes.

    Attributes:
        graph: the graph that the last pass left.
        decisions: pass name to decision, of the passes so far.
        seconds: stage, mostly a pass, to its wall time.
        flow: the values that the graph computes, which the next pass must keep, see :mod:`roamc.graph.value_flow`.
        constraints: what else the next pass must keep of the graph.
    """

    graph: TrainGraph
    decisions: Mapping[str, Any]
    seconds: Mapping[str, Seconds]
    flow: Flow
    constraints: verify.Constraints


@dataclass(frozen=True)
class Runner:
    """Decides, applies and verifies passes.

    Attributes:
        options: what the user set.
        plan: a plan whose decisions are used instead of deciding; passes that it has no decision of are left out.
        deep: also derive the metadata of all nodes again after every pass and compare it (slow; for tests).
    """

    options: Options
    plan: Plan | None = None
    deep: bool = False

    def run(self, state: State, passes: Iterable[Pass], decisions: Mapping[str, Any] | None = None) -> State:
        """Run ``passes`` in turn on the graph of ``state`` and return the state behind them.

        Passes that ``options.disable`` names are left out, and so are those of which :attr:`plan`, if there is one, has
        no decision. After every pass the graph is verified.

        Args:
            state: where to begin; its graph may be changed in place, so begin a second run at a copy.
            passes: a part of :data:`PIPELINE`, in its order.
            decisions: pass name to a decision to apply. A pass that is missing or None decides by itself, or takes the
                decision of :attr:`plan`.

        Raises:
            PlanError: a decision does not fit the graph.
            VerifyError: a pass left an invalid graph.
        """
        for each in passes:
            left_out = self.plan is not None and each.name not in self.plan.decisions
            if each.name not in self.options.disable and not left_out:
                state = self._run(each, state, (decisions or {}).get(each.name))
        return state

    def _run(self, each: Pass, state: State, decision: Any) -> State:
        """Run one pass; with None for ``decision`` it decides, or the plan does."""
        begun = time.perf_counter()
        ticker.say(each.name)
        memory = build_memory(state.graph)
        if decision is None:
            decision = self._decision(each, state.graph)
        with errors_name(each.name):
            graph = each.apply(state.graph, decision)
        flow, constraints, rewritten = state.flow, state.constraints, kept_memory(graph) is not memory
        if each.judge is not None and graph.module is not state.graph.module:
            verify.check_graph(graph, each.name, deep=self.deep)
            each.judge(state.graph, graph, each.name)
            flow = value_flow.read(graph, Numbers(), each.name)
        elif rewritten or self.deep or not differ_in_layout_only(graph, state.graph):
            verify.check_graph(graph, each.name, constraints, deep=self.deep)
            flow = value_flow.check(graph, flow, each.name, self.options.codecs, fast=self.options.numerics == "fast")
        if rewritten:
            constraints = verify.constraints(graph)
        seconds = state.seconds.get(each.name, 0.0) + time.perf_counter() - begun
        decisions, times = {**state.decisions, each.name: decision}, {**state.seconds, each.name: seconds}
        return State(graph, decisions, times, flow, constraints)

    def _decision(self, each: Pass, graph: TrainGraph) -> Any:
        """Return the decision of a pass: that of the plan if there is one, else its own."""
        if self.plan is None:
            with errors_name(each.name):
                return each.decide(graph, self.options)
        where = f"the plan's decision of pass {each.name!r}"
        return decode.read(each.decision, self.plan.decisions[each.name], where)

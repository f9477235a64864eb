"""The road: an ordered tuple of passes, and the runner that checks the graph after each.

Read this file top to bottom, then one pass, then one solver.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roamc import budget, cost, typed, verify
from roamc.errors import BudgetError, PlanError
from roamc.graph import Role, TrainGraph, copied, main_device, operators, tensors_of
from roamc.memory import build_memory, eager_live_bytes, input_bytes
from roamc.options import Options
from roamc.passes import donate, layout, normalize, reorder, retain
from roamc.plan import Plan
from roamc.units import Bytes, Seconds, format_bytes
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
    Pass(retain.NAME, retain.Decision, retain.decide, retain.apply),
    Pass(reorder.NAME, reorder.Decision, reorder.decide, reorder.apply),
    Pass(donate.NAME, donate.Decision, donate.decide, donate.apply),
    Pass(layout.NAME, layout.Decision, layout.decide, layout.apply),
)

SHARED = 1
"""So many passes at the head are the same whatever the budget; those behind are tried several times."""

REQUIRED = frozenset({layout.NAME})
"""Passes that no option leaves out: without them there is no program."""


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
    """

    graph: TrainGraph
    decisions: Mapping[str, Any]
    seconds: Mapping[str, float]


def run(graph: TrainGraph, options: Options, plan: Plan | None = None, *, deep: bool = False) -> Planned:
    """Decide, apply and verify every pass in turn; under a budget the later ones again until it is kept.

    Args:
        graph: straight from capture; its nodes are moved and erased in place.
        options: what the user set.
        plan: decisions to use instead of deciding; every apply and every check still runs.
        deep: also derive all metadata again after every pass (slow; for tests).

    Raises:
        PlanError: ``plan`` was made for another graph.
        VerifyError: a pass left an invalid graph.
        BudgetError: no plan was found that keeps ``options.memory_budget``.
    """
    _check_disabled(options)
    mark = fingerprint(graph)
    if plan is not None:
        _check_plan(plan, graph, mark)
    verify.check_graph(graph, "capture", deep=deep)
    baseline = int(eager_live_bytes(build_memory(graph)).max(initial=0))
    fixed = input_bytes(graph)
    state = fixed.get(Role.OPTIMIZER_STATE.value, 0)
    limit = budget.resolve(options.memory_budget, baseline, main_device(graph), state)
    options = dataclasses.replace(options, memory_budget=limit)
    start = Stop(graph.replace(eager_bytes=baseline), {}, {})
    clean = _travel(start, PIPELINE[:SHARED], options, plan, deep)
    device = main_device(graph)
    alone = 0.0 if limit is None else cost.step_seconds(clean.graph, cost.load_profile(device, options.profile))

    def attempt(target: Bytes | None, order: Sequence[str] | None) -> _Attempt:
        road = [_aimed(step, target, order) if step.name == retain.NAME else step for step in PIPELINE[SHARED:]]
        begin = clean if target is None and limit is None else dataclasses.replace(clean, graph=copied(clean.graph))
        return _Attempt(_finish(_travel(begin, road, options, plan, deep), mark, limit, alone))

    tried = attempt(None, None) if plan is not None or retain.NAME in options.disable else budget.fit(attempt, limit)
    _check_budget(tried.planned.plan, limit)
    log.info("%s", tried.planned.plan)
    return tried.planned


def _aimed(step: Pass, target: Bytes | None, order: Sequence[str] | None) -> Pass:
    """The retain pass with the live bytes that it is asked for, and the order it starts from."""
    return dataclasses.replace(step, decide=functools.partial(retain.decide, target=target, order=order))


@dataclass(frozen=True)
class _Attempt:
    """A finished plan, as the search for a budget sees it."""

    planned: Planned

    @property
    def peak_bytes(self) -> Bytes:
        return self.planned.plan.peak_bytes

    @property
    def added_seconds(self) -> Seconds:
        return self.planned.plan.added_seconds

    @property
    def asked_bytes(self) -> Bytes:
        decision = self.planned.plan.decisions[retain.NAME]
        return int(decision["peak_bytes"])

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(op.node.name for op in build_memory(self.planned.graph).operators)


def _travel(start: Stop, road: Sequence[Pass], options: Options, plan: Plan | None, deep: bool) -> Stop:
    """Decide, apply and check the passes of ``road``."""
    graph, decisions, seconds = start.graph, dict(start.decisions), dict(start.seconds)
    for step in road:
        if step.name in options.disable or (plan is not None and step.name not in plan.decisions):
            continue
        begun = time.perf_counter()
        kept = verify.constraints(graph)
        decision = _decision(step, graph, options, plan)
        graph = step.apply(graph, decision)
        verify.check_graph(graph, step.name, kept, deep=deep)
        decisions[step.name] = decision
        seconds[step.name] = time.perf_counter() - begun
    return Stop(graph, decisions, seconds)


def _finish(end: Stop, mark: str, limit: Bytes | None, alone: Seconds) -> Planned:
    """Check the layout and write the plan."""
    begun = time.perf_counter()
    verify.check_layout(end.graph)
    made = _plan(end, mark, limit, alone)
    made.seconds["verify"] = time.perf_counter() - begun  # type: ignore[index]
    return Planned(end.graph, made)


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


def fingerprint(graph: TrainGraph) -> str:
    """A hash of operators, arguments, shapes and roles; the same in every process."""
    digest = hashlib.sha256()
    for node in graph.graph.nodes:
        geometry = [(tuple(map(int, t.shape)), tuple(map(int, t.stride())), str(t.dtype)) for _, t in tensors_of(node)]
        digest.update(f"{node.op}|{node.name}|{node.target}|{node.args}|{node.kwargs}|{geometry}\n".encode())
    digest.update(repr([(port.role.value, int(port.phase)) for port in (*graph.inputs, *graph.outputs)]).encode())
    phases = [(node.name, int(graph.phase[node.name])) for node in operators(graph.graph) if node.name in graph.phase]
    digest.update(f"{graph.boundary}|{graph.saved}|{graph.gradients}|{sorted(graph.waits.items())}|{phases}".encode())
    return digest.hexdigest()


def _check_disabled(options: Options) -> None:
    known = [step.name for step in PIPELINE if step.name not in REQUIRED]
    for name in options.disable:
        if name not in known:
            raise PlanError(f"cannot leave out pass {name!r}; passes that can be left out: {', '.join(known)}")


def _plan(end: Stop, mark: str, limit: Bytes | None, alone: Seconds) -> Plan:
    graph, decisions = end.graph, end.decisions
    placed: layout.Decision = decisions[layout.NAME]
    ordered: reorder.Decision | None = decisions.get(reorder.NAME)
    kept: retain.Decision = decisions.get(retain.NAME, retain.NOTHING)
    peak_bytes, bound_bytes = placed.arena_bytes + placed.outside_bytes, ordered.bound_bytes if ordered else 0
    statuses = {placed.status, ordered.status if ordered else "gap"}
    if peak_bytes > bound_bytes * (1 + PADDING):
        statuses.add("gap")
    return Plan(
        name=graph.name,
        fingerprint=mark,
        versions={"roamc": __version__, "torch": torch.__version__},
        budget_bytes=limit or 0,
        peak_bytes=peak_bytes,
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
        notes=graph.notes,
        seconds=dict(end.seconds),
    )


def _check_budget(plan: Plan, limit: Bytes | None) -> None:
    if not limit or plan.peak_bytes <= limit:
        return
    raise BudgetError(
        f"{plan.name} needs {format_bytes(plan.peak_bytes)} ({plan.peak_bytes} bytes) at its peak, above "
        f"memory_budget={format_bytes(limit)}, with all that can be dropped and made again dropped. "
        "Raise the budget, or use a smaller batch",
        plan,
    )

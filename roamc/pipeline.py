"""The road: an ordered tuple of passes, and the runner that checks the graph after each.

Read this file top to bottom, then one pass, then one solver.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from roamc import typed, verify
from roamc.errors import BudgetError, PlanError
from roamc.graph import TrainGraph, operators, tensors_of
from roamc.memory import build_memory, eager_live_bytes, input_bytes
from roamc.options import Options
from roamc.passes import donate, layout, normalize, reorder
from roamc.plan import Plan
from roamc.units import format_bytes
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
    Pass(reorder.NAME, reorder.Decision, reorder.decide, reorder.apply),
    Pass(donate.NAME, donate.Decision, donate.decide, donate.apply),
    Pass(layout.NAME, layout.Decision, layout.decide, layout.apply),
)

REQUIRED = frozenset({layout.NAME})
"""Passes that no option leaves out: without them there is no program."""


PADDING = 0.001
"""A peak is still optimal above the bound of live bytes by this share: sizes are rounded up to the alignment."""


@dataclass(frozen=True)
class Planned:
    """A graph with every decision applied, and the plan that did it."""

    graph: TrainGraph
    plan: Plan


def run(graph: TrainGraph, options: Options, plan: Plan | None = None, *, deep: bool = False) -> Planned:
    """Decide, apply and verify every pass in turn.

    Args:
        graph: straight from capture; its nodes are moved and erased in place.
        options: what the user set.
        plan: decisions to use instead of deciding; every apply and every check still runs.
        deep: also derive all metadata again after every pass (slow; for tests).

    Raises:
        PlanError: ``plan`` was made for another graph.
        VerifyError: a pass left an invalid graph.
        BudgetError: the plan's peak is above ``options.memory_limit``.
    """
    _check_disabled(options)
    mark = fingerprint(graph)
    if plan is not None and plan.fingerprint != mark:
        raise PlanError(f"the plan of {plan.name!r} was made for another graph than this {graph.name!r}: plan again")
    missing = REQUIRED.difference(plan.decisions) if plan is not None else ()
    if missing:
        raise PlanError(f"the plan has no decision of pass {', '.join(sorted(missing))}: plan again")
    verify.check_graph(graph, "capture", deep=deep)
    baseline = int(eager_live_bytes(build_memory(graph)).max(initial=0))
    graph = graph.replace(eager_bytes=baseline)
    decisions: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for step in PIPELINE:
        if step.name in options.disable or (plan is not None and step.name not in plan.decisions):
            continue
        start = time.perf_counter()
        kept = verify.constraints(graph)
        decision = _decision(step, graph, options, plan)
        graph = step.apply(graph, decision)
        verify.check_graph(graph, step.name, kept, deep=deep)
        decisions[step.name] = decision
        seconds[step.name] = time.perf_counter() - start
    start = time.perf_counter()
    verify.check_layout(graph)
    made = _plan(graph, mark, baseline, decisions, seconds)
    made.seconds["verify"] = time.perf_counter() - start  # type: ignore[index]
    _check_limit(made, options)
    log.info("%s", made)
    return Planned(graph, made)


def _decision(step: Pass, graph: TrainGraph, options: Options, plan: Plan | None) -> Any:
    if plan is None:
        return step.decide(graph, options)
    return typed.read(step.decision, plan.decisions[step.name], f"the plan's decision of pass {step.name!r}")


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


def _plan(graph: TrainGraph, mark: str, baseline: int, decisions: dict[str, Any], seconds: dict[str, float]) -> Plan:
    placed: layout.Decision = decisions[layout.NAME]
    ordered: reorder.Decision | None = decisions.get(reorder.NAME)
    peak_bytes, bound_bytes = placed.peak_bytes, ordered.bound_bytes if ordered else 0
    statuses = {placed.status, ordered.status if ordered else "gap"}
    if peak_bytes > bound_bytes * (1 + PADDING):
        statuses.add("gap")
    return Plan(
        name=graph.name,
        fingerprint=mark,
        versions={"roamc": __version__, "torch": torch.__version__},
        peak_bytes=peak_bytes,
        arena_bytes=placed.arena_bytes,
        live_bytes=placed.live_bytes,
        bound_bytes=bound_bytes,
        baseline_bytes=baseline,
        status="optimal" if statuses == {"optimal"} else "limit" if "limit" in statuses else "gap",
        fixed_bytes=input_bytes(graph),
        decisions={name: dataclasses.asdict(decision) for name, decision in decisions.items()},
        notes=graph.notes,
        seconds=seconds,
    )


def _check_limit(plan: Plan, options: Options) -> None:
    if options.memory_limit is None or plan.peak_bytes <= options.memory_limit:
        return
    raise BudgetError(
        f"{plan.name} needs {format_bytes(plan.peak_bytes)} ({plan.peak_bytes} bytes) at its peak, above "
        f"memory_limit={format_bytes(options.memory_limit)}; no order of its operators needs less than "
        f"{format_bytes(plan.bound_bytes)}. Raise the limit, or use a smaller batch",
        plan,
    )

"""Plans from elsewhere: which file of the option ``plan`` is applied to a graph, and under which budget it stands."""

from __future__ import annotations

import dataclasses
import functools
import os

from roamc import notices
from roamc.budget import LIGHT, NO_TIME, Budget
from roamc.errors import BudgetError, PlanError
from roamc.graph import TrainGraph, main_device
from roamc.options import Options
from roamc.planning.plan import Plan, load_plan
from roamc.planning.plan_check import added
from roamc.planning.plan_maker import terms_of
from roamc.planning.planned import Terms
from roamc.units import format_bytes


def plan_for(graph: TrainGraph, options: Options, mark: str) -> tuple[TrainGraph, Plan | None, str]:
    """Return the plan of a file of ``options.plan`` that was made for ``graph``: the first that keeps the budget.

    Args:
        graph: the graph as it was captured.
        options: what the user set; names files.
        mark: the fingerprint of ``graph``.

    Returns:
        (graph, plan, file): the graph, with a note where several files are for it or none is; the plan and its file,
        None and "" where none is, after a warning.

    Raises:
        PlanError: a file cannot be read; or none is for this graph, and the option ``strict`` is set.
        BudgetError: no plan for this graph keeps the budget.
    """
    plans = {file: plan for file in options.plan if (plan := _read(file)).fingerprint == mark}
    if not plans:
        note = f"no plan of {', '.join(options.plan)} is for this graph"
        error = PlanError(f"{note}, {graph.name!r}: save one for it, or leave plan out")
        notices.warn_or_raise(graph.module, "plan", error, options, "; it is planned anew")
        return graph.replace(notes=(*graph.notes, note)), None, ""
    device, asked = main_device(graph).type, options.memory_budget
    here = {file: plan for file, plan in plans.items() if plan.device == device} or plans
    reasons = {
        file: _not_kept(plan, terms_of(graph, asked, plan.baseline_needed_bytes, options.room), asked)
        for file, plan in here.items()
    }
    file = min(here, key=lambda name: reasons[name] != "")  # the first that keeps the budget
    _refuse(plans[file], reasons[file], file)
    if len(plans) > 1:
        others = ", ".join(name for name in plans if name != file)
        note = f"the plan is that of {file}; {others} would be for this graph, too"
        graph = graph.replace(notes=(*graph.notes, note))
    return graph, plans[file], file


def check_kept(plan: Plan, terms: Terms, asked: Budget | None, file: str) -> None:
    """Refuse a plan of a file that does not keep a budget.

    Args:
        plan: the plan.
        terms: what the budget asks for.
        asked: the budget as the user sets it, for the message.
        file: where the plan is from.

    Raises:
        BudgetError: says in which way, and names the file; has the plan.
    """
    _refuse(plan, _not_kept(plan, terms, asked), file)


def _refuse(plan: Plan, reason: str, file: str) -> None:
    if reason:
        advice = "leave plan out, so that roamc plans for the budget, or leave the budget out"
        raise BudgetError(f"{file}: the plan of {plan.name!r} {reason}: {advice}", plan)


def _not_kept(plan: Plan, terms: Terms, asked: Budget | None) -> str:
    """In which way ``plan`` does not keep a budget, as the rest of a sentence; "" where it keeps it.

    The lowest peak takes a search: a plan has it if it was made for it.
    """
    if terms.limit is None:
        return f"adds {added(plan)}, above memory_budget={asked!r}" if asked == NO_TIME and plan.added_seconds else ""
    if terms.limit:
        taken = terms.taken(plan)
        lost = ", with what the allocator loses by rounding" if taken > plan.needed_bytes else ""
        needs = f"needs {format_bytes(taken)} ({taken} bytes{lost})"
        return "" if terms.keeps(plan) else f"{needs}, above memory_budget={asked!r}, {terms.limit} bytes here"
    if terms.added_share and not plan.adds_at_most(terms.added_share):
        return f"adds {added(plan)}, above memory_budget={asked!r}"
    lowest = plan.budget_bytes == 0 and (not plan.budget_added or plan.budget_added >= terms.added_share > 0)
    if lowest and ("retain" not in plan.decisions or (plan.allowed == LIGHT) == (terms.allowed == LIGHT)):
        return ""
    return f"was made for {plan.asked_for}, which may need more than memory_budget={asked!r} takes"


def _read(file: str) -> Plan:
    """The plan in ``file``, read once for as long as the file does not change."""
    if not os.path.isfile(file):
        return load_plan(file)  # says what is wrong
    stamp = os.stat(file)
    return _read_at(file, stamp.st_mtime_ns, stamp.st_size, stamp.st_ino)


@functools.lru_cache(maxsize=16)
def _read_at(file: str, *_: int) -> Plan:
    return load_plan(file)


def under_terms(counted: Plan, loaded: Plan, terms: Terms) -> Plan:
    """Return ``counted`` with the budget that ``terms`` ask for, and with that of ``loaded`` if they name none.

    A lower bound on the bytes for one share of time holds for smaller shares, too.

    Args:
        counted: the plan that was counted from the graph.
        loaded: the plan from elsewhere whose decisions ``counted`` has.
        terms: the terms of the user's options.
    """
    size, added, least = loaded.budget_bytes, loaded.budget_added, loaded.least_bytes
    if terms.limit:
        size, added, least = terms.limit, 0.0, 0
    elif terms.added_share:
        holds = terms.added_share <= added and terms.allowed == loaded.allowed
        size, added, least = 0, terms.added_share, least if holds else 0
    return dataclasses.replace(counted, budget_bytes=size, budget_added=added, least_bytes=least)

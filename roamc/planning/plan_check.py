"""Plans from elsewhere: what they say of themselves is counted again where that can be, else compared with the rest.

What a plan does is checked where it is applied; here, whether the user's options allow its last bits. Its numbers are
what budgets are compared with and users are shown. Nothing here can tell that no order is below a plan's
``bound_bytes`` and no choice of reruns below ``bound_seconds`` or ``least_bytes``, which takes a search, nor what was
asked for, how it was searched, and that seconds are those of a profile: the checksum of a plan file holds these
together, see :data:`roamc.planning.plan.CHECKSUM`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from roamc.budget import added_share
from roamc.errors import REQUIRED, PlanError
from roamc.graph import TrainGraph, main_device
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from roamc.options import Options
from roamc.passes import layout, overlap, reorder, retain, shard
from roamc.planning import pipeline
from roamc.planning.plan import STATUSES, Plan
from roamc.planning.planned import Planned

ROUNDING = 1e-9
"""Share by which two sums of the same seconds may differ."""

WORDS = {layout.NAME: STATUSES, overlap.NAME: STATUSES, reorder.NAME: STATUSES, retain.NAME: (*STATUSES, "infeasible")}
"""What the status of each decision may be."""

TAKEN_OVER = {
    "peak_bytes": (layout.NAME, "peak_bytes"),
    "needed_bytes": (layout.NAME, "needed_bytes"),
    "arena_bytes": (layout.NAME, "arena_bytes"),
    "live_bytes": (layout.NAME, "live_bytes"),
    "bound_bytes": (reorder.NAME, "bound_bytes"),
    "added_seconds": (retain.NAME, "added_seconds"),
    "added_bound_seconds": (retain.NAME, "bound_seconds"),
}
"""Fields of a plan that are those of a decision; 0 where it has none."""


COUNTED = ("baseline_bytes", "baseline_lost_bytes", "in_flight")
"""Fields of a plan that are counted from the captured graph."""


def check_origin(plan: Plan, graph: TrainGraph, mark: str) -> None:
    """Refuse a plan for another device, for another graph than ``graph``, or of other passes.

    ``mark`` is the fingerprint of ``graph``.

    Raises:
        PlanError: names the device, the graph or the passes that differ.
    """
    device = main_device(graph).type
    if plan.device != device:
        raise PlanError(
            f"the plan of {plan.name!r} was made for {plan.device}, and this step runs on {device}: plan again"
        )
    if plan.fingerprint != mark:
        raise PlanError(f"the plan of {plan.name!r} was made for another graph than this {graph.name!r}: plan again")
    missing = REQUIRED.difference(plan.decisions)
    if missing:
        raise PlanError(f"the plan has no decision of pass {', '.join(sorted(missing))}: plan again")
    unknown = set(plan.decisions).difference(step.name for step in pipeline.PIPELINE)
    if unknown:
        raise PlanError(f"the plan has a decision of {', '.join(sorted(unknown))}, which is no pass: plan again")


def check_options(planned: Planned, options: Options) -> None:
    """Refuse a plan whose results may have other last bits than those that the user's options ask for.

    Of codecs, products and groups :func:`roamc.graph.value_flow.check` refuses those that the options do not allow.

    Args:
        planned: the graph that a plan from elsewhere made, and the plan.
        options: what the user set.

    Raises:
        PlanError: values are split along the tokens, or by class, and ``options.shard`` is not "sequence"; or the arena
            has a smaller alignment than the options ask for; or the plan adds more time than the budget allows.
    """
    share = added_share(options.memory_budget)
    if share and not planned.plan.adds_at_most(share):
        raise PlanError(
            f"{retain.NAME}: the plan adds {added(planned.plan)}, above memory_budget={options.memory_budget!r}: "
            "plan again"
        )
    split = planned.plan.decisions.get(shard.NAME, {})
    if options.shard != "sequence" and (split.get("regions") or split.get("classes")):
        raise PlanError(
            f"{shard.NAME}: the plan splits values among ranks, whose sums are then made in another order: allow it "
            "with options={'shard': 'sequence'}, or plan again"
        )
    alignment, least = planned.plan.decisions[layout.NAME]["alignment"], layout.least_alignment(planned.graph, options)
    if alignment < least:
        raise PlanError(
            f"{layout.NAME}: the plan aligns tensors to {alignment} bytes, and matrix products have torch's own bits "
            f"at {least}: allow it with options={{'alignment': {alignment}}}, or plan again"
        )


def check_numbers(plan: Plan, planned: Planned) -> None:
    """Refuse a plan whose numbers are not those of what it does, or contradict each other.

    A plan may need more than the budget that it was made for: that of a ``BudgetError`` does.

    Args:
        plan: as it was read.
        planned: the graph that the decisions of ``plan`` made, and the plan that was counted from it.

    Raises:
        PlanError: names the number, and what it should be.
    """
    counted = planned.plan
    _check_words(counted)
    _check_limits(counted)
    _check_reruns(counted.decisions.get(retain.NAME))
    _check_order(counted.decisions.get(reorder.NAME), counted.decisions.get(overlap.NAME), planned.graph)
    _check_overlap(counted.decisions.get(overlap.NAME), planned.graph)
    _check_layout(counted.decisions[layout.NAME], planned.graph)
    _check_taken_over(plan)
    _check_share_of_time(plan)
    _check_counted(plan, counted)


def _check_share_of_time(plan: Plan) -> None:
    """Refuse a plan that adds more time than its ``budget_added``, or has numbers that do not go with a share of time.

    Raises:
        PlanError: names the field, with its value.
    """
    if plan.budget_added and plan.budget_bytes:
        raise PlanError(
            f"the plan has budget_added {plan.budget_added} and budget_bytes {plan.budget_bytes}, which are two "
            "budgets: plan again"
        )
    if plan.least_bytes and not plan.budget_added:
        raise PlanError(f"the plan has least_bytes {plan.least_bytes} and no budget_added: plan again")
    if plan.least_bytes > plan.needed_bytes:
        raise PlanError(
            f"the plan has least_bytes above its needed_bytes, {plan.least_bytes} and {plan.needed_bytes}: plan again"
        )
    if plan.budget_added and not plan.adds_at_most(plan.budget_added):
        raise PlanError(f"the plan adds {added(plan)}, above its budget_added, {plan.budget_added}: plan again")


def added(plan: Plan) -> str:
    """The added time of ``plan`` in words; a plan may say that its step takes no time."""
    if not plan.step_seconds:
        return f"{plan.added_seconds} s to a step of 0 s"
    return f"{plan.added_share:.2%} of the step's time"


def for_threads(planned: Planned, threads: int) -> Planned:
    """Return ``planned`` for ``threads`` of torch's threads, on which operators may take more bytes for themselves.

    If the plan covers that already, the result is ``planned`` itself; else copies of its graph and plan with these
    threads and with ``needed_bytes`` counted again. The count is that of a caller whose idle arenas are freed, which
    may be more than a new plan would say.
    """
    plan, placement = planned.plan, planned.graph.layout
    if planned.covers(threads):
        return planned
    assert placement is not None  # the judge of layouts has seen it
    needed = max(plan.needed_bytes, layout.recounted(planned.graph.replace(threads=threads), placement)["needed_bytes"])
    graph = planned.graph.replace(threads=threads, layout=dataclasses.replace(placement, needed_bytes=needed))
    placed = {**plan.decisions[layout.NAME], "needed_bytes": needed}
    decisions = {**plan.decisions, layout.NAME: placed}
    return Planned(graph, dataclasses.replace(plan, threads=threads, needed_bytes=needed, decisions=decisions))


def _check_words(plan: Plan) -> None:
    for name, words in WORDS.items():
        word = plan.decisions.get(name, {}).get("status", words[0])
        if word not in words:
            raise PlanError(f"{name}: the status must be one of {', '.join(words)}, not {word!r}")


def _check_limits(plan: Plan) -> None:
    """Refuse a plan with a lower bound above the number that it bounds.

    Raises:
        PlanError: names both, with their values.
    """
    for low, high, says in (
        (plan.bound_bytes, plan.peak_bytes, "bound_bytes above its peak_bytes"),
        (plan.live_bytes, plan.arena_bytes, "live_bytes above its arena_bytes"),
        (plan.peak_bytes, plan.needed_bytes, "peak_bytes above its needed_bytes"),
        (plan.added_bound_seconds, plan.added_seconds * (1 + ROUNDING), "bound_seconds above its added_seconds"),
    ):
        if low > high:
            raise PlanError(f"the plan has {says}, {low} and {high}: plan again")


def _check_reruns(decision: Mapping[str, Any] | None) -> None:
    """Refuse a decision of pass retain whose ``added_seconds`` is not the sum over its reruns and codecs.

    ``decision`` has the decision's fields; nothing is checked if it is None.

    Raises:
        PlanError: names both numbers, in seconds.
    """
    if decision is None:
        return
    parts = [*(again[4] for again in decision["reruns"]), *(code[4] for code in decision["codes"])]
    if not math.isclose(math.fsum(parts), decision["added_seconds"], rel_tol=ROUNDING):
        _refuse(retain.NAME, "added_seconds", decision["added_seconds"], math.fsum(parts))


def _check_order(ordered: Mapping[str, Any] | None, overlapped: Mapping[str, Any] | None, graph: TrainGraph) -> None:
    """Refuse a decision of pass reorder whose peak of live bytes is not that of ``graph``, in the order it will run.

    Where pass overlap has changed the order, the peak may be lower. ``ordered`` and ``overlapped`` have the decisions'
    fields; nothing is checked if pass reorder was left out.

    Raises:
        PlanError: the peak is another, or is called optimal and is not the bound.
    """
    if ordered is None:
        return
    peak = int(live_bytes(build_memory(graph)).max(initial=0))
    changed = overlapped is not None and overlapped["collectives"]
    if ordered["peak_bytes"] < peak or (ordered["peak_bytes"] > peak and not changed):
        _refuse(reorder.NAME, "peak_bytes", ordered["peak_bytes"], peak)
    if ordered["status"] == "optimal" and ordered["bound_bytes"] != peak:
        bound = ordered["bound_bytes"]
        raise PlanError(f"{reorder.NAME}: the status is 'optimal' and the peak is not the bound of {bound}")


def _check_overlap(overlapped: Mapping[str, Any] | None, graph: TrainGraph) -> None:
    """Refuse a decision of pass overlap whose peak is not that of ``graph``, or whose seconds contradict each other.

    ``overlapped`` has the decision's fields; nothing is checked if it is None.

    Raises:
        PlanError: names the number, and what it should be.
    """
    if overlapped is None:
        return
    peak = int(live_bytes(build_memory(graph)).max(initial=0)) if overlapped["collectives"] else 0
    if overlapped["peak_bytes"] != peak:
        _refuse(overlap.NAME, "peak_bytes", overlapped["peak_bytes"], peak)
    seconds = [overlapped[name] for name in ("bound_seconds", "exposed_seconds", "link_seconds")]
    if not overlapped["collectives"] and seconds[-1]:
        _refuse(overlap.NAME, "link_seconds", seconds[-1], 0.0)
    for name, less, more in zip(("bound_seconds", "exposed_seconds"), seconds, seconds[1:], strict=False):
        if less > more * (1 + ROUNDING):
            raise PlanError(f"{overlap.NAME}: the plan has {name} {less}, above {more}: plan again")


def _check_layout(placed: Mapping[str, Any], graph: TrainGraph) -> None:
    """Refuse a decision of pass layout whose numbers do not follow from the places and trims of ``graph.layout``.

    ``placed`` has the decision's fields. Its ``needed_bytes`` may be less than counted here, as
    :func:`roamc.planning.layout_judge.check_layout` has checked that it is enough; other numbers must be equal.

    Raises:
        PlanError: names the number, and what was counted.
    """
    assert graph.layout is not None  # the judge of layouts has seen it
    with pipeline.errors_name(layout.NAME):
        counted = layout.recounted(graph, graph.layout)
    most = counted.pop("needed_bytes")
    for name, value in counted.items():
        if placed[name] != value:
            _refuse(layout.NAME, name, placed[name], value)
    if placed["needed_bytes"] > most:
        _refuse(layout.NAME, "needed_bytes", placed["needed_bytes"], most)


def _check_counted(plan: Plan, counted: Plan) -> None:
    for name in COUNTED:
        if getattr(plan, name) != getattr(counted, name):
            _refuse("plan", name, getattr(plan, name), getattr(counted, name))


def _check_taken_over(plan: Plan) -> None:
    for name, (where, field) in TAKEN_OVER.items():
        value = plan.decisions.get(where, {}).get(field, 0)
        if getattr(plan, name) != value:
            _refuse("plan", name, getattr(plan, name), value)


def _refuse(where: str, name: str, claimed: float, counted: float) -> None:
    raise PlanError(f"{where}: the plan says {name} {claimed}, and what it does makes {counted}: plan again")

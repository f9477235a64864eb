"""A graph with every decision applied, its plan, and the error for a plan that needs more than the budget."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from roamc import decode
from roamc.compat_groups import planned_groups
from roamc.cost import workspaces
from roamc.errors import BudgetError
from roamc.gpus import Gpu, margin
from roamc.graph import Role, TrainGraph, main_device, placeholders
from roamc.graph.lifetimes import lifetimes, sizes, timeline
from roamc.graph.memory import Place, Storage, build_memory, input_bytes
from roamc.graph.ranks import groups
from roamc.graph.rewrite import value_of
from roamc.operators.fused import Fused
from roamc.passes import layout, reorder, retain
from roamc.planning import codec_notes, other_orders
from roamc.planning.effort import EFFORT, Effort
from roamc.planning.pipeline import State
from roamc.planning.plan import WITHOUT_STATES, Plan
from roamc.units import Bytes, Seconds, format_apart, format_bytes
from roamc.version import __version__

GRADIENT_OF = "gradient of "
"""Start of the name that capture gives a tangent; behind it comes the output."""

LARGER = "Take a larger GPU"
"""What to do where no plan fits a GPU."""


@dataclass(frozen=True)
class Terms:
    """The budget that a plan is made for.

    Attributes:
        limit: bytes; 0 for the lowest peak, None to recompute nothing, whatever the peak.
        allowed: the operators that may be recomputed, one of :data:`roamc.passes.retain.ALLOWED`.
        added_share: most time that a plan for the lowest peak may add, as a share of the step's; 0 for any.
        total: whether the limit is what a total leaves to the step, see :meth:`Plan.limited_bytes`.
    """

    limit: Bytes | None
    allowed: str = "all"
    added_share: float = 0.0
    total: bool = False

    def taken(self, plan: Plan) -> Bytes:
        """Return the bytes of ``plan`` that :attr:`limit` is compared with."""
        return plan.limited_bytes(total=self.total)

    def keeps(self, plan: Plan) -> bool:
        """Whether ``plan`` takes at most :attr:`limit` bytes; any plan does where that is 0 or None."""
        return not self.limit or self.taken(plan) <= self.limit


@dataclass(frozen=True)
class Planned:
    """A graph that is ready to be emitted, and its plan.

    Attributes:
        graph: the graph behind all passes, with its layout.
        plan: the decisions that were applied, and what the graph takes.
    """

    graph: TrainGraph
    plan: Plan

    def covers(self, threads: int) -> bool:
        """Whether operators take no more for themselves with ``threads`` threads than the plan counts.

        On fewer threads than planned for, a group of operators may have larger blocks, or run whole.
        """
        planned = self.plan.threads
        return threads == planned or (
            threads < planned and all(group.block_rows(threads) <= group.block_rows(planned) for group in self._groups)
        )

    @functools.cached_property
    def _groups(self) -> tuple[Fused, ...]:
        return tuple(node.target for node in self.graph.graph.nodes if isinstance(node.target, Fused))


def plan_of(
    end: State,
    fingerprint: str,
    limit: Bytes | None,
    step_seconds: Seconds,
    eager_needs: Bytes,
    eager_loses: Bytes,
    effort: Effort = EFFORT,
    codecs: Collection[str] = (),
    room: Gpu | None = None,
) -> Plan:
    """Write the plan of a graph behind the whole pipeline.

    Args:
        end: the state that the last pass left.
        fingerprint: hash of the captured graph.
        limit: budget in bytes; 0 for the lowest peak, None for no limit.
        step_seconds: predicted time of a step in which nothing is recomputed.
        eager_needs: bytes that eager PyTorch takes at its worst step, see :attr:`Plan.baseline_needed_bytes`.
        eager_loses: bytes that its allocator loses, see :attr:`Plan.baseline_lost_bytes`.
        effort: how far above its bound a peak may be and count as optimal.
        codecs: names of the codecs with an error that pass retain could decide on.
        room: what is to hold the whole process; None for nothing named.
    """
    graph, decisions = end.graph, end.decisions
    placed: layout.Decision = decisions[layout.NAME]
    ordered: reorder.Decision | None = decisions.get(reorder.NAME)
    retain_decision: retain.Decision = decisions.get(retain.NAME, retain.NOTHING)
    peak_bytes, bound_bytes = placed.peak_bytes, ordered.bound_bytes if ordered else 0
    coded = [(storage, codec) for storage, codec, *_ in retain_decision.codes]
    short = other_orders.falls_short(placed, effort.padding_share)
    statuses = {placed.status if short else "optimal", ordered.status if ordered else "gap"}
    if peak_bytes > bound_bytes * (1 + effort.padding_share):
        statuses.add("gap")
    return Plan(
        name=graph.name,
        threads=graph.threads,
        fingerprint=fingerprint,
        device=main_device(graph).type,
        versions={"roamc": __version__, "torch": torch.__version__},
        budget_bytes=limit,
        budget_added=0.0,
        least_bytes=0,
        peak_bytes=peak_bytes,
        needed_bytes=placed.needed_bytes,
        arena_bytes=placed.arena_bytes,
        live_bytes=placed.live_bytes,
        bound_bytes=bound_bytes,
        baseline_bytes=graph.eager_bytes or 0,
        baseline_needed_bytes=eager_needs,
        baseline_lost_bytes=eager_loses,
        in_flight=graph.in_flight,
        step_seconds=step_seconds,
        added_seconds=retain_decision.added_seconds,
        added_bound_seconds=retain_decision.bound_seconds,
        status="optimal" if statuses == {"optimal"} else "limit" if "limit" in statuses else "gap",
        room=room.title if room else "",
        room_bytes=room.capacity if room else 0,
        margin_bytes=margin_of(graph, placed.needed_bytes - placed.arena_bytes),
        fixed_bytes=input_bytes(graph),
        decisions={name: decode.plain(decision) for name, decision in decisions.items()},
        notes=(
            *graph.notes,
            *assumed(graph),
            *_without_states(graph),
            *codec_notes.notes(graph, coded, dict(retain_decision.offered), codecs),
            *other_orders.note(ordered, placed),
        ),
        seconds=dict(end.seconds),
    )


def margin_of(graph: TrainGraph, apart: Bytes = 0) -> dict[str, Bytes]:
    """Return what a process takes beside a plan of ``graph``, by name: on a GPU, see :func:`roamc.gpus.margin`.

    ``apart`` are the bytes that the step holds outside its arena.
    """
    if main_device(graph).type != "cuda":
        return {}
    return margin(sum(input_bytes(graph).values()), apart, len({*groups(graph), *planned_groups()}))


def _without_states(graph: TrainGraph) -> tuple[str, ...]:
    """Return a sentence on the optimizer's states where the graph has no update, so that the total lacks them."""
    if not graph.boundary or graph.assumed_state is not None:
        return ()
    return (WITHOUT_STATES,)


def check_budget(planned: Planned, terms: Terms, *, gpu: bool) -> None:
    """Refuse a plan that does not keep the bytes of ``terms``; ``gpu`` says whether its room is a GPU, for the advice.

    Raises:
        BudgetError: names what is needed, and the largest storages at the peak; has the plan.
    """
    plan = planned.plan
    if not terms.limit or terms.keeps(plan):
        return
    how = "with as much recomputation as helps" if retain.NAME in plan.decisions else "without recomputation"
    needed, allowed = format_apart(plan.needed_bytes, terms.limit)
    needs = f"{plan.name} needs {needed} ({plan.needed_bytes} bytes) at its peak, above memory_budget={allowed}"
    if terms.total:
        needs = plan.headline
    largest = "; ".join((_largest(planned.graph), *assumed(planned.graph)))
    advice = LARGER if gpu and terms.total else "Raise the budget"
    raise BudgetError(f"{needs}, {how}; {largest}", plan, advice=advice, verdict=terms.total)


def _largest(graph: TrainGraph, count: int = 3) -> str:
    """Return words that name what takes most bytes at the step that needs most: storages, and its workspace.

    A graph that makes nothing but views has no such step: no storage is allocated.

    Args:
        graph: the graph behind all passes.
        count: how many are named, at most.
    """
    memory = build_memory(graph)
    if not memory.operators:
        return "only views are made, and these bytes are their tensor objects"
    born, dead = lifetimes(memory)
    own = workspaces(memory.operators, graph.threads)
    step = int((timeline(sizes(memory.counted), born, dead, len(memory.operators)) + own).argmax())
    alive = [s for s, first, end in zip(memory.counted, born, dead, strict=True) if first <= step < end]
    tangents = _tangents(graph)
    parts = [(_name(storage, tangents), storage.nbytes) for storage in alive]
    parts.append((f"workspace of {memory.operators[step].node.name}", int(own[step])))
    parts.sort(key=lambda part: -part[1])
    return "largest storages at that step: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in parts[:count])


def _name(storage: Storage, tangents: Mapping[str, str]) -> str:
    """The name of a storage; of a gradient that the caller hands in, which no line of the model makes, what it is."""
    if storage.place is not Place.TANGENT:
        return storage.name
    return f"{storage.name} (the {tangents.get(storage.name, 'gradient of an output')})"


def _tangents(graph: TrainGraph) -> dict[str, str]:
    """Names of tangents that capture has named after the outputs of a model: of the node, to the user's.

    Such a model was captured to be planned, without a loss function.
    """
    fed = zip(placeholders(graph.graph), graph.inputs, strict=True)
    return {node.name: port.name for node, port in fed if port.role is Role.TANGENT and port.name != node.name}


def assumed(graph: TrainGraph) -> tuple[str, ...]:
    """Return a sentence on the gradients of outputs that a plan without a loss function counts; nothing if it has one.

    The gradient of a single number, as of a loss that the model returns, is not worth a word.
    """
    names = _tangents(graph)
    fed = {names[node.name]: value_of(node) for node in placeholders(graph.graph) if node.name in names}
    large = {name.removeprefix(GRADIENT_OF): value for name, value in fed.items() if value.numel() > 1}
    if not large:
        return ()
    whose = "its gradient" if len(large) == 1 else "their gradients"
    size = format_bytes(sum(value.untyped_storage().nbytes() for value in large.values()))
    what = f"forward and backward of {', '.join(large)}, with {whose} of {size} handed in"
    if any(_is_loss(name) for name in names.values()):
        return (
            f"{what}, as torch.compile has it; for the loss alone give a loss_fn, such as lambda m, **b: m(**b).loss",
        )
    return (f"{what}, as there is no loss_fn; {loss_advice(graph)}",)


def loss_advice(graph: TrainGraph) -> str:
    """Return how to plan a training step of a model that was captured without a loss: a loss function of its inputs."""
    batch = "**b" if any(port.name.startswith("batch['") for port in graph.inputs) else "*b"
    output = next(iter(_tangents(graph).values()), "").removeprefix(GRADIENT_OF).removeprefix("output")
    return f"for a training step give one, such as lambda m, {batch}: criterion(m({batch}){output})"


def _is_loss(tangent: str) -> bool:
    return tangent.endswith((".loss", "['loss']"))

"""The choice of another order where the layout of the first one falls short.

The order is chosen for the least live bytes and the layout for that order. A layout falls short if its arena is larger
than the most live bytes in it at one step, which is seldom. Then orders with no higher peak are laid out as well, on
the memory model and without touching the graph, and the one that needs the fewest bytes is taken. What is decided
becomes part of the decision of pass reorder:

    normalize → reorder → reuse → layout       falls short?  orders of no higher peak → the best one
                   ^                                                     |
                   |_____________________________________________________|

Nothing is done where the layout does not fall short, where it does by no more than padding and keeps the budget, or
where the user names an order or leaves reorder out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from roamc import ticker
from roamc.graph import TrainGraph
from roamc.graph.memory import MemoryModel, build_memory, rearranged
from roamc.options import Options
from roamc.passes import layout, reorder
from roamc.planning.effort import EFFORT, Effort
from roamc.rewriting.in_place import Reuse, all_reuses, due, wanted
from roamc.rewriting.order_problem import HANDOVER, order_problem
from roamc.solvers.order import OrderProblem
from roamc.solvers.order.equal_peak import NamedOrder, equal_peaks
from roamc.units import Bytes, format_bytes

NAME = "other orders"
"""Name of this stage in ``Plan.seconds``, in reports and in messages."""


def may_look_again(options: Options) -> bool:
    """Whether other orders may be tried: neither option ``order`` nor ``disable`` fixes the order."""
    return options.order == "best" and reorder.NAME not in options.disable


def first_look(options: Options, effort: Effort = EFFORT) -> Options:
    """Return ``options`` for the layout of the first order, with ``layout_nodes`` at most ``effort.first_nodes``.

    If the layout falls short, another order may do better than a long search; else :func:`decide` makes up for it.
    """
    return dataclasses.replace(options, layout_nodes=min(options.layout_nodes, effort.first_nodes))


def falls_short(placed: layout.Decision, share: float = 0.0) -> bool:
    """Whether the arena of a layout is larger, by more than this share, than the most live bytes in it at one step."""
    return placed.arena_bytes > placed.live_bytes * (1 + share)


def is_worth_another(placed: layout.Decision, options: Options, effort: Effort = EFFORT) -> bool:
    """Whether other orders should be laid out: the arena is above its live bytes by more than padding.

    Where the budget is missed, any byte above them counts.
    """
    limit = options.limit_bytes
    above = limit is not None and placed.needed_bytes > limit
    return falls_short(placed, 0.0 if above else effort.padding_share)


@dataclass(frozen=True)
class LaidOut:
    """An order and its layout.

    Attributes:
        ordered: the decision of pass reorder.
        placed: the decision of pass layout for that order.
    """

    ordered: reorder.Decision
    placed: layout.Decision

    @property
    def total(self) -> Bytes:
        """Peak in bytes: the arena without what is trimmed, and what lies outside it, at the step that has most."""
        return self.placed.peak_bytes


def decide(graph: TrainGraph, first: LaidOut, options: Options, effort: Effort = EFFORT) -> LaidOut:
    """Choose the order with the lowest total among the present one and others with no higher peak of live bytes.

    The search ends with the first order whose total is no more than the live bytes of the present order, in its arena
    and outside it. If there is none, and the lowest total is above that by more than ``effort.padding_share`` of it,
    the present order is laid out again with all nodes that the options allow.

    Args:
        graph: the graph in the order of ``first``, before in-place reuse; it stays as it is.
        first: that order and its layout, which falls short.
        options: what the user set.
        effort: number of orders, and node limits.

    Returns:
        The order and its layout; ``ordered.laid_out`` names every order that was laid out, with its bytes.
    """
    scene = _Scene(graph, build_memory(graph), options)
    floor = first.placed.live_bytes + first.placed.outside_bytes
    best, tried = first, [(first.ordered.algorithm, first.total)]
    problem, names = scene.problem()
    for other in islice(equal_peaks(problem, np.arange(problem.num_ops, dtype=np.int32)), effort.trial_orders):
        order = tuple(names[index] for index in other.order.tolist() if names[index] != HANDOVER)
        candidate = LaidOut(_with_order(first.ordered, other, order), scene.lay_out(order, effort.trial_nodes))
        tried.append((other.name, candidate.total))
        ticker.say(f"layout of order {len(tried)}: {format_bytes(candidate.total)}, at best {format_bytes(floor)}")
        best = min(best, candidate, key=lambda item: item.total)
        if best.total <= floor:
            break
    if best.total > floor * (1 + effort.padding_share) and options.layout_nodes > effort.first_nodes:
        candidate = LaidOut(first.ordered, scene.lay_out(first.ordered.order, options.layout_nodes))
        best = min(candidate, best, key=lambda item: item.total)
    return LaidOut(dataclasses.replace(best.ordered, laid_out=tuple(tried)), best.placed)


def _with_order(ordered: reorder.Decision, other: NamedOrder, order: tuple[str, ...]) -> reorder.Decision:
    """Return ``ordered`` with another order, and with that order among its candidates.

    Args:
        ordered: the decision of pass reorder for the present order.
        other: the other order, as numbers of operators, with its name and peak in bytes.
        order: the names of the operators in the same order.
    """
    name = f"{ordered.algorithm}+{other.name}"
    candidates = (*ordered.candidates, (name, other.peak_bytes))
    return dataclasses.replace(ordered, order=order, peak_bytes=other.peak_bytes, algorithm=name, candidates=candidates)


@dataclass(frozen=True)
class _Scene:
    """The graph in one order, before in-place reuse, from which layouts of other orders are computed."""

    graph: TrainGraph
    memory: MemoryModel
    options: Options

    @cached_property
    def reuses(self) -> list[Reuse]:
        """The results that may be written over an argument, in any order."""
        return wanted(self.memory, self.options)

    @cached_property
    def number(self) -> dict[str, int]:
        """Name of each operator to its position in the present order, from 0."""
        return {operator.node.name: index for index, operator in enumerate(self.memory.operators)}

    def problem(self) -> tuple[OrderProblem, list[str]]:
        """Return the graph as an order problem and the operators' names, see :mod:`roamc.rewriting.order_problem`."""
        return order_problem(self.graph, self.memory, self.reuses)

    def lay_out(self, names: Iterable[str], node_limit: int) -> layout.Decision:
        """Return what pass layout would decide behind reorder and reuse, for operators in the order of ``names``."""
        order = [self.number[name] for name in names]
        limited = dataclasses.replace(self.options, layout_nodes=min(self.options.layout_nodes, node_limit))
        return layout.lay_out(rearranged_with_reuse(self.memory, order, self.reuses), self.graph, limited)


def rearranged_with_reuse(memory: MemoryModel, order: Sequence[int], reuses: Iterable[Reuse]) -> MemoryModel:
    """Return the memory of the graph behind reorder and reuse, as pass reuse decides for operators in ``order``.

    Args:
        memory: of the graph before in-place reuse.
        order: numbers of its operators, first to last.
        reuses: the results that may be written over an argument.
    """
    return rearranged(memory, order, {one.result: one.reused for one in due(memory, order, reuses)})


def eager_floor(graph: TrainGraph, memory: MemoryModel) -> layout.Floor:
    """Return the bytes that eager holds at least at every moment, see :data:`roamc.passes.layout.eager.Floor`.

    Every result that can be written over an argument counts as if it were, since eager may do that.

    Args:
        graph: the captured graph, in program order.
        memory: its memory.
    """
    order = range(len(memory.operators))
    rewritten = rearranged_with_reuse(memory, order, all_reuses(memory))
    return layout.eager_floor(rewritten, boundary=graph.boundary)


def note(ordered: reorder.Decision | None, placed: layout.Decision) -> tuple[str, ...]:
    """Return the note of the plan about a layout that falls short: one sentence, or none if it does not.

    Args:
        ordered: the decision of pass reorder; None if it was left out.
        placed: the decision of pass layout.
    """
    if not falls_short(placed):
        return ()
    above: Bytes = placed.arena_bytes - placed.live_bytes
    others = len(ordered.laid_out) - 1 if ordered else 0
    share = above / placed.live_bytes if placed.live_bytes else 0.0
    tried = f"; {others} other orders with no higher peak were laid out as well" if others > 0 else ""
    return (
        f"the arena is {format_bytes(above)} ({share:.2%}) above the most that lives in it at one step: "
        f"the layout search ended with {placed.status!r}{tried}",
    )

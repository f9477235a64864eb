"""Another order where the layout of the first one falls short.

The order is chosen for the least live bytes and the layout for that order. Mostly the arena then is what lives in
it. Where it is not, orders with no higher peak are laid out as well, on the memory model and without touching the
graph, and the one that needs least is taken. All that is decided becomes part of the decision of pass reorder:

    normalize → reorder → reuse → layout       falls short?  orders of no higher peak → the best one
                   ^                                                     |
                   |_____________________________________________________|

Nothing is spent where the layout does not fall short, or where the user names an order or leaves reorder out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from roamc import progress
from roamc.graph import TrainGraph
from roamc.graph.memory import MemoryModel, build_memory, rearranged
from roamc.options import Options
from roamc.passes import layout, reorder
from roamc.rewriting import in_place
from roamc.rewriting.in_place import Reuse, wanted
from roamc.rewriting.order_problem import HANDOVER, order_problem
from roamc.solvers.order import OrderProblem
from roamc.solvers.order.equal_peak import NamedOrder, equal_peaks
from roamc.units import Bytes, format_bytes

NAME = "other orders"
"""In ``Plan.seconds``, in reports and in messages."""

FIRST_NODES = 40_000
"""Node limit of a layout for which other orders can still be tried."""

TRIAL_NODES = 5_000
"""Node limit of the layout of each of these orders."""

TRIALS = 12
"""How many other orders are laid out."""


def may_look_again(options: Options) -> bool:
    """Whether neither option ``order`` nor ``disable`` fixes the order."""
    return options.order == "best" and reorder.NAME not in options.disable


def first_look(options: Options) -> Options:
    """Options for a layout before other orders were tried: a long search may then be no longer needed."""
    return dataclasses.replace(options, layout_nodes=min(options.layout_nodes, FIRST_NODES))


def falls_short(placed: layout.Decision) -> bool:
    """Whether the arena is above what lives in it."""
    return placed.arena_bytes > placed.live_bytes


@dataclass(frozen=True)
class Found:
    """The order that was taken and its layout."""

    ordered: reorder.Decision
    placed: layout.Decision

    @property
    def total(self) -> Bytes:
        """Bytes of the arena and outside of it, at the fullest step."""
        return self.placed.peak_bytes


def decide(graph: TrainGraph, first: Found, options: Options) -> Found:
    """The best of the orders with no higher peak than the present one, which may be the present one.

    Ends with the first that needs no more than the present one would with nothing lost in its arena. If there is
    none, the layout of the present order gets its long search after all.

    Args:
        graph: in the order of ``first``, before in-place reuse.
        first: that order and its layout, which falls short.
        options: what the user set.
    """
    scene = _Scene(graph, build_memory(graph), options)
    floor = first.placed.live_bytes + first.placed.outside_bytes
    best, tried = first, [(first.ordered.algorithm, first.total)]
    problem, names = scene.problem()
    for other in islice(equal_peaks(problem, np.arange(problem.num_ops, dtype=np.int32)), TRIALS):
        order = tuple(names[index] for index in other.order.tolist() if names[index] != HANDOVER)
        found = Found(_with_order(first.ordered, other, order), scene.lay_out(order, TRIAL_NODES))
        tried.append((other.name, found.total))
        progress.say(f"layout of order {len(tried)}: {format_bytes(found.total)}, at best {format_bytes(floor)}")
        best = min(best, found, key=lambda item: item.total)
        if best.total <= floor:
            break
    if best.total > floor and options.layout_nodes > FIRST_NODES:
        found = Found(first.ordered, scene.lay_out(first.ordered.order, options.layout_nodes))
        best = min(found, best, key=lambda item: item.total)
    return Found(dataclasses.replace(best.ordered, laid_out=tuple(tried)), best.placed)


def _with_order(ordered: reorder.Decision, other: NamedOrder, order: tuple[str, ...]) -> reorder.Decision:
    name = f"{ordered.algorithm}+{other.name}"
    candidates = (*ordered.candidates, (name, other.peak_bytes))
    return dataclasses.replace(ordered, order=order, peak_bytes=other.peak_bytes, algorithm=name, candidates=candidates)


@dataclass(frozen=True)
class _Scene:
    """The graph in one order, before in-place reuse, from which layouts of other orders are foretold."""

    graph: TrainGraph
    memory: MemoryModel
    options: Options

    @cached_property
    def reuses(self) -> list[Reuse]:
        """What may be written over what, in any order."""
        return wanted(self.memory, self.options)

    @cached_property
    def number(self) -> dict[str, int]:
        """Name to number of every operator."""
        return {operator.node.name: index for index, operator in enumerate(self.memory.operators)}

    def problem(self) -> tuple[OrderProblem, list[str]]:
        """As :func:`roamc.rewriting.order_problem.order_problem`."""
        return order_problem(self.graph, self.memory, self.reuses)

    def lay_out(self, names: Iterable[str], node_limit: int) -> layout.Decision:
        """What pass layout would decide behind reorder and reuse, for the operators in this order."""
        order = [self.number[name] for name in names]
        limited = dataclasses.replace(self.options, layout_nodes=min(self.options.layout_nodes, node_limit))
        return layout.lay_out(rearranged(self.memory, order, due(self.memory, order, self.reuses)), self.graph, limited)


def due(memory: MemoryModel, order: Sequence[int], reuses: Iterable[Reuse]) -> dict[int, int]:
    """What pass reuse decides in ``order``: storage of a result to that of the argument that it is written over."""
    return {one.result: one.reused for one in in_place.due(memory, order, reuses)}


def eager_floor(graph: TrainGraph, memory: MemoryModel) -> layout.Floor:
    """What eager holds at least at every moment, everything that may be written over an argument being so."""
    order = range(len(memory.operators))
    rewritten = rearranged(memory, order, due(memory, order, in_place.all_reuses(memory)))
    return layout.eager_floor(rewritten, boundary=graph.boundary)


def note(ordered: reorder.Decision | None, placed: layout.Decision) -> tuple[str, ...]:
    """What the user should know about an arena above what lives in it; nothing where it is not."""
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

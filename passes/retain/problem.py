"""A graph as a problem for :mod:`roamc.solvers.retain`: what may be dropped between two readers and made again."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from roamc.budget import LIGHT
from roamc.cost import workspaces
from roamc.cost.kind import is_light
from roamc.graph import TrainGraph
from roamc.graph.memory import Storage, build_memory
from roamc.options import Options
from roamc.rewriting.expiry import Able, droppable, expiries
from roamc.rewriting.in_place import wanted
from roamc.rewriting.order_problem import HANDOVER, buffers_of, order_problem
from roamc.rewriting.rerun import may_run_again
from roamc.solvers.retain import Ground, RetainProblem, make_problem, reference_order
from roamc.units import Seconds


@dataclass(frozen=True)
class Question:
    """A graph as a problem for the retention solver, and the names behind its numbers.

    Attributes:
        problem: the problem: which buffers may be dropped and made again, in one reference order.
        operators: name of each operator of ``problem``, by number; ``""`` for the handover, the moment between forward
            and backward at which the caller hands in the tangents.
        storages: storage of each buffer of ``problem``, by number.
        allowed: what may run again, ``"all"`` or ``"light"``.
    """

    problem: RetainProblem
    operators: tuple[str, ...]
    storages: tuple[Storage, ...]
    allowed: str

    @functools.cached_property
    def ground(self) -> Ground:
        """The tables that the solver's searches for different peaks share, computed on first access."""
        return Ground(self.problem)


def question(
    graph: TrainGraph, options: Options, order: Sequence[str], prices: Mapping[str, Seconds], allowed: str = "all"
) -> Question:
    """Return the solver's problem for a graph: which operators to run again, in one order of the operators.

    Args:
        graph: the graph, with the operators of codecs if there are any; stays as it is.
        options: in-place reuse counts unless ``options.disable`` names the pass "reuse".
        order: names of all operators, in a legal order.
        prices: predicted seconds of every operator, by name.
        allowed: ``"all"``, or ``"light"`` to let only operators run again that are light on any device.
    """
    able = ALLOWED[allowed]
    memory = build_memory(graph)
    problem, names = order_problem(
        graph, memory, wanted(memory, options), workspaces(memory.operators, graph.threads).tolist()
    )
    nodes = {op.node.name: op.node for op in memory.operators}
    sequence = reference_order(problem, np.array(_sequence(names, order, memory.boundary), dtype=np.int32)).tolist()
    storages = buffers_of(memory)
    made = make_problem(
        problem,
        sequence,
        seconds=[prices[name] if name else 0.0 for name in names],
        repeatable=[bool(name) and able(nodes[name]) for name in names],
        droppable=droppable(memory, storages, able),
        expires=expiries(memory, nodes, names, sequence, boundary=graph.boundary),
    )
    return Question(made, tuple(names), storages, allowed)


def _may_run_lightly(node: fx.Node) -> bool:
    return may_run_again(node) and is_light(node)


ALLOWED: dict[str, Able] = {"all": may_run_again, LIGHT: _may_run_lightly}
"""Maps a value of :attr:`roamc.passes.retain.decision.Decision.allowed` to the test that says of a node whether it may
run again."""


def _sequence(names: Sequence[str], order: Sequence[str], boundary: int) -> list[int]:
    """The order as numbers; the caller hands in the tangents right behind forward."""
    number = {name: index for index, name in enumerate(names)}
    sequence = [number[name] for name in order]
    if HANDOVER in number:
        sequence.insert(boundary, number[HANDOVER])
    return sequence

"""A graph as a problem for :mod:`roamc.solvers.retain`: what may be dropped between two readers and made again."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

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
    """A graph as numbers, and the names behind them.

    Attributes:
        problem: for the solver.
        operators: per operator its name; empty for the moment at which the caller hands in the tangents.
        storages: per buffer its storage.
        allowed: what may run again, ``"all"`` or ``"light"``.
    """

    problem: RetainProblem
    operators: tuple[str, ...]
    storages: tuple[Storage, ...]
    allowed: str

    @functools.cached_property
    def ground(self) -> Ground:
        """What the solver keeps of the problem for further peaks."""
        return Ground(self.problem)


def question(
    graph: TrainGraph, options: Options, order: Sequence[str], prices: Mapping[str, Seconds], allowed: str = "all"
) -> Question:
    """The graph as a problem of reruns, for operators in ``order``; ``prices`` says how long each takes.

    With ``"light"`` for ``allowed`` only operators run again that are light on any device.
    """
    able = ALLOWED[allowed]
    memory = build_memory(graph)
    problem, names = order_problem(graph, memory, wanted(memory, options), workspaces(memory.operators).tolist())
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


ALLOWED: dict[str, Able] = {"all": may_run_again, "light": _may_run_lightly}
"""Which operators may run again, by what :attr:`roamc.passes.retain.decision.Decision.allowed` says."""


def _sequence(names: Sequence[str], order: Sequence[str], boundary: int) -> list[int]:
    """The order as numbers; the caller hands in the tangents right behind forward."""
    number = {name: index for index, name in enumerate(names)}
    sequence = [number[name] for name in order]
    if HANDOVER in number:
        sequence.insert(boundary, number[HANDOVER])
    return sequence

"""A graph as a problem for :mod:`roamc.solvers.retain`: what may be dropped between two readers and made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem

import numpy as np
import torch
from torch import fx

from roamc.budget import LIGHT
from roamc.cost import workspaces
from roamc.cost.kind import is_light
from roamc.graph import Phase, TrainGraph
from roamc.graph.memory import MemoryModel, Storage, build_memory
from roamc.operators import ops
from roamc.operators.projection import projection
from roamc.options import Options
from roamc.rewriting.expiry import Able, droppable, expiries
from roamc.rewriting.in_place import wanted
from roamc.rewriting.order_problem import HANDOVER, buffers_of, order_problem
from roamc.rewriting.rerun_variants import may_run_again
from roamc.solvers.retain import RetainProblem, make_problem, reference_order
from roamc.units import Seconds


@dataclass(frozen=True)
class Question:
    """A graph as a problem for the retention solver, and the names behind its numbers.

    Attributes:
        graph: the graph.
        memory: the memory model of ``graph``.
        problem: the problem: which buffers may be dropped and made again, in one reference order.
        operators: name of each operator of ``problem``, by number; ``""`` for the handover, the moment between forward
            and backward at which the caller hands in the tangents.
        storages: storage of each buffer of ``problem``, by number.
        allowed: what may run again, one of :data:`ALLOWED`.
    """

    graph: TrainGraph
    memory: MemoryModel
    problem: RetainProblem
    operators: tuple[str, ...]
    storages: tuple[Storage, ...]
    allowed: str


def question(
    graph: TrainGraph,
    options: Options,
    order: Sequence[str],
    prices: Mapping[str, Seconds],
    allowed: str = "all",
    *,
    as_given: bool = False,
) -> Question:
    """Return the solver's problem for a graph: which operators to run again, in one order of the operators.

    Args:
        graph: the graph, with the operators of codecs if there are any; stays as it is.
        options: in-place reuse counts unless ``options.disable`` names the pass "reuse".
        order: names of all operators, in a legal order.
        prices: predicted seconds of every operator, by name.
        allowed: what may run again, one of :data:`ALLOWED`.
        as_given: whether ``order`` is the reference order, and not only where the search for one begins.
    """
    able = able_in(graph, allowed)
    memory = build_memory(graph)
    problem, names = order_problem(
        graph, memory, wanted(memory, options), workspaces(memory.operators, graph.threads).tolist()
    )
    nodes = {op.node.name: op.node for op in memory.operators}
    sequence = _sequence(names, order, memory.boundary)
    if not as_given:
        sequence = reference_order(problem, np.array(sequence, dtype=np.int32)).tolist()
        sequence = _late(memory, names, sequence)
    storages = buffers_of(memory)
    retain_problem = make_problem(
        problem,
        sequence,
        seconds=[prices[name] if name else 0.0 for name in names],
        repeatable=[bool(name) and able(nodes[name]) for name in names],
        droppable=droppable(memory, storages, able),
        expires=expiries(memory, nodes, names, sequence, boundary=graph.boundary),
        idle=_idle(memory, names),
        waiting=graph.in_flight - 1,
        boundary=names.index(HANDOVER) if graph.in_flight > 1 else -1,
    )
    return Question(graph, memory, retain_problem, tuple(names), storages, allowed)


def _late(memory: MemoryModel, names: Sequence[str], sequence: Sequence[int]) -> list[int]:
    """Move inputs that are projected for gradients, and projections, from where they are to their first readers.

    Such a product reads nothing that backward makes, so that an order may have it run in forward: there it waits in the
    place of its input. That is less than the input, but more than an input that can run again. None moves behind an
    operator that writes over what it reads.
    """
    projections = [index for index, op in enumerate(memory.operators) if op.node.target is projection]
    if not projections:
        return [*sequence]
    early = {-1, *projections, *(index for index, op in enumerate(memory.operators) if op.phase is Phase.FORWARD)}
    products = dict.fromkeys(user for index in projections for user in _users(memory, index))
    inputs = [each for each in products if early.issuperset(_makers(memory, each))]
    number = {name: at for at, name in enumerate(names)}
    moved = [*sequence]
    for index in (*inputs, *projections):
        own, *later = (number[memory.operators[each].node.name] for each in (index, *_later(memory, index)))
        moved.remove(own)
        moved.insert(next(at for at, each in enumerate(moved) if each in later), own)
    return moved


def _later(memory: MemoryModel, index: int) -> list[int]:
    """The operators that must run behind operator ``index``."""
    return [after for before, after in memory.edges if before == index]


def _users(memory: MemoryModel, index: int) -> list[int]:
    """The operators that use what operator ``index`` makes."""
    births = memory.operators[index].births
    return [user for birth in births for user in memory.uses[birth] if user != index]


def _makers(memory: MemoryModel, index: int) -> set[int]:
    """The operators that make what operator ``index`` reads, and -1 where that is an input."""
    return {memory.storages[read].producer for read in memory.operators[index].reads}


def _idle(memory: MemoryModel, names: Sequence[str]) -> list[bool]:
    """Whether each operator is erased once nothing reads its tensors; one that makes a gradient never is."""
    idle = {
        op.node.name: not ops.must_run(op.node.target)
        and not any(memory.storages[birth].gradient for birth in op.births)
        and all(isinstance(result.meta.get("val"), torch.Tensor) for result in _results(op.node))
        for op in memory.operators
    }
    return [bool(name) and idle[name] for name in names]


def _results(node: fx.Node) -> list[fx.Node]:
    """The nodes that stand for single results of an operator: its own, or those that pick one of several."""
    picks = [user for user in node.users if user.target is getitem]
    return picks if isinstance(node.meta.get("val"), list | tuple) else [node]


SAFE = "safe"
"""All operators, but no run in backward reads an input that the caller may write after forward. Results are out of
reach under all values, see :func:`roamc.rewriting.expiry.guarded`."""

ALLOWED = ("all", LIGHT, SAFE)
"""The values of :attr:`roamc.passes.retain.decision.Decision.allowed`."""


def able_in(graph: TrainGraph, allowed: str) -> Able:
    """Return the test that says of a node of ``graph`` whether it may run again under ``allowed``, one of ALLOWED."""

    def able(node: fx.Node) -> bool:
        return may_run_again(node, graph.same_plan) and (allowed != LIGHT or is_light(node))

    return able


def _sequence(names: Sequence[str], order: Sequence[str], boundary: int) -> list[int]:
    """The order as numbers; the caller hands in the tangents right behind forward."""
    number = {name: index for index, name in enumerate(names)}
    sequence = [number[name] for name in order]
    if HANDOVER in number:
        sequence.insert(boundary, number[HANDOVER])
    return sequence

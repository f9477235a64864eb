"""A graph as plain numbers for the solvers of :mod:`roamc.solvers.order`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from roamc.graph import Phase, TrainGraph
from roamc.graph.memory import MemoryModel, Place, Storage
from roamc.rewriting.in_place import Reuse
from roamc.solvers.order import OrderProblem, make_problem
from roamc.units import Bytes

HANDOVER = ""
"""Name of the operator that stands in a problem for the moment at which the caller hands the tangents to backward."""


def order_problem(
    graph: TrainGraph, memory: MemoryModel, reuses: Iterable[Reuse] = (), workspace: Sequence[Bytes] | None = None
) -> tuple[OrderProblem, list[str]]:
    """Return the graph as plain numbers for the solvers, and the names of the problem's operators.

    The problem of a graph whose forward runs apart has stages, and one operator more than the graph: :data:`HANDOVER`,
    behind forward, makes the tangents.

    Args:
        graph: says whether forward runs apart.
        memory: memory model of ``graph``.
        reuses: results that may take over the bytes of an argument.
        workspace: bytes that each operator of ``memory`` takes for itself; None to count none.

    Returns:
        The problem, in which buffer k stands for storage k of :func:`buffers_of`; and the operators' names by their
        numbers in the problem, :data:`HANDOVER` among them.
    """
    names = operator_names(graph, memory)
    stage = [_stage(graph, op.phase) for op in memory.operators]
    at = memory.boundary
    new = [number for number, name in enumerate(names) if name != HANDOVER]
    if graph.apart:
        stage.insert(at, 1)
    own = [0] * len(stage)
    for operator_, count in zip(new, workspace, strict=True) if workspace is not None else ():
        own[operator_] = count
    edges = [(new[before], new[after]) for before, after in memory.edges]
    buffers: list[tuple[Bytes, int, list[int], bool]] = []
    number: dict[int, int] = {}
    reuses = list(reuses)
    taken_over = _taken_over(memory, reuses)
    for storage in buffers_of(memory):
        users = [new[user] for user in taken_over.get(storage.index, memory.uses[storage.index])]
        maker = new[storage.producer] if storage.producer >= 0 else at
        number[storage.index] = len(buffers)
        buffers.append((storage.nbytes, maker, users, storage.place is Place.OUTPUT))
    reusable: list[list[int]] = [[] for _ in buffers]
    for possible in reuses:
        reusable[number[possible.result]].append(number[possible.reused])
    return make_problem(stage, edges, buffers, own, reusable), names


def _stage(graph: TrainGraph, phase: Phase) -> int:
    """The stage of an operator of ``phase``; the handover has stage 1."""
    if graph.boundary:
        return 2 * int(phase)
    return 2 if graph.apart and phase is not Phase.FORWARD else 0


def _taken_over(memory: MemoryModel, reuses: Iterable[Reuse]) -> dict[int, tuple[int, ...]]:
    """Storages that an operator that ends later takes over in every order, to their users: without what waits for it.

    So it is where that operator alone reads the storage. Storage and result are then one, which lives until the wait.
    """
    starts = {one.reused: memory.storages[one.result].producer for one in reuses}
    return {
        storage: (start,)
        for storage, start in starts.items()
        if start in memory.ends and memory.uses[storage] == (start, memory.ends[start])
    }


def operator_names(graph: TrainGraph, memory: MemoryModel) -> list[str]:
    """Return the names of the operators of :func:`order_problem` by their numbers, :data:`HANDOVER` among them."""
    names = [op.node.name for op in memory.operators]
    if graph.apart:
        names.insert(memory.boundary, HANDOVER)
    return names


def buffers_of(memory: MemoryModel) -> tuple[Storage, ...]:
    """Return the storages that the buffers of :func:`order_problem` stand for: entry k is the storage of buffer k.

    The result has the storages of ``memory.counted`` in the same sequence, without tangents that no operator uses and
    that are not outputs.
    """
    return tuple(s for s in memory.counted if s.producer >= 0 or memory.uses[s.index] or s.place is Place.OUTPUT)

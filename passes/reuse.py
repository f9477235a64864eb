"""reuse: write results over an input whose last use this is, instead of into memory of their own (in-place reuse).

    rewrite:  y = t * 2   -->  mul(t, 2, out=t), if nothing reads t afterwards

              bytes of x  ####                      ####
                       t     ####                      ####
                       y        ####                      (in t's bytes)
    checks:   the operator table allows writing over this argument; no later operator uses its storage; argument and
              result have the same shape, strides and dtype; the operator reads that storage in no other geometry

The bits are those of the operator that allocates its result. Which arguments may be written over stands in
:mod:`roamc.operators.ops`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roamc.errors import PlanError
from roamc.graph import TrainGraph, tensors_of
from roamc.graph.memory import MemoryModel, Operator, Place, Storage, build_memory, identity
from roamc.operators import ops
from roamc.operators.out_variants import FormKind, form_of
from roamc.options import Options
from roamc.units import Bytes

NAME = "reuse"


@dataclass(frozen=True)
class Decision:
    """What is written over what.

    Attributes:
        overwrites: (operator, position of the argument that it writes over), first to last.
        nbytes: bytes of all these results, which are not allocated.
    """

    overwrites: tuple[tuple[str, int], ...]
    nbytes: Bytes


@dataclass(frozen=True)
class Reuse:
    """A result that may take over the bytes of an argument, in an order in which that is the argument's last use.

    Attributes:
        position: of the argument.
        reused: index of the argument's storage, whose bytes the result takes over.
        result: index of the result's storage.
    """

    position: int
    reused: int
    result: int


def decide(graph: TrainGraph, options: Options) -> Decision:
    """In the graph's present order, every result that can take over an argument's bytes does."""
    memory = build_memory(graph)
    chosen = due(memory, range(len(memory.operators)), all_reuses(memory))
    return Decision(
        overwrites=tuple((_maker(memory, reuse), reuse.position) for reuse in chosen),
        nbytes=sum(memory.storages[reuse.result].nbytes for reuse in chosen),
    )


def due(memory: MemoryModel, order: Sequence[int], reuses: Iterable[Reuse]) -> list[Reuse]:
    """What is written over what in ``order``: of the reuses of each result the first that is possible."""
    chosen: dict[int, Reuse] = {}
    for reuse in possible(memory, order, reuses):
        chosen.setdefault(reuse.result, reuse)
    return list(chosen.values())


def possible(memory: MemoryModel, order: Sequence[int], reuses: Iterable[Reuse]) -> Iterator[Reuse]:
    """The reuses whose operator is the last to use the argument's storage, for operators in ``order``."""
    position = {operator: step for step, operator in enumerate(order)}
    for reuse in reuses:
        maker = memory.storages[reuse.result].producer
        if max(position[user] for user in memory.uses[reuse.reused]) == position[maker]:
            yield reuse


def _maker(memory: MemoryModel, reuse: Reuse) -> str:
    """The name of the operator that makes the result."""
    return memory.operators[memory.storages[reuse.result].producer].node.name


def all_reuses(memory: MemoryModel) -> list[Reuse]:
    """The possible reuses of every operator, in the graph's order."""
    return [reuse for operator in memory.operators for reuse in reuses(memory, operator)]


def reuses(memory: MemoryModel, operator: Operator) -> Iterator[Reuse]:
    """The arguments that ``operator`` may write its result over once nobody else needs them, best first."""
    node = operator.node
    tensors = [tensor for _, tensor in tensors_of(node)]
    if len(operator.births) != 1 or len(tensors) != 1 or form_of(node, 1).kind is FormKind.ALLOCATE:
        return
    result = memory.storages[operator.births[0]]
    for position in ops.may_overwrite(node):
        argument = node.args[position] if position < len(node.args) else None
        if isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor):
            reused = memory.storage_of(argument)
            if _may_reuse(reused, result, argument) and _is_read_as(node, argument, tensors[0]):
                yield Reuse(position, reused.index, result.index)


def _may_reuse(reused: Storage, result: Storage, argument: fx.Node) -> bool:
    """Whether ``result`` may take over the bytes of ``reused``: as many bytes, and both storages are the step's own.

    A result that is handed out takes over the storage of an argument that made it, not of a view of it.
    """
    if reused.place is not Place.TEMPORARY or reused.nbytes != result.nbytes or not reused.nbytes:
        return False
    return result.place is Place.TEMPORARY or (result.place is Place.OUTPUT and reused.name == argument.name)


def _is_read_as(node: fx.Node, argument: fx.Node, result: torch.Tensor) -> bool:
    """Whether the argument, and all else that ``node`` reads of its storage, has the geometry of ``result``."""
    storage = identity(argument.meta["val"])
    same = [t for other in node.all_input_nodes for _, t in tensors_of(other) if identity(t) == storage]
    return all(_geometry(tensor) == _geometry(result) for tensor in same)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, bits


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Enter in ``TrainGraph.reuse`` that each result, with its views, takes over the memory of its argument.

    Raises:
        PlanError: the graph has no such operators, or they cannot write over these arguments.
    """
    memory = build_memory(graph)
    now = possible(memory, range(len(memory.operators)), all_reuses(memory))
    allowed = {(_maker(memory, reuse), reuse.position) for reuse in now}
    for name, position in decision.overwrites:
        if (name, position) not in allowed:
            raise PlanError(f"reuse: {name} cannot write over its argument {position} in this graph")
    return graph.replace(reuse=dict(decision.overwrites))

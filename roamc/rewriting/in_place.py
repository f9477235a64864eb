"""Results that may be written over an argument, by an operator that is the last to use it (in-place reuse).

The bits are those of the operator that allocates its result. Which arguments may be written over stands in
:mod:`roamc.operators.ops`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roamc.compat import identity
from roamc.graph import tensors_of
from roamc.graph.memory import MemoryModel, Operator, Place, Storage
from roamc.operators import ops
from roamc.operators.out_variants import FormKind, form_of
from roamc.options import Options

PASS = "reuse"
"""The pass that decides what is written over what, by its name in ``Options.disable``."""


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


def wanted(memory: MemoryModel, options: Options) -> list[Reuse]:
    """All that are possible; none where the user leaves in-place reuse out."""
    return [] if PASS in options.disable else all_reuses(memory)


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

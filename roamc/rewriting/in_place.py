"""Results that may be written over an argument, by an operator that is the last to use it (in-place reuse).

The result has the same bits as if it were allocated. Which arguments may be written over says
:func:`roamc.operators.ops.may_overwrite`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roamc.graph import tensors_of
from roamc.graph.memory import MemoryModel, Operator, Place, Storage
from roamc.graph.storage_ids import id_of, ids_of, placed
from roamc.operators import ops
from roamc.operators.out_variants import FormKind, form_of
from roamc.operators.table import Space
from roamc.options import Options

PASS = "reuse"
"""Name, in ``Options.disable``, of the pass that decides which results are written over which arguments."""


@dataclass(frozen=True)
class Reuse:
    """A result that may take over the bytes of an argument, in an order in which that is the argument's last use.

    Attributes:
        position: index of the argument among the positional arguments of the result's operator.
        reused: index in ``MemoryModel.storages`` of the argument's storage, whose bytes the result takes over.
        result: index in ``MemoryModel.storages`` of the result's storage.
    """

    position: int
    reused: int
    result: int


def due(memory: MemoryModel, order: Sequence[int], reuses: Iterable[Reuse]) -> list[Reuse]:
    """Return the reuses to carry out in ``order``: for each result the first of ``reuses`` that is possible.

    A reuse is possible if the result's operator is the last to use the argument's storage in ``order``, see
    :func:`possible`.

    Args:
        memory: memory model of a graph with n operators.
        order: the operators in the order in which they run, a permutation of 0..n-1.
        reuses: candidates, for each result the best first.
    """
    chosen: dict[int, Reuse] = {}
    for reuse in possible(memory, order, reuses):
        chosen.setdefault(reuse.result, reuse)
    return list(chosen.values())


def possible(memory: MemoryModel, order: Sequence[int], reuses: Iterable[Reuse]) -> Iterator[Reuse]:
    """Yield those of ``reuses`` whose operator is, in ``order``, the last to use the argument's storage.

    The operator that waits for the end of the result's does not count: it waits for result and argument in one.

    Args:
        memory: memory model of a graph with n operators.
        order: the operators in the order in which they run, a permutation of 0..n-1.
        reuses: candidates, yielded in the sequence given.
    """
    position = {operator: step for step, operator in enumerate(order)}
    latest: dict[int, list[int]] = {}  # storage to the last two operators that use it, of which one may not count
    for reuse in reuses:
        maker = memory.storages[reuse.result].producer
        if reuse.reused not in latest:
            latest[reuse.reused] = heapq.nlargest(2, memory.uses[reuse.reused], key=position.__getitem__)
        if maker == next(user for user in latest[reuse.reused] if user != memory.ends.get(maker)):
            yield reuse


def wanted(memory: MemoryModel, options: Options) -> list[Reuse]:
    """Return :func:`all_reuses` of ``memory``, or an empty list if ``options.disable`` names the pass "reuse"."""
    return [] if PASS in options.disable else all_reuses(memory)


def all_reuses(memory: MemoryModel) -> list[Reuse]:
    """Return, in graph order, a :class:`Reuse` for each argument that an operator may write its single result over.

    Several entries may name the same result or the same argument; the entries of one operator stand best first.

    Args:
        memory: memory model of a graph.
    """
    return [reuse for operator in memory.operators for reuse in reuses(memory, operator)]


def reuses(memory: MemoryModel, operator: Operator) -> Iterator[Reuse]:
    """Yield a :class:`Reuse` for each argument that ``operator`` may write its single result over, best first.

    A Reuse is valid in each order in which ``operator`` is the last to use the argument's storage, see
    :func:`possible`. An operator with several results, or that cannot write into given memory, has none.
    """
    node = operator.node
    tensors = [tensor for _, tensor in tensors_of(node)]
    if len(operator.births) != 1 or len(tensors) != 1 or form_of(node, 1).kind is FormKind.ALLOCATE:
        return
    result = memory.storages[operator.births[0]]
    for position in ops.may_overwrite(node, ids_of):
        argument = node.args[position] if position < len(node.args) else None
        if isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor):
            reused = memory.storage_of(argument)
            if _may_reuse(reused, result, argument) and _is_read_as(node, argument, tensors[0]):
                yield Reuse(position, reused.index, result.index)


def _may_reuse(reused: Storage, result: Storage, argument: fx.Node) -> bool:
    """Whether ``result`` may take over the bytes of ``reused``: as many bytes, and both storages are the step's own.

    A result that is handed out may take over a storage only through the argument that made it, not through a view.
    """
    if reused.space is not Space.DEVICE or result.space is not Space.DEVICE:
        return False
    if reused.place is not Place.TEMPORARY or reused.nbytes != result.nbytes or not reused.nbytes:
        return False
    return result.place is Place.TEMPORARY or (result.place is Place.OUTPUT and reused.name == argument.name)


def _is_read_as(node: fx.Node, argument: fx.Node, result: torch.Tensor) -> bool:
    """Whether the argument, and all else that ``node`` reads of its storage, has the geometry of ``result``."""
    storage = id_of(argument)
    same = [tensor for other in node.all_input_nodes for _, tensor, lies_in in placed(other) if lies_in == storage]
    return all(_geometry(tensor) == _geometry(result) for tensor in same)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, bits

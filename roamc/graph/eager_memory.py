"""What eager PyTorch holds at every step, by the same storages and lives as a plan.

Eager runs in program order, keeps gradients to the end of the step, and writes some values over what is there. In
backward it differs from the graph in three ways, which the metadata of a trace tells:

    a node of autograd    several operators; the gradients it is called with, and what it has saved, live to its end
    a sum of gradients    a value of the graph; eager adds to one of the two where nobody else reads that
    no gradient           where a model returns its loss, its other outputs get none, and nothing is computed of it
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from roamc.graph import Phase, tensors_of
from roamc.graph.lifetimes import dropped_lifetimes, lifetimes, sizes, timeline
from roamc.graph.memory import WROTE_OVER, Int64s, MemoryModel, Operator, Place, Step, Storage, roots_of
from roamc.graph.rewrite import value_of
from roamc.operators import ops
from roamc.operators.random import dropout_mask
from roamc.units import Bytes

aten = torch.ops.aten

SUM_OF_GRADIENTS = "is_gradient_acc"
"""Key in a node's ``meta``, set by torch: autograd adds up two gradients of one tensor."""

STEPS_OWN = (Place.TEMPORARY, Place.TANGENT)
"""Places of storages that nobody holds behind their last use in the graph."""

SCALAR: Bytes = 8
"""Bytes of a tangent up to which it is taken for that of a loss."""


def of_eager(memory: MemoryModel) -> MemoryModel:
    """Return ``memory`` with the sizes of eager's storages: on a CPU, a dropout keeps its mask in the input's dtype."""
    larger = {}
    for operator in memory.operators:
        dtype = _dropped_dtype(operator.node)
        if dtype is not None and len(operator.births) == len(list(tensors_of(operator.node))):
            mask = memory.storages[operator.births[-1]]
            if mask.device == "cpu":
                larger[mask.index] = replace(mask, nbytes=mask.nbytes * dtype.itemsize)
    return replace(memory, storages=tuple(larger.get(s.index, s) for s in memory.storages)) if larger else memory


def _dropped_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of what a dropout drops elements of, if ``node`` makes the bool mask of one."""
    if node.target is aten.native_dropout.default:
        dropped = node.all_input_nodes[:1]
    elif node.target is dropout_mask:
        dropped = [user for user in node.users if user.target is aten.native_dropout_backward.default]
    else:
        return None
    dtypes: list[torch.dtype] = [value_of(each).dtype for each in dropped]
    return dtypes[0] if dtypes else None


def eager_lifetimes(memory: MemoryModel, *, dropped: bool = False) -> tuple[Int64s, Int64s]:
    """Return ``born`` and ``dead`` of :func:`roamc.graph.lifetimes.lifetimes` as eager has them, in graph order.

    Gradients live to the end of the step. Some operators of the graph make a value that eager writes over the
    operator's first argument. Where that argument is all of a temporary's storage and has its last use there, it dies
    one step earlier: the result takes over its bytes. What eager writes to a part of a storage, or to a tensor of the
    caller's, lies there and has ``dead == born``; the storage lives as long as all that lies in it. What eager does not
    make, see :func:`not_made`, has ``dead == born`` as well.

    Args:
        memory: of a graph in program order.
        dropped: whether the caller drops the outputs of forward at once, see
            :func:`roamc.graph.lifetimes.dropped_lifetimes`.

    Returns:
        ``born`` and ``dead``, int64, an entry for each storage of ``memory.counted``, in steps.
    """
    born, dead = lifetimes(memory)
    if dropped:
        dead = dropped_lifetimes(memory, dead)
    gradients = np.array([storage.gradient for storage in memory.counted], dtype=bool)
    dead[gradients] = len(memory.operators)
    row = {storage.index: at for at, storage in enumerate(memory.counted)}
    missing = not_made(memory)
    _keep_to_end_of_node(memory, row, dead)
    _write_in_place(memory, row, born, dead, missing)
    for index in missing:
        dead[row[index]] = born[row[index]]
    return born, dead


def not_made(memory: MemoryModel) -> frozenset[int]:
    """Return the storages that the graph makes, or is given, and eager does not.

    A graph has a tangent for every output that needs a gradient. A model that returns its loss, a scalar, beside other
    outputs is taken to have its backward run from the loss: eager makes no gradients of the others, and nothing of
    them.

    Returns:
        Indices of ``memory.storages``; empty if no tangent is a scalar, or all are.
    """
    tangents = [storage for storage in memory.storages if storage.place is Place.TANGENT]
    large = {storage.index for storage in tangents if storage.nbytes > SCALAR}
    if len(large) == len(tangents):
        return frozenset()
    missing, of_tangents = set(large), {storage.index for storage in tangents}
    for operator in memory.operators if large else ():
        gradients = of_tangents.intersection(operator.reads)
        of_tangents.update(operator.births if gradients else ())
        if gradients and missing.issuperset(gradients):
            missing.update(operator.births)
    return frozenset(missing)


def _keep_to_end_of_node(memory: MemoryModel, row: Mapping[int, int], dead: Int64s) -> None:
    """Let what a node of autograd reads, or has saved, and has not made itself, live until all of the node has run."""
    ends: dict[int, Step] = {}
    for number, begin, end in _nodes_of_autograd(memory):
        ends[number] = end
        for operator in memory.operators[begin:end]:
            for index in operator.reads:
                if index in row and memory.storages[index].producer < begin:
                    dead[row[index]] = max(dead[row[index]], end)
    for operator in memory.operators[: memory.boundary]:
        end = ends.pop(operator.node.meta.get("seq_nr", -1), 0)  # those behind it with this number need no gradient
        for position in ops.rule(operator.node.target).saves if end else ():
            part = _part_of(memory, operator.node.args[position])
            if part is not None and part[0].index in row:
                dead[row[part[0].index]] = max(dead[row[part[0].index]], end)


def _nodes_of_autograd(memory: MemoryModel) -> Iterator[tuple[int, Step, Step]]:
    """Yield (number, first operator, operator behind the last) of each node of autograd."""
    begin = 0
    for number, members in itertools.groupby(memory.operators, _node_of_autograd):
        end = begin + sum(1 for _ in members)
        if number is not None:
            yield number, begin, end
        begin = end


def _node_of_autograd(operator: Operator) -> int | None:
    """The number of the node of autograd that ``operator`` is a part of; None if it is of none, or not known."""
    own = operator.phase is Phase.BACKWARD and not operator.node.meta.get(SUM_OF_GRADIENTS)
    number: int | None = operator.node.meta.get("seq_nr") if own else None
    return number


def _write_in_place(
    memory: MemoryModel, row: Mapping[int, int], born: Int64s, dead: Int64s, missing: frozenset[int]
) -> None:
    """Change ``dead`` where eager writes a value into memory that is there: of the value and of that memory."""
    callers = {storage.index for storage in memory.storages if storage.place is Place.INPUT}
    holder: dict[int, int] = {}  # of a value that eager writes to a part of a storage, or over what lies in one
    heir: dict[int, int] = {}  # of a value that eager writes over as a whole
    for position, argument, whole, result in _written_over(memory, row, dead, missing):
        if result.index in missing:
            continue
        if argument.index in callers:
            callers.add(result.index)
            dead[row[result.index]] = born[row[result.index]]
        elif not whole or argument.index in holder:
            holder[result.index] = argument.index
        elif not argument.gradient and argument.place in STEPS_OWN and dead[row[argument.index]] == position + 1:
            dead[row[argument.index]] = position
            heir[argument.index] = result.index
    root = roots_of({**holder, **heir})
    for part in holder:
        around = row[root[part]]
        dead[around] = max(dead[around], dead[row[part]])
        dead[row[part]] = born[row[part]]


def _written_over(
    memory: MemoryModel, row: Mapping[int, int], dead: Int64s, missing: frozenset[int]
) -> Iterator[tuple[Step, Storage, bool, Storage]]:
    """Find the operators that eager runs in place where the graph makes a value.

    Yields:
        The operator's index, the storage that eager writes to, whether it writes all of it, the storage of the value.
        ``dead`` is read when the next operator is asked for.
    """
    for position, operator in enumerate(memory.operators):
        rule = ops.rule(operator.node.target)
        gradient = (rule.accumulates or rule.part is not None) and operator.phase is not Phase.FORWARD
        if not operator.births:
            continue
        if operator.node.meta.get(SUM_OF_GRADIENTS):
            dying = {index for index in operator.reads if index in row and dead[row[index]] == position + 1}
            written = _added_to(memory, operator, missing, dying)
        elif WROTE_OVER in operator.node.meta or gradient:
            written = _part_of(memory, operator.node.args[0])
        else:
            written = None
        if written is not None:
            yield position, *written, memory.storages[operator.births[0]]


def _added_to(
    memory: MemoryModel, operator: Operator, missing: frozenset[int], dying: set[int]
) -> tuple[Storage, bool] | None:
    """The gradient to which autograd adds the other, and whether that is a storage of its own; None for a new one.

    A gradient that eager does not make is not added: the other one is the sum, whoever else reads it.
    """
    parts = [part for argument in operator.node.args[:2] if (part := _part_of(memory, argument)) is not None]
    summands = [(storage, whole) for storage, whole in parts if storage.index not in missing]
    if len(summands) == 1 < len(parts):
        return summands[0][0], False
    nbytes = memory.storages[operator.births[0]].nbytes
    free = (s for s, whole in summands if whole and s.nbytes == nbytes and s.place in STEPS_OWN and s.index in dying)
    return next(((storage, True) for storage in free), None)


def _part_of(memory: MemoryModel, argument: object) -> tuple[Storage, bool] | None:
    """The storage of a tensor, and whether the tensor fills it; None for what is no single tensor."""
    if not isinstance(argument, fx.Node) or (argument.name, 0) not in memory.owner:
        return None
    storage = memory.storage_of(argument)
    return storage, argument.meta["val"].nbytes >= storage.nbytes


def eager_live_bytes(memory: MemoryModel, *, dropped: bool = False) -> Int64s:
    """Return int64[n], the live bytes of eager PyTorch at each of n steps, with lives of :func:`eager_lifetimes`.

    Eager frees a saved tensor when the backward node that reads it has run, which is its last use in the traced graph.
    A gradient stays in ``.grad`` until ``zero_grad``, after the optimizer.

    Args:
        memory: of a graph with n operators, in program order.
        dropped: as for :func:`eager_lifetimes`.
    """
    memory = of_eager(memory)
    born, dead = eager_lifetimes(memory, dropped=dropped)
    return timeline(sizes(memory.counted), born, dead, len(memory.operators))

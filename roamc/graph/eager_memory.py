"""What eager PyTorch holds at every step, by the same storages and lives as a plan.

Eager runs in program order, keeps gradients to the end of the step, and writes some values over what is there. It
differs from the graph in six ways more; the first four are of backward, and the metadata of a trace tells them:

    a node of autograd    several operators; the gradients it is called with, and what it has saved, live to its end
    a sum of gradients    a value of the graph; eager adds to the first where nobody else holds that
    an expression         of C++; its temporaries live to its end
    no gradient           where a model returns its loss, its other outputs get none, and nothing is computed of it
    a variable            of torch.optim's loop over parameters; holds what it names until it names the next one's
    a list                of tensors that one call of torch.optim's makes, for all parameters; lives until the list ends
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx

from roamc.graph import Phase, tensors_of
from roamc.graph.lifetimes import dropped_lifetimes, lifetimes, sizes, timeline
from roamc.graph.memory import (
    FOREACH,
    WROTE_OVER,
    Int64s,
    MemoryModel,
    Operator,
    Place,
    Step,
    Storage,
    rearranged,
    roots_of,
)
from roamc.graph.origin import SUM_OF_GRADIENTS
from roamc.graph.rewrite import value_of
from roamc.graph.second_runs import second_runs
from roamc.operators import ops
from roamc.operators.call import call_of
from roamc.operators.random import dropout_mask
from roamc.units import Bytes

aten = torch.ops.aten

STEPS_OWN = (Place.TEMPORARY, Place.TANGENT)
"""Places of storages that nobody holds behind their last use in the graph."""

SCALAR: Bytes = 8
"""Bytes of a tangent up to which it is taken for that of a loss."""

EXPRESSION = 7
"""Most operators of a gradient's formula that is taken for one expression of C++: its temporaries live to its end.

A longer one is taken for a function, whose temporaries have names and end one by one."""

FULL_SIZE = (aten.mse_loss.default, aten.smooth_l1_loss.default)
"""Losses that eager on a CPU reduces where it has computed the elements: the result keeps the memory of all."""

NAMED: dict[object, int] = {
    aten.add.Tensor: 0,  # the gradient with weight decay: the variable names the bare one before the next sum
    aten.neg.default: 1,  # the negated gradient
    aten.div.Tensor: 1,  # Adam's denominator
}
"""Operators whose results torch.optim's loop over parameters keeps in a variable until they run for the next one.

Each with 1 if a result is there while the next one is made, else 0."""

LISTED = aten.div.Tensor
"""Operator whose results, a list of Adam's denominators, torch.optim keeps in a variable until it has the next list."""


def of_eager(memory: MemoryModel) -> MemoryModel:
    """Return ``memory`` with eager's storages, in their sizes on a CPU, and operators in eager's order.

    A dropout keeps its mask in the input's dtype, and losses of :data:`FULL_SIZE` the memory of all their elements. The
    operators of one call of ``torch._foreach_*`` stand side by side: all that the call makes is there behind it.
    """
    memory = _by_call(memory)
    larger = {}
    for operator in memory.operators:
        nbytes = _eager_bytes(operator.node)
        if nbytes and len(operator.births) == len(list(tensors_of(operator.node))):
            last = memory.storages[operator.births[-1]]
            if last.device == "cpu" and nbytes > last.nbytes:
                larger[last.index] = replace(last, nbytes=nbytes)
    return replace(memory, storages=tuple(larger.get(s.index, s) for s in memory.storages)) if larger else memory


def _by_call(memory: MemoryModel) -> MemoryModel:
    """Return ``memory`` with its operators of :data:`FOREACH` in the order of the calls, at the places they have."""
    calls = {at: each.node.meta[FOREACH] for at, each in enumerate(memory.operators) if FOREACH in each.node.meta}
    if not calls:
        return memory
    order = {at: at for at in range(len(memory.operators))}
    order.update(zip(calls, sorted(calls, key=lambda at: calls[at]), strict=True))
    return rearranged(memory, [*order.values()], {})


def _eager_bytes(node: fx.Node) -> Bytes:
    """The bytes of eager's storage for the last result of ``node``; 0 if they are those of the result."""
    if node.target in FULL_SIZE:
        inputs = [value_of(each) for each in node.all_input_nodes]
        elements = int(math.prod(torch.broadcast_shapes(*(each.shape for each in inputs))))
        return elements * int(value_of(node).element_size())
    dtype = _dropped_dtype(node)
    if dtype is None:
        return 0
    *_, (_, mask) = tensors_of(node)
    return mask.numel() * dtype.itemsize


def _dropped_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of what a dropout drops elements of, if ``node`` makes the bool mask of one."""
    call = call_of(node)  # of a checkpoint that draws the mask again too
    if call.target is aten.native_dropout.default:
        dropped = [call.args[0]]
    elif call.target is dropout_mask:
        dropped = [user for user in node.users if user.target is aten.native_dropout_backward.default]
    else:
        return None
    dtypes: list[torch.dtype] = [value_of(each).dtype for each in dropped]
    return dtypes[0] if dtypes else None


def eager_lifetimes(memory: MemoryModel, *, dropped: bool = False) -> tuple[Int64s, Int64s]:
    """Return ``born`` and ``dead`` of :func:`roamc.graph.lifetimes.lifetimes` as eager has them, in graph order.

    Gradients live to the end of the step. Some operators of the graph make a value that eager writes over the
    operator's first argument. Where that argument is all of a temporary's storage and has its last use there, it dies
    one step earlier: the result takes over its bytes. So does what eager writes over a gradient, and lives to the end
    of the step. What eager writes to a part of a storage, or to a tensor of the caller's, lies there and has
    ``dead == born``; the storage lives as long as all that lies in it. What eager does not make, see :func:`not_made`,
    has ``dead == born`` as well.

    Args:
        memory: of a graph in program order; :func:`of_eager` brings updates of lists into eager's order.
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
    _keep_in_variables(memory, row, dead)
    _write_in_place(memory, row, born, dead, missing)
    for index in missing:
        dead[row[index]] = born[row[index]]
    return born, dead


def not_made(memory: MemoryModel) -> frozenset[int]:
    """Return the storages that the graph makes, or is given, and eager does not.

    A graph has a tangent for every output that needs a gradient. A model that returns a scalar beside other outputs is
    taken to have its backward run from the scalar, its loss: eager makes no gradients of the others, and nothing of
    them. A scalar that does not depend on all that is trained, such as a penalty beside logits, is no loss.

    Returns:
        Indices of ``memory.storages``; empty if no tangent is a scalar, all are, or none is that of a loss.
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
    trained_by_others = any(memory.storages[index].place is Place.OUTPUT for index in missing)
    return frozenset() if trained_by_others else frozenset(missing)


def _keep_to_end_of_node(memory: MemoryModel, row: Mapping[int, int], dead: Int64s) -> None:
    """Let what a node of autograd reads, or has saved, and has not made itself, live until all of the node has run."""
    ends: dict[int, Step] = {}
    for number, begin, end in _nodes_of_autograd(memory):
        ends[number] = end
        for operator in memory.operators[begin:end]:
            for index in operator.reads:
                if index in row and memory.storages[index].producer < begin:
                    dead[row[index]] = max(dead[row[index]], end)
        _keep_to_end_of_expression(memory, row, dead, begin, end)
    for operator in memory.operators[: memory.boundary]:
        end = ends.pop(operator.node.meta.get("seq_nr", -1), 0)  # those behind it with this number need no gradient
        for position in ops.rule(operator.node.target).saves if end else ():
            part = _part_of(memory, operator.node.args[position])
            if part is not None and part[0].index in row:
                dead[row[part[0].index]] = max(dead[row[part[0].index]], end)


def _keep_in_variables(memory: MemoryModel, row: Mapping[int, int], dead: Int64s) -> None:
    """Let results of :data:`NAMED` in the update live until their variable names something else, or its loop ends.

    A result that makes another one, such as the negated gradient of which a sum is made, loses its variable to that.
    Where lists are updated, see :func:`_keep_lists`, no variable is left of an earlier loop.
    """
    updates = [(step, each) for step, each in enumerate(memory.operators) if each.phase is Phase.UPDATE]
    for of_lists, members in itertools.groupby(updates, lambda update: FOREACH in update[1].node.meta):
        (_keep_lists if of_lists else _keep_in_loop)(memory, row, dead, [*members])


Updates = list[tuple[Step, Operator]]
"""Operators of the update that eager runs one after the other, with their steps."""


def _keep_in_loop(memory: MemoryModel, row: Mapping[int, int], dead: Int64s, updates: Updates) -> None:
    ends: dict[Any, Step] = dict.fromkeys(NAMED, updates[-1][0] + 1)
    makes_another: dict[int, bool] = {}  # of a storage: whether its last reader does
    for step, operator in reversed(updates):
        target = operator.node.target
        for index in operator.births if target in ends else ():
            if index in row and memory.storages[index].place is Place.TEMPORARY and not makes_another.get(index):
                dead[row[index]] = max(dead[row[index]], ends[target])
        if target in ends:
            ends[target] = step + NAMED[target]
        for index in operator.reads:
            makes_another.setdefault(index, bool(operator.births))


def _keep_lists(memory: MemoryModel, row: Mapping[int, int], dead: Int64s, updates: Updates) -> None:
    """Let the results of :data:`LISTED` live until the next list of the same group is there."""
    begins: dict[tuple[int, int], Step] = {}
    for step, operator in reversed(updates):
        if operator.node.target is LISTED:
            group, number, _ = operator.node.meta[FOREACH]
            begins[group, number] = step
            for index in operator.births:
                if index in row:
                    dead[row[index]] = max(dead[row[index]], 1 + begins.get((group, number + 1), -1))


def _keep_to_end_of_expression(
    memory: MemoryModel, row: Mapping[int, int], dead: Int64s, begin: Step, end: Step
) -> None:
    """Let what operators ``begin`` to ``end``, a node of autograd, make for themselves live as in the C++ of eager.

    A temporary lives to the end of its expression: a result of the node, or what is read twice, which has a name in
    C++. What is written over does not live beside what is written.
    """
    temporaries = [
        [i for i in dict.fromkeys(operator.reads) if i in row and begin <= memory.storages[i].producer < step]
        for step, operator in enumerate(memory.operators[begin:end], begin)
    ]
    readers: dict[Step, list[Step]] = {}
    for step, read in enumerate(temporaries, begin):
        for index in read:
            readers.setdefault(memory.storages[index].producer, []).append(step)
    last: dict[Step, Step] = {}  # of an operator: the last one of its expression
    for step in reversed(range(begin, end)):
        by = readers.get(step, [])
        goes_on = len(by) == 1 and not _adds_up_what_was_broadcast(memory.operators[by[0]].node, by[0] in readers)
        last[step] = last[by[0]] if goes_on else step
    lengths = Counter(last.values())
    for step, read in enumerate(temporaries, begin):
        node = memory.operators[step].node
        over = _part_of(memory, node.args[0]) if WROTE_OVER in node.meta else None
        for index in read:
            if lengths[last[step]] <= EXPRESSION and (over is None or over[0].index != index):
                dead[row[index]] = max(dead[row[index]], last[step] + 1)


def _adds_up_what_was_broadcast(node: fx.Node, is_read: bool) -> bool:
    """Whether autograd runs ``node`` on a result of the formula, to give it the shape of an input."""
    return node.target is aten.sum.dim_IntList and not is_read


def _nodes_of_autograd(memory: MemoryModel) -> Iterator[tuple[int, Step, Step]]:
    """Yield (number, first operator, operator behind the last) of each node of autograd.

    What a checkpoint runs again for a node that has saved it is no part of the node's formula.
    """
    graph = memory.operators[0].node.graph if memory.operators else fx.Graph()
    again = second_runs(graph, {each.node for each in memory.operators if each.phase is Phase.FORWARD})
    begin = 0
    for number, members in itertools.groupby(memory.operators, lambda operator: _node_of_autograd(operator, again)):
        end = begin + sum(1 for _ in members)
        if number is not None:
            yield number, begin, end
        begin = end


def _node_of_autograd(operator: Operator, again: Collection[fx.Node]) -> int | None:
    """The number of the node of autograd that ``operator`` is a part of; None if it is of none, or not known."""
    node = operator.node
    own = operator.phase is Phase.BACKWARD and node not in again and not node.meta.get(SUM_OF_GRADIENTS)
    number: int | None = node.meta.get("seq_nr") if own else None
    return number


def _write_in_place(
    memory: MemoryModel, row: Mapping[int, int], born: Int64s, dead: Int64s, missing: frozenset[int]
) -> None:
    """Change ``dead`` where eager writes a value into memory that is there: of the value and of that memory."""
    callers = {storage.index for storage in memory.storages if storage.place is Place.INPUT}
    gradients = {storage.index for storage in memory.storages if storage.gradient}
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
        elif argument.index in gradients:
            # A second result is the gradient of another parameter, for which autograd has copied this one.
            dead[row[argument.index]] = min(dead[row[argument.index]], position)
            dead[row[result.index]] = len(memory.operators)
            gradients.add(result.index)
        elif argument.place in STEPS_OWN and dead[row[argument.index]] == position + 1:
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

    Autograd adds to the gradient that came first, unless anybody else holds it. A view holds the tensor that it is of.
    A gradient that eager does not make is not added: the other one is the sum, whoever else reads it.
    """
    parts = [part for argument in operator.node.args[:2] if (part := _part_of(memory, argument)) is not None]
    summands = [(storage, whole) for storage, whole in parts if storage.index not in missing]
    if len(summands) == 1 < len(parts):
        return summands[0][0], False
    first = operator.node.args[0]
    if len(summands) < len(parts) or not isinstance(first, fx.Node) or ops.is_view(first.target):
        return None
    storage, whole = parts[0]
    own = whole and storage.nbytes == memory.storages[operator.births[0]].nbytes and storage.place in STEPS_OWN
    return (storage, True) if own and storage.index in dying else None


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

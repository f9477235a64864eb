"""What eager PyTorch holds at every step, by the same storages and lives as a plan.

Eager runs in program order, frees a saved tensor when the backward node that reads it has run, keeps gradients to the
end of the step, and writes some values over what is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from torch import fx

from roamc.graph import Phase
from roamc.graph.lifetimes import dropped_lifetimes, lifetimes, sizes, timeline
from roamc.graph.memory import WROTE_OVER, Int64s, MemoryModel, Place, Step, Storage, roots_of
from roamc.operators import ops


def eager_lifetimes(memory: MemoryModel, *, dropped: bool = False) -> tuple[Int64s, Int64s]:
    """Return ``born`` and ``dead`` of :func:`roamc.graph.lifetimes.lifetimes` as eager has them, in graph order.

    Gradients live to the end of the step. Some operators of the graph make a value that eager writes over the
    operator's first argument. Where that argument is all of a temporary's storage and has its last use there, it dies
    one step earlier: the result takes over its bytes. What eager writes to a part of a storage, or to a tensor of the
    caller's, lies there and has ``dead == born``; the storage lives as long as all that lies in it.

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
    _write_in_place(memory, row, born, dead)
    return born, dead


def _write_in_place(memory: MemoryModel, row: Mapping[int, int], born: Int64s, dead: Int64s) -> None:
    """Change ``dead`` where eager writes a value into memory that is there: of the value and of that memory."""
    callers = {storage.index for storage in memory.storages if storage.place is Place.INPUT}
    holder: dict[int, int] = {}  # of a value that eager writes to a part of a storage, or over what lies in one
    heir: dict[int, int] = {}  # of a value that eager writes over as a whole
    for position, argument, whole, result in _written_over(memory):
        if argument.index in callers:
            callers.add(result.index)
            dead[row[result.index]] = born[row[result.index]]
        elif not whole or argument.index in holder:
            holder[result.index] = argument.index
        elif not argument.gradient and argument.place is Place.TEMPORARY and dead[row[argument.index]] == position + 1:
            dead[row[argument.index]] = position
            heir[argument.index] = result.index
    root = roots_of({**holder, **heir})
    for part in holder:
        around = row[root[part]]
        dead[around] = max(dead[around], dead[row[part]])
        dead[row[part]] = born[row[part]]


def _written_over(memory: MemoryModel) -> Iterator[tuple[Step, Storage, bool, Storage]]:
    """Find the operators that eager runs in place where the graph makes a value.

    Yields:
        The operator's index, the storage that eager writes to, whether it writes all of it, the storage of the value.
    """
    for position, operator in enumerate(memory.operators):
        rule = ops.rule(operator.node.target)
        gradient = (rule.accumulates or rule.part is not None) and operator.phase is not Phase.FORWARD
        if operator.births and (WROTE_OVER in operator.node.meta or gradient):
            argument = operator.node.args[0]
            if isinstance(argument, fx.Node) and (argument.name, 0) in memory.owner:
                storage = memory.storage_of(argument)
                whole = argument.meta["val"].nbytes >= storage.nbytes
                yield position, storage, whole, memory.storages[operator.births[0]]


def eager_live_bytes(memory: MemoryModel) -> Int64s:
    """Return int64[n], the live bytes of eager PyTorch at each of n steps, with lives of :func:`eager_lifetimes`.

    Eager frees a saved tensor when the backward node that reads it has run, which is its last use in the traced graph.
    A gradient stays in ``.grad`` until ``zero_grad``, after the optimizer.

    Args:
        memory: of a graph with n operators, in program order.
    """
    born, dead = eager_lifetimes(memory)
    return timeline(sizes(memory.counted), born, dead, len(memory.operators))

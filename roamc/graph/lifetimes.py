"""When the storages of a graph live in an order of its operators, and the bytes that live at each step.

Lifetimes are half-open, in steps of the order: a storage lives in ``[born, dead)``, born at the step that makes it,
dead after the last step that uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from roamc.graph.memory import Int64s, MemoryModel, Place, Storage
from roamc.graph.train_graph import Phase


def lifetimes(memory: MemoryModel, order: Sequence[int] | None = None) -> tuple[Int64s, Int64s]:
    """Return the half-open life ``[born, dead)`` of every counted storage, in steps of ``order``.

    Args:
        memory: of a graph with n operators.
        order: a permutation of 0..n-1, the operator that runs at each step; None for graph order.

    Returns:
        ``born`` and ``dead``, int64, an entry for each storage of ``memory.counted``. Outputs live to step n. Tangents
        are born where backward starts; a tangent without users has ``dead == born``.
    """
    count = len(memory.operators)
    position = np.empty(count, dtype=np.int64)
    position[np.arange(count) if order is None else np.asarray(order)] = np.arange(count)
    own = np.array([storage.producer >= 0 for storage in memory.counted], dtype=bool)
    born = np.full(len(own), memory.boundary, dtype=np.int64)
    born[own] = [position[storage.producer] for storage in memory.counted if storage.producer >= 0]
    dead = born + own
    for row, storage in enumerate(memory.counted):
        if storage.place is Place.OUTPUT:
            dead[row] = count
        elif memory.uses[storage.index]:
            dead[row] = max(dead[row], 1 + max(position[user] for user in memory.uses[storage.index]))
    return born, dead


def timeline(nbytes: Int64s, born: Int64s, dead: Int64s, steps: int) -> Int64s:
    """Return int64[steps], the live bytes at each of ``steps`` steps.

    Args:
        nbytes: int64[m], the size of each of m storages, in bytes.
        born: int64[m], the first step of each life.
        dead: int64[m], the step behind the last; ``born <= dead <= steps``.
        steps: the number of steps.
    """
    change = np.zeros(steps + 1, dtype=np.int64)
    np.add.at(change, born, nbytes)
    np.subtract.at(change, dead, nbytes)
    return np.cumsum(change)[:steps]


def live_bytes(memory: MemoryModel, order: Sequence[int] | None = None) -> Int64s:
    """Return int64[n], the bytes of those storages in ``memory.counted`` that live at each of n steps.

    Args:
        memory: of a graph with n operators.
        order: a permutation of 0..n-1, the operator that runs at each step; None for graph order.
    """
    born, dead = lifetimes(memory, order)
    return timeline(sizes(memory.counted), born, dead, len(memory.operators))


def dropped_lifetimes(memory: MemoryModel, dead: Int64s) -> Int64s:
    """Return ``dead`` for a caller that keeps no output of forward.

    Outputs that FORWARD makes die at the boundary, or after their last use in backward; other storages as in ``dead``.

    Args:
        memory: of a graph with a boundary.
        dead: int64, an entry for each storage of ``memory.counted``, in graph order; stays as it is.
    """
    earlier = dead.copy()
    for row, storage in enumerate(memory.counted):
        of_forward = storage.producer >= 0 and memory.operators[storage.producer].phase is Phase.FORWARD
        if storage.place is Place.OUTPUT and of_forward:
            last = max(memory.uses[storage.index], default=0) + 1
            earlier[row] = min(dead[row], max(memory.boundary, last))
    return earlier


def sizes(storages: Iterable[Storage]) -> Int64s:
    """Return the bytes of each of ``storages`` as an int64 array, in their order."""
    return np.array([storage.nbytes for storage in storages], dtype=np.int64)

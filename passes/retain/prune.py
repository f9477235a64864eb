"""Which codecs of a finished decision are not needed: there is room for the whole value while its code waits.

All storages whose codec costs the same for a byte are taken or left together by a price. Where the budget needs only
some of them, this says which may stay whole; the solver is then asked again, and the better answer taken.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from roamc.cost import workspace
from roamc.graph import TrainGraph
from roamc.memory import MemoryModel, build_memory, live_bytes
from roamc.passes.retain.compress import MARK
from roamc.units import Bytes

Spare = tuple[str, Bytes]
"""A storage that is kept smaller, and by how many bytes."""


def not_needed(graph: TrainGraph, coded: Iterable[Spare], target: Bytes) -> set[str]:
    """The storages, of those in ``coded`` as many as possible from the first on, that fit as they are.

    Args:
        graph: with codecs, reruns and donation, in the order in which it will run.
        coded: those that may be taken back, the dearest first.
        target: live bytes, operators' own memory included, that no step may exceed.
    """
    memory = build_memory(graph)
    live = live_bytes(memory) + np.array([workspace(op.node) for op in memory.operators], dtype=np.int64)
    waits = _waits(memory)
    found: set[str] = set()
    for storage, more in coded:
        begin, end = waits.get(storage, (0, len(live)))
        if live[begin:end].max(initial=0) + more <= target:
            live[begin:end] += more
            found.add(storage)
    return found


def _waits(memory: MemoryModel) -> dict[str, tuple[int, int]]:
    """Per storage the steps in which its code waits: behind the last that writes it, up to the first that reads it."""
    found: dict[str, tuple[int, int]] = {}
    for step, op in enumerate(memory.operators):
        mark = op.node.meta.get(MARK)
        if mark is not None and mark.role == "encode":
            found[mark.storage] = step, len(memory.operators)
        elif mark is not None and mark.role == "decode":
            begin, end = found.get(mark.storage, (0, step))
            found[mark.storage] = begin, min(end, step)
    return {storage: (begin, end) for storage, (begin, end) in found.items() if begin < end}

"""What eager PyTorch allocates for a captured step, and when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from roamc.graph import Phase
from roamc.graph.eager_memory import eager_lifetimes
from roamc.graph.lifetimes import sizes, timeline
from roamc.graph.memory import Int64s, MemoryModel
from roamc.units import Bytes

aten = torch.ops.aten


@dataclass(frozen=True)
class Trace:
    """Storages of the step in program order: bytes, first step, step behind the last."""

    size: Int64s
    born: Int64s
    dead: Int64s
    steps: int

    @property
    def peak_bytes(self) -> Bytes:
        """The most bytes alive at one step."""
        return int(timeline(self.size, self.born, self.dead, self.steps).max(initial=0))


def trace(memory: MemoryModel) -> Trace:
    """The storages of eager PyTorch: as captured, but for two things.

    Gradients live to the end of the step, where ``zero_grad`` drops them. And ``torch.optim.Adam`` (its loop
    over single tensors) divides the root of the second moment into a new tensor, where the captured update
    divides in place.
    """
    born, dead = eager_lifetimes(memory)
    size = sizes(memory.counted)
    row_of = {storage.index: row for row, storage in enumerate(memory.counted)}
    more: list[tuple[Bytes, int, int]] = []
    for step, operator in enumerate(memory.operators):
        if operator.phase is Phase.UPDATE and operator.node.target is aten.div_.Tensor and operator.writes:
            row = row_of.get(operator.writes[0])
            if row is not None:
                more.append((int(size[row]), step, int(dead[row])))
                dead[row] = step + 1
    added = np.array(more, dtype=np.int64).reshape(-1, 3).T
    return Trace(
        size=np.concatenate([size, added[0]]),
        born=np.concatenate([born, added[1]]),
        dead=np.concatenate([dead, added[2]]),
        steps=len(memory.operators),
    )

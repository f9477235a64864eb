"""What eager PyTorch allocates for a captured step, and when."""

from __future__ import annotations

from dataclasses import dataclass

from roamc.graph.eager_memory import eager_lifetimes, of_eager
from roamc.graph.lifetimes import sizes, timeline
from roamc.graph.memory import Int64s, MemoryModel
from roamc.units import Bytes


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
    """The storages of eager PyTorch in a step as captured, without in-place reuse."""
    memory = of_eager(memory)
    return Trace(sizes(memory.counted), *eager_lifetimes(memory), len(memory.operators))

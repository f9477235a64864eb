"""What the micro-batches of a pipeline hold that have run forward and wait for their backward."""

from __future__ import annotations

from roamc.graph.memory import MemoryModel
from roamc.graph.train_graph import Phase, Role, TrainGraph, placeholders, tensors_of
from roamc.units import Bytes


def waiting_bytes(graph: TrainGraph, memory: MemoryModel) -> Bytes:
    """Return the bytes that the other micro-batches in flight hold; 0 if there is one alone.

    Each has its own batch and what forward has saved of it. Of the batch it holds what is read behind forward, such as
    the input of a stage's first layer.

    Args:
        graph: of one micro-batch.
        memory: the memory model of ``graph``.
    """
    if graph.in_flight == 1:
        return 0
    return (graph.in_flight - 1) * (memory.saved_bytes + _batch_bytes(graph, memory))


def _batch_bytes(graph: TrainGraph, memory: MemoryModel) -> Bytes:
    """The bytes of batch tensors that BACKWARD or UPDATE uses."""
    behind = {index for index, operator in enumerate(memory.operators) if operator.phase is not Phase.FORWARD}
    fed = zip(placeholders(graph.graph), graph.inputs, strict=True)
    batch = [node for node, port in fed if port.role is Role.INPUT]
    held = {memory.storage_of(node, place).index for node in batch for place, _ in tensors_of(node)}
    return sum(memory.storages[index].nbytes for index in held if not behind.isdisjoint(memory.uses[index]))

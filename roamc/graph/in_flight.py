"""What the micro-batches of a pipeline, or the calls of a module, hold that have run forward and wait for backward."""

from __future__ import annotations

from roamc.graph.memory import MemoryModel, Place
from roamc.graph.train_graph import Phase, Role, TrainGraph, placeholders, tensors_of
from roamc.units import Bytes


def waiting_bytes(graph: TrainGraph, memory: MemoryModel, *, eager: bool = False) -> Bytes:
    """Return the bytes that the others in flight hold; 0 if there is one alone.

    A micro-batch has its own batch and what forward has saved of it. Of the batch it holds what is read behind forward,
    such as the input of a stage's first layer. A call holds what forward has saved and its outputs. Once the backward
    of the first call has run, autograd holds the gradients that it has made, until the last adds its own: with the
    second, one call less waits, and the gradients are there twice.

    Args:
        graph: of one micro-batch or call.
        memory: the memory model of ``graph``.
        eager: count for eager PyTorch, which adds each gradient as soon as it is made.
    """
    if graph.in_flight == 1:
        return 0
    if not graph.calls:
        return (graph.in_flight - 1) * (memory.saved_bytes + _batch_bytes(graph, memory))
    each = call_bytes(memory)
    return (graph.in_flight - 2) * each + max(each, 0 if eager else _gradient_bytes(memory))


def call_bytes(memory: MemoryModel) -> Bytes:
    """Return the bytes that a call of a module holds between its forward and its backward, its outputs included."""
    early = {index for index, operator in enumerate(memory.operators) if operator.phase is Phase.FORWARD}
    outputs = (each for each in memory.counted if each.place is Place.OUTPUT and each.producer in early)
    return sum(storage.nbytes for storage in dict.fromkeys((*memory.saved, *outputs)))


def _gradient_bytes(memory: MemoryModel) -> Bytes:
    """The bytes of what backward hands out: gradients."""
    late = {index for index, operator in enumerate(memory.operators) if operator.phase is not Phase.FORWARD}
    return sum(each.nbytes for each in memory.counted if each.place is Place.OUTPUT and each.producer in late)


def _batch_bytes(graph: TrainGraph, memory: MemoryModel) -> Bytes:
    """The bytes of batch tensors that BACKWARD or UPDATE uses."""
    behind = {index for index, operator in enumerate(memory.operators) if operator.phase is not Phase.FORWARD}
    fed = zip(placeholders(graph.graph), graph.inputs, strict=True)
    held = {
        port.memory or storage
        for node, port in fed
        if port.role is Role.INPUT
        for storage in (memory.storage_of(node, place) for place, _ in tensors_of(node))
        if not behind.isdisjoint(memory.uses[storage.index])
    }
    return sum(each.nbytes for each in held)

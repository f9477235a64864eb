"""Which storages another run of an operator would make again, and until which step it may run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import fx

from roamc.graph import Phase, Port, Role, TrainGraph, input_gradients, output_values, placeholders, tensors_of
from roamc.graph.memory import MemoryModel, Operator, Place, Storage, build_memory
from roamc.rewriting.rerun_variants import makes_again, may_run_again, must_stay, reads_again

Able = Callable[[fx.Node], bool]
"""From the node of an operator to whether it may run again."""


def droppable(memory: MemoryModel, storages: Sequence[Storage], able: Able = may_run_again) -> list[bool]:
    """Return for each of ``storages`` whether the storage can be freed early and recomputed.

    A storage can be recomputed if it is a temporary of more than 0 bytes, no other operator writes it, and its operator
    may run again by ``able``, makes it in that run too, and was not traced in forward inside :func:`roamc.keep`.

    Args:
        memory: the memory model that ``storages`` come from.
        storages: storages of ``memory``, in any sequence.
        able: takes the node of an operator, returns whether the operator may run again.

    Returns:
        One bool for each of ``storages``.
    """
    written = {storage for op in memory.operators for storage in op.writes}
    makes = {storage for op in memory.operators for storage in _made_again(memory, op, able)}
    again = makes - written
    return [s.place is Place.TEMPORARY and s.nbytes > 0 and s.index in again for s in storages]


def _made_again(memory: MemoryModel, operator: Operator, able: Able) -> set[int]:
    """The storages that another run of ``operator`` would make; none if it must not run again."""
    may = operator.births and not must_stay(operator) and able(operator.node)
    return makes_again(memory, operator) if may else set()


def guarded(graph: TrainGraph, *, inputs: bool) -> TrainGraph:
    """Return ``graph`` with what eager's autograd lets the caller write after forward marked as overwritten.

    That is what backward neither reads nor gives back as a gradient, of results of forward, such as one that the caller
    halves in place, and of inputs, such as a queue of keys of which forward took a copy. Trained parameters of one
    dimension are left out: rows are normed again with their bias, which hardly anybody writes between forward and
    backward. A graph without a boundary stays as it is: nothing of the caller's runs within it.

    Args:
        graph: the graph before a pass that lets operators of forward run in backward; stays as it is.
        inputs: whether inputs are guarded as well as results.
    """
    if not graph.boundary:
        return graph
    memory, trained = build_memory(graph), {node for node, _ in input_gradients(graph)}
    late = (operator for operator in memory.operators if operator.phase is not Phase.FORWARD)
    read = {storage for operator in late for storage in operator.reads}
    returned = list(zip(output_values(graph.graph), graph.outputs, strict=True))
    back = (node for node, port in returned if node is not None and port.role is Role.GRADIENT)
    read |= {memory.owner[node.name, position] for node in back for position, _ in tensors_of(node)}
    # An input that the graph itself writes is out of reach already, see :func:`expiries`.
    read |= {at for each in memory.operators for at in each.writes if memory.storages[at].place is Place.INPUT}

    def marked(node: fx.Node | None, port: Port) -> Port:
        if node is None or port.role in (Role.TANGENT, Role.GRADIENT):
            return port
        flat = port.role is Role.PARAMETER and node in trained and node.meta["val"].dim() <= 1
        unread = read.isdisjoint(memory.owner[node.name, position] for position, _ in tensors_of(node))
        return dataclasses.replace(port, overwritten=port.overwritten or (unread and not flat))

    arguments = tuple(map(marked, placeholders(graph.graph), graph.inputs)) if inputs else graph.inputs
    results = tuple(marked(node, port) for node, port in returned)
    same = (arguments, results) == (graph.inputs, graph.outputs)
    return graph if same else graph.replace(inputs=arguments, outputs=results)


def expiries(
    memory: MemoryModel, nodes: dict[str, fx.Node], names: Sequence[str], sequence: Sequence[int], *, boundary: bool
) -> list[int]:
    """Return for each operator the first step in front of which it must not run again: what it reads is overwritten.

    Args:
        memory: memory model of the graph.
        nodes: name of each operator to its node.
        names: names of all operators of ``memory``; "" stands for a step that is no operator of the graph.
        sequence: a permutation of the indices of ``names``: the order in which they run.
        boundary: whether forward and backward run apart. If so, an operator of forward that reads an input which the
            graph writes, or what the caller may write when forward has run, must not run again in backward: after the
            boundary, the caller or another forward has written it.

    Returns:
        One step for each of ``names``, in steps of ``sequence``: a rerun is allowed in front of any earlier step.
        ``len(names)`` if the operator may run again in front of every step.
    """
    steps = {names[index]: step for step, index in enumerate(sequence)}
    writes: dict[int, list[int]] = {}
    for op in memory.operators:
        for storage in op.writes:
            writes.setdefault(storage, []).append(steps[op.node.name])
    of_caller = memory.storages if boundary else ()
    handed = {s.index for s in of_caller if s.overwritten or (s.place is Place.INPUT and s.index in writes)}
    limits = []
    for name in names:
        read = reads_again(memory, nodes[name]) if name and (writes or handed) else ()
        later = [step for storage in read for step in writes.get(storage, ()) if step > steps[name]]
        last = min(later, default=len(names) - 1) + 1
        forward = bool(handed.intersection(read)) and steps[name] < memory.boundary
        limits.append(min(last, memory.boundary) if forward else last)
    return limits

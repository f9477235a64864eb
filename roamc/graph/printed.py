"""A graph in words: every input, operator, output and storage on one line. ``roamc explain --graph`` prints it.

    Model: 3 operators, 2 storages of the step, at most 64 B live (at 1)
    inputs
      x: input float32[2, 4]
    operators
      forward   0  mm float32[2, 4] = aten.mm(x, t)
      forward   .  view float32[8] = aten.view(mm, [8])  view of mm
      backward  1  relu float32[8] = aten.relu(view)  over mm
    outputs
      relu: output
    storages
      mm: 32 B, made at 0, lives [0, 2), arena at 0

Operators have the number of their step; views do no work and have none. Lives are half-open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from roamc import files
from roamc.graph import TrainGraph, maker_of, operators, output_values, placeholders, source_line, tensors_of
from roamc.graph.lifetimes import lifetimes, sizes, timeline
from roamc.graph.memory import Int64s, MemoryModel, Place, Storage, build_memory
from roamc.operators import ops
from roamc.operators.schemas import name_of

if TYPE_CHECKING:
    import networkx as nx


def printed(graph: TrainGraph) -> str:
    """Return ``graph`` as text: a heading, then one line for each input, operator, output and storage of the step.

    Operators come in graph order. The heading has the live bytes at their peak, a storage its bytes and its life.
    """
    return "\n".join(_lines(graph)) + "\n"


def operator_graph(graph: TrainGraph) -> nx.MultiDiGraph:
    """Return a networkx graph: operators and inputs are nodes, storages that one makes and another uses are edges.

    The key of a node is its name in ``graph``. Every node has the attribute ``kind``, "input" or "operator". Operators
    have ``step`` (position in graph order, from 0), ``phase`` ("forward", "backward" or "update"), ``operator`` (the
    operator's name) and ``source`` (file and line of the user's model, "" where unknown) as well. Edges have
    ``storage`` (its name), ``bytes`` and ``use`` ("read" or "write"). Every attribute is a string or a number, so that
    networkx can write all of its formats.
    """
    import networkx as nx  # here, as no other command needs it

    memory = build_memory(graph)
    result = nx.MultiDiGraph(name=graph.name)
    for node in placeholders(graph.graph):
        result.add_node(node.name, kind="input")
    for step, operator in enumerate(memory.operators):
        node = operator.node
        about = {"operator": name_of(node.target), "source": source_line(node)}
        result.add_node(node.name, kind="operator", step=step, phase=operator.phase.name.lower(), **about)
    makers = _makers(graph, memory)
    for operator in memory.operators:
        for use, storages in (("read", operator.reads), ("write", operator.writes)):
            for storage in (memory.storages[index] for index in storages if index in makers):
                edge = {"storage": storage.name, "bytes": storage.nbytes, "use": use}
                result.add_edge(makers[storage.index], operator.node.name, **edge)
    return result


def write_graphml(graph: TrainGraph, path: Path) -> None:
    """Write the graph that :func:`operator_graph` returns to the file ``path``, as GraphML for Gephi, yEd or networkx.

    Raises:
        OSError: the file cannot be written.
    """
    import networkx as nx

    files.write_text(path, "\n".join(nx.generate_graphml(operator_graph(graph))) + "\n")


def _makers(graph: TrainGraph, memory: MemoryModel) -> dict[int, str]:
    """Storage to the name of the operator or input that it comes from; constants of the graph have none."""
    makers = {s.index: memory.operators[s.producer].node.name for s in memory.storages if s.producer >= 0}
    for node in placeholders(graph.graph):
        for position, _ in tensors_of(node):
            makers.setdefault(memory.owner[node.name, position], node.name)
    return makers


def _lines(graph: TrainGraph) -> Iterator[str]:
    memory = build_memory(graph)
    born, dead = lifetimes(memory)
    yield _heading(graph, memory, timeline(sizes(memory.counted), born, dead, len(memory.operators)))
    yield "inputs"
    for node, port in zip(placeholders(graph.graph), graph.inputs, strict=True):
        name = f" {port.name}" if port.name != node.name else ""
        yield f"  {node.name}: {port.role.value}{name}{_tensors(node)}"
    yield "operators"
    steps = {operator.node: step for step, operator in enumerate(memory.operators)}
    width = len(str(len(steps)))
    for node in operators(graph.graph):
        phase = graph.phase[node.name].name.lower()
        yield f"  {phase:<8}  {steps.get(node, '.'):>{width}}  {_operator(graph, memory, node, node in steps)}"
    yield "outputs"
    for value, port in zip(output_values(graph.graph), graph.outputs, strict=True):
        name = f" {port.name}" if value is None or port.name != value.name else ""
        yield f"  {value}: {port.role.value}{name}"
    yield "storages"
    for storage, first, end in zip(memory.counted, born, dead, strict=True):
        yield f"  {_storage(graph, storage, int(first), int(end))}"


def _heading(graph: TrainGraph, memory: MemoryModel, live: Int64s) -> str:
    highest = int(live.argmax()) if len(live) else 0
    peak = f"at most {int(live[highest]):,} B live (at {highest})" if len(live) else "nothing lives"
    boundary = ", backward starts at the boundary" if graph.boundary else ""
    counts = f"{len(memory.operators)} operators, {len(memory.counted)} storages of the step"
    return f"{graph.name}: {counts}, {peak}{boundary}"


def _operator(graph: TrainGraph, memory: MemoryModel, node: fx.Node, works: bool) -> str:
    remarks = []
    if not works:
        names = {memory.storage_of(node, position).name: None for position, _ in tensors_of(node)}
        remarks = [f"view of {', '.join(names)}"] if names else []
    remarks += [f"writes {argument.name}" for argument in ops.mutated_arguments(node)]
    if node.name in graph.reuse:
        remarks.append(f"over {node.args[graph.reuse[node.name]]}")
    remarks += _codecs(graph, node)
    line = source_line(node)
    remarks += [f"# {line}"] if line else []
    arguments = [*map(_argument, node.args), *(f"{key}={_argument(value)}" for key, value in node.kwargs.items())]
    call = f"{name_of(node.target).removesuffix('.default')}({', '.join(arguments)})"
    return "  ".join([f"{node.name}{_tensors(node)} = {call}", *remarks])


def _codecs(graph: TrainGraph, node: fx.Node) -> list[str]:
    """A remark for every storage that ``node`` makes and of which some readers read an encoding."""
    encodings = [encoding for encoding in graph.encodings if maker_of(encoding.storage) == node.name]
    return [f"{encoding.storage} encoded by {encoding.codec}" for encoding in encodings]


def _storage(graph: TrainGraph, storage: Storage, first: int, end: int) -> str:
    birth = f"made at {storage.producer}" if storage.producer >= 0 else "handed in"
    life = f"lives [{first}, {end})" if end > first else "never used"
    parts = [f"{storage.name}: {storage.nbytes:,} B", birth, life]
    if storage.gradient:
        parts.append("gradient")
    if storage.place is not Place.TEMPORARY:
        parts.append("the caller's")
    elif graph.layout is not None and storage.name in graph.layout.offset:
        parts.append(f"arena at {graph.layout.offset[storage.name]:,}")
    elif graph.layout is not None and storage.name in graph.layout.with_allocator:
        parts.append("with the allocator")
    return ", ".join(parts)


def _tensors(node: fx.Node) -> str:
    """The dtype and shape of every result, with a space in front; nothing for what is no tensor."""
    shown = [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for _, tensor in tensors_of(node)]
    single = isinstance(node.meta.get("val"), torch.Tensor)
    return f" {shown[0]}" if single else f" ({', '.join(shown)})" if shown else ""


def _argument(value: Any) -> str:
    """An argument as it is written in a call."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{_joined(value)}]"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value).removeprefix("torch.")
    if callable(value):
        return name_of(value)
    return str(value)


def _joined(values: Iterable[Any]) -> str:
    return ", ".join(map(_argument, values))

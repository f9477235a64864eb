"""Which operators of a plan run as one, and the bytes that no longer exist because of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roamc.graph import TrainGraph, operators, tensors_of
from roamc.operators.fused import REBUILDS, Fused
from roamc.operators.gpu.results import made_by
from roamc.report.origin import Origins
from roamc.units import Bytes


@dataclass(frozen=True)
class Grouped:
    """The groups that end at one line and module of the model and are made of the same operators, as one per layer.

    Attributes:
        source: line of the model, as :class:`roamc.report.origin.Origin` has it.
        module: the module, with its numbers of layers as ``*``: likewise.
        operators: names of the operators, such as ``fused(mul.Tensor, silu_backward)``.
        count: number of groups.
        nbytes: bytes of the values inside, which have no storage.
        rebuilt: those of them that an operator of forward has made before, and that are made once more: forward need
            not store them for these groups.
    """

    source: str
    module: str
    operators: str
    count: int
    nbytes: Bytes
    rebuilt: Bytes = 0


def grouped(graph: TrainGraph) -> tuple[Grouped, ...]:
    """Return the groups of a planned graph by line, module and operators, those with most bytes inside first."""
    origins = Origins(graph)
    totals: dict[tuple[str, str, str], Grouped] = {}
    for node in operators(graph.graph):
        if not isinstance(node.target, Fused):
            continue
        origin = origins.of(node, graph.phase[node.name])
        key = origin.source, origin.layers, node.target.title
        read = set(map(made_by, node.target.results))
        results = [(member, position, t) for member in node.target.nodes for position, t in tensors_of(member)]
        inside = [(member, t.numel() * t.itemsize) for member, position, t in results if (member, position) not in read]
        before = totals.get(key, Grouped(*key, 0, 0))
        totals[key] = replace(
            before,
            count=before.count + 1,
            nbytes=before.nbytes + sum(nbytes for _, nbytes in inside),
            rebuilt=before.rebuilt + sum(nbytes for member, nbytes in inside if REBUILDS in member.meta),
        )
    return tuple(sorted(totals.values(), key=lambda item: (-item.nbytes, item.source, item.module, item.operators)))

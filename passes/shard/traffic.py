"""What ranks send: collectives of a graph, and their bytes by the algorithm of a ring.

An all-gather or a reduce-scatter of S bytes among n ranks sends S (n - 1) / n from each, an all-reduce twice that
(Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roamc.graph import TrainGraph, operators, tensors_of
from roamc.operators.schemas import group_of
from roamc.units import Bytes, format_bytes

WORDS = {
    "all_reduce": ("all-reduce", 2),
    "all_reduce_coalesced": ("all-reduce", 2),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
    "all_gather_into_tensor": ("all-gather", 1),
}
"""Name of a collective to its word in reports, and how often a ring sends its bytes."""


@dataclass(frozen=True)
class Traffic:
    """Collectives of one group.

    Attributes:
        counts: word for a collective to how many there are.
        sent: bytes that each rank sends in a step.
    """

    counts: Mapping[str, int]
    sent: Bytes

    def __str__(self) -> str:
        parts = [f"{count} {word}{'s' if count > 1 else ''}" for word, count in self.counts.items()]
        return f"{', '.join(parts) or 'no collectives'}, {format_bytes(self.sent)} sent by each rank"


def traffic(graph: TrainGraph, group: object, ranks: int) -> Traffic:
    """Count the collectives of ``graph`` in one group of ``ranks`` ranks, and the bytes that they send.

    Args:
        graph: the graph.
        group: the group's name, as operators are called with it.
        ranks: how many ranks the group has.
    """
    counts: dict[str, int] = {}
    sent = 0
    for node in operators(graph.graph):
        word, times = WORDS.get(getattr(node.target, "_schema", node).name.rpartition("::")[2], ("", 0))
        if not times or group_of(node) != group:
            continue
        counts[word] = counts.get(word, 0) + 1
        made = sum(tensor.numel() * tensor.itemsize for _, tensor in tensors_of(node))
        whole = made * ranks if word == "reduce-scatter" else made
        sent += times * whole * (ranks - 1) // ranks
    return Traffic(counts, sent)

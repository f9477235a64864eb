"""What ranks send: collectives of a graph, their bytes and their seconds by the algorithm of a ring.

An all-gather or a reduce-scatter of S bytes among n ranks sends S (n - 1) / n from each in n - 1 turns, an all-reduce
twice that (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009):

    seconds = (n - 1) latency + S (n - 1) / (n bandwidth)                             collective_seconds()

Latency and bandwidth are those of the slowest link in the ring: inside a node, or between nodes. The collectives of a
group run one after the other, beside what stands between their start and their wait; what that does not hide of their
seconds is exposed, see :func:`exposed_seconds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from roamc.compat_groups import numbers_in, ranks_in
from roamc.compat_operators import tensors_in
from roamc.cost.profile import NETWORK, NODE, DeviceProfile, load_profile
from roamc.graph import TrainGraph, main_device, operators
from roamc.graph.memory import started_by
from roamc.operators import ops
from roamc.operators.call import fakes
from roamc.operators.costs.kinds import COLLECTIVE
from roamc.operators.products_sent import PRODUCTS_SENT
from roamc.operators.schemas import group_of
from roamc.units import Bytes, Seconds, format_bytes

WORDS = {
    "all_reduce": ("all-reduce", 2),
    "all_reduce_coalesced": ("all-reduce", 2),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", 1),
    "all_gather_into_tensor": ("all-gather", 1),
    "all_gather_into_tensor_coalesced": ("all-gather", 1),
    "broadcast": ("broadcast", 1),
    "all_to_all_single": ("all-to-all", 1),
    "all_gather_mm": ("all-gather", 1),
    "mm_reduce_scatter": ("reduce-scatter", 1),
}
"""Name of an operator of :func:`sending` to the word of its collective in reports, and how often a ring sends its
bytes."""


@dataclass(frozen=True)
class Traffic:
    """Collectives of one group.

    Attributes:
        counts: word for a collective, such as "all-reduce", to how many of them a step has.
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
    for node in sending(graph):
        if group_of(node) == group:
            word, _ = _word(node)
            counts[word] = counts.get(word, 0) + 1
            sent += sent_bytes(node, ranks)
    return Traffic(counts, sent)


def collectives(graph: TrainGraph) -> Iterator[fx.Node]:
    """Yield the operators of ``graph`` of kind COLLECTIVE, such as an all-reduce of a tensor, in graph order."""
    return (node for node in operators(graph.graph) if ops.rule(node.target).cost.kind == COLLECTIVE)


def sending(graph: TrainGraph) -> Iterator[fx.Node]:
    """Yield :func:`collectives`, and the operators that run a collective together with matrix products."""
    return (
        node
        for node in operators(graph.graph)
        if node.target in PRODUCTS_SENT or ops.rule(node.target).cost.kind == COLLECTIVE
    )


def sent_bytes(node: fx.Node, ranks: int) -> Bytes:
    """Return the bytes that each of ``ranks`` ranks sends for ``node``, one of :func:`sending`."""
    return _turns_and_bytes(node, ranks)[1]


def ring(times: int, whole: Bytes, ranks: int) -> tuple[int, Bytes]:
    """Return the turns of a ring of ``ranks`` ranks, and the bytes that each of them sends in these turns together.

    Args:
        times: how often the ring sends its bytes, see :data:`WORDS`.
        whole: bytes of the tensor that all ranks have parts of; of an all-reduce, of the tensor that is reduced.
        ranks: how many ranks the ring has.
    """
    return times * (ranks - 1), times * whole * (ranks - 1) // ranks


def collective_seconds(node: fx.Node, profile: DeviceProfile) -> Seconds | None:
    """Predict the seconds of the collective in ``node``, one of :func:`sending`, while no other operator runs.

    Returns:
        The seconds; None if this process does not know the group, or ``profile`` has no links.
    """
    group = group_of(node)
    ranks, link = ranks_in(group), _link(group, profile)
    if ranks is None or link is None:
        return None
    turns, sent = _turns_and_bytes(node, ranks)
    return profile.overhead + turns * link["latency"] + sent / link["bandwidth"]


def exposed_seconds(graph: TrainGraph, prices: Mapping[str, Seconds]) -> Seconds:
    """Return the predicted seconds of collectives in which a step does nothing else.

    Args:
        graph: its operators run in graph order.
        prices: name of each operator to its seconds; of a collective, to those while no other operator runs.
    """
    clock = exposed = 0.0
    free: dict[str, Seconds] = {}
    ends: dict[fx.Node, Seconds] = {}
    for node in operators(graph.graph):
        start = started_by(node)
        if start is None and ops.rule(node.target).cost.kind != COLLECTIVE:
            clock += prices[node.name]
            continue
        if start is None:
            group = str(group_of(node))
            ends[node] = free[group] = max(clock, free.get(group, 0.0)) + prices[node.name]
        if start is not None or not ops.rule(node.target).asynchronous:
            waited = max(0.0, ends.pop(start or node) - clock)
            exposed, clock = exposed + waited, clock + waited
    return exposed


def note(
    graph: TrainGraph, prices: Callable[[DeviceProfile], Mapping[str, Seconds]], profile: str | None
) -> tuple[str, ...]:
    """Say what the collectives of a step send and how long they take, in at most one sentence, for its plan.

    Args:
        graph: the planned graph.
        prices: gives the seconds of each operator on a profile, as for :func:`exposed_seconds`.
        profile: as for :func:`roamc.cost.load_profile`; read only where there are collectives.
    """
    nodes = list(sending(graph))
    sends = [(sent_bytes(node, ranks), node) for node in nodes if (ranks := ranks_in(group_of(node))) is not None]
    if not sends:
        return ()
    sent = f"collectives: each rank sends {format_bytes(sum(count for count, _ in sends))} in a step"
    links = load_profile(main_device(graph), profile)
    seconds = [duration for _, node in sends if (duration := collective_seconds(node, links)) is not None]
    if len(seconds) < len(nodes):
        return (sent,)
    exposed = exposed_seconds(graph, prices(links))
    return (
        f"{sent}: {sum(seconds) * 1e3:.3g} ms on the links of profile {links.name}, {exposed * 1e3:.3g} ms exposed",
    )


def _turns_and_bytes(node: fx.Node, ranks: int) -> tuple[int, Bytes]:
    """What :func:`ring` returns, for ``node``."""
    word, times = _word(node)
    part = fakes(node.args[0]) if word == "all-gather" else node.meta["val"]
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors_in(part))
    return ring(times, nbytes * ranks if word in ("all-gather", "reduce-scatter") else nbytes, ranks)


def _word(node: fx.Node) -> tuple[str, int]:
    name: str = node.target._schema.name.rpartition("::")[2]  # type: ignore[union-attr]
    return WORDS[name.removeprefix("start_")]


def _link(group: object, profile: DeviceProfile) -> Mapping[str, float] | None:
    """The slowest link between neighbours in a ring over the ranks of ``group``; None where it is not known."""
    if not profile.links or ranks_in(group) is None:
        return None
    each = int(profile.links[NODE]["ranks"]) if NODE in profile.links else 1
    nodes = {number // each for number in numbers_in(group)}
    return profile.links.get(NODE if len(nodes) == 1 else NETWORK)

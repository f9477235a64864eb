"""Operators that repeat another one: the same call on the same values, whose result is still there.

    mask   = where(causal, 0, -inf)            mask = where(causal, 0, -inf)
    a      = attention(q1, k1, v1, mask)  -->  a    = attention(q1, k1, v1, mask)
    mask_1 = where(causal, 0, -inf)
    b      = attention(q2, k2, v2, mask_1)     b    = attention(q2, k2, v2, mask)

The first result has to live until the second is made: then no step holds more bytes without the second.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import fx

from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph, operators, output_node
from roamc.graph.keep import is_kept
from roamc.graph.rewrite import derived, mode_of
from roamc.graph.storage_ids import STORAGES, StorageId, all_ids, id_of, ids_of
from roamc.operators import ops
from roamc.operators.alike import Alike

LiveNodes = Callable[[Mapping[fx.Node, fx.Node]], Collection[fx.Node]]
"""Returns the nodes that something reads, or that have another effect, if readers of some nodes read others instead."""


def repeats(graph: TrainGraph, live: LiveNodes) -> dict[fx.Node, fx.Node]:
    """Return each operator that repeats an earlier one of its phase, whose result still lives, to that earlier one.

    An operator repeats another if both are the same call on the same values, see :func:`may_repeat`. Neither its result
    nor its arguments may be written over or handed to the caller. Operators of the update are left out.

    Args:
        graph: stays as it is.
        live: says which nodes are still needed when repeats are left out; a result lives until the last of them reads
            it.
    """
    position = {node: at for at, node in enumerate(graph.graph.nodes)}
    used = live({})
    equal = [[node for node in nodes if node in used] for nodes in _equal(graph)]
    pairs = _while_they_live(equal, position, _last_reads(used, position))
    while True:  # without the second of a pair, what it read may die earlier
        again = _while_they_live(equal, position, _last_reads(live(pairs), position), pairs)
        if again == pairs:
            return pairs
        pairs = again


def _equal(graph: TrainGraph) -> list[list[fx.Node]]:
    """Operators that have equal results, in graph order."""
    fixed, alike = fixed_storages(graph), Alike()
    numbers: dict[fx.Node, int] = {}
    number_of: dict[tuple[int, ...], int] = {}
    equal: dict[tuple[int, Phase], list[fx.Node]] = {}
    free = {node: fixed.isdisjoint(all_ids([node])) for node in graph.graph.nodes}
    for node in graph.graph.nodes:
        numbers[node] = len(numbers)
        if node.op != "call_function" or not all(free[value] for value in (node, *node.all_input_nodes)):
            continue
        if ops.rule(node.target).renames:
            numbers[node] = numbers[node.all_input_nodes[0]]
        elif ops.is_view(node.target) or may_repeat(node):
            key = alike.call(node), *(numbers[argument] for argument in node.all_input_nodes)
            numbers[node] = number_of.setdefault(key, numbers[node])
            # What backward makes again of what forward has made, a user may have asked for.
            if not ops.is_view(node.target) and graph.phase[node.name] is not Phase.UPDATE:
                equal.setdefault((numbers[node], graph.phase[node.name]), []).append(node)
    return [nodes for nodes in equal.values() if len(nodes) > 1]


def fixed_storages(graph: TrainGraph) -> set[StorageId]:
    """Return the storages that some operator writes over, or that the caller gets."""
    written = (argument for node in operators(graph.graph) for argument in ops.mutated_arguments(node))
    return all_ids([*output_node(graph.graph).all_input_nodes, *written])


def may_repeat(node: fx.Node) -> bool:
    """Whether an equal call would make an equal tensor, so that the result of one may stand for that of the other.

    False for views, collectives, and operators that draw random numbers, write to an argument or make several tensors.
    False also if the user decided about ``node``: by a policy of selective checkpointing, or by ``roamc.keep``.
    """
    rule = ops.rule(node.target)
    if not rule.recomputable or rule.mutates or rule.may_draw or rule.collective or rule.view_of:
        return False
    alone = isinstance(node.meta.get("val"), torch.Tensor) and len(ids_of(node)) == 1
    return alone and "recompute" not in node.meta and not is_kept(node)


def _last_reads(live: Iterable[fx.Node], position: Mapping[fx.Node, int]) -> dict[StorageId, int]:
    """Return storage to the position of the last node that reads or makes it; views read nothing."""
    last: dict[StorageId, int] = {}
    for node in live:
        if node.op != "call_function" or not ops.is_view(node.target):
            for own in all_ids([node, *node.all_input_nodes]):
                last[own] = max(last.get(own, 0), position[node])
    return last


def _while_they_live(
    equal: Sequence[Sequence[fx.Node]],
    position: Mapping[fx.Node, int],
    last: Mapping[StorageId, int],
    among: Mapping[fx.Node, fx.Node] | None = None,
) -> dict[fx.Node, fx.Node]:
    """Return each node to an earlier one with an equal result, which lives until the node runs.

    Args:
        equal: nodes with equal results.
        position: of all nodes.
        last: storage to the position of its last reader.
        among: the nodes that may be replaced; None for all.
    """
    pairs: dict[fx.Node, fx.Node] = {}
    for nodes in equal:
        first, end = None, -1
        for node in nodes:
            own = last.get(id_of(node), position[node])
            if first is None or end < position[node] or (among is not None and node not in among):
                first, end = node, own
            else:
                pairs[node], end = first, max(end, own)
    return pairs


def read_first(graph: TrainGraph, pairs: Iterable[tuple[str, str]]) -> None:
    """Let readers of each second node read the first one, in place; the second is left without readers.

    Names of second nodes in the graph's ``saved``, ``gradients`` and ``waits`` are for the caller to replace.

    Args:
        graph: the graph; its FX graph is changed in place.
        pairs: names of the second and the first.

    Raises:
        PlanError: there are no such nodes, or the first cannot stand for the second.
    """
    nodes = {node.name: node for node in operators(graph.graph)}
    places: dict[StorageId, StorageId] = {}
    fixed = fixed_storages(graph)
    for name, earlier in pairs:
        second, first = nodes.get(name), nodes.get(earlier)
        if second is None or first is None or not _stands_for(graph, first, second, fixed):
            raise PlanError(f"{name!r} does not repeat {earlier!r} in this graph")
        second.replace_all_uses_with(first)
        places[id_of(second)] = id_of(first)
    move_views(graph, places)


def move_views(graph: TrainGraph, places: Mapping[StorageId, StorageId]) -> None:
    """Note of views, in place, that they lie in other storages now, as their arguments do.

    Args:
        graph: its views have these arguments already.
        places: id of a storage that has readers no longer to that of the one that they read.
    """
    mode = mode_of(graph.graph)
    if not places or mode is None:
        return
    for node in operators(graph.graph):
        if ops.is_view(node.target) and not places.keys().isdisjoint(ids_of(node)):
            node.meta["val"] = derived(node, mode)  # a view of the first one's fake tensor
            node.meta[STORAGES] = tuple(places.get(own, own) for own in ids_of(node))


def _stands_for(graph: TrainGraph, first: fx.Node, second: fx.Node, fixed: Collection[StorageId]) -> bool:
    """Whether readers of ``second`` may read ``first``; that both have equal values is for the judge to see.

    Neither may be in ``fixed``, see :func:`fixed_storages`.
    """
    if not first < second or graph.phase[first.name] is not graph.phase[second.name]:
        return False
    if any(own in fixed for own in all_ids([first, second])) or not (may_repeat(first) and may_repeat(second)):
        return False
    one, other = first.meta["val"], second.meta["val"]
    return (one.shape, one.stride(), one.dtype, one.device) == (other.shape, other.stride(), other.dtype, other.device)

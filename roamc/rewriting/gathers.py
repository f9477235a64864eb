"""One gather in the place of two: the whole value stays until backward has read it.

    w  = all_gather(x)                 w = all_gather(x)
    y  = mm(w, a)                      y = mm(w, a)
    ...                          -->   ...                    w lives on
    w1 = all_gather(x)
    da = mm(t(w1), g)                  da = mm(t(w), g)

Pass ``shard`` writes a gather for each phase. What it gathers in backward is another run of the gather of forward, so
that under a budget pass ``retain`` chooses for each value: to keep it whole, or to keep its rows and gather again.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph, operators
from roamc.graph.ranks import runs_together
from roamc.graph.storage_ids import StorageId, all_ids, id_of, ids_of
from roamc.operators import ops
from roamc.operators.table import Together
from roamc.rewriting.repeats import fixed_storages, move_views
from roamc.rewriting.versions import up_to_date

Pair = tuple[str, str]
"""Name of a gather behind forward, and of the gather of forward that gives the same."""


def gathered_twice(graph: TrainGraph) -> tuple[Pair, ...]:
    """Return the gathers behind forward that repeat one of forward, each with that one, in graph order.

    Both read the same value, which nothing writes, on all ranks of a group that runs one plan; see
    :attr:`roamc.graph.TrainGraph.same_plan`. ``graph`` stays as it is.
    """
    if not graph.same_plan:
        return ()
    fixed = fixed_storages(graph)
    first: dict[object, str] = {}
    pairs: list[Pair] = []
    for node in operators(graph.graph):
        if not _may_stand_for(graph, node, fixed):
            continue
        key = node.target, node.args
        if graph.phase[node.name] is Phase.FORWARD:
            first.setdefault(key, node.name)
        elif key in first:
            pairs.append((node.name, first[key]))
    return tuple(pairs)


def gathered_once(graph: TrainGraph, pairs: Iterable[Pair]) -> TrainGraph:
    """Let readers of the second gather of each pair read the first one, and erase the second; in place.

    Args:
        graph: the graph; its FX graph is changed.
        pairs: as :func:`gathered_twice` returns them, all or some.

    Returns:
        The graph with the same FX graph, ``phase``, ``waits`` and ``saved`` brought up to date.

    Raises:
        PlanError: a pair is none in this graph.
    """
    firsts = dict(gathered_twice(graph))
    nodes = {node.name: node for node in operators(graph.graph)}
    places: dict[StorageId, StorageId] = {}
    for name, earlier in pairs:
        if firsts.pop(name, None) != earlier:
            raise PlanError(f"{name!r} does not gather what {earlier!r} has gathered in this graph: plan again")
        second, first = nodes[name], nodes[earlier]
        second.replace_all_uses_with(first)
        places[id_of(second)] = id_of(first)
        graph.graph.erase_node(second)
    move_views(graph, places)
    return up_to_date(graph, graph.phase)


def _may_stand_for(graph: TrainGraph, node: fx.Node, fixed: set[StorageId]) -> bool:
    """Whether ``node`` is a gather of one tensor that may run again, and nothing writes what it reads or makes."""
    gathers = ops.rule(node.target).together is Together.MOVED and runs_together(node, graph.same_plan)
    single = gathers and len(ids_of(node)) == 1 and not node.kwargs
    return single and fixed.isdisjoint(all_ids([node, *node.all_input_nodes]))

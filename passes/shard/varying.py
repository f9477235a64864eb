"""Which values of a tensor-parallel graph differ from rank to rank.

Nothing in a graph of local tensors says which parameters are parts of a larger one. What a rank adds up over the ranks
does: a product that an all-reduce sums has a factor that differs, so the parameter in it is this rank's part.

    y = all_reduce(mm(x, w))     w is a part: rows of the matrix in forward, its columns in backward

What is computed from a part differs as well, until a collective of the group makes it the same for all. A parameter
whose gradient differs is a part too. Everything else is the same on every rank: replicas of parameters, the batch, and
random numbers, for which all ranks of a tensor-parallel group must have the same seed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from roamc.graph import Role, TrainGraph, input_gradients, operators, placeholders
from roamc.operators import ops
from roamc.operators.collectives import FINISHED
from roamc.operators.schemas import group_of
from roamc.operators.shards import own_classes, own_indices, own_part

aten = torch.ops.aten

FACTORS: dict[object, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.embedding.default: (0,),
}
"""Product to the positions of its factors; a look-up is a product with rows of an identity matrix."""

SAME_AFTER = frozenset(
    FINISHED[start]
    for start in FINISHED
    if start._schema.name.rpartition("::")[2].removesuffix("_coalesced")
    in ("all_reduce", "all_gather_into_tensor", "broadcast")
)
"""Collectives whose result every rank of the group has."""


OWN = (own_part, own_classes, own_indices)


def varying(graph: TrainGraph, group: object) -> frozenset[fx.Node]:
    """Return the values that may differ between the ranks of ``group``.

    Args:
        graph: the captured graph, with collectives that are one operator each.
        group: the group's name, as operators are called with it.
    """
    parts = _summed_parameters(graph, group)
    pairs = input_gradients(graph)
    while True:
        differ = _spread(graph, group, parts)
        more = {parameter for parameter, gradient in pairs if gradient in differ} - parts
        if not more:
            return differ
        parts |= more


def _summed_parameters(graph: TrainGraph, group: object) -> set[fx.Node]:
    """Parameters in products that an all-reduce of the group sums."""
    roles = zip(placeholders(graph.graph), graph.inputs, strict=True)
    parameters = {node for node, port in roles if port.role is not Role.TANGENT}
    summed: set[fx.Node] = set()
    for node in operators(graph.graph):
        if node.target in SAME_AFTER and group_of(node) == group:
            summed |= {factor for factor in _factors(node.all_input_nodes) if factor in parameters}
    return summed


def is_of_products(value: object) -> bool:
    """Whether ``value`` is a product or a look-up, or made of one element by element."""
    return isinstance(value, fx.Node) and bool(_factors([value]))


def _factors(summed: Iterable[fx.Node]) -> set[fx.Node]:
    """What views and casts lead from to the factors of the products that ``summed`` is a sum or a view of."""
    factors: set[fx.Node] = set()
    waiting, seen = list(summed), set(summed)
    while waiting:
        node = waiting.pop()
        if node.op != "call_function":
            continue
        if node.target in FACTORS:
            factors |= {_source(factor) for at in FACTORS[node.target] if isinstance(factor := node.args[at], fx.Node)}
        elif ops.is_view(node.target) or ops.rule(node.target).overwrites or _copies(node):
            fresh = [argument for argument in node.all_input_nodes if argument not in seen]
            waiting += fresh
            seen.update(fresh)
    return factors


def _copies(node: fx.Node) -> bool:
    return node.target in (aten.clone.default, aten._to_copy.default)


def _source(node: fx.Node) -> fx.Node:
    """The value that ``node`` is a view or a cast of."""
    while node.op == "call_function" and (ops.is_view(node.target) or _copies(node)):
        node = node.all_input_nodes[0]
    return node


def _spread(graph: TrainGraph, group: object, parts: set[fx.Node]) -> frozenset[fx.Node]:
    """All values that are computed from ``parts``, or are a rank's own, with no collective of the group in between."""
    differ = set(parts)
    for node in operators(graph.graph):
        same = node.target in SAME_AFTER and group_of(node) == group
        if not same and (node.target in OWN or not differ.isdisjoint(read(node))):
            differ.add(node)
    return frozenset(differ)


def read(node: fx.Node) -> set[fx.Node]:
    """Return the arguments of which ``node`` reads more than the shape."""
    rule = ops.rule(node.target)
    shapes = (*rule.shape_of, *((0,) if rule.broadcasts else ()))
    arguments: set[fx.Node] = set()
    fx.map_arg(([value for at, value in enumerate(node.args) if at not in shapes], node.kwargs), arguments.add)
    return arguments

"""What becomes of an error in a value that an operator reads: the kinds of the readers of a graph.

A table says it of single operators (:attr:`roamc.operators.table.Facts.kinds`). That a product is a gradient of weights
is found by a walk from its result to updates:

    backward    dw = mm(dy.t(), x)        x is read by a product ...
                gw = dw.t()               ... whose result goes through views, casts, multiples and sums of such ...
    update      addcdiv_(w, gw, ...)      ... to operators of UPDATE on parameters and optimizer states alone

In a graph of ``torch.compile`` the walk ends at outputs that are the gradient of a parameter. Whatever is not known is
``Kind.ANY``. Passes and the judge of values ask for the kinds of readers in the graph that each of them has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from roamc.graph.storage_ids import ids_of
from roamc.graph.train_graph import Phase, Role, TrainGraph, operators, output_values, placeholders, tensors_of
from roamc.operators import ops
from roamc.operators.composite import Composite
from roamc.operators.table import Kind

aten = torch.ops.aten

TURNS: dict[Any, Callable[..., bool]] = {
    aten.t.default: lambda: True,
    aten.transpose.int: lambda first, second: (first - second) % 2 == 1,
    aten.permute.default: lambda dims: dims[0] % 2 == 1,
}
"""Views of matrices: whether a call with these arguments exchanges rows and columns."""

UPDATED = (Role.PARAMETER, Role.OPTIMIZER_STATE)
"""Roles of the inputs that an update writes."""


def position_in(reader: fx.Node, argument: fx.Node) -> int:
    """Return the index of ``argument`` in ``reader.args``; -1 if it is a keyword, in a list, or there several times."""
    everywhere: list[fx.Node] = []
    fx.map_arg((reader.args, reader.kwargs), everywhere.append)
    once = everywhere.count(argument) == 1 and argument in reader.args
    return reader.args.index(argument) if once else -1


class ReaderKinds:
    """The kinds of the readers of one graph, which must not be changed meanwhile."""

    def __init__(self, graph: TrainGraph) -> None:
        self.graph = graph

    def of(self, reader: fx.Node, position: int) -> Kind:
        """Return as what ``reader`` reads its argument at ``position``, see :func:`position_in`.

        A copy, a cast, a sum, also over ranks, or a multiple has the kind of all its readers, a group that of all its
        members that read the argument, if that is one kind. The output node of the graph reads as ``ANY``.
        """
        if reader.op != "call_function" or position < 0:
            return Kind.ANY
        target: Any = reader.target
        is_group = isinstance(target, Composite)
        if is_group:
            return self._common(placeholders(target.body)[position])
        if position in _carried(reader):
            return self._common(reader)
        rule = ops.rule(target)
        if position in rule.multiplies and self._updates_weights(reader, rule.multiplies[position]):
            return Kind.WEIGHT
        return rule.kinds.get(position, Kind.ANY)

    def _common(self, value: fx.Node) -> Kind:
        """The kind of all readers of ``value`` and of its views, in the graph or in a group; ANY if they differ."""
        kinds = {self.of(reader, position_in(reader, argument)) for reader, argument in readers_of(value)}
        return kinds.pop() if len(kinds) == 1 else Kind.ANY

    def _updates_weights(self, product: fx.Node, results: Sequence[int]) -> bool:
        """Whether those of the results of ``product`` that an argument is multiplied into reach updates alone."""
        if isinstance(product.meta.get("val"), torch.Tensor):
            return product in self.updating
        picks = [user for user in product.users if user.args[1] in results]
        return all(pick in self.updating for pick in picks)

    @functools.cached_property
    def updating(self) -> frozenset[fx.Node]:
        """The nodes whose values reach updates of parameters, or outputs that are a parameter's gradient, alone."""
        updating: set[fx.Node] = set()
        returned = self._returned()
        roles = self._roles()
        for node in reversed(operators(self.graph.graph)):
            written = {storage for argument in ops.mutated_arguments(node) for storage in ids_of(argument)}
            odd = any(roles.get(storage, UPDATED[0]) not in UPDATED for storage in written)
            if not odd and node not in returned and all(self._passes_on(node, user, updating) for user in node.users):
                updating.add(node)
        return frozenset(updating)

    def _passes_on(self, node: fx.Node, user: fx.Node, updating: set[fx.Node]) -> bool:
        """Whether ``user`` reads ``node`` for an update, or hands it on to operators that do, and to no others."""
        if user.op == "output":
            return True
        early = self.graph.phase[user.name] is not Phase.UPDATE
        if user not in updating or not early:
            return user in updating
        if ops.is_view(user.target):
            return True
        carried = [user.args[position] for position in _carried(user)]
        # In a sum, as of a parameter that is used twice, others are gradients of weights as well.
        return node in carried and all(set(other.users) == {user} for other in user.all_input_nodes)

    def _roles(self) -> dict[Any, Role]:
        """Storage of each input to the role of the input."""
        inputs = zip(placeholders(self.graph.graph), self.graph.inputs, strict=True)
        return {storage: port.role for node, port in inputs for storage in ids_of(node)}

    def _returned(self) -> set[fx.Node]:
        """The nodes that the graph returns as something else than the gradient of a parameter."""
        values = list(zip(output_values(self.graph.graph), self.graph.outputs, strict=True))
        gradients = [at for at, (_, port) in enumerate(values) if port.role is Role.GRADIENT]
        owners = [port for port in self.graph.inputs if port.phase is Phase.FORWARD]
        # torch.compile returns a gradient, or None, for each input of forward; a step only those of its batch.
        per_input = self.graph.boundary and len(gradients) == len(owners)
        pairs = zip(gradients, owners, strict=True) if per_input else ()
        of_parameters = {at for at, owner in pairs if owner.role is Role.PARAMETER}
        return {node for at, (node, _) in enumerate(values) if node is not None and at not in of_parameters}


def chain_to_product(value: fx.Node) -> list[fx.Node]:
    """Return ``value`` and what it is a view of, down to the product of two matrices that makes it; empty if none does.

    Each view keeps all elements, and ``value`` has the rows and columns of the product.
    """
    chain: list[fx.Node] = []
    turned = False
    while value.op == "call_function":
        chain.append(value)
        if value.target is aten.mm.default:
            return [] if turned else chain
        if value.target not in TURNS and not ops.rule(value.target).renames:
            return []
        turned ^= value.target in TURNS and TURNS[value.target](*value.args[1:])
        value = value.all_input_nodes[0]
    return []


def _carried(node: fx.Node) -> tuple[int, ...]:
    """The positions of the arguments whose errors the result of ``node`` has, as a copy, a cast or a sum."""
    result, carries = node.meta.get("val"), ops.rule(node.target).carries
    if not carries or not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return ()
    tensors = [argument for argument in node.all_input_nodes if any(tensors_of(argument))]
    return carries if all(position_in(node, argument) in carries for argument in tensors) else ()


def readers_of(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each reader of ``value`` or of a view of it, the output node included, with the node that it reads."""
    for user in value.users:
        if user.op == "call_function" and ops.is_view(user.target):
            yield from readers_of(user)
        else:
            yield user, value

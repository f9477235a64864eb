"""The operators that read a value, also inside groups: those that read it, and one that makes it.

    sum, y, mean, rstd = group(x, h, weight, bias)      # sum = x + h;  y, mean, rstd = layer_norm(sum, weight, bias)

Here ``sum`` has the layer norm as a reader, whose output is ``y`` in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import NamedTuple

from torch import fx

from roamc.graph import placeholders
from roamc.operators import ops
from roamc.operators.fused import Fused


class Reading(NamedTuple):
    """An operator that reads a value.

    Attributes:
        node: the node of the operator, or of the group that it is a member of.
        call: the node of the operator, in the body of the group if it is a member of one.
        argument: what it reads: the value or a view of it.
    """

    node: fx.Node
    call: fx.Node
    argument: fx.Node

    def outside(self, inner: fx.Node) -> fx.Node | None:
        """Return the node of the graph for what ``call`` reads or makes; None if the group keeps it to itself."""
        group = self.node.target
        if not isinstance(group, Fused):
            return inner
        read = dict(zip(placeholders(group.body), self.node.args, strict=True))
        if inner in read:
            return read[inner]  # type: ignore[return-value]
        if inner not in group.results:
            return None
        if not isinstance(self.node.meta["val"], list | tuple):
            return self.node
        at = group.results.index(inner)
        return next((user for user in self.node.users if user.target is getitem and user.args[1] == at), None)


def readings(node: fx.Node) -> Iterator[Reading]:
    """Yield the operators that read ``node`` or a view of it."""
    yield from _reads(node)
    maker, at = node.args if node.target is getitem else (node, 0)
    if isinstance(maker, fx.Node) and isinstance(maker.target, Fused):
        members = _reads(maker.target.results[at])  # type: ignore[index]
        yield from (read._replace(node=maker) for read in members)


def _reads(node: fx.Node) -> Iterator[Reading]:
    for user in node.users:
        if ops.is_view(user.target):
            yield from _reads(user)
        elif isinstance(user.target, Fused):
            inside = zip(placeholders(user.target.body), user.args, strict=True)
            members = [read for own, argument in inside if argument is node for read in _reads(own)]
            yield from (read._replace(node=user) for read in members)
        elif user.op == "call_function" and user.target is not getitem:
            yield Reading(user, user, node)

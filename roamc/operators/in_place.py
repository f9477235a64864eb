"""Operators in place inside a group: what they write is a value there, and the group writes the last one at its end.

    mul_(v, 0.9)                             v1 = mul(v, 0.9)
    addcmul_(v, g, g)                        v2 = addcmul(v1, g, g)
    d = sqrt(v)                              d1 = sqrt(v2)
    add_(d, 1e-8)                            d2 = add(d1, 1e-8)
    addcdiv_(p, m, d)                        p1 = addcdiv(p, m, d2)
                                             v <- v2,  p <- p1

So a member never reads an argument behind a write to it, whatever the order in which a kernel stores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from roamc.graph.memory import fills_storage
from roamc.graph.storage_ids import STORAGES, StorageId, new_id
from roamc.operators import ops
from roamc.operators.schemas import value_form


class Versions:
    """The values that operators of a group read and make, while the group's own graph, its body, is written.

    Args:
        body: the graph that gets the operators; :meth:`take` adds to it.
        operands: node of the outer graph that the group reads to its placeholder in ``body``.
    """

    def __init__(self, body: fx.Graph, operands: dict[fx.Node, fx.Node]) -> None:
        self.body = body
        self._copies = dict(operands)
        self._written: dict[StorageId, fx.Node] = {}

    def now(self, node: fx.Node) -> fx.Node:
        """Return the node of the body for what ``node``, of the outer graph, holds after all writes so far."""
        return self.written(node) or self._copies[node]

    def written(self, node: fx.Node) -> fx.Node | None:
        """Return the node of the body for the last value written to ``node``, of the outer graph; None without one."""
        return next((self._written[own] for own in _ids(node) if own in self._written), None)

    def take(self, node: fx.Node) -> None:
        """Add ``node``, a member or a view between members, to ``body``. Call it in graph order.

        The new node reads what :meth:`now` returns for the arguments of ``node``. For an operator in place ``body``
        gets the operator that makes the same as a new value, which :meth:`now` then returns for the argument that is
        written. ``copy_`` adds no node: :meth:`now` then returns its second argument's value.
        """
        value = value_form(node.target)
        if value is None:
            copy = self._copies[node] = self.body.node_copy(node, self.now)
            copy.name = node.name
            return
        (own,) = _ids(node.all_input_nodes[0])
        if copies(node):
            self._written[own] = self.now(node.args[1])  # type: ignore[arg-type]
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.now)
        version = self.body.create_node("call_function", value, args, kwargs, name=node.name)
        version.name = node.name
        version.meta = {**node.meta, STORAGES: (new_id(own.nbytes),)}
        self._written[own] = version


def copies(node: fx.Node) -> bool:
    """Whether a node writes over its first argument the elements of its second, and does nothing else."""
    return node.target is torch.ops.aten.copy_.default


def writers(members: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the members that write an argument, in order."""
    return [node for node in members if ops.rule(node.target).mutates]


def unfit(members: Sequence[fx.Node]) -> str:
    """Say why what the operators of a group write cannot be a value inside it; "" if it can.

    An operator in place must write a whole storage. All operators of the group must see that storage with one shape and
    strides, and through one node from outside of the group.

    Args:
        members: operators of a graph with storage ids, and the views between them.
    """
    inside = set(members)
    written: dict[StorageId, fx.Node] = {}
    sources: list[fx.Node] = []
    for node in writers(members):
        into = node.args[0] if node.args else None
        reason = _unfit_writer(node, into, inside)
        if reason or not isinstance(into, fx.Node):
            return reason or f"{node.name} writes no tensor"
        written.setdefault(_ids(into)[0], into)
        if copies(node):
            sources.append(node.args[1])  # type: ignore[arg-type]
    if len(set(sources)) != len(sources):
        return f"{sources[0].name} is copied twice"
    operands: dict[StorageId, fx.Node] = {}
    reads = ((node, argument, own) for node in members for argument in node.all_input_nodes for own in _ids(argument))
    for node, argument, own in reads:
        if own not in written:
            continue
        if _lies(argument) != _lies(written[own]):
            return f"{node.name} reads {argument.name}, a part of what {written[own].name} is written over"
        if argument not in inside and operands.setdefault(own, argument) is not argument:
            return f"{argument.name} and {operands[own].name} are one storage, which is written"
    return ""


def _unfit_writer(node: fx.Node, into: object, inside: set[fx.Node]) -> str:
    if value_form(node.target) is None or not isinstance(into, fx.Node):
        return f"{node.name} writes otherwise than over its first argument"
    written = into.meta.get("val")
    if not isinstance(written, torch.Tensor) or not fills_storage(written) or written.is_conj() or written.is_neg():
        return f"{node.name} writes a part of a storage"
    if any(user not in inside for user in node.users):
        return f"{node.name} is read outside"
    tensors = [argument.meta.get("val") for argument in node.all_input_nodes]
    if any(isinstance(tensor, torch.Tensor) and tensor.dtype is not written.dtype for tensor in tensors):
        return f"{node.name} converts what it writes"
    if not copies(node):
        return ""
    source = node.args[1]
    made_inside = isinstance(source, fx.Node) and source in inside and not ops.is_view(source.target)
    if not made_inside or ops.rule(source.target).mutates or _lies(source) != _lies(into):  # type: ignore[union-attr,arg-type]
        return f"{node.name} copies what no member makes"
    return ""


def _ids(node: fx.Node) -> tuple[StorageId, ...]:
    ids: tuple[StorageId, ...] = node.meta.get(STORAGES, ())
    return ids


def _lies(node: fx.Node) -> tuple[object, ...]:
    tensor: torch.Tensor = node.meta["val"]
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg()

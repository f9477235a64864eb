"""Writes to a tensor of the caller's, as functionalization leaves them: the operator writes there itself.

    before                               after
    v = lerp(x, s, 0.1)                  v = lerp_(x, s, 0.1)
    ... v ...                            ... v ...
    copy_(x, v)

``x`` is an input of the graph, such as a buffer. ``v`` has no bytes of its own any more, as in eager; of a chain
(``x.mul_(0.9).add_(y)``) neither has what lies between. A value that backward reads, or that the caller gets, stays:
the caller may write to ``x`` as soon as forward has ended.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from roamc.capture.in_place_values import geometry, makes_value
from roamc.capture.sharing import Half
from roamc.compat import OpOverload
from roamc.graph.memory import identities, identity
from roamc.operators import ops

aten = torch.ops.aten


@functools.cache
def writes_over(target: object) -> OpOverload | None:
    """The operator that writes over its first argument what ``target`` makes of it, with the same bits."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    packet = getattr(aten, f"{target._schema.name.removeprefix('aten::')}_", None)
    twin = getattr(packet, target._overloadname, None)
    return twin if makes_value(twin) is target else None


def to_callers(half: Half, copy: fx.Node) -> list[str]:
    """Let what makes the value of ``copy`` write to its input, if nobody reads anything else then.

    Returns:
        The name of ``copy`` if it is gone.
    """
    if copy.target is not aten.copy_.default or copy.users:
        return []
    given, value = copy.args[:2]
    if not isinstance(given, fx.Node) or given.op != "placeholder":
        return []
    chain = _chain(given, value)
    if not chain or not _may(half, given, chain, copy):
        return []
    half.graph.erase_node(copy)
    for node in chain:
        node.target = writes_over(node.target)  # type: ignore[assignment]
        half.put(half.shared.pop(identity(node.meta["val"])), given.meta["val"])
    return [copy.name]


def _may(half: Half, given: fx.Node, chain: list[fx.Node], copy: fx.Node) -> bool:
    """Whether each value has been read when the next is written over it, and only forward reads the last one.

    Behind ``copy``, readers of the input read the last value already.
    """
    for node, following in zip([given, *chain[:-1]], chain, strict=True):
        until = half.places[following]
        ends = half.places[copy] if node is given else len(half.places)
        if any(until < half.places[reader] < ends for reader in half.readers(node)):
            return False
    last = [reader for reader in half.readers(chain[-1]) if reader is not copy]
    return half.are_forward(last) and not any(half.is_named(node) or half.is_written(node) for node in chain)


def _chain(given: fx.Node, value: object) -> list[fx.Node]:
    """The operators that make ``value`` of ``given``, each of the result of the one before; none if one of them cannot
    write over its argument."""
    chain: list[fx.Node] = []
    while value is not given:
        if not isinstance(value, fx.Node) or not _fits(value, given):
            return []
        chain.insert(0, value)
        value = value.args[0]
    return chain


def _fits(node: fx.Node, given: fx.Node) -> bool:
    """Whether ``node`` may write its result over its first argument, and the result lies as ``given`` does."""
    if node.op != "call_function" or writes_over(node.target) is None or 0 not in ops.may_overwrite(node):
        return False
    if geometry(node.meta["val"]) != geometry(given.meta["val"]) or not isinstance(node.args[0], fx.Node):
        return False
    return identities([node.args[0]]).isdisjoint(identities(set(node.all_input_nodes) - {node.args[0]}))

"""Writes to a part of a value, as functionalization leaves them: the operator writes to that part itself.

    before                               after
    v = slice(y, 1, 0, 4)                v = slice(y, 1, 0, 4)
    m = mul(v, 0.5)                      m = mul_(v, 0.5)
    z = slice_scatter(y, m, 1, 0, 4)
    ... z ...                            ... y ...

``m`` has no bytes of its own any more, as in eager. What has been written over cannot be made again from what it was,
so that ``y`` and ``z`` must not be read in backward: there no budget could drop them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from roamc import ops
from roamc.capture.caller_writes import writes_over
from roamc.capture.in_place_values import geometry
from roamc.compat import FakeTensorMode, OpOverload
from roamc.graph import Phase, tensors_of
from roamc.memory import WROTE_OVER, identity
from roamc.rewrite import move, placed_in

aten = torch.ops.aten

PARTS: Mapping[object, OpOverload] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
"""Operators that put a value into a copy of their first argument, to the view of the part that it fills."""

ROUNDED = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default})
"""Operators whose results are rounded once: they have the same bits wherever the result lies."""


def in_parts(
    graph: fx.Graph, mode: FakeTensorMode, phase: Mapping[str, Phase], named: Collection[str]
) -> tuple[str, ...]:
    """Let such operators write to the part.

    Args:
        graph: changed in place.
        mode: the fake mode of its tensors.
        phase: of every operator and view.
        named: nodes whose tensors others take over; they stay as they are.

    Returns:
        Names of the scatters, which are gone.
    """
    scatters = [node for node in graph.nodes if node.target in PARTS]
    return tuple(node.name for node in scatters if _exchange(graph, node, mode, phase, named))


def _exchange(
    graph: fx.Graph, scatter: fx.Node, mode: FakeTensorMode, phase: Mapping[str, Phase], named: Collection[str]
) -> bool:
    base, value = scatter.args[:2]
    if not isinstance(base, fx.Node) or not isinstance(value, fx.Node) or not _fits(scatter, base, value, mode):
        return False
    before, behind = (_sharing(graph, node) for node in (base, scatter))
    places = {node: place for place, node in enumerate(graph.nodes)}
    last = max(places[reader] for node in before for reader in node.users if reader is not scatter)
    readers = [reader for node in (*before, *behind) for reader in node.users]
    if last > places[value] or any(phase.get(reader.name) is not Phase.FORWARD for reader in readers):
        return False
    if any(node.op != "call_function" or node.name in named for node in (*before, *behind)):
        return False
    if any(ops.mutated_arguments(reader) for node in behind for reader in node.users):
        return False
    part: Any = value.args[0]
    value.target = writes_over(value.target)  # type: ignore[assignment]
    storage = base.meta["val"].untyped_storage()
    with mode:
        value.meta["val"] = placed_in(part.meta["val"], storage)
        for node in behind:
            for position, tensor in list(tensors_of(node)):
                if identity(tensor) == identity(scatter.meta["val"]) and node is not scatter:
                    move(node, position, storage)
    scatter.replace_all_uses_with(base)
    graph.erase_node(scatter)
    return True


def _fits(scatter: fx.Node, base: fx.Node, value: fx.Node, mode: FakeTensorMode) -> bool:
    """Whether ``value`` is made of the part that ``scatter`` fills with it, and may be written over that."""
    part = value.args[0] if value.args else None
    if value.target not in ROUNDED or value.kwargs or scatter.kwargs or WROTE_OVER not in value.meta:
        return False
    if list(value.users) != [scatter] or not isinstance(part, fx.Node) or 0 not in ops.may_overwrite(value):
        return False
    whole, seen, made = base.meta["val"], part.meta["val"], value.meta["val"]
    with mode:
        filled = PARTS[scatter.target](whole, *scatter.args[2:])
    others = {
        identity(t) for argument in value.all_input_nodes if argument is not part for _, t in tensors_of(argument)
    }
    return bool(
        identity(seen) == identity(whole)
        and geometry(seen) == geometry(filled)
        and geometry(whole) == geometry(scatter.meta["val"])
        and (seen.shape, seen.dtype) == (made.shape, made.dtype)
        and identity(whole) not in others
        and writes_over(value.target) is not None
    )


def _sharing(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The nodes with a tensor in the storage of ``node``."""
    storage = identity(node.meta["val"])
    dense = ((node, tensor) for node in graph.nodes for _, tensor in tensors_of(node) if tensor.layout is torch.strided)
    return list(dict.fromkeys(other for other, tensor in dense if identity(tensor) == storage))

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

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from roamc import ops
from roamc.capture.caller_writes import writes_over
from roamc.capture.in_place_values import geometry
from roamc.capture.sharing import Half
from roamc.compat import FakeTensorMode, OpOverload
from roamc.memory import WROTE_OVER, identities, identity
from roamc.rewrite import placed_in

aten = torch.ops.aten

PARTS: Mapping[object, OpOverload] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
"""Operators that put a value into a copy of their first argument, to the view of the part that it fills."""

ROUNDED = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default})
"""Operators whose results are rounded once: they have the same bits wherever the result lies."""


def to_parts(half: Half, scatter: fx.Node) -> bool:
    """Let what makes the value of ``scatter`` write to the part, if only forward reads the whole; it is gone then."""
    if scatter.target not in PARTS:
        return False
    base, value = scatter.args[:2]
    if not isinstance(base, fx.Node) or not isinstance(value, fx.Node) or not _fits(scatter, base, value, half.mode):
        return False
    if not _may(half, scatter, base, value):
        return False
    part: Any = value.args[0]
    value.target = writes_over(value.target)  # type: ignore[assignment]
    whole = base.meta["val"]
    behind = [place for place in half.shared.pop(identity(scatter.meta["val"])) if place[0] is not scatter]
    del half.shared[identity(value.meta["val"])]
    with half.mode:
        value.meta["val"] = placed_in(part.meta["val"], whole.untyped_storage())
    half.of(base).append((value, 0))
    half.put(behind, whole)
    scatter.replace_all_uses_with(base)
    half.graph.erase_node(scatter)
    return True


def _may(half: Half, scatter: fx.Node, base: fx.Node, value: fx.Node) -> bool:
    """Whether the old whole has been read when its part is written, and only forward reads the old one or the new."""
    before = [reader for reader in half.readers(base) if reader is not scatter]
    if any(half.places[reader] > half.places[value] for reader in before):
        return False
    if any(node.op != "call_function" for node, _ in (*half.of(base), *half.of(scatter))):
        return False
    if half.is_named(base) or half.is_named(scatter) or any(map(ops.mutated_arguments, half.readers(scatter))):
        return False
    return half.are_forward([*before, *half.readers(scatter)])


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
    others = identities(set(value.all_input_nodes) - {part})
    return bool(
        identity(seen) == identity(whole)
        and geometry(seen) == geometry(filled)
        and geometry(whole) == geometry(scatter.meta["val"])
        and (seen.shape, seen.dtype) == (made.shape, made.dtype)
        and identity(whole) not in others
        and writes_over(value.target) is not None
    )

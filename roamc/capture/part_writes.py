"""Writes to a part of a value, as functionalization leaves them: the operator writes to that part itself.

    before                               after
    v = slice(y, 1, 0, 4)                v = slice(y, 1, 0, 4)
    m = mul(v, 0.5)                      m = mul_(v, 0.5)
    z = slice_scatter(y, m, 1, 0, 4)
    ... z ...                            ... y ...

``m`` has no bytes of its own any more, as in eager. Of a view of a view (``y[3:][:, 1].mul_(2)``) there are as many
scatters as views, and all of them go. What has been written over cannot be made again from what it was,
so that ``y`` and ``z`` must not be read in backward: there no budget could drop them.

:mod:`roamc.capture.caller_writes` does the same where ``y`` is a tensor of the caller's, by functions of this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from roamc.capture.in_place_values import geometry, writes_over
from roamc.capture.sharing import Half, reads_as_another
from roamc.compat import FakeTensorMode, identity
from roamc.compat_operators import is_pointwise
from roamc.graph.memory import WROTE_OVER
from roamc.graph.rewrite import placed_in
from roamc.graph.storage_ids import addresses_of
from roamc.operators import ops

aten = torch.ops.aten


def to_parts(half: Half, scatter: fx.Node) -> list[str]:
    """Let the operator that makes the value of ``scatter`` write to the part that it fills, and erase ``scatter``.

    A scatter, such as ``slice_scatter(whole, value, ...)``, copies a whole with one part replaced by a value. Nothing
    changes unless eager computes the value in place (its node has ``WROTE_OVER`` in ``meta``), only forward reads the
    whole before and after the write, and every reader keeps what it reads.

    Args:
        half: its graph and storages are changed in place.
        scatter: any node of the graph.

    Returns:
        Names of the erased nodes: ``scatter``, and those that put its result into something larger. Empty if nothing
        has changed.
    """
    if ops.rule(scatter.target).part is None:
        return []
    scatters = until_whole(scatter, half.mode)
    whole, value = scatters[-1].args[0], scatter.args[1]
    if not isinstance(whole, fx.Node) or not isinstance(value, fx.Node):
        return []
    if not fits(scatter, whole, value, half.mode) or not _may(half, scatters, whole, value):
        return []
    if geometry(whole.meta["val"]) != geometry(scatters[-1].meta["val"]):
        return []
    half.since_write[identity(whole.meta["val"])] = [value, *half.readers(scatters[-1])]
    write_to_part(half, value, whole)
    return without_scatters(half, scatters, whole)


def write_to_part(half: Half, value: fx.Node, whole: fx.Node) -> None:
    """Make ``value`` call the in-place form of its operator, on its first argument, a view in the storage of ``whole``.

    Call it where :func:`fits` holds. The fake result of ``value`` is moved to the storage of ``whole``; ``half.shared``
    follows.
    """
    part: Any = value.args[0]
    value.target = writes_over(value.target)  # type: ignore[assignment]
    del half.shared[identity(value.meta["val"])]
    with half.mode:
        value.meta["val"] = placed_in(part.meta["val"], whole.meta["val"].untyped_storage())
    half.of(whole).append((value, 0))


def copy_to_part(half: Half, scatters: Sequence[fx.Node], whole: fx.Node) -> None:
    """Insert a copy of the value that ``scatters`` put into ``whole`` to the part of ``whole`` that it fills.

    Args:
        half: gets the views that lead to the part, and the copy, in front of the last scatter.
        scatters: nested as in :func:`until_whole`, innermost first; they stay.
        whole: what the last of them puts its value into.
    """
    part = whole
    for scatter in reversed(scatters):
        part = half.add(scatters[-1], ops.rule(scatter.target).part, (part, *scatter.args[2:]))
    half.add(scatters[-1], aten.copy_.default, (part, scatters[0].args[1]))


def without_scatters(half: Half, scatters: Sequence[fx.Node], whole: fx.Node) -> list[str]:
    """Erase nested scatters whose value has been written to ``whole``: readers of the last one read ``whole``.

    Args:
        half: its graph and storages are changed in place.
        scatters: nested as in :func:`until_whole`, innermost first.
        whole: takes the place of the last one's result; views of that move into its storage.

    Returns:
        Names of the scatters.
    """
    behind = [place for place in half.of(scatters[-1]) if place[0] is not scatters[-1]]
    half.put(behind, whole.meta["val"])
    scatters[-1].replace_all_uses_with(whole)
    for scatter in reversed(scatters):
        del half.shared[identity(scatter.meta["val"])]
        half.graph.erase_node(scatter)
    return [scatter.name for scatter in scatters]


def filled_by(scatter: fx.Node, mode: FakeTensorMode) -> torch.Tensor:
    """Return the part of the first argument of ``scatter`` that ``scatter`` fills, as a fake view of that argument.

    Args:
        scatter: a node that copies its first argument with one part replaced, such as ``slice_scatter``.
        mode: the fake mode of its tensors.
    """
    view: Any = ops.rule(scatter.target).part
    whole = scatter.args[0].meta["val"]  # type: ignore[union-attr]
    with mode:
        part: torch.Tensor = view(whole, *scatter.args[2:])
    return part


def until_whole(scatter: fx.Node, mode: FakeTensorMode) -> list[fx.Node]:
    """Return the nested scatters that begin with ``scatter``, innermost first, ``scatter`` alone if it is not nested.

    With ``w = slice(x, 0, 3)``, ``z = select_scatter(w, s, 1, 1)`` is nested in ``slice_scatter(x, z, 0, 3)``: the
    outer one is the only reader of ``z``, and fills the part of ``x`` that ``w`` is a view of. ``mode`` is the fake
    mode of the scatters' tensors.
    """
    scatters = [scatter]
    while len(scatters[-1].users) == 1:
        (outer,) = scatters[-1].users
        if not _puts_back(outer, scatters[-1], mode):
            break
        scatters.append(outer)
    return scatters


def down_from(scatter: fx.Node, mode: FakeTensorMode) -> tuple[fx.Node, ...]:
    """Return the nested scatters that end in ``scatter``, innermost first; nested as in :func:`until_whole`.

    ``mode`` is the fake mode of their tensors.
    """
    scatters = [scatter]
    while isinstance(inner := scatters[0].args[1], fx.Node) and ops.rule(inner.target).part and not inner.kwargs:
        if len(inner.users) > 1 or not _puts_back(scatters[0], inner, mode):
            break
        scatters.insert(0, inner)
    return tuple(scatters)


def _puts_back(outer: fx.Node, scatter: fx.Node, mode: FakeTensorMode) -> bool:
    """Whether ``outer`` puts what ``scatter`` makes of a part to where that part was."""
    if ops.rule(outer.target).part is None or outer.kwargs or outer.args[1] is not scatter:
        return False
    part, filled = scatter.args[0].meta["val"], filled_by(outer, mode)  # type: ignore[union-attr]
    return identity(part) == identity(filled) and geometry(part) == geometry(filled)


def _may(half: Half, scatters: Sequence[fx.Node], whole: fx.Node, value: fx.Node) -> bool:
    """Whether the old whole has been read when its part is written, and only forward reads the old one or the new."""
    own = {*scatters, *(scatter.args[0] for scatter in scatters[:-1])}
    since = half.since_write.get(identity(whole.meta["val"]))
    before = [reader for reader in (half.readers(whole) if since is None else since) if reader not in own]
    behind = list(half.readers(scatters[-1]))
    if any(half.places[reader] > half.places[value] for reader in before):
        return False
    joined = scatters if since is not None else [whole, *scatters]
    if any(node.op != "call_function" for end in (joined[0], joined[-1]) for node, _ in half.of(end)):
        return False
    if any(map(half.is_named, joined)) or any(map(ops.mutated_arguments, behind)):
        return False
    return half.are_forward([*before, *behind])


def fits(scatter: fx.Node, whole: fx.Node, value: fx.Node, mode: FakeTensorMode) -> bool:
    """Whether ``value`` may be written straight into the part of ``whole`` that ``scatter`` copies it into.

    That is so if all of this holds: eager computes ``value`` in place (``WROTE_OVER`` in its ``meta``) from that same
    part of ``whole``; ``scatter`` is its only reader; and its bits do not depend on where it lies.

    Args:
        scatter: a node that copies ``whole`` with one part replaced, such as ``slice_scatter``.
        whole: the first argument of ``scatter``.
        value: its second argument.
        mode: the fake mode of their tensors.
    """
    part = value.args[0] if value.args else None
    if value.kwargs or scatter.kwargs or WROTE_OVER not in value.meta:
        return False
    if list(value.users) != [scatter] or not isinstance(part, fx.Node):
        return False
    if 0 not in ops.may_overwrite(value, addresses_of):
        return False
    storage, part_tensor, result = identity(whole.meta["val"]), part.meta["val"], value.meta["val"]
    return bool(
        identity(part_tensor) == storage
        and geometry(part_tensor) == geometry(filled_by(scatter, mode))
        and (part_tensor.shape, part_tensor.dtype) == (result.shape, result.dtype)
        and not reads_as_another(value, part)
        and writes_over(value.target) is not None
        and (ops.rule(value.target).rounds_once or _is_same_loop(value, part_tensor, result))
    )


def _is_same_loop(value: fx.Node, part: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether a pointwise operator takes the same vectorised loop over ``part`` as over its result: strides are equal.

    Only then are the last bits sure to be the same.
    """
    return is_pointwise(value.target) and part.stride() == result.stride()

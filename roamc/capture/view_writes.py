"""Writes to a view, as functionalization leaves them: the copy in the middle is what is copied.

    before                               after
    v = slice(x, 1, 0, 4)                y = slice_scatter(x, expand(s, shape of v), 1, 0, 4)
    c = copy(v, s)
    y = slice_scatter(x, c, 1, 0, 4)

``copy`` makes ``s`` as a tensor with the strides of ``v``: as many bytes as lie between the first element of ``v`` and
its last, so that a write to four columns of ``x`` costs nearly the bytes of ``x``. The scatter reads elements only.

``s`` may be a part of ``x``. If it is what the scatter fills (Python assigns the result of ``x[:4] *= 2`` to ``x[:4]``
once more), then ``y`` is ``x``. If it is another part, the copy stays: as long as it stands between them, ``y`` may
be written over ``x``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from roamc.capture.in_place_values import geometry
from roamc.capture.part_writes import filled_by, until_whole
from roamc.capture.sharing import Sharing
from roamc.compat import FakeTensorMode, identity
from roamc.graph.rewrite import derived
from roamc.graph.storage_ids import addresses
from roamc.operators import ops

aten = torch.ops.aten


def without_copies(graph: fx.Graph, mode: FakeTensorMode, named: Collection[str]) -> list[str]:
    """Turn each copy that only scatters, such as ``slice_scatter``, read into a view of what it copies.

    Where all scatters fill a part of their base with that part itself, copy and scatters are erased, and readers of
    the scatters read the base. A copy stays if what it copies is written before the scatters read it, or is another
    part of their base.

    Args:
        graph: changed in place.
        mode: the fake mode of its tensors.
        named: names of the nodes that are outputs or are saved for backward; they stay.

    Returns:
        Names of the erased nodes.
    """
    sharing = Sharing(graph, mode)
    places = sharing.places
    erased: list[str] = []
    writes: dict[int, list[int]] = {}
    for node in graph.nodes:
        for storage in addresses(ops.mutated_arguments(node)):
            writes.setdefault(storage, []).append(places[node])

    def is_written(storage: int, first: fx.Node, readers: Iterable[fx.Node]) -> bool:
        last = max(map(places.__getitem__, readers), default=-1)
        of_storage = writes.get(storage, [])
        return bisect_right(of_storage, places[first]) < bisect_right(of_storage, last)

    for node in list(graph.nodes):
        if not ops.rule(node.target).broadcasts or node.name in named or not _is_scattered(node) or not _is_plain(node):
            continue
        source, scatters = node.args[1], list(node.users)
        storage = identity(source.meta["val"])
        if is_written(storage, node, scatters):
            continue
        if storage not in addresses(scatter.args[0] for scatter in scatters):
            _let_expand(sharing, node, source)
        elif all(_fills_with_itself(scatter, source, mode) for scatter in scatters):
            lying = [place for scatter in scatters for place in sharing.of(scatter)]
            own = addresses(scatters)
            if any(other.name in named for other, _ in lying) or not own.isdisjoint(writes):
                continue
            if not is_written(storage, node, [reader for other, _ in lying for reader in other.users]):
                erased += _erased(sharing, node)
    return erased


def _let_expand(sharing: Sharing, copy: fx.Node, source: fx.Node) -> None:
    """Make ``copy`` a view of ``source``, which it copies."""
    sharing.of(copy).remove((copy, 0))
    copy.target, copy.args, copy.kwargs = aten.expand.default, (source, list(copy.meta["val"].shape)), {}
    copy.meta["val"] = derived(copy, sharing.mode)
    sharing.of(copy).append((copy, 0))


def put_at_once(graph: fx.Graph, mode: FakeTensorMode, named: Collection[str]) -> list[str]:
    """Replace nested scatters, which put a value into a view of a view, by one scatter into the whole.

        before                               after
        w = slice(x, 0, 3)                   y = as_strided_scatter(x, s, ...)
        z = select_scatter(w, s, 1, 1)
        y = slice_scatter(x, z, 0, 3)

    ``z`` is nearly as large as ``x``, and ``y`` may be written over ``x``.

    Args:
        graph: changed in place.
        mode: the fake mode of its tensors.
        named: names of the nodes that are outputs or are saved for backward; they stay.

    Returns:
        Names of the erased scatters.
    """
    erased: list[str] = []
    written = {storage for node in graph.nodes for storage in addresses(ops.mutated_arguments(node))}
    for node in list(graph.nodes):
        if ops.rule(node.target).part is None or node.kwargs or node.name in erased:
            continue
        *inner, last = until_whole(node, mode)
        whole: Any = last.args[0]
        value: Any = node.args[1]
        of_named = any(scatter.name in named for scatter in inner)
        if not inner or of_named or not _is_alone(whole, last) or not written.isdisjoint(addresses([whole, value])):
            continue
        filled = filled_by(node, mode)
        place = list(filled.shape), list(filled.stride()), filled.storage_offset()
        last.target, last.args = aten.as_strided_scatter.default, (whole, value, *place)
        for scatter in reversed(inner):
            graph.erase_node(scatter)
        erased += [scatter.name for scatter in inner]
    return erased


def _is_alone(whole: fx.Node, scatter: fx.Node) -> bool:
    """Whether ``whole`` is all that lies in its storage, and the result of ``scatter`` lies as it does."""
    tensor = whole.meta["val"]
    alone = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    return bool(alone and not tensor.storage_offset() and geometry(tensor) == geometry(scatter.meta["val"]))


def _fills_with_itself(scatter: fx.Node, source: fx.Node, mode: FakeTensorMode) -> bool:
    """Whether ``source`` is the part of its base that ``scatter`` fills, so that its result is its base."""
    whole = scatter.args[0].meta["val"]  # type: ignore[union-attr]
    if ops.rule(scatter.target).part is None or scatter.kwargs or geometry(whole) != geometry(scatter.meta["val"]):
        return False
    part = source.meta["val"]
    return identity(part) == identity(whole) and geometry(part) == geometry(filled_by(scatter, mode))


def _erased(sharing: Sharing, copy: fx.Node) -> list[str]:
    """Erase ``copy`` and its scatters: readers of a scatter, or of a view of it, read its base.

    Returns:
        Names of the scatters and of ``copy``.
    """
    erased = [*copy.users, copy]
    for scatter in list(copy.users):
        base: Any = scatter.args[0]
        views = [place for place in sharing.of(scatter) if place[0] is not scatter]
        sharing.put(views, base.meta["val"])
        scatter.replace_all_uses_with(base)
        sharing.graph.erase_node(scatter)
    sharing.graph.erase_node(copy)
    return [node.name for node in erased]


def _is_scattered(node: fx.Node) -> bool:
    """Whether all that is done with ``node`` is to put its elements into another tensor."""
    return bool(node.users) and all(
        ops.rule(reader.target).part is not None and reader.args[1] is node and reader.args[0] is not node
        for reader in node.users
    )


def _is_plain(node: fx.Node) -> bool:
    """Whether ``node`` has the elements that it copies, bit for bit."""
    source = node.args[1]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    result = node.meta["val"]
    return bool(value.dtype == result.dtype and value.device == result.device)

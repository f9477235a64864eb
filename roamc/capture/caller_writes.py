"""Writes to a tensor of the caller's, as functionalization leaves them: the operator writes there itself.

    before                               after
    v = lerp(x, s, 0.1)                  v = lerp_(x, s, 0.1)
    ... v ...                            ... v ...
    copy_(x, v)

    v = slice_scatter(x, s, 0, 2)        p = slice(x, 0, 2)
    ... v ...                            copy_(p, s)
    copy_(x, v)                          ... x ...

    p = slice(x, 0, 2)                   p = slice(x, 0, 2)
    m = mul(p, 0.5)                      m = mul_(p, 0.5)
    v = slice_scatter(x, m, 0, 2)        ... x ...
    copy_(x, v)

``x`` is an input of the graph, such as a buffer. ``v`` has no bytes of its own any more, as in eager; of a chain
(``x.mul_(0.9).add_(y)``) neither has what lies between. A value that backward reads, or that the caller gets, stays:
the caller may write to ``x`` as soon as forward has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roamc.capture import part_writes
from roamc.capture.in_place_values import geometry, writes_over
from roamc.capture.sharing import Half, reads_as_another, viewed
from roamc.compat import identity
from roamc.graph.memory import WROTE_OVER
from roamc.graph.storage_ids import addresses_of
from roamc.operators import ops

aten = torch.ops.aten


@dataclass(frozen=True)
class _Write:
    """One of the operators that lead from what an input holds to what is copied to it.

    Attributes:
        base: what it changes: the input, or the result of the write before.
        result: what is then in the base.
        at: the node at which the first element is written.
        scatters: where a part is changed, the nodes that put it into the whole, innermost first, ``result`` the last.
    """

    base: fx.Node
    result: fx.Node
    at: fx.Node
    scatters: tuple[fx.Node, ...] = ()


def to_callers(half: Half, copy: fx.Node) -> list[str]:
    """Let the operators that make the value of ``copy`` write to its input in place, and erase ``copy``.

    Nothing changes unless ``copy`` is ``copy_`` to an input of the graph, its value is made of that input by operators
    that have an in-place form or fill a part, only forward reads that value, and every reader keeps what it reads.

    Args:
        half: its graph and storages are changed in place.
        copy: any node of the graph.

    Returns:
        Names of the erased nodes: ``copy``, and nodes like ``slice_scatter`` that copy a tensor with one part replaced.
        Empty if nothing has changed.
    """
    if copy.target is not aten.copy_.default or copy.users:
        return []
    entry, value = copy.args[:2]
    if not isinstance(entry, fx.Node) or entry.op != "placeholder" or not isinstance(value, fx.Node):
        return []
    writes = _writes(half, entry, value)
    if not writes or geometry(value.meta["val"]) != geometry(entry.meta["val"]) or not _may(half, writes, copy):
        return []
    half.graph.erase_node(copy)
    erased = [copy.name]
    for write in writes:
        erased += _apply(half, write, entry)
    return erased


def _apply(half: Half, write: _Write, entry: fx.Node) -> list[str]:
    """Make one write in the memory of ``entry``, where the writes before it are made; return names of erased nodes."""
    if not write.scatters:
        write.result.target = writes_over(write.result.target)  # type: ignore[assignment]
        half.put(half.shared.pop(identity(write.result.meta["val"])), entry.meta["val"])
        return []
    base: Any = write.result.args[0]  # by now: the result of the write before may be gone
    if write.at is write.result:
        part_writes.copy_to_part(half, write.scatters, base)
    else:
        part_writes.write_to_part(half, write.at, base)
    return part_writes.without_scatters(half, write.scatters, base)


def _may(half: Half, writes: list[_Write], copy: fx.Node) -> bool:
    """Whether each value has been read when the next is written over it, and only forward reads the last one.

    Behind ``copy``, readers of the input read the last value already.
    """
    for write in writes:
        ends = half.places[copy] if write is writes[0] else len(half.places)
        own = {write.result, *write.scatters, *(scatter.args[0] for scatter in write.scatters[:-1])}
        readers = [half.places[reader] for reader in half.readers(write.base) if reader not in own]
        if any(half.places[write.at] < place < ends for place in readers):
            return False
    results = [write.result for write in writes]
    rewritten = [*results, *(scatter for write in writes for scatter in write.scatters)]
    last = [reader for reader in half.readers(results[-1]) if reader is not copy]
    return half.are_forward(last) and not any(map(half.is_named, rewritten)) and not any(map(half.is_written, results))


def _writes(half: Half, entry: fx.Node, value: fx.Node) -> list[_Write]:
    """Return the writes that lead from ``entry`` to ``value``, each to the result of the one before or a view of it.

    Empty if one of them cannot write there.
    """
    writes: list[_Write] = []
    while (whole := viewed(value)) is not entry:
        write = _write(half, whole)
        if write is None:
            return []
        writes.insert(0, write)
        value = write.base
    return writes


def _write(half: Half, node: fx.Node) -> _Write | None:
    """Return ``node`` as a write to its first argument; None if its result cannot be written there."""
    base = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(base, fx.Node) or not isinstance(node.meta["val"], torch.Tensor):
        return None
    if geometry(node.meta["val"]) != geometry(base.meta["val"]):
        return None
    if ops.rule(node.target).part is not None:
        scatters = part_writes.down_from(node, half.mode)
        part = scatters[0].args[1]
        if not isinstance(part, fx.Node) or node.kwargs or identity(part.meta["val"]) == identity(base.meta["val"]):
            return None
        alone = part_writes.fits(scatters[0], base, part, half.mode)
        return _Write(base, node, part if alone else node, scatters)
    return _Write(base, node, node) if _overwrites(node) and not reads_as_another(node, base) else None


def _overwrites(node: fx.Node) -> bool:
    """Whether ``node`` has the same bits where it writes over its first argument, or is what eager runs in place."""
    if writes_over(node.target) is None:
        return False
    if 0 in ops.may_overwrite(node, addresses_of):
        return True
    return WROTE_OVER in node.meta and not ops.reads_elsewhere(node, 0, addresses_of)

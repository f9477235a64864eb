"""FLOPs and bytes of a node, counted off its fake tensors: the same on every device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import flop_counter

from roamc.compat_operators import tensors_in
from roamc.cost.kind import kind_of
from roamc.graph import output_node, placeholders, tensors_of
from roamc.graph.storage_ids import StorageId, placed
from roamc.operators import ops
from roamc.operators.call import Call, call_of, fakes
from roamc.operators.costs.kinds import FREE, VIEW
from roamc.operators.gpu.shifts import columns_before
from roamc.units import Bytes

Flops = int

Placed = tuple[torch.Tensor, StorageId]
"""A fake tensor, and the id of the storage that it lies in."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that an operator must move between memory and the processor.

    Attributes:
        read: bytes that it reads of its arguments; a tensor that is given twice counts once, and so does an element
            that an expanded dimension repeats.
        written: bytes of its results and of arguments that it writes, counted in the same way.
    """

    read: Bytes
    written: Bytes

    @property
    def total(self) -> Bytes:
        """Bytes read and written together."""
        return self.read + self.written


def flops(node: fx.Node) -> Flops:
    """Count the multiplications and additions of products, such as ``mm`` and convolutions, in ``node``.

    The formulas are those of ``torch.utils.flop_counter``, or of :attr:`roamc.operators.costs.cost.Cost.flops`: a
    multiplication with its addition counts as two.

    Args:
        node: a ``call_function`` node with fake tensors in its metadata.

    Returns:
        FLOPs; 0 for pointwise operators, reductions and views, whose time is not bound by arithmetic, and for custom
        operators, whose FLOPs are not known. :func:`roamc.cost.kind.kind_of` tells the first from the second.
    """
    call = call_of(node)
    own = ops.rule(call.target).cost.flops
    args, kwargs = fakes(call.args), fakes(call.kwargs)
    if own is not None:
        return int(own(*args))
    count = flop_counter.flop_registry.get(getattr(call.target, "overloadpacket", call.target))
    return 0 if count is None else int(count(*args, **kwargs, out_val=node.meta.get("val")))


def traffic(node: fx.Node) -> Traffic:
    """Count the bytes that ``node``, a ``call_function`` node, reads and writes.

    Both counts are 0 for views and for operators that make a tensor without filling it, such as ``empty``.
    """
    kind = kind_of(node)
    if kind in (VIEW, FREE):
        return Traffic(0, 0)
    call = call_of(node)
    mutated = _placed(ops.mutated_arguments(node))
    written = {storage for _, storage in mutated}
    fresh = [(tensor, storage) for _, tensor, storage in placed(node) if storage not in written]
    if ops.rule(call.target).cost.picks_from is not None or kind == "scatter":
        return _picked(call, mutated, fresh)
    return Traffic(_bytes(_read(call, bool(mutated))), _bytes([*mutated, *fresh]))


def group_traffic(body: fx.Graph) -> Traffic:
    """Count the bytes that a group of operators with this ``body`` reads and writes: its operands and its results.

    An operand that is a slice of another one's rows counts nothing: the group reads both in one go.
    """
    read = _placed(placeholders(body))
    read = [one for one in read if not any(_is_slice(one, other) for other in read)]
    results = [(tensor, storage) for node in output_node(body).all_input_nodes for _, tensor, storage in placed(node)]
    return Traffic(_bytes(read), _bytes(results))


def _is_slice(part: Placed, whole: Placed) -> bool:
    """Whether a tensor has some columns of another one in the same storage."""
    return part[1] == whole[1] and columns_before(part[0], whole[0]) is not None


def _read(call: Call, in_place: bool) -> list[Placed]:
    """Return the argument tensors of which ``call`` reads elements; ``in_place`` says that it writes an argument."""
    cost = ops.rule(call.target).cost
    unread = cost.unread_in_place if in_place and cost.unread_in_place else cost.unread
    args = [value for at, value in enumerate(call.args) if at not in unread]
    return _placed([*args, *(v for k, v in call.kwargs.items() if k != "out")])


def _placed(arguments: Any) -> list[Placed]:
    """Return all tensors that the nodes in ``arguments`` stand for, in order, also of nodes in nested lists."""
    nodes: list[fx.Node] = []
    fx.node.map_arg(arguments, nodes.append)
    return [(tensor, storage) for node in nodes for _, tensor, storage in placed(node)]


def _picked(call: Call, mutated: list[Placed], fresh: list[Placed]) -> Traffic:
    """Count the bytes of an operator that reads or writes by index: of the indexed tensor at most the picked ones."""
    read = _read(call, False)
    if ops.rule(call.target).cost.picks_from is not None:
        (table, _), others = read[0], read[1:]
        picked = max((tensor.numel() for tensor, _ in [*others, *fresh]), default=0)
        return Traffic(min(own_bytes(table), picked * table.itemsize) + _bytes(others), _bytes(fresh))
    written = [one for one in read if all(one[0] is not other for other, _ in mutated)]
    touched = min(_bytes(mutated), max((own_bytes(tensor) for tensor, _ in written), default=0)) if mutated else 0
    return Traffic(_bytes(written) + touched, touched + _bytes(fresh))


def own_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of the elements that ``tensor`` has in memory: an expanded dimension counts as one element."""
    own_sizes = (int(size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step or not size)
    return math.prod(own_sizes) * tensor.itemsize


def _bytes(tensors: Iterable[Placed]) -> Bytes:
    """Sum :func:`own_bytes` over distinct tensors; two with equal storage, offset, shape and strides count once."""
    places = {
        (storage, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())): own_bytes(tensor)
        for tensor, storage in tensors
    }
    return sum(places.values())


def elements(node: fx.Node) -> int:
    """Return the number of elements that ``node``, a ``call_function`` node, works through; 0 without tensors.

    This is the size of its largest argument or result, unless the cost table has a formula. Elements that an expanded
    dimension repeats count each time. A tensor that is read or written by index is left out: the picked elements count,
    as indices, source or result.
    """
    call = call_of(node)
    cost = ops.rule(call.target).cost
    results = [tensor for _, tensor in tensors_of(node)]
    if cost.elements is not None:
        return cost.elements(call, results[0])
    left_out = cost.picks_from
    if kind_of(node) == "scatter":
        left_out, results = cost.written_into, []
    args = [value for at, value in enumerate(call.args) if at != left_out]
    tensors = [*tensors_in(fakes([*args, *call.kwargs.values()])), *results]
    return max((tensor.numel() for tensor in tensors), default=0)

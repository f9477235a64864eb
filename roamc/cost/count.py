"""FLOPs and bytes of a node, counted off its fake tensors: the same on every device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import flop_counter

from roamc.compat import identity
from roamc.cost.kind import kind_of
from roamc.graph import tensors_of
from roamc.operators import ops
from roamc.operators.call import Call, call_of, fakes, tensors_in
from roamc.operators.costs.kinds import FREE, VIEW
from roamc.units import Bytes

Flops = int


@dataclass(frozen=True)
class Traffic:
    """Bytes that a node must move.

    Attributes:
        read: of its arguments, each once, expanded dimensions once.
        written: of its results and of arguments that it writes.
    """

    read: Bytes
    written: Bytes

    @property
    def total(self) -> Bytes:
        """Both."""
        return self.read + self.written


def flops(node: fx.Node) -> Flops:
    """Multiplications and additions of the products in ``node``, two for each pair, by torch's own formulas.

    0 for pointwise operators, reductions and views, whose time is not bound by arithmetic, and for custom operators,
    of which nothing is known: :func:`roamc.cost.kind.kind_of` tells these apart.
    """
    call = call_of(node)
    own = ops.rule(call.target).cost.flops
    args, kwargs = fakes(call.args), fakes(call.kwargs)
    if own is not None:
        return int(own(*args))
    count = flop_counter.flop_registry.get(getattr(call.target, "overloadpacket", call.target))
    return 0 if count is None else int(count(*args, **kwargs, out_val=node.meta.get("val")))


def traffic(node: fx.Node) -> Traffic:
    """Bytes that ``node`` reads and writes; none for views and for tensors that are not filled."""
    kind = kind_of(node)
    if kind in (VIEW, FREE):
        return Traffic(0, 0)
    call = call_of(node)
    mutated = list(tensors_in(fakes(ops.mutated_arguments(node))))
    fresh = [
        tensor for _, tensor in tensors_of(node) if not any(identity(tensor) == identity(other) for other in mutated)
    ]
    if ops.rule(call.target).cost.picks_from is not None or kind == "scatter":
        return _picked(call, mutated, fresh)
    return Traffic(_bytes(_read(call, bool(mutated))), _bytes([*mutated, *fresh]))


def _read(call: Call, in_place: bool) -> list[torch.Tensor]:
    cost = ops.rule(call.target).cost
    unread = cost.unread_in_place if in_place and cost.unread_in_place else cost.unread
    args = [value for at, value in enumerate(call.args) if at not in unread]
    return list(tensors_in(fakes([*args, *(v for k, v in call.kwargs.items() if k != "out")])))


def _picked(call: Call, mutated: list[torch.Tensor], fresh: list[torch.Tensor]) -> Traffic:
    """Reads or writes by index: of the tensor that is picked from, no more than there is to pick."""
    read = _read(call, False)
    if ops.rule(call.target).cost.picks_from is not None:
        table, others = read[0], read[1:]
        made = max((tensor.numel() for tensor in [*others, *fresh]), default=0)
        return Traffic(min(own_bytes(table), made * table.itemsize) + _bytes(others), _bytes(fresh))
    written = [tensor for tensor in read if all(tensor is not other for other in mutated)]
    touched = min(_bytes(mutated), max((own_bytes(tensor) for tensor in written), default=0)) if mutated else 0
    return Traffic(_bytes(written) + touched, touched + _bytes(fresh))


def own_bytes(tensor: torch.Tensor) -> Bytes:
    """Bytes of the elements that ``tensor`` really has: expanded dimensions count once."""
    kept = (int(size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step or not size)
    return math.prod(kept) * tensor.itemsize


def _bytes(tensors: Iterable[torch.Tensor]) -> Bytes:
    """Of all that are distinct: another storage, offset or geometry."""
    places = {
        (identity(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())): own_bytes(tensor)
        for tensor in tensors
    }
    return sum(places.values())


def elements(node: fx.Node) -> int:
    """The most elements that any argument or result of ``node`` has; expanded ones count, as each is worked on.

    Of what is read or written by index, only elements that are picked.
    """
    call = call_of(node)
    cost = ops.rule(call.target).cost
    results = [tensor for _, tensor in tensors_of(node)]
    left_out = cost.picks_from
    if kind_of(node) == "scatter":
        left_out, results = cost.written_into, []
    args = [value for at, value in enumerate(call.args) if at != left_out]
    found = [*tensors_in(fakes([*args, *call.kwargs.values()])), *results]
    return max((tensor.numel() for tensor in found), default=0)

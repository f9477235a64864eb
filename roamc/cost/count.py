"""FLOPs and bytes of a node, counted off its fake tensors: the same on every device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import flop_counter

from roamc.cost.call import Call, call_of, fakes, tensors_in
from roamc.cost.kinds import FREE, VIEW, kind_of
from roamc.graph import tensors_of
from roamc.graph.memory import identity
from roamc.operators import ops
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
    of which nothing is known: :func:`roamc.cost.kinds.kind_of` tells these apart.
    """
    call = call_of(node)
    packet = getattr(call.target, "overloadpacket", call.target)
    own = _FORMULAS.get(call.name)
    if own is None and packet not in flop_counter.flop_registry:
        return 0
    args, kwargs = fakes(call.args), fakes(call.kwargs)
    if own is not None:
        return int(own(*args))
    count: Callable[..., Any] = flop_counter.flop_registry[packet]
    return int(count(*args, **kwargs, out_val=node.meta.get("val")))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Flops:
    """Two batched products: queries by keys, weights by values (Vaswani et al. 2017, equation 1).

    Several heads of the query may read one head of keys and values. (torch's own formulas refuse that before 2.13.)
    """
    return 2 * _scores(query, key) * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> Flops:
    """Five: the weights again, and the gradients of values, weights, queries and keys (Dao et al. 2022)."""
    return 2 * _scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: torch.Tensor, key: torch.Tensor) -> int:
    """A score for every query, key and head of the query ``[batch, heads, queries, head]``."""
    return math.prod(query.shape[:-1]) * key.shape[-2]


def _product(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Flops:
    """``a @ b`` for vectors, matrices and batches of them."""
    columns = b.shape[-1] if b.dim() > 1 else 1
    return 2 * a.numel() * columns if a.dim() > 1 or b.dim() < 2 else 2 * b.numel()


_FORMULAS: dict[str, Callable[..., Flops]] = {
    **{
        f"_scaled_dot_product_{kernel}_attention{device}{way}": formula
        for kernel, device in (("flash", ""), ("flash", "_for_cpu"), ("efficient", ""), ("cudnn", ""))
        for way, formula in (("", _attention), ("_backward", _attention_backward))
    },
    "mv": _product,
    "dot": _product,
    "vdot": _product,
    "matmul": _product,
    "_int_mm": _product,
    "addmv": lambda addend, a, b, *rest: _product(a, b),
    "addbmm": lambda addend, a, b, *rest: _product(a, b),
    "linear": lambda x, weight, *rest: 2 * x.numel() * weight.shape[0],
    "addr": lambda addend, a, b, *rest: 2 * a.numel() * b.numel(),
    "outer": lambda a, b, *rest: a.numel() * b.numel(),
    "ger": lambda a, b, *rest: a.numel() * b.numel(),
}
"""What torch's registry lacks in some supported version, by the name of :class:`roamc.cost.call.Call`."""

UNREAD: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("copy", "fill", "zero", "uniform", "normal", "bernoulli", "random", "exponential"), (0,)),
    **dict.fromkeys([f"{name}_like" for name in ("zeros", "ones", "full", "rand", "randn", "randint")], (0,)),
    **dict.fromkeys([f"new_{name}" for name in ("zeros", "ones", "full")], (0,)),
}
"""Positions of arguments of which only the geometry is read; for the random ones, of their in-place forms."""
_IN_PLACE_ONLY = frozenset({"uniform", "normal", "bernoulli", "random", "exponential"})

PICKED: dict[str, int] = {
    "embedding": 0, "gather": 0, "index": 0, "index_select": 0, "take": 0, "_unsafe_index": 0, "_embedding_bag": 0,
    "nll_loss_forward": 0, "nll_loss2d_forward": 0,
}  # fmt: skip
"""Position of the argument of which no more elements are read than results, or indices, there are."""


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
    if call.name in PICKED or kind == "scatter":
        return _picked(call, mutated, fresh)
    return Traffic(_bytes(_read(call, bool(mutated))), _bytes([*mutated, *fresh]))


def _read(call: Call, in_place: bool) -> list[torch.Tensor]:
    unread = UNREAD.get(call.name, ())
    if call.name in _IN_PLACE_ONLY and not in_place:
        unread = ()
    args = [value for at, value in enumerate(call.args) if at not in unread]
    return list(tensors_in(fakes([*args, *(v for k, v in call.kwargs.items() if k != "out")])))


def _picked(call: Call, mutated: list[torch.Tensor], fresh: list[torch.Tensor]) -> Traffic:
    """Reads or writes by index: of the tensor that is picked from, no more than there is to pick."""
    read = _read(call, False)
    if call.name in PICKED:
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


BASE: dict[str, int | None] = {"embedding_dense_backward": None, "embedding_backward": None, "nll_loss_backward": 1}
"""Of operators that write by index: position of what is written into and not worked through; 0 for all others."""


def elements(node: fx.Node) -> int:
    """The most elements that any argument or result of ``node`` has; expanded ones count, as each is worked on.

    Of what is read or written by index, only elements that are picked.
    """
    call = call_of(node)
    results = [tensor for _, tensor in tensors_of(node)]
    left_out: int | None = PICKED.get(call.name)
    if kind_of(node) == "scatter":
        left_out, results = BASE.get(call.name, 0), []
    args = [value for at, value in enumerate(call.args) if at != left_out]
    found = [*tensors_in(fakes([*args, *call.kwargs.values()])), *results]
    return max((tensor.numel() for tensor in found), default=0)

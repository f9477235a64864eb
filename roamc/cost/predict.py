"""Seconds of a node on a device: a roofline by kind of operator (Williams, Waterman and Patterson 2009).

    seconds = launches overhead + max(FLOPs / rate, bytes / bandwidth, elements / rate)        seconds()

    seconds = launches overhead + max(the same, seconds of the ring)                  a collective with its products

Convolutions add the two instead: libraries bring weights and images into another order before they multiply.
Collectives are priced by :mod:`roamc.cost.collectives` where group and links are known, else like the following.
An operator of which nothing is known is priced as if it went over its tensors ``UNKNOWN_PASSES`` times: too expensive
to be recomputed, but not so expensive that it dominates the time of a step.
"""

from __future__ import annotations

import itertools

import torch
from torch import fx

from roamc.compat_operators import tensors_in
from roamc.cost.collectives import collective_seconds, collectives, exposed_seconds
from roamc.cost.count import elements, flops, group_traffic, own_bytes, traffic
from roamc.cost.kind import kind_of
from roamc.cost.profile import DeviceProfile, Rates
from roamc.graph import TrainGraph, operators, tensors_of
from roamc.operators import ops
from roamc.operators.call import call_of, fakes
from roamc.operators.costs.attention import causal_share
from roamc.operators.costs.kinds import COLLECTIVE, CONVOLUTIONS, FREE, ONEDNN, PRODUCTS, UNKNOWN, VIEW
from roamc.operators.fused import Fused
from roamc.operators.products_sent import PRODUCTS_SENT
from roamc.operators.schemas import argument_of
from roamc.units import Bytes, Seconds

UNKNOWN_PASSES = 32
"""How many times the bytes of its tensors an operator is priced as moving, if nothing is known of it; or a collective,
if its group or links are not known."""

NEXT = {
    "batched_matmul": "matmul",
    "attention": "batched_matmul",
    "convolution": "matmul",
    "convolution_1x1": "convolution",
    "convolution_grouped": "convolution",
    **{f"{kind}_backward": kind for kind in ("attention", "convolution", "convolution_1x1", "convolution_grouped")},
    "random_backward": "mixed",
    "safe_softmax": "softmax",
    "exponential_backward": "exponential",
    "concatenation": "strided",
}
"""Kind to the kind whose rate is used where a profile has none for the first."""


def seconds(node: fx.Node, profile: DeviceProfile) -> Seconds:
    """Predict the seconds that ``node`` takes on the device that ``profile`` describes.

    The result is 0 for views and for nodes that are not ``call_function``.
    """
    if node.op != "call_function":
        return 0.0
    kind = kind_of(node)
    if kind == VIEW:
        return 0.0
    if kind == FREE:
        return profile.overhead
    if isinstance(node.target, Fused):
        return group_seconds(node.target, profile)
    count, moved = 1, _move_seconds(traffic(node).total, profile)
    if launches := ops.rule(node.target).cost.launches:
        result = next(tensors_in(node.meta["val"]))
        if result.device.type != "cpu":
            count, nbytes = launches(call_of(node), result)
            moved = _move_seconds(nbytes, profile)
    if kind == COLLECTIVE and (sent := collective_seconds(node, profile)) is not None:
        return sent
    if kind in (COLLECTIVE, UNKNOWN):
        return profile.overhead + UNKNOWN_PASSES * moved
    if kind not in PRODUCTS:
        return profile.overhead * count + max(moved, _per(elements(node), profile.elements, kind, node))
    rated = kind if kind in profile.flops else ONEDNN.get(kind, kind)
    products = _per(flops(node), profile.flops, rated, node)
    if node.target in PRODUCTS_SENT:
        return _sent_seconds(node, max(products, moved), profile)
    if kind in CONVOLUTIONS:
        return profile.overhead + products + moved + _reorder_seconds(node, profile)
    return profile.overhead + max(products * _share(node), moved)


def _sent_seconds(node: fx.Node, products: Seconds, profile: DeviceProfile) -> Seconds:
    """The seconds of a collective and its products, which take turns: each product has a launch for every rank's rows.

    Where the links are not known the collective takes as long as for :func:`seconds`.
    """
    sent = collective_seconds(node, profile)
    if sent is None:
        sent = profile.overhead + UNKNOWN_PASSES * _move_seconds(traffic(node).total, profile)
    call = call_of(node)
    ranks = int(argument_of(call.target, call.args, call.kwargs, "group_size"))
    count = sum(1 for _ in tensors_in(fakes(call.args[1])))
    return profile.overhead * ranks * count + max(products, sent)


def group_seconds(group: Fused, profile: DeviceProfile) -> Seconds:
    """Predict the seconds that ``group`` takes on the device that ``profile`` describes.

    They are the longer of two times, plus the overhead of its launches: that of moving its operands and results to and
    from memory, and that of its members one after the other. On a CPU, where blocks of the values inside are written, a
    member takes at least the time to move its tensors to and from a cache.
    """
    inside = sum(_inside(member, group, profile) for member in group.nodes)
    moved = _move_seconds(group_traffic(group.body).total, profile)
    return profile.overhead * group.launches + max(inside, moved)


def _inside(member: fx.Node, group: Fused, profile: DeviceProfile) -> Seconds:
    """The seconds of one member of a group beside the transfers of the group."""
    computed = _per(elements(member), profile.elements, kind_of(member), member)
    return max(traffic(member).total / profile.cache_bandwidth, computed) if group.in_blocks else computed


def prices(graph: TrainGraph, profile: DeviceProfile) -> dict[str, Seconds]:
    """Return node name to predicted seconds, for every ``call_function`` node of ``graph``, views included."""
    return {node.name: seconds(node, profile) for node in operators(graph.graph)}


def step_seconds(graph: TrainGraph, profile: DeviceProfile) -> Seconds:
    """Predict the seconds of one step: its operators run one after the other, started collectives beside them."""
    seconds_of = prices(graph, profile)
    sent = sum(seconds_of[node.name] for node in collectives(graph))
    return sum(seconds_of.values()) - sent + exposed_seconds(graph, seconds_of)


def _move_seconds(count: Bytes, profile: DeviceProfile) -> Seconds:
    """Return the seconds in which ``count`` bytes are moved, from a cache if they fit in it."""
    return count / (profile.cache_bandwidth if count <= profile.cache_bytes else profile.bandwidth)


def _reorder_seconds(node: fx.Node, profile: DeviceProfile) -> Seconds:
    """Return the seconds in which a convolution's weights are reordered for the library's kernels, at every call.

    In backward the gradient of the weights is reordered as well.
    """
    call = call_of(node)
    weights = [tensor for tensor in tensors_in(fakes(call.args[1:3])) if tensor.dim() > 2]
    count = max((own_bytes(tensor) // tensor.itemsize for tensor in weights[-1:]), default=0)
    ways = 2 if ops.rule(call.target).cost.kind == "convolution_backward" else 1
    return _per(ways * count, profile.elements, "convolution_weights", node)


def _share(node: fx.Node) -> float:
    """Return the share of its products that ``node`` computes: 1, but less for fused attention with a causal mask.

    Such attention leaves out what the mask hides: half of the products, or less where it works on whole blocks.
    """
    call = call_of(node)
    if argument_of(call.target, call.args, call.kwargs, "is_causal") is not True:
        return 1.0
    cost = ops.rule(call.target).cost
    if not cost.causal_blocks:
        return 0.5
    first = 1 if cost.kind == "attention_backward" else 0  # behind the gradient
    query, key = itertools.islice(tensors_in(fakes(call.args[first:])), 2)
    return causal_share(query.shape[-2], key.shape[-2])


def _per(count: int, rates: Rates, kind: str, node: fx.Node) -> Seconds:
    """Return the seconds of ``count`` FLOPs or elements at the rate of ``kind`` for the dtype of ``node``.

    A dtype without a rate takes that of float32, halved for float64 and complex64. The result is 0 where there is none.
    """
    by_dtype = rates.get(kind)
    while not by_dtype and kind in NEXT:
        kind = NEXT[kind]
        by_dtype = rates.get(kind)
    if not by_dtype or not count:
        return 0.0
    dtype = dtype_of(node)
    name = str(dtype).removeprefix("torch.")
    if name in by_dtype:
        return count / by_dtype[name]
    slower = 2 if dtype in (torch.float64, torch.complex64) else 1
    return count * slower / by_dtype["float32"] if "float32" in by_dtype else 0.0


def dtype_of(node: fx.Node) -> torch.dtype:
    """Return the dtype of the first floating-point result, else of the first such argument, else float32."""
    results = [tensor for _, tensor in tensors_of(node)]
    call = call_of(node)
    both = [*results, *tensors_in(fakes([*call.args, *call.kwargs.values()]))]
    return next((tensor.dtype for tensor in both if tensor.is_floating_point()), torch.float32)

"""Operators with other names and the same values, for the judge of values.

Shares no code with the passes and rewritings that exchange such operators: what they claim to be the same stands here a
second time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from roamc.graph.train_graph import tensors_of
from roamc.graph.value_numbers import Key, Number
from roamc.operators import ops
from roamc.operators.random import dropout_mask

if TYPE_CHECKING:
    from roamc.graph.value_flow import Walk

aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """One call: its node; what is called with which arguments; their keys; state of the generator; name if it may
    give other bits the next time."""

    node: fx.Node
    target: Any
    args: Sequence[Any]
    keys: tuple[Key, Key]
    state: Number | None
    once: str | None


def _dropout(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """On a CPU a dropout draws its mask, whatever the input, and multiplies by it and by the scale, rounded to the
    input's dtype; ``native_dropout_backward`` is that product."""
    if len(call.args) != 3 or call.args[2] is False or not call.args[1]:
        return None
    tensors = dict(tensors_of(call.node))
    (x,) = (tensor for _, tensor in tensors_of(call.args[0]))
    dropped, mask = tensors[0], tensors[1]
    if x.device.type != "cpu" or not x.is_contiguous() or not mask.is_contiguous() or dropped.stride() != x.stride():
        return None
    keep = 1.0 - float(call.args[1])
    drawn = list(map(int, mask.shape)), list(map(int, mask.stride())), keep
    keys = walk.keys(dropout_mask, drawn, {"device": mask.device})
    number = walk.called(dropout_mask, keys, call.state)
    drops = walk.numbers.of("part", number, 0)
    (place,) = (place for place in walk.numbers.places(call.node) if place.position == 1)
    (scale,), _ = walk.keys(dropout_mask, [_held(1.0 / keep if keep else 0.0, x.dtype)], {})
    product = call.keys[0][0], ("read", drops, place.geometry), scale
    kept = walk.called(aten.native_dropout_backward.default, (product, ()))
    return number, {0: walk.numbers.of("part", kept, 0), 1: drops}


def _batch_norm(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """In training the running statistics change nothing of what is normalised: as if there were none."""
    (x, weight, bias, _, _, training, momentum, epsilon), keywords = call.keys
    if keywords or call.args[5] is not True:
        return None
    plain = x, weight, bias, training, momentum, epsilon
    same = walk.called(aten._native_batch_norm_legit.no_stats, (plain, ()))
    return walk.number(call), {position: walk.numbers.of("part", same, position) for position in range(3)}


def _scattered(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """A write to a part of the first argument, whether that part is written itself or a copy of the whole is made."""
    base, value = call.args[:2]
    whole, written = base.meta["val"], value.meta["val"]
    if call.keys[1] or whole.dtype != written.dtype:
        return None
    numbers = walk.numbers
    (lies,), (result,) = numbers.places(base), numbers.places(call.node)
    view: Any = numbers.target(call.target).rule.part
    key = numbers.target(view).number, lies.geometry, call.keys[0][2:]
    (part,) = numbers.lies(key, whole, lambda: view(whole, *call.args[2:]))
    content, elements = walk.content(lies), walk.elements(value)
    if lies.whole and lies.geometry == result.geometry:
        found = numbers.patched(content, part, elements)
    else:
        found = numbers.patched_part(content, lies, part, elements)
    return numbers.of("scattered", found), {0: found}


def _copied(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """The second argument in the shape of the first, in whatever place."""
    into, source = call.args[:2]
    target, value = into.meta["val"], source.meta["val"]
    if target.dtype != value.dtype or target.device != value.device:
        return None
    (lies,) = walk.numbers.places(source)
    key = "expanded", lies.geometry, tuple(target.shape)
    (expanded,) = walk.numbers.lies(key, value, lambda: aten.expand.default(value, list(target.shape)))
    found = walk.numbers.of("copied", walk.content(lies), expanded.geometry)
    (result,) = walk.numbers.places(call.node)
    if result.whole and call.node.target is call.target:  # as if it were written over all that was there
        found = walk.numbers.patched(found, result, walk.uncopied(found))
    return walk.number(call), {0: found}


def _cloned(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """A copy that lies as what it copies, of all that is in a storage."""
    (lies,), (result,) = walk.numbers.places(call.args[0]), walk.numbers.places(call.node)
    if not lies.whole or lies.geometry != result.geometry:
        return None
    return walk.number(call), {0: walk.content(lies)}


Equal = Callable[["Walk", Call], tuple[Number, dict[int, Number]] | None]

EQUAL: dict[object, Equal] = {
    aten.native_dropout.default: _dropout,
    aten._native_batch_norm_legit.default: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.clone.default: _cloned,
}
"""Operator to the number of a call, and of those of its results that another operator makes as well."""


def equal_of(target: Any, rule: ops.OpRule) -> Equal | None:
    """What gives a call of ``target`` its number, and those of its results that another operator makes as well."""
    if rule.part is not None:
        return _scattered
    return _copied if rule.broadcasts else EQUAL.get(target)


def _held(value: float, dtype: torch.dtype) -> float:
    """``value`` as an element of ``dtype`` holds it, rounded to float32 on the way if that is narrower."""
    if dtype is torch.float64:
        return value
    (bits,) = struct.unpack("I", struct.pack("f", value))
    if dtype is torch.bfloat16:
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    (single,) = struct.unpack("f", struct.pack("I", bits))
    if dtype is not torch.float16:
        return float(single)
    try:
        return float(struct.unpack("e", struct.pack("e", single))[0])
    except OverflowError:
        return float("inf")

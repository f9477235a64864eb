"""Which calls of different operators give the same values, for :mod:`roamc.graph.value_flow`.

Shares no code with the passes and rewritings that exchange such operators, so that it can check them: what they claim
to be the same stands here a second time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from roamc.graph.train_graph import placeholders, tensors_of
from roamc.graph.value_numbers import Key, Number
from roamc.operators import ops
from roamc.operators.composite import Composite
from roamc.operators.products_sent import ALL_GATHER_MM, MM_REDUCE_SCATTER
from roamc.operators.random import dropout_mask
from roamc.operators.scores import label_scores, nll_of_scores
from roamc.operators.split_collectives import STARTS

if TYPE_CHECKING:
    from roamc.graph.value_walk import Walk

aten = torch.ops.aten
_COLLECTIVES: Any = torch.ops.roamc_collective


@dataclass(frozen=True)
class Call:
    """One call of an operator, and what its value number is made of, see :mod:`roamc.graph.value_numbers`.

    Attributes:
        node: the node that calls.
        target: the operator; of one that writes over its first argument, the form that makes a new value.
        args: the positional arguments.
        keys: keys of the positional and of the keyword arguments, see :meth:`roamc.graph.value_walk.Walk.keys`.
        state: number of the generator's state; None if the operator draws nothing.
        once: name of the node if another call with the same keys and state may give other bits; else None.
    """

    node: fx.Node
    target: Any
    args: Sequence[Any]
    keys: tuple[Key, Key]
    state: Number | None
    once: str | None


def _dropout(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """A dropout on a CPU is ``dropout_mask``, then ``native_dropout_backward`` of input, mask and the rounded scale."""
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
    scaled = walk.called(aten.native_dropout_backward.default, (product, ()))
    return number, {0: walk.numbers.of("part", scaled, 0), 1: drops}


def _batch_norm(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """In training a batch norm's first three results are those of ``no_stats``: it reads no running statistics."""
    (x, weight, bias, _, _, training, momentum, epsilon), keywords = call.keys
    if keywords or call.args[5] is not True:
        return None
    plain = x, weight, bias, training, momentum, epsilon
    same = walk.called(aten._native_batch_norm_legit.no_stats, (plain, ()))
    return walk.number(call), {position: walk.numbers.of("part", same, position) for position in range(3)}


def _loss(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """A loss of rows of classes, without weights of classes, is ``nll_of_scores`` of ``label_scores``."""
    (scores, labels, *_), named = call.keys
    rows: torch.Tensor = call.args[0].meta["val"]
    if named or rows.dim() != 2 or call.args[2] is not None:
        return None
    *_, reduction, ignored = call.args
    how, _ = walk.keys(label_scores, ([1], False, ignored), {})
    picked = walk.numbers.of("part", walk.called(label_scores, ((scores, labels, *how), ())), 0)
    read = "read", picked, walk.numbers.in_rows(rows.shape[:1], rows.dtype)
    how, _ = walk.keys(nll_of_scores, (int(rows.shape[1]), reduction, ignored), {})
    number = walk.called(nll_of_scores, ((read, labels, *how), ()))
    return number, {position: walk.numbers.of("part", number, position) for position in range(2)}


def _scattered(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """A copy of the first argument with a part overwritten has the content of that argument after a write in place."""
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
        after = numbers.patched(content, part, elements)
    else:
        after = numbers.patched_part(content, lies, part, elements)
    return numbers.of("scattered", after), {0: after}


def _copied(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """``copy`` has the elements of its second argument in the shape of the first, wherever the result lies."""
    into, source = call.args[:2]
    target, value = into.meta["val"], source.meta["val"]
    if target.dtype != value.dtype or target.device != value.device:
        return None
    (lies,) = walk.numbers.places(source)
    key = "expanded", lies.geometry, tuple(target.shape)
    (expanded,) = walk.numbers.lies(key, value, lambda: aten.expand.default(value, list(target.shape)))
    (result,) = walk.numbers.places(call.node)
    elements = walk.numbers.unpadded(walk.content(lies), expanded.geometry)
    content = walk.numbers.of("copied", *elements, result.geometry)
    if result.whole and call.node.target is call.target:  # as if it were written over all that was there
        content = walk.numbers.patched(content, result, walk.uncopied(content))
    return walk.number(call), {0: content}


def _cloned(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """A copy of a whole storage, or of all rows that lie apart in one, has its content if it lies as that did."""
    (lies,), (result,) = walk.numbers.places(call.args[0]), walk.numbers.places(call.node)
    content, geometry = walk.numbers.unpadded(walk.content(lies), lies.geometry)
    whole = lies.whole or walk.numbers.has_all_rows(walk.content(lies), lies.geometry)
    return (walk.number(call), {0: content}) if whole and geometry == result.geometry else None


def _by_another_library(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]]:
    """A product by oneDNN or by aligned copies counts as ATen's; the judge refuses it where that is not allowed."""
    number = walk.called(ATEN[call.target], call.keys, call.state)
    return number, {0: walk.numbers.of("part", number, 0)}


def _padded_product(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """A product with padded rows is ATen's, with rows further apart."""
    number, results = _by_another_library(walk, call)
    return number, {0: _further_apart(walk, call, results[0])}


def _padded_copy(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """A copy with padded rows of a whole storage has that storage's rows further apart."""
    (lies,), tensor = walk.numbers.places(call.args[0]), call.args[0].meta["val"]
    if tensor.dim() < 2 or not lies.whole or lies.geometry != walk.numbers.in_rows(tensor.shape, tensor.dtype):
        return None
    return walk.number(call), {0: _further_apart(walk, call, walk.content(lies))}


def _further_apart(walk: Walk, call: Call, content: Number) -> Number:
    result: torch.Tensor = call.node.meta["val"]
    return walk.numbers.padded(content, walk.numbers.in_rows(result.shape, result.dtype), int(result.stride(-2)))


def _products_of_gathered(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """``all_gather_mm`` is an all-gather, whose number it has, and products of what that gives."""
    (rows, others, *rest, _, biases), _ = call.keys
    source, ranks = call.args[0].meta["val"], call.args[2]
    gather = walk.called(_COLLECTIVES.all_gather_into_tensor.default, ((rows, *rest), ()), call.state, call.once)
    gathered = walk.numbers.of("part", gather, 0)
    geometry = walk.numbers.in_rows((source.shape[0] * ranks, *source.shape[1:]), source.dtype)
    read, added = ("read", gathered, geometry), call.args[5] or [None] * len(call.args[1])
    parts = zip(others[1:], added, biases[1:] or added, strict=True)
    products = [_multiplied(walk, read, other, key if bias is not None else None) for other, bias, key in parts]
    results = {at: walk.numbers.of("part", product, 0) for at, product in enumerate(products)}
    return gather, {**results, len(products): gathered} if call.args[4] else results


def _multiplied(walk: Walk, left: Key, right: Key, bias: Key | None) -> Number:
    """The number of a product to which ``bias`` is added, unless that is None."""
    if bias is None:
        return walk.called(aten.mm.default, ((left, right), ()))
    return walk.called(aten.addmm.default, ((bias, left, right), ()))


def _products_reduced(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """``mm_reduce_scatter`` is a reduce-scatter, whose number it has, of products that are added up from the first."""
    (inputs, others, bias, *rest), _ = call.keys
    first, columns = call.args[0][0].meta["val"], call.args[1][0].meta["val"]
    geometry = walk.numbers.in_rows((first.shape[0], columns.shape[1]), first.dtype)
    biases = [bias if call.args[2] is not None else None, *[None] * (len(inputs) - 2)]
    total: Key = ()
    for left, right, added in zip(inputs[1:], others[1:], biases, strict=True):
        product = "read", walk.numbers.of("part", _multiplied(walk, left, right, added), 0), geometry
        if total:
            product = "read", walk.numbers.of("part", walk.called(aten.add.Tensor, ((total, product), ())), 0), geometry
        total = product
    scatter = walk.called(_COLLECTIVES.reduce_scatter_tensor.default, ((total, *rest), ()), call.state, call.once)
    return scatter, {0: walk.numbers.of("part", scatter, 0)}


def _finished_later(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """A collective that is only started gives what the finished one gives: nothing reads it before the wait."""
    return walk.called(FINISHED_FORM[call.target], call.keys, call.state, call.once), {}


def _member_by_member(walk: Walk, call: Call) -> tuple[Number, dict[int, Number]] | None:
    """A group has the number of the member of its name, and the results of its members, which run one after the other.

    What it writes over its arguments counts as results -1, -2 and so on.
    """
    places = [place for argument in call.args for place in walk.numbers.places(argument)]
    inner_places = [place for node in placeholders(call.target.body) for place in walk.numbers.places(node)]
    if [place.geometry for place in places] != [place.geometry for place in inner_places]:
        return None
    number, contents = walk.run(call.target.body, [walk.given(argument) for argument in call.args], call.node.name)
    results = len(contents) - len(walk.numbers.target(call.target).rule.mutates)
    written = {-1 - at: content for at, content in enumerate(contents[results:])}
    return number, {**dict(enumerate(contents[:results])), **written}


ATEN: dict[object, Any] = {
    torch.ops.roamc.onednn_mm.default: aten.mm.default,
    torch.ops.roamc.onednn_addmm.default: aten.addmm.default,
    torch.ops.roamc.onednn_bmm.default: aten.bmm.default,
    torch.ops.roamc.aligned_mm.default: aten.mm.default,
    torch.ops.roamc.aligned_addmm.default: aten.addmm.default,
    torch.ops.roamc.padded_mm.default: aten.mm.default,
    torch.ops.roamc.padded_addmm.default: aten.addmm.default,
}
"""Operator that sums in another order, so that last bits differ, to the operator of ATen that it stands for."""

OTHER_SUMS: dict[object, object] = {
    **ATEN,
    ALL_GATHER_MM: "an all-gather and its products",
    MM_REDUCE_SCATTER: "products and their reduce-scatter",
}
"""Operator that sums in another order, to what sums in the order that eager does, for a message."""

FINISHED_FORM: dict[object, Any] = {start: finished for finished, start in STARTS.items()}
"""Operator that starts a collective to the one that also waits for it."""

Equal = Callable[["Walk", Call], tuple[Number, dict[int, Number]] | None]
"""Function of a walk and a call that returns the number of the call, and the numbers of some results by position.

The results are those that another operator makes too. None if no other call gives the same values.
"""

EQUAL: dict[object, Equal] = {
    aten.native_dropout.default: _dropout,
    aten._native_batch_norm_legit.default: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.clone.default: _cloned,
    aten.nll_loss_forward.default: _loss,
    **dict.fromkeys(ATEN, _by_another_library),
    torch.ops.roamc.padded_mm.default: _padded_product,
    torch.ops.roamc.padded_addmm.default: _padded_product,
    torch.ops.roamc.padded_rows.default: _padded_copy,
    **dict.fromkeys(FINISHED_FORM, _finished_later),
    ALL_GATHER_MM: _products_of_gathered,
    MM_REDUCE_SCATTER: _products_reduced,
}
"""Operator to the function that numbers its calls and results, for operators whose results another one makes too."""


def equal_of(target: Any, rule: ops.OpRule) -> Equal | None:
    """Return the function that numbers calls of ``target``; None if no other operator makes the same results.

    ``Equal`` says what the function takes and returns.

    Args:
        target: an operator, or a group of operators that run as one.
        rule: what the operator table says of ``target``.
    """
    if isinstance(target, Composite):
        return _member_by_member
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

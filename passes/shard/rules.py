"""What an operator does on some rows of its arguments: one function for each family of operators.

    captured                                           on this rank's tokens
    y = add(x [b, s, h], p [s, h])                     y' = add(x' [n, h], part of p expanded to [b, s, h])
    m = mean(x [b, s, h], [2], True)                   m' = mean(x' [n, h], [1], True)
    g = sum(x [b, s, h], [0, 1])                       g' = sum(x' [n, h], [0]), and g is the sum of all g'
    y = mm(x [bs, h], w [h, v])                        y' = mm(x' [n, h], w)
    d = mm(t(g [bs, v]), x [bs, h])                    d' = mm(t(g' [n, v]), x' [n, h]), and d is the sum of all d'
    l, c = nll_loss_forward(p, labels, mean)           l', c' = nll_loss_forward(p', labels', sum); l is the sum of all
                                                       l' divided by c, the sum of all c', the count of valid tokens

What a row is, and which dimensions count tokens, says :mod:`roamc.passes.shard.rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from roamc.compat import OpOverload
from roamc.compat_operators import is_pointwise
from roamc.operators import ops
from roamc.operators.table import Rowwise
from roamc.passes.shard.rows import Addend, Form, Indices, Local, Part, Rows, Turned, Whole

aten = torch.ops.aten


def local(node: fx.Node, rows: Rows) -> Local | None:
    """Return what ``node`` becomes on this rank's tokens; None if it needs the whole of an argument.

    Args:
        node: a ``call_function`` node, but no collective and no ``getitem``.
        rows: the region.
    """
    target = node.target
    if not isinstance(target, OpOverload) or not _sized(node):
        return None
    rule = RULES.get(target)
    if rule is not None:
        return rule(node, rows)
    facts = ops.rule(target)
    if facts.mutates or facts.may_draw or facts.collective:
        return None
    if facts.renames or facts.broadcasts:
        return _renamed(node, rows)
    along = facts.rowwise
    if along is not None and along.dim is not None:
        return _along(node, rows, along)
    pointwise = target.namespace == "aten" and is_pointwise(target)
    if target in ELEMENTWISE or (pointwise and not facts.view_of) or along == Rowwise():
        return _elementwise(node, rows)
    return None


def _sized(node: fx.Node) -> bool:
    """Whether all sizes of the results are numbers."""
    value = node.meta.get("val")
    results = value if isinstance(value, list | tuple) else (value,)
    return all(isinstance(size, int) for item in results if isinstance(item, torch.Tensor) for size in item.shape)


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _part(node: object, rows: Rows) -> Part | None:
    """``node`` as rows, if its leading dimensions count the tokens and all ranks agree on it."""
    if not isinstance(node, fx.Node) or rows.form(node) is Form.SUM:
        return None
    shape = _shape(node)
    if shape is None or rows.lead(shape) is None or (rows.form(node) is None and rows.varies(node)):
        return None
    return Part(node)


def _whole(node: Any, rows: Rows) -> bool:
    """Whether an argument is no tensor, or one that all ranks have whole and alike."""
    return not isinstance(node, fx.Node) or (rows.form(node) is None and not rows.varies(node))


def _elementwise(node: fx.Node, rows: Rows) -> Local | None:
    """Every element of the result depends on the elements of the arguments at its place."""
    shape = _shape(node)
    lead = None if shape is None else rows.lead(shape)
    if shape is None or lead is None or any(isinstance(value, fx.Node) for value in node.kwargs.values()):
        return None
    if node.kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        return None
    sums = _sum_of_sums(node, rows)
    if sums is not None:
        return sums
    args: list[Any] = []
    for value in node.args:
        operand = _operand(value, shape, lead, rows)
        if operand is None and value is not None:
            return None
        args.append(operand)
    if node.target in DIVISIONS and isinstance(args[1], Part) and not args[1].node.meta["val"].is_floating_point():
        return None  # it raises where a divisor is 0, on all ranks
    kwargs = {key: value for key, value in node.kwargs.items() if key != "memory_format"}
    return Local(node.target, tuple(args), (Form.SHARD,), kwargs)


def _operand(value: Any, shape: tuple[int, ...], lead: int, rows: Rows) -> Any:
    """An argument that is broadcast to ``shape``: as it is, as rows, or with its token dimensions of size 1 cut off."""
    if isinstance(value, list | tuple):
        return None if any(isinstance(item, fx.Node) for item in value) else value
    if not isinstance(value, fx.Node):
        return value
    own = _shape(value)
    if own is None or rows.form(value) is Form.SUM:
        return None
    padded = (1,) * (len(shape) - len(own)) + own
    if rows.form(value) is Form.SHARD:
        return Part(value) if padded == own and own[:lead] == shape[:lead] else None
    if rows.varies(value):
        return None
    if all(size == 1 for size in padded[:lead]):
        behind = len(shape) - lead
        return Whole(value) if len(own) <= behind else Whole(value, own[len(own) - behind :] or (1,))
    full = (*shape[:lead], *padded[lead:])
    return Part(value, () if full == own else full)


def _sum_of_sums(node: fx.Node, rows: Rows) -> Local | None:
    """A sum with an addend among its arguments is one, whatever the other is; for other operators None."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    args: list[Any] = []
    for value in node.args:
        if not isinstance(value, fx.Node) or not _alike(value, node):
            return None
        form = rows.form(value)
        if form is None:
            return None
        args.append(Addend(value) if form is Form.SUM else Part(value))
    return Local(node.target, tuple(args), (Form.SUM,)) if any(isinstance(term, Addend) for term in args) else None


def _alike(value: fx.Node, node: fx.Node) -> bool:
    first, second = value.meta["val"], node.meta["val"]
    return isinstance(first, torch.Tensor) and first.shape == second.shape and first.dtype == second.dtype


def _renamed(node: fx.Node, rows: Rows) -> Local | None:
    """A copy, or another name, of an argument of the same shape and dtype: that argument itself."""
    source = node.args[1 if ops.rule(node.target).broadcasts else 0]
    if not isinstance(source, fx.Node) or not _alike(source, node):
        return None
    if rows.form(source) is Form.SUM:
        return Local(None, (Addend(source),), (Form.SUM,))
    part = _part(source, rows)
    return None if part is None else Local(None, (part,), (Form.SHARD,))


def cuts_nothing(node: fx.Node) -> bool:
    """Return whether ``node`` cuts its argument along one dimension, from the first element to the last.

    DTensor cuts so what it gathers, in case the ranks do not divide it.
    """
    return node.target in SLICES and isinstance(node.args[0], fx.Node) and _alike(node.args[0], node)


def _sliced(node: fx.Node, rows: Rows) -> Local | None:
    """A part of an argument along one dimension: for all of it, that argument itself."""
    source = node.args[0]
    part = _part(source, rows) if cuts_nothing(node) else None
    return None if part is None else Local(None, (part,), (Form.SHARD,))


def _along(node: fx.Node, rows: Rows, along: Rowwise) -> Local | None:
    """Operators along some dimensions, named by an argument: those of the rows, or all that count tokens in a sum."""
    at = along.dim
    first = _shape(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    lead = None if first is None else rows.lead(first)
    if at is None or first is None or lead is None or along.per_row or along.whole or at >= len(node.args):
        return None
    named: Any = node.args[at]
    dims = [named] if isinstance(named, int) else list(named or range(len(first)))
    dims = [dim % len(first) for dim in dims]
    parts: list[Any] = [_part(value, rows) if isinstance(value, fx.Node) else value for value in node.args]
    if any(value is None and isinstance(node.args[i], fx.Node) for i, value in enumerate(parts)):
        return None
    inside = [dim - lead + 1 for dim in dims if dim >= lead]
    tokens = [dim for dim in dims if dim < lead]
    if tokens and (node.target is not aten.sum.dim_IntList or len(tokens) != lead):
        return None
    if tokens and rows.form(node.args[0]) is not Form.SHARD:  # type: ignore[arg-type]
        return None
    parts[at] = inside[0] if isinstance(named, int) else [0, *inside] if tokens else inside
    return Local(node.target, tuple(parts), (Form.SUM if tokens else Form.SHARD,), node.kwargs)


def _sum(node: fx.Node, rows: Rows) -> Local | None:
    """The sum of all elements."""
    source = node.args[0]
    if node.kwargs or not isinstance(source, fx.Node) or rows.form(source) is not Form.SHARD:
        return None
    return Local(node.target, (Part(source),), (Form.SUM,))


def _norm(node: fx.Node, rows: Rows) -> Local | None:
    """Layer and RMS norms over dimensions of the rows: all results have one entry or one row for each token."""
    return _with_weights(node, rows, parts=(0,), behind=1, forms=(Form.SHARD,) * len(node.meta["val"]))


def _layer_norm_backward(node: fx.Node, rows: Rows) -> Local | None:
    """The gradient of the input is that of each row; those of weight and bias are sums over the tokens."""
    return _norm_backward(node, rows, parts=(0, 1, 3, 4))


def _rms_norm_backward(node: fx.Node, rows: Rows) -> Local | None:
    """The gradient of the input is that of each row; that of the weight is a sum over the tokens."""
    return _norm_backward(node, rows, parts=(0, 1, 3))


def _norm_backward(node: fx.Node, rows: Rows, parts: tuple[int, ...]) -> Local | None:
    output_mask: Any = node.args[-1]
    used = zip((Form.SHARD, *(Form.SUM,) * (len(output_mask) - 1)), output_mask, strict=True)
    return _with_weights(node, rows, parts, behind=2, forms=tuple(form if needed else None for form, needed in used))


def _with_weights(
    node: fx.Node, rows: Rows, parts: tuple[int, ...], behind: int, forms: tuple[Form | None, ...]
) -> Local | None:
    """An operator with rows at the positions ``parts``, weights elsewhere, and the shape of a weight at ``behind``."""
    args: list[Any] = list(node.args)
    for position, value in enumerate(node.args):
        if position in parts:
            args[position] = _part(value, rows)
            if args[position] is None:
                return None
        elif isinstance(value, fx.Node):
            args[position] = Whole(value)
            if not _whole(value, rows):
                return None
    shape = _shape(node.args[parts[0]])  # type: ignore[arg-type]
    lead = None if shape is None else rows.lead(shape)
    fits = shape is not None and lead is not None and len(args[behind]) <= len(shape) - lead
    return Local(node.target, tuple(args), forms) if fits and not node.kwargs else None


def _dropout(node: fx.Node, rows: Rows) -> Local | None:
    """Dropout and its mask: a rank drops with its rows of the mask that one rank draws."""
    part, shape = _part(node.args[0], rows), _shape(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    share, train = node.args[1:3]
    if part is None or shape is None or train is False or not isinstance(share, float) or not 0 < share < 1:
        return None
    return Local(node.target, (part, share), (Form.SHARD, Form.SHARD))


def _embedding(node: fx.Node, rows: Rows) -> Local | None:
    """Rows of a table by index: one index for each token."""
    table, index = node.args[:2]
    part = _part(index, rows)
    if part is None or node.kwargs or not isinstance(table, fx.Node) or not _whole(table, rows):
        return None
    shape, indices = _shape(node), _shape(part.node)
    if shape is None or indices is None or rows.lead(shape) != rows.lead(indices) or len(indices) >= len(shape):
        return None
    own = Indices(part.node, int(table.meta["val"].shape[0]), None)
    return Local(node.target, (Whole(table), own, *node.args[2:]), (Form.SHARD,))


def _product(node: fx.Node, rows: Rows) -> Local | None:
    """A product of rows with a matrix that all ranks have, or one that adds up over the tokens: a weight's gradient."""
    if node.kwargs:
        return None
    *bias, left, right = node.args
    inner = turned(left)
    if inner is not None and not bias and _is_matrix_of_rows(inner, rows) and _is_matrix_of_rows(right, rows):
        return Local(node.target, (Turned(left), Part(right)), (Form.SUM,))  # type: ignore[arg-type]
    part, shape = _part(left, rows), _shape(left) if isinstance(left, fx.Node) else None
    if part is None or shape is None or rows.lead(shape) != 1:
        return None
    if not isinstance(right, fx.Node) or not _whole(right, rows):
        return None
    added = [Whole(value) for value in bias if isinstance(value, fx.Node) and _whole(value, rows)]
    per_token = any((1, 1, *value.node.meta["val"].shape)[-2] != 1 for value in added)
    if per_token or len(added) != len(bias):
        return None
    return Local(node.target, (*added, part, Whole(right)), (Form.SHARD,))


def turned(node: object) -> fx.Node | None:
    """Return the matrix that ``node`` is a view of with its two dimensions exchanged; None for anything else."""
    if not isinstance(node, fx.Node) or node.target not in TURNS:
        return None
    source = node.all_input_nodes[0]
    exchanged = node.target is aten.t.default or sorted(at % 2 for at in node.args[1:]) == [0, 1]  # type: ignore[operator]
    return source if len(source.meta["val"].shape) == 2 and exchanged else None


def _is_matrix_of_rows(node: object, rows: Rows) -> bool:
    """Whether a rank has rows of a matrix with one row for each token."""
    if not isinstance(node, fx.Node) or rows.form(node) is not Form.SHARD:
        return False
    shape = _shape(node)
    return shape is not None and len(shape) == 2 and rows.lead(shape) == 1


def _turned_sum(node: fx.Node, rows: Rows) -> Local | None:
    """A matrix with its dimensions exchanged, of which a rank has an addend."""
    source = turned(node)
    if source is None or rows.form(source) is not Form.SUM:
        return None
    return Local(node.target, (Addend(source), *node.args[1:]), (Form.SUM,))


NONE, MEAN, SUM = 0, 1, 2
"""What a loss does with those of the tokens, as its operators number it."""


def _nll_loss(node: fx.Node, rows: Rows) -> Local | None:
    """The loss of each token, or their sum, and the sum of the tokens' weights; see :func:`divides` for their mean."""
    scores, target, weight, reduction, ignored = node.args
    parts = _scores_and_target(scores, target, ignored, rows)
    if parts is None or not _whole(weight, rows) or overflows(node):
        return None
    how = NONE if reduction == NONE else SUM
    first = Form.SHARD if reduction == NONE else Form.SUM
    return Local(node.target, (*parts, _optional(weight), how, ignored), (first, Form.SUM))


def _nll_loss_backward(node: fx.Node, rows: Rows) -> Local | None:
    """The gradient of each row of scores; a mean is divided by the weights of the tokens of all ranks."""
    gradient, scores, target, weight, reduction, ignored, total = node.args
    parts = _scores_and_target(scores, target, ignored, rows)
    if parts is None or not _whole(weight, rows) or not _is_number(total, rows):
        return None
    own = _part(gradient, rows) if reduction == NONE else Whole(gradient)  # type: ignore[arg-type]
    if own is None or (reduction != NONE and not _is_number(gradient, rows)):
        return None
    args = (own, *parts, _optional(weight), reduction, ignored, Whole(total))  # type: ignore[arg-type]
    return Local(node.target, args, (Form.SHARD,))


def divides(node: fx.Node) -> bool:
    """Return whether ``node`` is a loss that divides by the weights of all tokens, as the ranks do with their sums."""
    return node.target is aten.nll_loss_forward.default and bool(node.args[3] == MEAN)


def overflows(node: fx.Node) -> bool:
    """Return whether a loss divides before it rounds to half precision, which has no room for the sum over tokens."""
    return divides(node) and node.meta["val"][0].dtype is torch.float16


def _scores_and_target(scores: object, target: object, ignored: Any, rows: Rows) -> tuple[Part, Indices] | None:
    """Rows of scores, one for each token, and the class of each token."""
    parts = _part(scores, rows), _part(target, rows)
    if parts[0] is None or parts[1] is None:
        return None
    shapes = [_shape(part.node) or () for part in parts if part is not None]
    fits = [len(shape) for shape in shapes] == [2, 1] and all(rows.lead(shape) == 1 for shape in shapes)
    return (parts[0], Indices(parts[1].node, shapes[0][1], ignored)) if fits else None


def _is_number(node: object, rows: Rows) -> bool:
    """Whether ``node`` is one element, which all ranks have once it is summed."""
    return isinstance(node, fx.Node) and _shape(node) == () and (rows.form(node) is Form.SUM or _whole(node, rows))


def _optional(weight: object) -> Whole | None:
    return Whole(weight) if isinstance(weight, fx.Node) else None


def _reshaped(node: fx.Node, rows: Rows) -> Local | None:
    """A view with the same elements in the same order."""
    source, shape = node.args[0], _shape(node)
    if not isinstance(source, fx.Node) or shape is None:
        return None
    if rows.form(source) is Form.SUM:
        return Local(aten.view.default, (Addend(source), list(shape)), (Form.SUM,))
    part, lead, before = _part(source, rows), rows.lead(shape), _shape(source)
    if part is None or lead is None or before is None:
        return None
    old = rows.own(before, rows.lead(before) or 0)
    own = rows.own(shape, lead)
    if old == own:
        return Local(None, (part,), (Form.SHARD,))
    return Local(aten.view.default, (part, list(own)), (Form.SHARD,))


def _expanded(node: fx.Node, rows: Rows) -> Local | None:
    """Rows that are repeated along dimensions of their own."""
    source, shape = node.args[0], _shape(node)
    part = _part(source, rows)
    before = _shape(part.node) if part else None
    if part is None or shape is None or before is None or node.kwargs:
        return None
    lead = rows.lead(before)
    if lead is None or len(before) != len(shape) or before[:lead] != shape[:lead]:
        return None
    return Local(node.target, (part, list(rows.own(shape, lead))), (Form.SHARD,))


Rule = Callable[[fx.Node, Rows], Local | None]

ELEMENTWISE = frozenset(
    {
        *(aten.clone.default, aten._to_copy.default, aten.native_dropout_backward.default),
        *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    }
)
"""Operators that work element by element though torch does not say so."""

INDICES: dict[object, int] = {
    aten.embedding.default: 1,
    aten.nll_loss_forward.default: 1,
    aten.nll_loss_backward.default: 2,
}
"""Operator that raises where an index is out of range, to the position of the indices."""

DIVISIONS = frozenset({aten.div.Tensor_mode, aten.remainder.Tensor, aten.remainder.Scalar_Tensor, aten.fmod.Tensor})
"""Operators that raise where an integer is divided by 0."""

RESHAPES: tuple[OpOverload, ...] = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
)

SLICES: tuple[OpOverload, ...] = (aten.slice.Tensor, aten.slice_backward.default)

TURNS: tuple[OpOverload, ...] = (aten.t.default, aten.transpose.int)

PRODUCTS: tuple[OpOverload, ...] = (aten.mm.default, aten.addmm.default)

RULES: dict[object, Rule] = {
    **dict.fromkeys(RESHAPES, _reshaped),
    **dict.fromkeys(TURNS, _turned_sum),
    **dict.fromkeys(SLICES, _sliced),
    **dict.fromkeys(PRODUCTS, _product),
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.expand.default: _expanded,
    aten.sum.default: _sum,
    aten.native_dropout.default: _dropout,
    aten.native_layer_norm.default: _norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.embedding.default: _embedding,
    aten.logsumexp.default: lambda node, rows: _along(node, rows, Rowwise(dim=1)),
}
"""Operator to its rule, where it does not follow from the operator table."""

for _name, _rule in (("_fused_rms_norm", _norm), ("_fused_rms_norm_backward", _rms_norm_backward)):
    if hasattr(aten, _name):  # torch 2.11 has neither
        RULES[getattr(aten, _name).default] = _rule

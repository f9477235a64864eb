"""What a rank has of the result of one operator, for :mod:`roamc.graph.shard_judge`: one rule for each family.

The states R, T and P, and what follows from them, are described there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from roamc.graph import tensors_of
from roamc.graph.shard_terms import Term, merged
from roamc.graph.storage_ids import ids_of
from roamc.operators import ops

if TYPE_CHECKING:
    from roamc.graph.shard_judge import Walk

aten = torch.ops.aten

R, T, P, C, V, L, M = "R", "T", "P", "C", "V", "L", "M"


@dataclass(frozen=True)
class Value:
    """What a rank has of one tensor.

    Attributes:
        term: number of the tensor's elements, equal for equal elements, see :mod:`roamc.graph.shard_terms`.
        state: what the rank has: "R", the whole tensor; "T", the rows of its own tokens; "P", an addend, where the
            tensor is the sum over the ranks; "C", those columns of a matrix that are rows of its own tokens in the
            matrix with the dimensions exchanged; "V", its own classes, along the last dimension; "L", targets as it
            counts its own classes; "M", an operand, where the tensor is the maximum over the ranks.
        shape: shape of the tensor; in states T, C and V that of the tensor with the parts of all ranks.
        group: name and size of the group whose ranks share the rows or the sum; None in state R.
    """

    term: Term
    state: str
    shape: tuple[int, ...]
    group: tuple[object, int] | None = None


WORDS = {
    **{R: "the whole", T: "its rows", P: "an addend", C: "its columns"},
    **{V: "its classes", L: "the targets among its classes", M: "an operand of the maximum"},
}


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes of a tensor as plain numbers."""
    return tuple(int(size) for size in tensor.shape)


def local_shape(value: Value) -> tuple[int, ...]:
    """Return the shape of the tensor that a rank has of ``value``: in state T only its own rows count."""
    if value.state not in (T, C, V) or value.group is None:
        return value.shape
    if value.state in (C, V):
        return (*value.shape[:-1], value.shape[-1] // value.group[1])
    return (value.shape[0] // value.group[1], *value.shape[1:])


def single(node: fx.Node) -> bool:
    """Return whether the result of ``node`` is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def literals(node: fx.Node, key: Callable[[fx.Node], object], without: Sequence[int] = ()) -> list[object]:
    """Return the arguments of a call in a form that can be compared and hashed.

    Args:
        node: the call.
        key: returns what stands for an argument that is a node.
        without: positions of arguments that are left out.

    Returns:
        An entry for each positional argument, without Nones at the end, then one for all keyword arguments but
        ``memory_format``.
    """

    def plain(value: Any) -> object:
        if isinstance(value, fx.Node):
            return key(value)
        if isinstance(value, list | tuple):
            return ("list", *map(plain, value))
        if isinstance(value, Mapping):
            return ("map", *((name, plain(value[name])) for name in sorted(value)))
        return (type(value).__name__, str(value))

    positional = [value for at, value in enumerate(node.args) if at not in without]
    while positional and positional[-1] is None:
        positional.pop()
    kwargs = {name: value for name, value in node.kwargs.items() if name != "memory_format"}
    return [*map(plain, positional), plain(kwargs)]


def joined(walk: Walk, node: fx.Node, values: Sequence[Value]) -> tuple[str, tuple[object, int] | None]:
    """Return state and group of what ``node`` makes row by row of ``values``: T if one of them is, else R.

    Args:
        walk: the walk over the graph.
        node: the operator.
        values: what it reads.

    Raises:
        VerifyError: a rank has an addend or columns of one of them, or they are rows of two groups.
    """
    groups = {value.group for value in values if value.state == T}
    for value in values:
        if value.state not in (R, T):
            walk.fail(node, f"reads a value of which a rank has only {WORDS[value.state]}")
    if len(groups) > 1:
        walk.fail(node, "reads rows of ranks of two groups")
    return (T, groups.pop()) if groups else (R, None)


def _same_elements(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """A view or a copy with the same elements in the same order."""
    source: Any = node.args[1 if node.target is aten.copy.default else 0]
    value, tensor, old = walk.values[source][0], node.meta["val"], source.meta["val"]
    converts = source is not node.args[0] and (old.dtype != tensor.dtype or old.shape != tensor.shape)
    if value is None or converts:
        return walk.opaque(node)
    if not ops.is_view(node.target):
        value = walk.argument(source)
        assert value is not None
    shape = shape_of(tensor)
    if value.state == T and value.group is not None:
        shape = (shape[0] * value.group[1], *shape[1:]) if shape else shape
    if value.state == V and value.group is not None:
        if shape[-1:] != local_shape(value)[-1:]:
            walk.fail(node, f"puts other numbers into a row than the classes of which a rank has {WORDS[V]}")
        shape = (*shape[:-1], value.shape[-1])
    return (replace(value, shape=shape),)


def _sliced(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """All of a tensor, or a part of it along one dimension."""
    source: Any = node.args[0]
    return _same_elements(walk, node) if source.meta["val"].shape == node.meta["val"].shape else walk.opaque(node)


def _expanded(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    value, shape = walk.values[node.args[0]][0], shape_of(node.meta["val"])  # type: ignore[index]
    if value is None or value.state not in (R, T):
        return walk.opaque(node)
    if value.state == T and value.group is not None:
        shape = (shape[0] * value.group[1], *shape[1:])
        if len(shape) != len(value.shape) or shape[0] != value.shape[0]:
            walk.fail(node, "repeats the rows of a rank along the tokens")
    return (replace(value, term=walk.terms.expanded(value.term, value.shape, shape), shape=shape),)


def elementwise(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """Return what a rank has of the result of ``node``, which works element by element, with broadcasting.

    Args:
        walk: the walk over the graph, which has passed the arguments of ``node``.
        node: an operator with one tensor as its result.

    Returns:
        One value: in state T if an argument is, in state P for the sum of two addends, else in state R, as
        :class:`Value` explains the states.

    Raises:
        VerifyError: rows, addends and whole values meet in a way that gives no such result.
    """
    operands: dict[fx.Node, Value] = {}
    for argument in node.all_input_nodes:
        value = walk.argument(argument)
        if value is None:
            return walk.opaque(node)
        operands[argument] = value
    plain = node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs
    if plain and len(operands) == len(node.args) and all(value.state == P for value in operands.values()):
        return (_added(walk, node, operands),)
    state, group = joined(walk, node, list(operands.values()))
    shape = shape_of(node.meta["val"])
    if state == T and group is not None:
        shape = (shape[0] * group[1], *shape[1:])
    whole: dict[fx.Node, Term] = {}
    for argument, value in operands.items():
        if state == T:
            _check_rows(walk, node, argument, value, shape, group)
        whole[argument] = walk.terms.expanded(value.term, value.shape, shape)
    if plain and len(operands) == len(set(node.args)):
        parts = [whole[argument] for argument in node.args if isinstance(argument, fx.Node)]
        if len(parts) == len(node.args) and _one_dtype(node):
            return (Value(walk.terms.total(parts), state, shape, group),)
    term = walk.terms.of("elements", node.target, *literals(node, whole.__getitem__))
    return (Value(term, state, shape, group),)


def _elementwise_if_alike(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """An operator that may sum its elements up, which the shape of its result tells."""
    sizes = [shape_of(argument.meta["val"]) for argument in node.all_input_nodes if single(argument)]
    broadcast = torch.broadcast_shapes(*sizes) if sizes else None
    return elementwise(walk, node) if broadcast == shape_of(node.meta["val"]) else walk.opaque(node)


def _one_dtype(node: fx.Node) -> bool:
    dtypes = {argument.meta["val"].dtype for argument in node.all_input_nodes}
    return dtypes == {node.meta["val"].dtype}


def _added(walk: Walk, node: fx.Node, operands: Mapping[fx.Node, Value]) -> Value:
    """The sum of addends of two sums over the ranks."""
    values = [operands[argument] for argument in node.args if isinstance(argument, fx.Node)]
    first = values[0]
    if any(value.group != first.group or value.shape != first.shape for value in values):
        walk.fail(node, "adds sums over different ranks")
    return replace(first, term=walk.terms.total([value.term for value in values]))


def _check_rows(walk: Walk, node: fx.Node, argument: fx.Node, value: Value, shape: tuple[int, ...], group: Any) -> None:
    """Check an argument of an operator that works on rows: rows of the same tokens, or the same for all tokens."""
    if value.state == T:
        if len(value.shape) != len(shape) or value.shape[0] != shape[0]:
            walk.fail(node, f"reads rows of other tokens in {argument.name}")
        return
    padded = (1,) * (len(shape) - len(value.shape)) + value.shape
    if padded[0] != 1:
        walk.fail(node, f"reads {argument.name}, which is whole, as if it were the rows of a rank")
    if not walk.shared(group[0])(value.term):
        walk.fail(node, f"reads {argument.name}, which differs from rank to rank, for the rows of a rank")


def along(position: int) -> Callable[[Walk, fx.Node], tuple[Value | None, ...]]:
    """Return the rule of operators that work along the dimension, or those, that the argument at ``position`` names."""

    def rule(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
        operands = {argument: walk.argument(argument) for argument in node.all_input_nodes}
        first = operands.get(node.args[0])  # type: ignore[arg-type]
        if first is None or any(value is None or value.shape != first.shape for value in operands.values()):
            return walk.opaque(node)
        values = [value for value in operands.values() if value is not None]
        state, group = joined(walk, node, values)
        if state == T and any(value.state != T for value in values):
            walk.fail(node, "reads a whole value as if it were the rows of a rank")
        named: Any = node.args[position] if position < len(node.args) else None
        dims = [named] if isinstance(named, int) else list(named or range(len(first.shape)))
        dims = [dim % len(first.shape) for dim in dims] if first.shape else []
        shape = shape_of(node.meta["val"])
        if state == T and 0 in dims:
            if node.target not in SUMS:
                walk.fail(node, f"works along the tokens, of which a rank has only {WORDS[T]}")
            state = P
        elif state == T and group is not None:
            shape = (shape[0] * group[1], *shape[1:])
        keepdim = position + 1 if node.target in REDUCTIONS else position
        key = literals(node, lambda argument: _of(operands, argument).term, without=(position, keepdim))
        name = aten.sum.dim_IntList if node.target in SUMS else node.target
        term = walk.terms.of("along", name, merged(first.shape, dims), *key)
        return (Value(term, state, shape, group),)

    return rule


def _of(operands: Mapping[fx.Node, Value | None], node: fx.Node) -> Value:
    value = operands[node]
    assert value is not None
    return value


def _norm(parts: Sequence[int], behind: int, sums: int) -> Callable[[Walk, fx.Node], tuple[Value | None, ...]]:
    """The rule of norms: rows at the positions ``parts``, the row's shape at ``behind``, the last ``sums`` results are
    sums over the rows."""

    def rule(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
        operands = {argument: walk.argument(argument) for argument in node.all_input_nodes}
        if any(value is None for value in operands.values()):
            return walk.opaque(node)
        rows = [_of(operands, node.args[at]) for at in parts]  # type: ignore[arg-type]
        state, group = joined(walk, node, [_of(operands, argument) for argument in operands])
        width: Any = node.args[behind]
        if state == T:
            _check_norm(walk, node, operands, rows, width, group)
        key = literals(node, lambda argument: _of(operands, argument).term, without=(behind,))
        term = walk.terms.of("norm", node.target, tuple(width), *key)
        results: list[Value | None] = []
        count = len(node.meta["val"])
        tensors = dict(tensors_of(node))
        for at in range(count):
            if at not in tensors:
                results.append(None)
                continue
            shape = shape_of(tensors[at])
            summed = at >= count - sums
            if state == T and not summed and group is not None:
                shape = (shape[0] * group[1], *shape[1:])
            form = P if state == T and summed else state
            results.append(Value(walk.terms.of("result", term, at), form, shape, group))
        return tuple(results)

    return rule


def _check_norm(
    walk: Walk, node: fx.Node, operands: Mapping[fx.Node, Value | None], rows: Sequence[Value], width: Any, group: Any
) -> None:
    tokens = {value.shape[0] for value in rows if value.shape}
    if any(value.state != T for value in rows) or len(tokens) != 1:
        walk.fail(node, "reads a whole value as if it were the rows of a rank")
    if len(width) >= len(rows[0].shape):
        walk.fail(node, f"works along the tokens, of which a rank has only {WORDS[T]}")
    for argument in operands:
        value = _of(operands, argument)
        if value.state == R and not walk.shared(group[0])(value.term):
            walk.fail(node, f"reads {argument.name}, which differs from rank to rank, for the rows of a rank")


def _dropout(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """A mask that depends on the shape alone, and a product with it: that of dropout's backward."""
    source: Any = node.args[0]
    value, share = walk.argument(source), node.args[1]
    if value is None or value.state != R or node.args[2] is False or not isinstance(share, float) or not 0 < share < 1:
        return walk.opaque(node)
    walk.draws += 1
    mask = walk.terms.of("mask", walk.draws, value.shape, share)
    walk.effects.append((mask, node.name))
    walk.note_draw(node, mask)
    scale = literals(node, lambda argument: value.term)[-1:]
    arguments = [value.term, mask, ("float", str(1.0 / (1.0 - share))), *scale]
    dropped = walk.terms.of("elements", aten.native_dropout_backward.default, *arguments)
    return tuple(replace(value, term=term) for term in (dropped, mask))


def _exchanged(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """A matrix with its dimensions exchanged: rows become columns, and an addend stays one."""
    value = walk.values[node.args[0]][0]  # type: ignore[index]
    swaps = node.target is aten.t.default or sorted(at % 2 for at in node.args[1:]) == [0, 1]  # type: ignore[operator]
    if value is None or value.state == R or len(value.shape) != 2 or not swaps:
        return walk.opaque(node)
    state = {T: C, C: T, P: P}[value.state]
    return (Value(as_whole(walk, node), state, value.shape[::-1], value.group),)


def as_whole(walk: Walk, node: fx.Node) -> Term:
    """Return the term that ``node`` has in the captured graph, on the whole of its arguments.

    Args:
        walk: the walk over the graph.
        node: the operator.
    """

    def key(argument: fx.Node) -> object:
        values = [value for value in walk.values[argument] if value is not None]
        as_read = values if ops.is_view(node.target) else [replace(v, term=walk.read(argument, v)) for v in values]
        return tuple((value.term, value.shape) for value in as_read)

    return walk.terms.of("operator", node.target, *literals(node, key))


def _product(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """Rows times a matrix that all ranks have gives rows; columns times rows, an addend."""
    arguments = [walk.argument(argument) for argument in node.args if isinstance(argument, fx.Node)]
    values = [value for value in arguments if value is not None]
    if len(values) < len(node.args) or all(value.state == R for value in values):
        return walk.opaque(node)
    *bias, left, right = values
    group = left.group if left.state in (T, C) else None
    if group is None:
        walk.fail(node, f"multiplies {WORDS[left.state]} with {WORDS[right.state]}")
    assert group is not None
    shape = (left.shape[0], right.shape[1])
    if left.state == C:
        if bias or right.state != T or right.group != group or right.shape[0] != left.shape[1]:
            walk.fail(node, "adds up over the tokens of a rank what it does not have the same rows of")
        return (Value(as_whole(walk, node), P, shape, group),)
    for value, argument in zip((*bias, right), (*node.args[: len(bias)], node.args[-1]), strict=True):
        if value.state != R:
            walk.fail(node, f"reads {argument} as a whole, and a rank has only {WORDS[value.state]} of it")
        if not walk.shared(group[0])(value.term):
            walk.fail(node, f"reads {argument}, which differs from rank to rank, for the rows of a rank")
    if any((1, 1, *value.shape)[-2] != 1 for value in bias):
        walk.fail(node, f"reads {node.args[0]}, which is whole, as if it were the rows of a rank")
    return (Value(as_whole(walk, node), T, shape, group),)


def is_shared(walk: Walk, value: Value, group: tuple[object, int] | None) -> bool:
    """Return whether ``value`` is whole, and the same on all ranks of ``group``, in the walk ``walk``."""
    return value.state == R and group is not None and walk.shared(group[0])(value.term)


def argument_of(walk: Walk, node: Any) -> Value:
    """Return what a rank has of the argument ``node``, which is one tensor, as it is read now in ``walk``."""
    value = walk.argument(node)
    assert value is not None
    return value


def _all_reduce(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    value = walk.argument(node.args[0])  # type: ignore[arg-type]
    return (_reduced(walk, node, node.args[0], value),)


def _reduced(walk: Walk, node: fx.Node, argument: Any, value: Value | None) -> Value:
    op, group = node.args[1], node.args[2]
    if value is None or value.state in (T, C, V, L):
        had = T if value is None else value.state
        walk.fail(node, f"sums {argument}, of which a rank has only {WORDS[had]}, with the rows of other tokens")
    assert value is not None
    if value.state in (P, M):
        if op != {P: "sum", M: "max"}[value.state] or value.group is None or value.group[0] != group:
            reduction = f"{WORDS[value.state]} of {argument} by {op!r} over the ranks of {group!r}"
            walk.fail(node, f"reduces {reduction}, which is to be reduced otherwise, or over another group")
        walk.common.setdefault(group, set()).add(value.term)
        return replace(value, state=R, group=None)
    return replace(value, term=walk.reduced(node, value.term, op, group))


def _all_reduce_bucket(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    arguments: Any = node.args[0]
    return tuple(_reduced(walk, node, argument, walk.argument(argument)) for argument in arguments)


def _reduce_scatter(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    op, size, name = node.args[1:4]
    group = walk.group(node, size, name)
    value = walk.argument(node.args[0])  # type: ignore[arg-type]
    if value is None or value.state not in (R, P):
        had = T if value is None else value.state
        walk.fail(node, f"sums {node.args[0]}, of which a rank has only {WORDS[had]}, with the rows of other tokens")
    assert value is not None
    if walk.is_captured(node):
        return walk.opaque(node)
    if op != "sum" or not value.shape or value.shape[0] % group[1]:
        walk.fail(node, f"does not give each of {size} ranks rows of a sum")
    if value.state == P:
        return (replace(value, state=T),)
    return (Value(walk.reduced(node, value.term, op, name), T, value.shape, group),)


def _all_gather(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    group = walk.group(node, node.args[1], node.args[2])
    value = walk.argument(node.args[0])  # type: ignore[arg-type]
    if value is None or value.state == R:
        return walk.checked(node, walk.opaque(node))
    if value.state != T or value.group != group:
        walk.fail(node, f"gathers {node.args[0]}, which is not the rows of these {group[1]} ranks")
    walk.gathers.update(dict.fromkeys(ids_of(node), (node.name, walk.graph.phase[node.name])))
    walk.common.setdefault(group[0], set()).add(value.term)
    return (replace(value, state=R, group=None),)


def _own_part(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    if walk.is_captured(node):  # the model takes its part itself, such as the columns that a layer reads
        return walk.checked(node, walk.opaque(node))
    return own_rows(walk, node, *node.args[1:])


def own_rows(walk: Walk, node: fx.Node, size: Any, name: Any) -> tuple[Value | None, ...]:
    """Return the rows that ``node`` takes for a rank out of its first argument.

    Args:
        walk: the walk over the graph.
        node: the operator.
        size: number of ranks that its arguments say.
        name: name of the group that its arguments say.

    Raises:
        VerifyError: the argument is not whole, differs from rank to rank, or cannot be divided among the ranks.
    """
    group = walk.group(node, size, name)
    value = walk.argument(node.args[0])  # type: ignore[arg-type]
    if value is None or value.state != R:
        walk.fail(node, f"takes rows of {node.args[0]}, which is not whole")
    assert value is not None
    if not value.shape or value.shape[0] % group[1]:
        walk.fail(node, f"does not give each of {group[1]} ranks the same number of rows")
    if not walk.shared(group[0])(value.term):
        walk.fail(node, f"takes rows of {node.args[0]}, which differs from rank to rank")
    return (replace(value, state=T, group=group),)


Rule = Callable[["Walk", fx.Node], tuple[Value | None, ...]]

SUMS = frozenset({aten.sum.dim_IntList, aten.sum.default})
REDUCTIONS = frozenset(
    {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default}
)

POINTWISE = (
    *(aten._to_copy.default, aten.native_dropout_backward.default, aten.silu_backward.default),
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.elu_backward.default, aten.leaky_relu_backward.default, aten.softplus_backward.default),
    *(aten.mish_backward.default, aten.hardtanh_backward.default, aten.hardswish_backward.default),
    *(aten.hardsigmoid_backward.default, aten.floor_divide.default, aten.complex.default, aten.polar.default),
)
"""Operators that work element by element though torch's tags do not say so."""

HELPERS = frozenset(
    {
        *(aten.add.Tensor, aten.expand.default, aten.clone.default, aten.view.default),
        *(aten.full.default, aten.native_dropout.default),
    }
)
"""Operators that may stand in front of a collective or of ``own_part`` alone, or draw a mask alone."""

SAME_ELEMENTS = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.clone.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.detach.default, aten.alias.default),
    aten.copy.default,
)

RULES: dict[object, Rule] = {
    **dict.fromkeys(SAME_ELEMENTS, _same_elements),
    aten.expand.default: _expanded,
    **dict.fromkeys([aten.slice.Tensor, aten.slice_backward.default], _sliced),
    **dict.fromkeys(POINTWISE, elementwise),
    **dict.fromkeys([aten.mse_loss.default, aten.smooth_l1_loss.default], _elementwise_if_alike),
    **dict.fromkeys([aten._softmax.default, *REDUCTIONS, aten.sum.default], along(1)),
    aten._softmax_backward_data.default: along(2),
    aten.native_dropout.default: _dropout,
    aten.native_layer_norm.default: _norm((0,), behind=1, sums=0),
    aten.native_layer_norm_backward.default: _norm((0, 1, 3, 4), behind=2, sums=2),
    **dict.fromkeys([aten.t.default, aten.transpose.int], _exchanged),
    **dict.fromkeys([aten.mm.default, aten.addmm.default], _product),
}

for _name, _parts, _behind, _sums in (("_fused_rms_norm", (0,), 1, 0), ("_fused_rms_norm_backward", (0, 1, 3), 2, 1)):
    if hasattr(aten, _name):  # torch 2.11 has neither
        RULES[getattr(aten, _name).default] = _norm(_parts, _behind, _sums)

COLLECTIVES: dict[str, Rule] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_bucket,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_gather_into_tensor": _all_gather,
    "own_part": _own_part,
}

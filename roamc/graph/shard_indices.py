"""What a rank has of look-ups and losses, which read indices of its own tokens, for :mod:`roamc.graph.shard_judge`.

    own_indices(R) = T          embedding(R, T) = T         nll_loss(T, T) = P, its gradient = T

An index out of range makes such an operator raise. One rank must not raise alone, since the others would wait for it in
the next collective: a rank takes its rows by ``own_indices``, which raises on all of them, and by nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from roamc.graph.shard_states import (
    WORDS,
    P,
    R,
    Rule,
    T,
    Value,
    argument_of,
    as_whole,
    is_shared,
    joined,
    literals,
    own_rows,
    shape_of,
)
from roamc.operators.shards import own_indices

if TYPE_CHECKING:
    from roamc.graph.shard_judge import Walk

aten = torch.ops.aten


RANGES: dict[object, tuple[int, int, int, int | None]] = {
    aten.embedding.default: (0, 1, 0, None),
    aten.nll_loss_forward.default: (0, 1, -1, 4),
    aten.nll_loss_backward.default: (1, 2, -1, 5),
}
"""Reader of indices to the positions of what has a size, of the indices, the dimension of that size, and the position
of a number that is ignored."""


def _taken(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """Rows of numbers that are in the range which each of their readers wants."""
    size, ignored = node.args[1:3]
    for reader in node.users:
        where = RANGES.get(reader.target)
        source: Any = reader.args[where[0]] if where is not None else None
        if where is None or reader.args[where[1]] is not node:
            walk.fail(node, f"takes indices for {reader.name}, which reads none here")
        assert where is not None
        end, skipped = source.meta["val"].shape[where[2]], None if where[3] is None else reader.args[where[3]]
        if (size, ignored) != (end, skipped):
            walk.fail(
                node, f"checks indices below {size}, {ignored} left out, and {reader.name} wants {end}, {skipped}"
            )
    return own_rows(walk, node, *node.args[3:])


def _check_indices(walk: Walk, node: fx.Node, indices: Any) -> None:
    """Check that all ranks raise where one of ``indices``, of which a rank has its rows, is out of range."""
    if indices.target is not own_indices:
        walk.fail(node, f"reads {indices.name}, and a rank whose indices are out of range would raise alone")


def _embedding(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """Rows of a table by index."""
    table, index = (walk.argument(argument) for argument in node.args[:2])  # type: ignore[arg-type]
    if table is None or index is None or index.state == R:
        index = replace(index, state=R) if index is not None else None
    if table is None or index is None or table.state != R or index.state == P:
        return walk.opaque(node)
    shape = (*index.shape, table.shape[-1])
    if index.state == T:
        _check_indices(walk, node, node.args[1])
    if index.state == T and index.group is not None and not walk.shared(index.group[0])(table.term):
        walk.fail(node, f"reads {node.args[0]}, which differs from rank to rank, for the rows of a rank")
    key = literals(node, lambda argument: "index" if argument is node.args[1] else "table")
    term = walk.terms.of("embedding", table.term, table.shape, index.term, *key)
    return (Value(term, index.state, shape, index.group),)


def _loss(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """The loss of each token, or the sum, and the sum of the weights; the mean is the quotient of two sums."""
    arguments = [walk.argument(argument) for argument in node.all_input_nodes]
    values = [value for value in arguments if value is not None]
    if len(values) < len(arguments):
        return walk.opaque(node)
    state, group = joined(walk, node, values)
    each, mean = node.args[3] == 0, node.args[3] == 1
    if state == T:
        _check_loss(walk, node, *node.args[:3])
        if mean:
            walk.fail(node, f"divides by the weights of the tokens of which a rank has {WORDS[T]}, not by those of all")
    key = literals(node, lambda argument: argument_of(walk, argument).term, without=(3,))
    term = walk.terms.of("loss", "each" if each else "sum", *key)
    first, weights = (walk.terms.of("result", term, at) for at in range(2))
    if mean:
        if walk.captured is None:
            walk.made.add(first)
        first = walk.terms.of("elements", aten.div.Tensor, first, weights, ("map",))
    shape = shape_of(node.meta["val"][0])
    if each and state == T and group is not None:
        shape = (shape[0] * group[1],)
    summed = P if state == T else R
    return (Value(first, state if each else summed, shape, group), Value(weights, summed, (), group))


def _loss_backward(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """The gradient of each token's scores."""
    arguments = [walk.argument(argument) for argument in node.all_input_nodes]
    values = [value for value in arguments if value is not None]
    state, group = joined(walk, node, values)
    if len(values) < len(arguments) or state == R:
        return walk.opaque(node)
    _check_loss(walk, node, *node.args[1:4])
    gradient, total = (argument_of(walk, node.args[at]) for at in (0, 6))
    of_tokens = gradient.state == T and gradient.shape[:1] == argument_of(walk, node.args[1]).shape[:1]
    if total.state != R or of_tokens != (node.args[4] == 0) or not (of_tokens or is_shared(walk, gradient, group)):
        walk.fail(node, "does not take the gradient of a loss of all ranks")
    shape = argument_of(walk, node.args[1]).shape
    return (Value(as_whole(walk, node), T, shape, group),)


def _check_loss(walk: Walk, node: fx.Node, scores: Any, target: Any, weight: Any) -> None:
    """Check that scores and target are rows of the same tokens, and that all ranks have the same weights."""
    rows, labels = argument_of(walk, scores), argument_of(walk, target)
    if rows.state != T or labels.state != T or len(rows.shape) != 2 or labels.shape != rows.shape[:1]:
        walk.fail(node, "reads rows of other tokens, or a whole value as if it were the rows of a rank")
    _check_indices(walk, node, target)
    if weight is not None and not is_shared(walk, argument_of(walk, weight), rows.group):
        walk.fail(node, f"reads {weight}, which differs from rank to rank, for the rows of a rank")


INDEX_RULES: dict[object, Rule] = {
    own_indices: _taken,
    aten.embedding.default: _embedding,
    aten.nll_loss_forward.default: _loss,
    aten.nll_loss_backward.default: _loss_backward,
}
"""Operator to its rule, beside those of :mod:`roamc.graph.shard_states`."""

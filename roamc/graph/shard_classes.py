"""What a rank has of scores of which it has its own classes, for :mod:`roamc.graph.shard_judge`.

The captured graph gathers the scores of all classes along their last dimension. A graph that leaves the gather out has
of them

    V   its own classes                       L   targets, with those of other ranks' classes left out
    M   an operand of a maximum               P   an addend, as elsewhere

and the states follow from the operators:

    element by element: V with V, with an R that has one element for all classes, and with a T of one element for each
    amax along the classes(V) = M             all_reduce(M, max) = R
    sum along the classes(V) = P              all_reduce(P, sum) = R
    own_classes(R) = L                        nll_loss(V, L) = P, its gradient = V

The softmax of the captured graph counts as what it is defined by, so that its parts are values of that graph:

    log_softmax(x) = z - log(sum(exp(z))), z = x - amax(x)      its gradient = g - exp(log_softmax(x)) sum(g)

That a V in the place of the part that the captured graph cuts out for its rank is that part, is all that is left.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from roamc.compat_groups import known_rank_in
from roamc.compat_operators import is_pointwise
from roamc.graph.shard_states import SUMS, WORDS, L, M, P, R, Rule, T, V, Value, along, literals, shape_of, single
from roamc.graph.shard_terms import Term, merged
from roamc.operators import ops
from roamc.operators.shards import FOREIGN, own_classes

if TYPE_CHECKING:
    from roamc.graph.shard_judge import Walk

aten = torch.ops.aten

HALF = (torch.bfloat16, torch.float16)
SINGLE = ("map", ("dtype", ("dtype", "torch.float32")))
NOTHING = ("map",)


def gathers_classes(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """Return the result of ``aten.cat``; if it puts the parts of all ranks side by side, notes that in the walk.

    Args:
        walk: the walk over the graph.
        node: the operator.
    """
    results = walk.opaque(node)
    source = _gathered(node)
    if source is None or results[0] is None:
        return results
    own, size, name = source
    value = walk.argument(own)
    if value is None or value.state != R or not _alone(own):
        return results
    term = walk.terms.of("classes", value.term, name, size)
    if walk.captured is None:
        walk.gathered[value.term] = (term, (name, size))
    return (replace(results[0], term=term),)


def _gathered(node: fx.Node) -> tuple[fx.Node, int, object] | None:
    """What ``node`` puts side by side, if that is a gather of a rank's part, cut into the parts: part, ranks, group."""
    pieces: Any = node.args[0]
    dims = node.meta["val"].dim()
    picks = [(piece.args[0], piece.args[1]) for piece in pieces if piece.target is operator.getitem]
    cuts = {cut for cut, _ in picks}
    if len(picks) != len(pieces) or len(cuts) != 1 or len(node.args) < 2 or node.args[1] % dims != dims - 1:
        return None
    cut: Any = cuts.pop()
    gather = cut.args[0] if cut.target is aten.split.Tensor else None
    if gather is None or not str(gather.target).startswith("roamc_collective.all_gather_into_tensor"):
        return None
    own, size, name = gather.args
    in_order = [at for _, at in picks] == list(range(size)) and (*cut.args[1:], 0)[1] == 0
    return (own, int(size), name) if in_order and cut.args[1] == own.meta["val"].shape[0] else None


def _alone(node: fx.Node) -> bool:
    """Whether nothing else reads ``node``, or what it is a view of."""
    while len(node.users) == 1 and ops.is_view(node.target):
        node = node.all_input_nodes[0]
    return len(node.users) == 1


def cuts_classes(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """Return the results of ``aten.split``; if one part along the last dimension is read alone, notes that in the walk.

    Args:
        walk: the walk over the graph.
        node: the operator.
    """
    results = walk.opaque(node)
    value = walk.argument(node.args[0])  # type: ignore[arg-type]
    read = {user.args[1] for user in node.users}
    dim: Any = node.args[2] if len(node.args) > 2 else 0
    if walk.captured is not None or value is None or len(read) != 1 or len(value.shape) < 2:
        return results
    (at,) = read
    part = results[at]  # type: ignore[index]
    if part is not None and dim % len(value.shape) == len(value.shape) - 1:
        walk.cut[value.term] = (part.term, int(at), len(results))  # type: ignore[arg-type]
    return results


def log_softmax(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """Return the result of a log-softmax or of its gradient; along the last dimension with the term of its definition.

    Along other dimensions, or where an argument is unknown, it is what :func:`roamc.graph.shard_states.along` gives.

    Args:
        walk: the walk over the graph; over the captured one, terms of the definition are added to ``walk.made``.
        node: the operator: ``aten._log_softmax`` or its gradient.
    """
    backward = node.target is aten._log_softmax_backward_data.default
    results = along(2 if backward else 1)(walk, node)
    first = walk.argument(node.args[0])  # type: ignore[arg-type]
    named: Any = node.args[2 if backward else 1]
    if results[0] is None or first is None or not first.shape or named % len(first.shape) != len(first.shape) - 1:
        return results
    define = _Definition(walk, first.shape)
    dtypes = [value.meta["val"].dtype for value in (*node.all_input_nodes, node)]
    if not backward:
        term = define.softmax(first.term, dtypes)
    else:
        other = walk.argument(node.args[1])  # type: ignore[arg-type]
        assert other is not None
        term = define.gradient(first.term, other.term, dtypes)
    return (replace(results[0], term=term),)


class _Definition:
    """Terms of the operators that a softmax over rows of ``shape`` is made of; in a captured graph they are noted."""

    def __init__(self, walk: Walk, shape: Sequence[int]) -> None:
        self.walk, self.shape = walk, tuple(shape)

    def softmax(self, x: Term, dtypes: Sequence[torch.dtype]) -> Term:
        """Scores less the logarithm of the sum of exponentials."""
        low = dtypes[0] in HALF
        x = self.elements(aten._to_copy.default, x, kwargs=SINGLE) if low else x
        z = self.elements(aten.sub.Tensor, x, self.along(aten.amax.default, x))
        total = self.along(aten.sum.dim_IntList, self.elements(aten.exp.default, z), wide=False)
        result = self.elements(aten.sub.Tensor, z, self.wide(self.elements(aten.log.default, total)))
        return self.cast(result, dtypes[-1]) if low else result

    def gradient(self, gradient: Term, result: Term, dtypes: Sequence[torch.dtype]) -> Term:
        """The gradient less its sum, shared out by the softmax."""
        low = dtypes[0] in HALF
        if low:
            gradient, result = (
                self.elements(aten._to_copy.default, term, kwargs=SINGLE) for term in (gradient, result)
            )
        total = self.along(aten.sum.dim_IntList, gradient)
        share = self.elements(aten.mul.Tensor, self.elements(aten.exp.default, result), total)
        difference = self.elements(aten.sub.Tensor, gradient, share)
        dtype = torch.float32 if low else dtypes[0]
        return difference if dtype == dtypes[-1] else self.cast(difference, dtypes[-1])

    def elements(self, target: object, *operands: Term, kwargs: object = NOTHING) -> Term:
        return self.note(self.walk.terms.of("elements", target, *operands, kwargs))

    def cast(self, term: Term, dtype: torch.dtype) -> Term:
        return self.elements(aten._to_copy.default, term, kwargs=("map", ("dtype", ("dtype", str(dtype)))))

    def along(self, target: object, x: Term, *, wide: bool = True) -> Term:
        sizes = merged(self.shape, [len(self.shape) - 1])
        term = self.note(self.walk.terms.of("along", target, sizes, x, NOTHING))
        return self.wide(term) if wide else term

    def wide(self, term: Term) -> Term:
        return self.walk.terms.expanded(term, (*self.shape[:-1], 1), self.shape)

    def note(self, term: Term) -> Term:
        if self.walk.captured is None:
            self.walk.made.add(term)
        return term


def is_by_class(walk: Walk, node: fx.Node) -> bool:
    """Return whether ``node``, of a sharded graph, reads a value of which a rank has its own classes."""
    if walk.captured is None or ops.is_view(node.target):
        return False
    values = [value for argument in node.all_input_nodes for value in walk.values[argument] if value is not None]
    return any(value.state in (V, L, M) or value.term in walk.captured.gathered for value in values)


def by_class(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """Return what a rank has of the results of ``node``, for which :func:`is_by_class` holds.

    Raises:
        VerifyError: values meet in a way that gives nothing of a rank's own classes.
    """
    rule = BY_CLASS.get(node.target)
    pointwise = is_pointwise(node.target)
    if rule is not None:
        results = rule(walk, node)
    elif (pointwise or node.target is aten._to_copy.default) and not ops.rule(node.target).mutates and single(node):
        results = _elements(walk, node)
    else:
        return walk.opaque(node)
    return tuple(_cut_out(walk, node, value) for value in results)


def _cut_out(walk: Walk, node: fx.Node, value: Value | None) -> Value | None:
    """A value by class as the captured graph has it, if that reads a rank's own part of it alone."""
    assert walk.captured is not None
    if value is None or value.state != V or value.group is None or value.term not in walk.captured.cut:
        return value
    term, at, parts = walk.captured.cut[value.term]
    if parts != value.group[1] or known_rank_in(value.group[0]) not in (at, None):
        walk.fail(node, f"gives the classes of this rank, and part {at} of {parts} is due")
    return Value(term, R, (*value.shape[:-1], value.shape[-1] // parts))


def _of(walk: Walk, node: Any) -> Value:
    """What a rank has of an argument, with scores that are gathered in the captured graph as its own classes."""
    assert walk.captured is not None
    value = walk.argument(node)
    if value is None:
        walk.fail(node, f"is read with {WORDS[V]} of a rank")
    assert value is not None
    if value.state == R and value.term in walk.captured.gathered:
        term, group = walk.captured.gathered[value.term]
        return Value(term, V, (*value.shape[:-1], value.shape[-1] * group[1]), group)
    return value


def _elements(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    operands = {argument: _of(walk, argument) for argument in node.all_input_nodes}
    groups = {value.group for value in operands.values() if value.state == V}
    group = groups.pop() if len(groups) == 1 else None
    if group is None:
        walk.fail(node, f"reads {', '.join(WORDS[value.state] for value in operands.values())} of values")
    assert group is not None
    local = shape_of(node.meta["val"])
    shape = (*local[:-1], local[-1] * group[1])
    for argument, value in operands.items():
        padded = (1,) * (len(shape) - len(value.shape)) + value.shape
        by_class = value.state == V and value.shape == shape
        per_class = value.state == T and value.group == group and value.shape == shape[-1:]
        same = value.state == R and padded[-1] == 1 and walk.shared(group[0])(value.term)
        if not (by_class or per_class or same):
            walk.fail(node, f"reads {WORDS[value.state]} of {argument.name} with {WORDS[V]} of a rank")
    whole = {argument: walk.terms.expanded(value.term, value.shape, shape) for argument, value in operands.items()}
    dtypes = {argument.meta["val"].dtype for argument in operands} | {node.meta["val"].dtype}
    if node.target is aten.add.Tensor and len(operands) == len(node.args) == 2 and not node.kwargs and len(dtypes) == 1:
        return (Value(walk.terms.total(list(whole.values())), V, shape, group),)
    term = walk.terms.of("elements", node.target, *literals(node, whole.__getitem__))
    return (Value(term, V, shape, group),)


def _along_classes(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """A sum or a maximum over the classes of a rank, which is to be reduced over the ranks."""
    value, named = _of(walk, node.args[0]), node.args[1]
    last = len(value.shape) - 1
    if value.state != V or [dim % (last + 1) for dim in named] != [last]:  # type: ignore[operator, union-attr]
        walk.fail(node, f"does not work along the classes, of which a rank has only {WORDS[V]}")
    key = literals(node, lambda argument: value.term, without=(1, 2))
    name = aten.sum.dim_IntList if node.target in SUMS else node.target
    term = walk.terms.of("along", name, merged(value.shape, [last]), *key)
    return (Value(term, P if node.target in SUMS else M, shape_of(node.meta["val"]), value.group),)


def labels(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """Return targets as a rank counts its own classes.

    Args:
        walk: the walk over the graph.
        node: a call of ``roamc::own_classes``.

    Raises:
        VerifyError: the targets are not whole, or not the same on all ranks.
    """
    arguments: Any = node.args
    target, classes, ignored, size, name = arguments
    group = walk.group(node, size, name)
    value = walk.argument(target)
    if value is None or value.state != R or not walk.shared(name)(value.term):
        walk.fail(node, f"reads {target}, which all ranks must have whole and alike")
    assert value is not None
    term = walk.terms.of("labels", value.term, ("int", str(ignored)), classes * group[1])
    return (replace(value, term=term, state=L, group=group),)


def _checked_loss(walk: Walk, node: fx.Node, at: int) -> tuple[Value, Term, object, Value | None]:
    """Scores, whole targets, the class that is ignored, and weights of a loss with its scores at ``at``."""
    scores, target = (_of(walk, argument) for argument in node.args[at : at + 2])
    weight = None if node.args[at + 2] is None else _of(walk, node.args[at + 2])
    if scores.state != V or target.state != L or target.group != scores.group:
        walk.fail(node, f"reads {WORDS[target.state]} of targets with {WORDS[scores.state]} of scores")
    _, term, ignored, classes = walk.terms.key(target.term)
    if classes != scores.shape[-1] or len(scores.shape) != 2 or target.shape != scores.shape[:1]:
        walk.fail(node, f"reads targets among {classes} classes for scores of {list(scores.shape)}")
    if node.args[at + 4] != FOREIGN:
        walk.fail(node, f"does not leave {FOREIGN} out, which stands for the classes of other ranks")
    if weight is not None and (weight.state != T or weight.group != scores.group or weight.shape != scores.shape[1:]):
        walk.fail(node, f"reads {WORDS[weight.state]} of the weights with {WORDS[V]} of scores")
    assert isinstance(term, Term)
    return scores, term, ignored, weight


def _loss(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """The losses of the tokens whose class a rank has, each or in sum, and the weights of those tokens."""
    scores, target, ignored, weight = _checked_loss(walk, node, 0)
    if node.args[3] == 1:
        walk.fail(node, f"divides by the weights of the tokens of which a rank has {WORDS[L]}, not by those of all")
    each = node.args[3] == 0
    of = ("NoneType", "None") if weight is None else weight.term
    term = walk.terms.of("loss", "each" if each else "sum", scores.term, target, of, ignored, NOTHING)
    shapes = (scores.shape[:1] if each else (), ())
    return tuple(Value(walk.terms.of("result", term, at), P, shapes[at], scores.group) for at in range(2))


def _loss_backward(walk: Walk, node: fx.Node) -> tuple[Value | None, ...]:
    """The gradient of a rank's classes."""
    scores, target, ignored, weight = _checked_loss(walk, node, 1)
    gradient, total = (_of(walk, node.args[at]) for at in (0, 6))
    assert scores.group is not None
    shared = walk.shared(scores.group[0])
    if gradient.state != R or total.state != R or not shared(gradient.term) or not shared(total.term):
        walk.fail(node, "does not take the gradient of a loss of all ranks")
    of = ("NoneType", "None") if weight is None else ((weight.term, weight.shape),)
    key = [((value.term, value.shape),) for value in (gradient, scores)]
    parts = [*key, ((target, scores.shape[:1]),), of, ("int", str(node.args[4])), ignored, ((total.term, ()),), NOTHING]
    return (replace(scores, term=walk.terms.of("operator", node.target, *parts)),)


BY_CLASS: dict[object, Rule] = {
    **dict.fromkeys([aten.sum.dim_IntList, aten.amax.default], _along_classes),
    aten.nll_loss_forward.default: _loss,
    aten.nll_loss_backward.default: _loss_backward,
}
"""Operator to its rule where an argument is by class."""

MORE_RULES: dict[object, Rule] = {
    **dict.fromkeys([aten._log_softmax.default, aten._log_softmax_backward_data.default], log_softmax),
    aten.cat.default: gathers_classes,
    aten.split.Tensor: cuts_classes,
    own_classes: labels,
}
"""Operator to its rule where no argument is by class, beside those of :mod:`roamc.graph.shard_states`."""

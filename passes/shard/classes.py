"""Scores of which every rank has its own classes: they are not gathered, and the loss works on a rank's classes.

A head whose outputs are split among the ranks gathers the scores of all classes, which softmax and loss then read. Of n
tokens and v classes that is n v numbers on every rank, several times. Here a rank works on its own n v/t:

    captured                               on this rank's classes
    x = gather of x' along the last        x' itself
    p = log_softmax(x)                     z = x' - all_reduce(amax(x'), max); p' = z - log(all_reduce(sum(exp(z))))
    l, c = nll_loss_forward(p, labels)     sums over the ranks of what nll_loss_forward(p', own_classes(labels)) gives:
                                           the rank that has a token's class adds its loss, the others add nothing
    g = nll_loss_backward(...)             g' = nll_loss_backward(..., own_classes(labels), ...)
    d = log_softmax_backward(g, p)         d' = g' - exp(p') all_reduce(sum(g'))
    d[own classes]                         d' itself

That is Megatron-LM's vocabulary-parallel loss (Shoeybi et al., arXiv 1909.08053, section 3): a rank sends a few numbers
for each token in the place of a row of scores.

A value is either wholly by class or not at all: scores that anything else reads are gathered, as before.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from roamc.compat_groups import known_rank_in, ranks_in
from roamc.compat_operators import is_pointwise
from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph, copied, copy_origin, operators
from roamc.graph.rewrite import mode_of
from roamc.operators import ops
from roamc.operators.collectives import FINISHED
from roamc.operators.corrections import note_results
from roamc.operators.schemas import group_of
from roamc.operators.shards import FOREIGN, own_classes, own_part
from roamc.passes.shard.rules import RESHAPES, cuts_nothing, overflows
from roamc.passes.shard.varying import varying
from roamc.rewriting.versions import erase_dead, up_to_date

aten = torch.ops.aten

COLLECTIVES = {start._schema.name.rpartition("::")[2]: op for start, op in FINISHED.items()}

LOW = (torch.bfloat16, torch.float16)
"""Types for which torch computes softmax in single precision."""


class Head(NamedTuple):
    """Scores that stay split by class.

    Attributes:
        gathered: name of the value that has the scores of all classes.
        ranks: how many ranks share the classes.
        values: names of the values of which a rank has its own classes, in graph order.
    """

    gathered: str
    ranks: int
    values: tuple[str, ...]


class _Scores(NamedTuple):
    """The gather of scores along their last dimension.

    Attributes:
        whole: the scores of all classes.
        own: what a rank gives to the gather.
        group: the group of ranks.
        ranks: how many there are.
        gather: the collective.
    """

    whole: fx.Node
    own: fx.Node
    group: Any
    ranks: int
    gather: fx.Node


def heads(graph: TrainGraph) -> tuple[Head, ...]:
    """Return the scores of ``graph`` that can stay split by class; the graph stays as it is."""
    split_heads: list[Head] = []
    for scores in _gathered(graph):
        columns = _Columns(graph, scores)
        if columns.find() and columns.has_loss:
            split_heads.append(Head(scores.whole.name, scores.ranks, tuple(node.name for node in columns.values)))
    return tuple(split_heads)


def by_class(graph: TrainGraph, head: Head) -> TrainGraph:
    """Return ``graph`` with one head's scores split by class, on a new FX graph; the given one stays as it is.

    Raises:
        PlanError: ``graph`` does not gather such scores, or another value reads them.
    """
    graph = copied(graph)
    columns = _Columns(graph, _scores(graph, head))
    if not columns.find() or tuple(node.name for node in columns.values) != head.values:
        raise PlanError(f"the values of {head.gathered} are not those that the plan splits by class")
    return _Writer(graph, columns).run()


def read_whole(graph: TrainGraph, head: Head) -> tuple[Any, tuple[str, ...]]:
    """Return the group of a head's ranks, and the names of what they must have the same of.

    That is what operators on a rank's own classes read besides these.

    Raises:
        PlanError: ``graph`` does not gather such scores.
    """
    columns = _Columns(graph, _scores(graph, head))
    columns.find()
    readers = [node for node in (*columns.values, *columns.summed) if node is not columns.scores.whole]
    names = (argument.name for node in readers for argument in node.all_input_nodes if argument not in columns.values)
    return columns.scores.group, tuple(dict.fromkeys(names))


def gather_of(graph: TrainGraph, head: Head) -> str:
    """Return the name of the collective that gathers a head's scores in ``graph``.

    Raises:
        PlanError: ``graph`` does not gather such scores.
    """
    return _scores(graph, head).gather.name


def _scores(graph: TrainGraph, head: Head) -> _Scores:
    for scores in _gathered(graph):
        if (scores.whole.name, scores.ranks) == (head.gathered, head.ranks):
            return scores
    raise PlanError(f"{head.gathered!r} does not gather the scores of {head.ranks} ranks")


def _gathered(graph: TrainGraph) -> Iterator[_Scores]:
    """Gathers along the last dimension: of the ranks' parts one behind another, cut, and put side by side."""
    for node in operators(graph.graph):
        if node.target is not aten.cat.default or graph.phase[node.name] is not Phase.FORWARD:
            continue
        pieces: Any = node.args[0]
        last = node.meta["val"].dim() - 1
        dim = node.args[1] if len(node.args) > 1 else 0
        cut = pieces[0].args[0] if pieces and pieces[0].target is operator.getitem else None
        if last < 1 or dim not in (last, -1) or not isinstance(cut, fx.Node) or cut.target is not aten.split.Tensor:
            continue
        gather = cut.args[0]
        if not isinstance(gather, fx.Node) or gather.target is not COLLECTIVES.get("all_gather_into_tensor"):
            continue
        own: Any = gather.args[0]
        ranks = ranks_in(group_of(gather)) or gather.args[1]
        parts = all(piece.target is operator.getitem and piece.args == (cut, at) for at, piece in enumerate(pieces))
        alone = set(gather.users) == {cut} and all(set(piece.users) == {node} for piece in pieces) and _is_alone(own)
        length = own.meta["val"].shape[0]
        whole = ranks == gather.args[1] == len(pieces) == len(cut.users) and cut.args[1:] in ((length,), (length, 0))
        if parts and alone and whole:
            yield _Scores(node, own, group_of(gather), len(pieces), gather)


def _is_alone(node: fx.Node) -> bool:
    """Whether one operator reads a value, and what it is a view of."""
    while len(node.users) == 1 and node.op == "call_function" and ops.is_view(node.target):
        node = node.all_input_nodes[0]
    return len(node.users) == 1


class _Columns:
    """Finds what can be computed of a rank's own classes.

    Attributes:
        values: the values of which a rank has its own classes, in graph order.
        picked: the values that are a rank's own classes already, to the value that they are cut out of.
        has_loss: whether a softmax is among the values.
    """

    def __init__(self, graph: TrainGraph, scores: _Scores) -> None:
        self.graph, self.scores = graph, scores
        self.classes = int(scores.whole.meta["val"].shape[-1])
        self.own = self.classes // scores.ranks
        self.values: dict[fx.Node, None] = {}
        self.picked: dict[fx.Node, fx.Node] = {}
        self.summed: dict[fx.Node, None] = {}
        self.varies = varying(graph, scores.group)
        self.rank = known_rank_in(scores.group)

    @property
    def has_loss(self) -> bool:
        return any(node.target is aten._log_softmax.default for node in self.values)

    def find(self) -> bool:
        """Fill the attributes; return whether all readers of the scores can do with a rank's own classes."""
        self.values[self.scores.whole] = None
        for node in self.graph.graph.nodes:
            if not any(argument in self.values for argument in node.all_input_nodes):
                continue
            if node.op != "call_function" or not self._takes(node):
                return False
        return True

    def _takes(self, node: fx.Node) -> bool:
        target = node.target
        if target is aten.split.Tensor:
            return self._picks(node)
        if target in (aten.nll_loss_forward.default, aten.sum.dim_IntList):
            self.summed[node] = None
            if target is aten.nll_loss_forward.default:
                return self._is_loss(node, 0) and not overflows(node)
            return self._along_classes(node, 1)
        fits = self._gives_classes(node)
        if fits:
            self.values[node] = None
        return fits

    def _gives_classes(self, node: fx.Node) -> bool:
        value, target = node.meta.get("val"), node.target
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[-1] != self.classes:
            return False
        if target is aten._log_softmax.default:
            return self._along_classes(node, 1)
        if target is aten._log_softmax_backward_data.default:
            return self._along_classes(node, 2) and all(value in self.values for value in node.args[:2])
        if target is aten.nll_loss_backward.default:
            return self._is_loss(node, 1) and self._is_same(node.args[0]) and self._is_same(node.args[6])
        source: Any = node.all_input_nodes[0]
        if self._is_name(node):
            return source in self.values and bool(value.shape[-1] == source.meta["val"].shape[-1])
        pointwise = is_pointwise(target)
        if not (pointwise or target in (aten._to_copy.default, aten.clone.default)) or ops.rule(target).mutates:
            return False
        if any(isinstance(argument, fx.Node) for argument in node.kwargs.values()):
            return False
        return all(self.operand(argument) is not None for argument in node.all_input_nodes)

    def operand(self, node: fx.Node) -> fx.Node | None:
        """Return what an operator by class reads in the place of ``node``; None if it cannot.

        That is ``node`` itself for a value by class and for one that is the same for all classes of a token.
        """
        shape = node.meta["val"].shape
        if node in self.values:
            return node
        if not self._is_same(node):
            return None
        if not shape or shape[-1] == 1 or math.prod(shape) == shape[-1] == self.classes:
            return node
        if node.target is aten.expand.default:
            source: Any = node.args[0]
            return source if source.meta["val"].shape[-1:] == (1,) else None
        return None

    def _is_same(self, node: Any) -> bool:
        """Whether ``node`` is no tensor, or one that all ranks have."""
        return not isinstance(node, fx.Node) or (node not in self.values and node not in self.varies)

    def _along_classes(self, node: fx.Node, at: int) -> bool:
        """Whether an operator works along the classes alone, which its argument at ``at`` names."""
        named: Any = node.args[at]
        rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
        dims = [named] if isinstance(named, int) else list(named or ())
        return [dim % rank for dim in dims] == [rank - 1] and not node.kwargs

    def _is_loss(self, node: fx.Node, at: int) -> bool:
        """Whether a loss, whose scores are its argument at ``at``, reads labels and weights that all ranks have."""
        scores, target, weight = node.args[at : at + 3]
        flat = scores in self.values and scores.meta["val"].dim() == 2  # type: ignore[union-attr]
        if not flat or not self._is_same(weight) or not isinstance(target, fx.Node) or not self._is_same(target):
            return False
        return target.meta["val"].dim() == 1 and target.meta["val"].dtype is torch.int64

    def _picks(self, node: fx.Node) -> bool:
        """Whether a value is cut by class, and only the part of this rank is read."""
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        dim = node.args[2] if len(node.args) > 2 else 0
        at = {user.args[1] for user in node.users if user.target is operator.getitem}
        if node.args[1] != self.own or dim not in (value.dim() - 1, -1) or len(at) != 1:
            return False
        if self.rank is not None and at != {self.rank}:
            return False
        if any(reader.op != "call_function" for user in node.users for reader in user.users):
            return False
        root: Any = node.args[0]
        while self._is_name(root):
            root = root.all_input_nodes[0]
        if any(reader is not node and not self._is_name(reader) for reader in self._readers(root)):
            return False
        self.picked.update((user, node.args[0]) for user in node.users)  # type: ignore[misc]
        return True

    @staticmethod
    def _is_name(node: fx.Node) -> bool:
        return node.target in RESHAPES or bool(ops.rule(node.target).renames) or cuts_nothing(node)

    def _readers(self, root: fx.Node) -> Iterator[fx.Node]:
        """What reads a value or another shape or name of it, those included."""
        for user in root.users:
            yield user
            if user in self.values and self._is_name(user):
                yield from self._readers(user)


class _Writer:
    """Writes what a rank computes of its own classes, in the place of what the captured graph has of all."""

    def __init__(self, graph: TrainGraph, columns: _Columns) -> None:
        self.graph, self.columns = graph, columns
        mode = mode_of(graph.graph)
        if mode is None:
            raise PlanError("the graph has no tensors")
        self.mode = mode
        self.phase = dict(graph.phase)
        self.own: dict[fx.Node, fx.Node] = {columns.scores.whole: columns.scores.own}
        self.labels: dict[tuple[fx.Node, int], fx.Node] = {}
        self.parts: dict[fx.Node, fx.Node] = {}
        self.at: fx.Node = columns.scores.whole

    def run(self) -> TrainGraph:
        """Write all values and return the new train graph."""
        graph, columns = self.graph.graph, self.columns
        for node in list(graph.nodes):
            self.at = node
            if node in columns.summed:
                self._write_sum(node)
            elif node in columns.picked:
                self._replace(node, self.own[columns.picked[node]])
            elif node in columns.values and node is not columns.scores.whole:
                self.own[node] = self._written(node)
        erase_dead(graph, set(self.graph.gradients))
        graph.erase_node(columns.scores.gather)
        names = {node.name for node in graph.nodes}
        gradients = tuple(name for name in self.graph.gradients if name in names)
        saved = tuple(name for name in self.graph.saved if name in names)
        left = self.graph.replace(module=fx.GraphModule(self.graph.module, graph), gradients=gradients, saved=saved)
        return up_to_date(left, {name: phase for name, phase in self.phase.items() if name in names})

    def _replace(self, node: fx.Node, by: fx.Node) -> None:
        """Let all readers of ``node`` read ``by``, of the same geometry."""
        shape = tuple(node.meta["val"].shape)
        if tuple(by.meta["val"].shape) != shape:
            by = self._call(aten.view.default, by, list(shape))
        node.replace_all_uses_with(by)
        waiting = list(by.users)
        while waiting:  # strides may be others than those of a part of a larger tensor
            user = waiting.pop(0)
            if user.op != "call_function":
                continue
            before = user.meta["val"]
            note_results(user, self.mode)
            after = user.meta["val"]
            moved = isinstance(after, torch.Tensor) and after.stride() != before.stride()
            everyone = moved or ops.is_view(user.target)
            waiting += [reader for reader in user.users if everyone or ops.is_view(reader.target)]

    def _written(self, node: fx.Node) -> fx.Node:
        """This rank's classes of a value."""
        target: Any = node.target
        if target is aten._log_softmax.default:
            return self._log_softmax(node)
        if target is aten._log_softmax_backward_data.default:
            return self._log_softmax_backward(node)
        if target is aten.nll_loss_backward.default:
            gradient, scores, labels, weight, reduction, ignored, total = node.args
            own = (self.own[scores], self._own_labels(labels, ignored), self._own_weight(weight))  # type: ignore[index]
            return self._call(target, gradient, *own, reduction, FOREIGN, total)
        if cuts_nothing(node):
            return self.own[node.args[0]]  # type: ignore[index]
        if target in RESHAPES:
            shape = [*node.meta["val"].shape[:-1], self.columns.own]
            return self._call(aten.view.default, self.own[node.args[0]], shape)  # type: ignore[index]
        args = fx.map_arg(node.args, self._operand)
        return self._call(target, *args, **node.kwargs)

    def _operand(self, node: fx.Node) -> fx.Node:
        read = self.columns.operand(node)
        if node in self.own or read is None:
            return self.own[node]
        shape = tuple(read.meta["val"].shape)
        if not shape or shape[-1] == 1:
            return read
        flat = read if len(shape) == 1 else self._call(aten.view.default, read, [self.columns.classes])
        part = self._own_weight(flat)
        assert part is not None
        return part

    def _own_labels(self, labels: Any, ignored: Any) -> fx.Node:
        key = (labels, ignored)
        if key not in self.labels:
            scores = self.columns.scores
            args = (labels, self.columns.own, ignored, scores.ranks, scores.group)
            self.labels[key] = self._call(own_classes, *args)
        return self.labels[key]

    def _own_weight(self, weight: Any) -> fx.Node | None:
        if weight is None:
            return None
        if weight not in self.parts:
            self.parts[weight] = self._call(own_part, weight, self.columns.scores.ranks, self.columns.scores.group)
        return self.parts[weight]

    def _log_softmax(self, node: fx.Node) -> fx.Node:
        """Scores less the logarithm of the sum of their exponentials over the classes of all ranks."""
        x, dtype = self.own[node.args[0]], node.meta["val"].dtype  # type: ignore[index]
        low = x.meta["val"].dtype in LOW
        x = self._cast(x, torch.float32) if low else x
        largest = self._unsqueezed(self._reduced(self._call(aten.amax.default, x, [-1]), "max"))
        shifted = self._call(aten.sub.Tensor, x, largest)
        total = self._unsqueezed(self._total(self._call(aten.exp.default, shifted)))
        result = self._call(aten.sub.Tensor, shifted, self._call(aten.log.default, total))
        return self._cast(result, dtype) if low else result

    def _log_softmax_backward(self, node: fx.Node) -> fx.Node:
        """The gradient less its sum over the classes of all ranks, shared out by the softmax."""
        gradient, result = (self.own[value] for value in node.args[:2])  # type: ignore[index]
        low, dtype = gradient.meta["val"].dtype in LOW, node.meta["val"].dtype
        gradient, result = (self._cast(value, torch.float32) if low else value for value in (gradient, result))
        total = self._unsqueezed(self._total(gradient))
        share = self._call(aten.mul.Tensor, self._call(aten.exp.default, result), total)
        input_gradient = self._call(aten.sub.Tensor, gradient, share)
        return input_gradient if input_gradient.meta["val"].dtype is dtype else self._cast(input_gradient, dtype)

    def _write_sum(self, node: fx.Node) -> None:
        """What is summed over classes, or over tokens whose classes one rank has each: a sum over the ranks."""
        if node.target is aten.sum.dim_IntList:
            whole = self._total(self.own[node.args[0]])  # type: ignore[index]
            self._replace(node, whole)
            return
        scores, labels, weight, reduction, ignored = node.args
        own = (self.own[scores], self._own_labels(labels, ignored), self._own_weight(weight))  # type: ignore[index]
        own_loss = self._call(node.target, *own, 2 if reduction == 1 else reduction, FOREIGN)
        addends = [self._call(operator.getitem, own_loss, at) for at in range(2)]
        sums = self._call(COLLECTIVES["all_reduce_coalesced"], addends, "sum", self.columns.scores.group)
        total, weights = (self._call(operator.getitem, sums, at) for at in range(2))
        first = self._call(aten.div.Tensor, total, weights) if reduction == 1 else total
        for user in list(node.users):
            self._replace(user, weights if user.args[1] else first)

    def _total(self, node: fx.Node) -> fx.Node:
        return self._reduced(self._call(aten.sum.dim_IntList, node, [-1]), "sum")

    def _reduced(self, node: fx.Node, how: str) -> fx.Node:
        return self._call(COLLECTIVES["all_reduce"], node, how, self.columns.scores.group)

    def _unsqueezed(self, node: fx.Node) -> fx.Node:
        return self._call(aten.unsqueeze.default, node, -1)

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self._call(aten._to_copy.default, node, dtype=dtype)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node in front of the one that it stands for, in its phase."""
        with self.graph.graph.inserting_before(self.at):
            node = self.graph.graph.create_node("call_function", target, args, kwargs, name=f"own_{self.at.name}")
        copy_origin(node, self.at)
        self.phase[node.name] = self.graph.phase[self.at.name]
        note_results(node, self.mode)
        return node

"""Which values of a tensor-parallel graph are sharded: found by propagation from the all-reduces of activations.

1. Every all-reduce of the forward pass that sums activations begins a *region*: its group and its number of tokens.
2. What is computed row by row from a sharded value is sharded, and so, backwards, is what a sharded value is computed
   from: the region begins at the embedding. Parameters and random numbers are never computed from rows; a rank takes
   its rows of them.
3. An all-reduce whose result no operator reads row by row, such as that of a gradient, stays as it is.
4. A product of rows with a matrix that every rank has, such as the head, runs on rows unless that gathers more: the
   logits, where something reads them as a whole, in the place of what they are computed from.
5. Where all-reduces are added up, as those of three linear layers that read the same value, the addends are summed
   first: one reduce-scatter in the place of three.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from roamc.compat_groups import ranks_in
from roamc.graph import Phase, TrainGraph, operators, output_values, storage_name, tensors_of
from roamc.graph.storage_ids import all_ids, ids_of
from roamc.operators import ops
from roamc.operators.collectives import FINISHED
from roamc.operators.schemas import group_of
from roamc.passes.shard.rows import Addend, Form, Indices, Local, Part, Rows, Turned
from roamc.passes.shard.rules import INDICES, PRODUCTS, local, turned
from roamc.passes.shard.varying import is_of_products, varying

aten = torch.ops.aten

ALL_REDUCE = next((FINISHED[start] for start in FINISHED if start._schema.name.endswith("::all_reduce")), None)

Forms = dict[fx.Node, tuple[Form | None, ...]]
"""Node to the form of each of its results."""


@dataclass
class Candidate:
    """A region: values of one group of ranks and one number of tokens that can be split along the tokens.

    Attributes:
        first: the first all-reduce of it, in graph order.
        group: the group's name, as operators are called with it.
        ranks: how many ranks the group has.
        tokens: how many tokens its values have.
        forms: node to the forms of its results, for those with a sharded result or a sum over the ranks; empty if the
            ranks do not divide the tokens.
    """

    first: fx.Node
    group: object
    ranks: int
    tokens: int
    forms: Forms = field(default_factory=dict)

    @property
    def even(self) -> bool:
        """Whether every rank gets the same number of tokens."""
        return self.tokens % self.ranks == 0


def regions(graph: TrainGraph) -> list[Candidate]:
    """Return the regions of ``graph``, which stays as it is.

    A region whose number of tokens the ranks do not divide has no forms. One in which no operator works on shards is
    left out.
    """
    sharded: list[Candidate] = []
    taken: set[fx.Node] = set()
    for each in _candidates(graph):
        search = _Search(graph, each, taken)
        each.forms = search.run()
        if each.forms:
            taken |= set(each.forms)
            sharded.append(each)
            if not each.even:
                each.forms = {}
    return sharded


def is_source(node: fx.Node) -> bool:
    """Whether ``node`` sums activations over the ranks of its group, and of at least one token."""
    return _sums_rows(node) and node.meta["val"].numel() > 0


def _sums_rows(node: fx.Node) -> bool:
    """Whether ``node`` sums activations over the ranks of its group: rows of floating-point numbers, one for a token.

    A tensor of two dimensions that is made of no product, as what a loss adds up for each token, has none.
    """
    if ALL_REDUCE is None or node.target is not ALL_REDUCE or node.args[1] != "sum":
        return False
    value = node.meta["val"]
    sized = all(isinstance(size, int) for size in value.shape)
    rows = value.dim() > 2 or (value.dim() == 2 and is_of_products(node.args[0]))
    return bool(value.is_floating_point() and rows and value.is_contiguous() and sized)


def groups(graph: TrainGraph) -> list[object]:
    """Return the groups of ranks over which forward sums activations, each once, in the order of their first sums.

    A batch without rows leaves nothing to split, and its rank has to meet the others all the same. Each group is given
    as in the arguments of the graph's operators: by its name, or as the process group itself.
    """
    forward = [node for node in operators(graph.graph) if graph.phase[node.name] is Phase.FORWARD]
    return list(dict.fromkeys(group_of(node) for node in forward if _sums_rows(node)))


def _candidates(graph: TrainGraph) -> Iterator[Candidate]:
    """One for each group and number of tokens that an all-reduce in forward has."""
    seen: set[tuple[object, int]] = set()
    for node in operators(graph.graph):
        if not is_source(node) or graph.phase[node.name] is not Phase.FORWARD:
            continue
        group, tokens = group_of(node), _tokens(node)
        ranks = ranks_in(group)
        if (group, tokens) not in seen and ranks is not None and ranks > 1 and tokens > 1:
            seen.add((group, tokens))
            yield Candidate(node, group, ranks, tokens)


def _tokens(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() // value.shape[-1])


class _Search:
    """Finds the forms of one region."""

    def __init__(self, graph: TrainGraph, region: Candidate, taken: set[fx.Node]) -> None:
        self.graph, self.region, self.taken = graph, region, taken
        self.nodes = operators(graph.graph)
        self.varies = varying(graph, region.group)
        self.fixed = self._fixed()
        self.forms: Forms = {}
        self.calls: dict[fx.Node, Local] = {}
        self.widest = 0
        self.rows = Rows(region.tokens, region.ranks if region.even else 1, self.form, self.varies.__contains__)

    def form(self, node: fx.Node) -> Form | None:
        """The form of a single value."""
        forms = self.forms.get(node)
        return forms[0] if forms is not None and len(forms) == 1 else None

    def run(self) -> Forms:
        """Return the forms of the region; empty if nothing is to be gained."""
        sources = [node for node in self.nodes if self._begins(node)]
        self.widest = max(map(_numel, sources), default=0)
        self._spread(sources, {})
        useful = [node for node in sources if self._is_used(node)]
        if not any(self.graph.phase[node.name] is Phase.FORWARD for node in useful):
            return {}
        self._settle(useful)
        while dear := [node for node in self.calls if self._gathers_more(node)]:
            self.fixed.update(dear)
            self._settle(useful)
        self._join()
        return self.forms

    def _settle(self, sources: list[fx.Node]) -> None:
        """Derive all forms from ``sources``, forwards and backwards."""
        read_as_rows: dict[fx.Node, None] = {}
        while True:
            self._spread(sources, read_as_rows)
            more = {node: None for node in self._read_as_rows() if node not in read_as_rows and self._may_begin(node)}
            if not more:
                return
            read_as_rows |= more

    def _gathers_more(self, product: fx.Node) -> bool:
        """Whether ``product``, computed on rows, makes a gather of more bytes than that of what it multiplies."""
        call = self.calls[product]
        if product.target not in PRODUCTS or call.forms != (Form.SHARD,):
            return False
        factor = next(value.node for value in call.args if isinstance(value, Part))
        while (of := self.calls.get(factor)) is not None and self._looks(of):
            factor = of.args[0].node
        free = self.form(factor) is not Form.SHARD or self._is_gathered(factor, self.graph.phase[product.name])
        return any(
            self._is_gathered(node) and (free or _numel(node) > _numel(factor)) for node in self._follow(product)
        )

    def _follow(self, product: fx.Node) -> set[fx.Node]:
        """``product`` and what is computed on rows of it and of nothing else that is sharded, up to other products."""
        reached = {product}
        for node in self.nodes:
            call = self.calls.get(maker(node))
            if node in reached or call is None or node.target in PRODUCTS:
                continue
            read = {value.node for value in call.args if isinstance(value, Part) and self.form(value.node)}
            if read and read <= reached and Form.SHARD in self.forms.get(node, ()):
                reached.add(node)
        return reached

    def _is_gathered(self, node: fx.Node, phase: Phase | None = None) -> bool:
        """Whether an operator, of ``phase`` if that is given, reads the whole of a value of which a rank has rows."""
        for user in node.users:
            call = self.calls.get(user)
            if call is not None:
                gathered = self._looks(call) and self._is_gathered(user, phase)
            elif user.target is operator.getitem:
                gathered = False  # one result of several, which is asked for by itself
            elif user.op == "call_function" and ops.is_view(user.target):
                turns = [reader for reader in user.users if Turned(user) in _args(self.calls.get(reader))]
                gathered = len(turns) < len(user.users) and self._is_gathered(user, phase)
            else:
                gathered = phase is None or user.op == "output" or self.graph.phase[user.name] is phase
            if gathered:
                return True
        return False

    @staticmethod
    def _looks(call: Local) -> bool:
        """Whether ``call`` only gives its argument another shape or name."""
        return call.forms == (Form.SHARD,) and (call.target is None or ops.is_view(call.target))

    def _begins(self, node: fx.Node) -> bool:
        """Whether ``node`` is an all-reduce of the region, of addends that differ from rank to rank."""
        own = is_source(node) and group_of(node) == self.region.group and _tokens(node) == self.region.tokens
        return own and node.args[0] in self.varies and node not in self.fixed

    def _fixed(self) -> set[fx.Node]:
        """Nodes that stay whole: of other regions, updates and indices, written in place, or returned with gaps."""
        written = all_ids(argument for node in self.nodes for argument in ops.mutated_arguments(node))
        returned = {node for node in output_values(self.graph.graph) if node is not None}
        fixed = self.taken | self._indices()
        for node in self.nodes:
            dense = all(tensor.is_contiguous() for _, tensor in tensors_of(node))
            late = self.graph.phase[node.name] is Phase.UPDATE
            if late or not written.isdisjoint(ids_of(node)) or (node in returned and not dense):
                fixed.add(node)
        return fixed

    def _indices(self) -> set[fx.Node]:
        """What indices are computed from, as far as that is integers alone: every rank checks the indices of all."""
        integers: set[fx.Node] = set()
        for node in self.graph.graph.nodes:
            tensors = [tensor for _, tensor in tensors_of(node)]
            whole = bool(tensors) and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
            if whole and integers.issuperset(node.all_input_nodes):
                integers.add(node)
        stays: set[fx.Node] = set()
        waiting: list[Any] = [node.args[INDICES[node.target]] for node in self.nodes if node.target in INDICES]
        while waiting:
            node = waiting.pop()
            if node in integers and node not in stays:
                stays.add(node)
                waiting += node.all_input_nodes
        return stays

    def _spread(self, sources: list[fx.Node], read_as_rows: dict[fx.Node, None]) -> None:
        """Derive all forms anew, in graph order, from ``sources`` and the nodes in ``read_as_rows``."""
        self.forms.clear()
        self.calls.clear()
        begin = set(sources)
        for node in self.nodes:
            if node in begin:
                self.forms[node] = (Form.SHARD,)
            elif node in self.fixed:
                continue
            elif len(picked := picked_forms(node, self.forms)) == 1:
                self.forms[node] = picked
            elif node in read_as_rows or any(argument in self.forms for argument in node.all_input_nodes):
                call = local(node, self.rows)
                if call is not None and self._is_rows(call):
                    self.calls[node], self.forms[node] = call, call.forms

    @staticmethod
    def _is_rows(call: Local) -> bool:
        return any(isinstance(value, Part | Indices | Addend) for value in call.args)

    def _is_used(self, source: fx.Node) -> bool:
        """Whether an operator works on the shard of ``source``, and does not only look at it."""
        waiting, seen = [source], {source}
        while waiting:
            for user in waiting.pop().users:
                call = self.calls.get(user)
                if call is not None and call.target is not None and not ops.is_view(user.target):
                    return True
                if call is not None and user not in seen:
                    seen.add(user)
                    waiting.append(user)
        return False

    def _read_as_rows(self) -> Iterator[fx.Node]:
        """Values that are whole so far and of which an operator reads this rank's rows."""
        for call in self.calls.values():
            for value in call.args:
                if isinstance(value, Part) and not value.expanded and self.form(value.node) is None:
                    yield maker(value.node)

    def _may_begin(self, node: fx.Node) -> bool:
        """Whether a value that is whole can be computed from rows, without a gather that would not be there else.

        Activations are worth one: the region begins at the embedding. Masks and indices are not, nor are values of more
        elements than what is summed over the ranks, such as logits.
        """
        if node.op != "call_function" or node in self.fixed or node.target is aten.detach.default:
            return False
        floating = any(tensor.is_floating_point() for _, tensor in tensors_of(node))
        rows = local(node, self.rows)
        if rows is None or not self._is_rows(rows):
            return False
        return (floating and _numel(node) <= self.widest) or all(self._takes_rows(user) for user in node.users)

    def _takes_rows(self, user: fx.Node) -> bool:
        """Whether ``user`` works on rows, or is a view of which products that add up over the tokens read the rows."""
        if user in self.forms:
            return True
        readers = list(user.users)
        sums = all(reader.target in PRODUCTS and self.form(reader.args[-1]) is Form.SHARD for reader in readers)  # type: ignore[arg-type]
        return turned(user) is not None and sums

    def _join(self) -> None:
        """Sum addends first where the results of all-reduces are added up."""
        for node in reversed(self.nodes):
            if self._adds(node):
                inner = self._addends(node, first=True)
                if sum(1 for part in inner if is_source(part)) > 1:
                    self.forms.update(dict.fromkeys((part for part in inner if part is not node), (Form.SUM,)))

    def _adds(self, node: fx.Node) -> bool:
        call = self.calls.get(node)
        plain = node.target is aten.add.Tensor and not node.kwargs and self.form(node) is Form.SHARD
        if call is None or not plain:
            return False
        return all(isinstance(value, Part) and self.form(value.node) is Form.SHARD for value in call.args)

    def _addends(self, node: fx.Node, *, first: bool = False) -> list[fx.Node]:
        """The sums, views and all-reduces of which ``node`` is the sum and that nothing else reads; with ``node``."""
        if not first and (len(node.users) != 1 or self.form(node) is not Form.SHARD):
            return []
        if is_source(node):
            return [node]
        call = self.calls.get(node)
        if self._adds(node) or (call is not None and call.target is None):
            values = [value.node for value in call.args if isinstance(value, Part)] if call is not None else []
        elif call is not None and call.target is aten.view.default:
            values = [call.args[0].node]
        else:
            return []
        inner = [part for value in values for part in self._addends(value)]
        return [*inner, node] if any(is_source(part) for part in inner) else []


def _numel(node: fx.Node) -> int:
    """How many elements the largest result has."""
    return max((int(tensor.numel()) for _, tensor in tensors_of(node)), default=0)


def _args(call: Local | None) -> tuple[object, ...]:
    return () if call is None else call.args


def maker(node: fx.Node) -> fx.Node:
    """Return the operator that ``node`` picks a result of; ``node`` itself if it picks none."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def picked_forms(node: fx.Node, forms: Forms) -> tuple[Form | None, ...]:
    """Return, as a tuple of one, the form of the result that ``node`` picks of an operator with several.

    The tuple is empty if ``node`` picks none, or picks one without a form.

    Args:
        node: any node.
        forms: operator to the forms of its results.
    """
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or source not in forms:
        return ()
    form = forms[source][node.args[1]]  # type: ignore[index]
    return () if form is None else (form,)


def names(node: fx.Node, forms: tuple[Form | None, ...], form: Form) -> list[str]:
    """Return the names of those results of ``node`` that have ``form``; ``forms`` are those of all its results."""
    return [storage_name(node, position) for position, result_form in enumerate(forms) if result_form is form]

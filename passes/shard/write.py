"""A graph on shards, written node by node after a captured one.

What stands for a value of the captured graph:

    captured                     for this rank
    a sharded value              its rows [tokens / ranks, ...]; a reader of the whole gets a gather, one for each
                                 value and phase, so that backward gathers again and only the rows are saved
    a whole value, read as rows  roamc.own_part of it, once, where it is made; roamc.own_indices of indices, which must
                                 be in range on all ranks
    a sum over the ranks         this rank's addend; what reads the sum gets an all-reduce, one for all sums so far
    a view of a sharded value    made again in each phase that reads it, of that phase's gather
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from roamc.compat import FakeTensorMode
from roamc.compat_groups import ranks_in
from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph, copy_origin, operators, output_node, storage_name, tensors_of
from roamc.graph.rewrite import mode_of
from roamc.operators import ops
from roamc.operators.collectives import FINISHED
from roamc.operators.corrections import note_results
from roamc.operators.schemas import group_of
from roamc.operators.shards import own_indices, own_part
from roamc.passes.shard.choose import is_source, maker, picked_forms
from roamc.passes.shard.rows import Addend, Form, Indices, Local, Part, Rows, Turned, Whole
from roamc.passes.shard.rules import TURNS, divides, local
from roamc.passes.shard.varying import varying
from roamc.rewriting.versions import erase_dead, up_to_date

aten = torch.ops.aten


def _collective(name: str) -> Any:
    """The operator of ours that runs a collective of ``_c10d_functional`` to its end."""
    return next(op for start, op in FINISHED.items() if start._schema.name.endswith(f"::{name}"))


class Region(NamedTuple):
    """One region of a decision, see :class:`roamc.passes.shard.Decision`.

    Attributes:
        first: name of an operator that talks to the region's group.
        ranks: how many ranks the group has.
        tokens: how many tokens the values have as a whole, before they are split.
        shards: names of values of which a rank has rows.
        sums: names of values of which a rank has an addend.
    """

    first: str
    ranks: int
    tokens: int
    shards: tuple[str, ...]
    sums: tuple[str, ...]


@dataclass(frozen=True)
class Held:
    """What the new graph has of one value of the captured graph.

    Attributes:
        whole: node of the value itself; None if there is none yet.
        shard: node of this rank's rows; None if there is none.
        addend: node of this rank's addend, if the value is a sum over the ranks that is not made yet; else None.
        rest: node of this rank's rows of what is added to that sum, such as a residual; None if nothing is.
        late: whether the value is a view of a sharded one, made where it is read.
    """

    whole: fx.Node | None = None
    shard: fx.Node | None = None
    addend: fx.Node | None = None
    rest: fx.Node | None = None
    late: bool = False


def sharded(graph: TrainGraph, region: Region) -> TrainGraph:
    """Return ``graph`` with one region on shards, on a new FX graph; the given graph stays as it is.

    Raises:
        PlanError: the region does not fit the graph.
    """
    return _Writer(graph, region).run()


@dataclass
class _Calls:
    """The local calls of a region, checked against the forms that the decision asks for."""

    graph: TrainGraph
    region: Region
    group: object
    forms: dict[fx.Node, tuple[Form | None, ...]] = field(default_factory=dict)
    calls: dict[fx.Node, Local] = field(default_factory=dict)

    @property
    def rows(self) -> Rows:
        differ = varying(self.graph, self.group)
        return Rows(self.region.tokens, self.region.ranks, self.form, differ.__contains__)

    def form(self, node: fx.Node) -> Form | None:
        forms = self.forms.get(node)
        return forms[0] if forms is not None and len(forms) == 1 else None

    def read(self) -> Rows:
        """Fill :attr:`forms` and :attr:`calls`, and return the region for rules.

        Raises:
            PlanError: a value is missing, or its operator cannot give what the decision asks for.
        """
        form_by_name = {**dict.fromkeys(self.region.shards, Form.SHARD), **dict.fromkeys(self.region.sums, Form.SUM)}
        left = set(form_by_name)
        nodes = [node for node in operators(self.graph.graph) if maker(node) is node]
        for node in nodes:
            names = [storage_name(node, at) for at in range(_results(node))]
            if any(name in form_by_name for name in names):
                self.forms[node] = tuple(form_by_name.get(name) for name in names)
                left.difference_update(names)
        if left:
            raise PlanError(f"the plan shards {min(left)!r}, which this graph does not have")
        for node in operators(self.graph.graph):
            if picked := picked_forms(node, self.forms):
                self.forms[node] = picked
        rows = self.rows
        for node in nodes:
            if node in self.forms:
                self.calls[node] = self._call(node, rows)
        return rows

    def _call(self, node: fx.Node, rows: Rows) -> Local:
        forms = self.forms[node]
        if is_source(node) and group_of(node) == self.group:
            call: Local | None = Local(None, (Whole(node.args[0]),), (Form.SUM,))  # type: ignore[arg-type]
        else:
            call = local(node, rows)
        gives = None if call is None else call.forms
        if call is None or (gives != forms and not (gives == (Form.SUM,) and forms == (Form.SHARD,))):
            raise PlanError(f"{node.name} cannot be computed from the rows of {self.region.tokens} tokens as planned")
        return call


def _results(node: fx.Node) -> int:
    value = node.meta.get("val")
    return len(value) if isinstance(value, list | tuple) else 1


class _Writer:
    """Writes the new graph from the first node to the last."""

    def __init__(self, graph: TrainGraph, region: Region) -> None:
        self.old, self.region = graph, region
        by_name = {node.name: node for node in graph.graph.nodes}
        if region.first not in by_name or group_of(by_name[region.first]) is None:
            raise PlanError(f"{region.first!r} is no collective of this graph")
        self.group: Any = group_of(by_name[region.first])
        self._check_sizes()
        self.calls = _Calls(graph, region, self.group)
        self.rows = self.calls.read()
        mode = mode_of(graph.graph)
        if mode is None:
            raise PlanError("the graph has no tensors")
        self.mode: FakeTensorMode = mode
        self.graph = fx.Graph()
        self.phase: dict[str, Phase] = {}
        self.held: dict[fx.Node, Held] = {}
        self.tuples: dict[fx.Node, fx.Node] = {}
        self.results: dict[fx.Node, tuple[Held, ...]] = {}
        self.kept: dict[tuple[object, ...], fx.Node] = {}
        self.pending: list[fx.Node] = []
        self.like: fx.Node | None = None

    def _check_sizes(self) -> None:
        ranks = ranks_in(self.group)
        if ranks not in (None, self.region.ranks):
            raise PlanError(f"the plan shards for {self.region.ranks} ranks, and the group has {ranks}")
        if self.region.ranks < 2 or self.region.tokens % self.region.ranks:
            raise PlanError(f"{self.region.ranks} ranks do not divide {self.region.tokens} tokens")

    def run(self) -> TrainGraph:
        """Write all nodes and return the new train graph."""
        crossed = not self.old.boundary
        for node in self.old.graph.nodes:
            self.like = node
            if node.op == "call_function":
                if not crossed and self.old.phase[node.name] is not Phase.FORWARD and not ops.is_view(node.target):
                    crossed = True
                    self._end_forward()
                if self.old.phase[node.name] is Phase.UPDATE:
                    self._reduce_pending()  # an update waits for its gradient, even where it does not read it first
                self._write(node)
            elif node.op != "output":
                self.held[node] = Held(whole=self._copied(node, node.args, {}))
        self.like = None
        outputs = dict(self._returned(None))
        old = output_node(self.old.graph)
        output = self.graph.output(tuple(outputs.get(at) for at in range(len(self.old.outputs))))
        output.meta = dict(old.meta)
        return self._finished()

    def _end_forward(self) -> None:
        """Make what forward returns, in front of views of backward that stand at the end of the graph so far."""
        last = [node for node in self.graph.nodes if self.phase.get(node.name) is Phase.FORWARD][-1]
        with self.graph.inserting_before(last.next):
            list(self._returned(Phase.FORWARD))

    def _returned(self, phase: Phase | None) -> Iterator[tuple[int, fx.Node]]:
        """(position, new node) of every output of ``phase``, all for None."""
        values: Any = output_node(self.old.graph).args[0]
        for position, (value, port) in enumerate(zip(values, self.old.outputs, strict=True)):
            if value is None or (phase is not None and port.phase is not phase):
                continue
            node = self._whole(value, port.phase)
            if _geometry(node) != _geometry(value):
                raise PlanError(f"the plan shards {value.name}, which the graph returns with gaps in memory")
            yield position, node

    def _finished(self) -> TrainGraph:
        old = self.old
        new_names = {node.name: name for node, held in self.held.items() if (name := self._name(node, held))}
        waits = {new_names.get(name, name): new_names.get(behind, behind) for name, behind in old.waits.items()}
        gradients = tuple(new_names.get(name, name) for name in old.gradients)
        erase_dead(self.graph, set(gradients))
        new = old.replace(
            module=fx.GraphModule(old.module, self.graph),
            waits=waits,
            gradients=gradients,
            saved=tuple(dict.fromkeys(new_names[name] for name in old.saved if name in new_names)),
        )
        return up_to_date(new, self.phase)

    def _name(self, node: fx.Node, held: Held) -> str | None:
        if held.late:
            return self._name(node.all_input_nodes[0], self.held[node.all_input_nodes[0]])
        replacement = held.shard or held.whole
        return None if replacement is None else replacement.name

    def _write(self, node: fx.Node) -> None:
        if node in self.calls.calls:
            self._write_local(node, self.calls.calls[node])
        elif maker(node) in self.tuples:
            self._pick(node)
        elif maker(node) in self.results:
            self.held[node] = self.results[maker(node)][node.args[1]]  # type: ignore[index]
        elif ops.is_view(node.target) and any(self._is_sharded(argument) for argument in node.all_input_nodes):
            self.held[node] = Held(late=True)
        else:
            self.held[node] = Held(whole=self._again(node, self.old.phase[node.name]))

    def _is_sharded(self, node: fx.Node) -> bool:
        return self.held[node].late or self.held[node].shard is not None

    def _pick(self, node: fx.Node) -> None:
        """One result of an operator on rows."""
        tuple_node, form = self.tuples[maker(node)], self.calls.form(node)
        if form is None:
            raise PlanError(f"{node.name} is no result on rows")
        self._hold(node, form, self._call(node.target, (tuple_node, node.args[1]), {}, node))

    def _hold(self, node: fx.Node, form: Form, value: fx.Node) -> None:
        """Note that ``value`` is what this rank has of ``node``."""
        shape = tuple(node.meta["val"].shape)
        if form is Form.SUM:
            if tuple(value.meta["val"].shape) != shape:
                value = self._call(aten.view.default, (value, list(shape)), {}, node)
            self.held[node] = Held(addend=value)
            self._end(node)
            return
        lead = self.rows.lead(shape)
        if lead is None or tuple(value.meta["val"].shape) != self.rows.own(shape, lead):
            raise PlanError(f"{node.name} does not have the rows of {self.region.tokens} tokens")
        self.held[node] = Held(shard=value)

    def _end(self, node: fx.Node) -> None:
        """Note that a sum is to be made, if it ends here. That of a matrix is made at once: it waits for no others."""
        if not self._ends(node):
            return
        others, self.pending = self.pending, [node]
        if sum(size > 1 for size in node.meta["val"].shape) > 1:
            self._reduce_pending()
        self.pending = [*others, *self.pending]

    def _ends(self, node: fx.Node) -> bool:
        """Whether an operator reads the sum itself, and no further addend is made of it."""
        for user in node.users:
            call = self.calls.calls.get(user)
            if call is None or Addend(node) not in call.args:
                return True
        return False

    def _write_local(self, node: fx.Node, call: Local) -> None:
        phase, forms = self.old.phase[node.name], self.calls.forms[node]
        if call.forms == (Form.SUM,) and (is_source(node) or any(isinstance(a, Addend) for a in call.args)):
            if forms == (Form.SUM,) and self._has_been_summed(call):
                self.held[node] = Held(whole=self._again(node, phase))
                return
            held = self._addend(node, call, phase)
            self.held[node] = held if forms == (Form.SUM,) else Held(shard=self._scattered(node, held))
            if forms == (Form.SUM,):
                self._end(node)
            return
        if call.target is None:
            self.held[node] = Held(shard=self._operand(call.args[0], phase))
            return
        args = tuple(self._operand(value, phase) for value in call.args)
        if call.target is aten.native_dropout.default:
            self.results[node] = self._dropped(node, *args)
            return
        if divides(node):
            self.results[node] = self._averaged(node, args)
            return
        result = self._call(call.target, args, dict(call.kwargs), node)
        if len(forms) == 1 and not isinstance(result.meta["val"], list | tuple):
            form = forms[0]
            assert form is not None
            self._hold(node, form, result)
        else:
            self.tuples[node] = result

    def _has_been_summed(self, call: Local) -> bool:
        """Whether a sum among the arguments was read in front of this operator, so that its addend is gone."""
        return any(self.held[value.node].addend is None for value in call.args if isinstance(value, Addend))

    def _dropped(self, node: fx.Node, x: fx.Node, share: float) -> tuple[Held, ...]:
        """The rows of a dropout's result and of its mask, which is drawn for all tokens."""
        whole, phase = node.meta["val"][0], self.old.phase[node.name]
        kwargs = {"dtype": whole.dtype, "device": whole.device}
        blank = self._insert(aten.full.default, (list(whole.shape), 0.0), kwargs, phase, "blank")
        drawn = self._call(aten.native_dropout.default, (blank, share, True), {}, node)
        mask = self._insert(operator.getitem, (drawn, 1), {}, phase, "mask")
        own = self._own_rows(mask, (), phase, (own_part,), behind=False)
        args = (x, own, 1.0 / (1.0 - share))
        dropped = self._insert(aten.native_dropout_backward.default, args, {}, phase, "dropout")
        return Held(shard=dropped), Held(shard=own)

    def _averaged(self, node: fx.Node, args: Sequence[Any]) -> tuple[Held, ...]:
        """The mean of a loss over the tokens of all ranks, and the sum of the tokens' weights."""
        phase = self.old.phase[node.name]
        own_loss = self._call(node.target, args, {}, node)
        addends = [self._insert(operator.getitem, (own_loss, at), {}, phase, "addend") for at in range(2)]
        once = (addends, "sum", self.group)
        sums = self._insert(_collective("all_reduce_coalesced"), once, {}, phase, "all_reduce_loss")
        total, weight = (self._insert(operator.getitem, (sums, at), {}, phase, "sum") for at in range(2))
        return Held(whole=self._insert(aten.div.Tensor, (total, weight), {}, phase, "mean")), Held(whole=weight)

    def _operand(self, value: Any, phase: Phase) -> Any:
        if isinstance(value, Part):
            return self._part(value, phase)
        if isinstance(value, Indices):
            return self._taken(value.node, (), phase, (own_indices, value.size, value.ignored))
        if isinstance(value, Whole):
            whole = self._whole(value.node, phase)
            return whole if value.shape is None else self._viewed(whole, value.shape, phase)
        if isinstance(value, Turned):
            own = self._part(Part(value.node), phase)
            return self._insert(value.view.target, (own, *value.view.args[1:]), {}, phase, value.view.name)
        return value

    def _addend(self, node: fx.Node, call: Local, phase: Phase) -> Held:
        """What this rank adds to a sum that is an all-reduce, a view of a sum, or a sum of sums."""
        if is_source(node):
            return Held(addend=self._whole(call.args[0].node, phase))
        parts = [self.held[value.node] for value in call.args if isinstance(value, Addend)]
        rests = [self._part(value, phase) for value in call.args if isinstance(value, Part)]
        rests += [part.rest for part in parts if part.rest is not None]
        addends = [part.addend for part in parts if part.addend is not None]
        if call.target is None:
            return parts[0]
        shape = tuple(node.meta["val"].shape)
        if call.target is aten.view.default:
            lead = self.rows.lead(shape)
            own = None if lead is None else self.rows.own(shape, lead)
            rest = self._viewed(rests[0], own, phase) if rests and own else None
            return Held(addend=self._viewed(addends[0], shape, phase), rest=rest)
        if call.target in TURNS:
            return Held(addend=self._call(call.target, (addends[0], *call.args[1:]), {}, node))
        flat = [self._viewed(addend, self._flat_shape(addend), phase) for addend in addends]
        return Held(addend=self._sum(flat, node), rest=self._sum(rests, node) if rests else None)

    def _flat_shape(self, addend: fx.Node) -> tuple[int, ...]:
        """The shape with one dimension of tokens, in which addends are summed: as they are reduced."""
        shape = tuple(addend.meta["val"].shape)
        lead = self.rows.lead(shape)
        return shape if lead is None else (self.region.tokens, *shape[lead:])

    def _sum(self, parts: Sequence[fx.Node], like: fx.Node) -> fx.Node:
        total = parts[0]
        for part in parts[1:]:
            total = self._call(aten.add.Tensor, (total, part), {}, like)
        return total

    def _scattered(self, node: fx.Node, held: Held) -> fx.Node:
        """This rank's rows of a sum."""
        assert held.addend is not None
        phase, shape = self.old.phase[node.name], tuple(node.meta["val"].shape)
        lead = self.rows.lead(shape)
        if lead is None:
            raise PlanError(f"{node.name} does not have {self.region.tokens} tokens")
        flat = self._viewed(held.addend, (self.region.tokens, *shape[lead:]), phase)
        args = (flat, "sum", self.region.ranks, self.group)
        scattered = self._insert(_collective("reduce_scatter_tensor"), args, {}, phase, "reduce_scatter")
        return scattered if held.rest is None else self._sum([held.rest, scattered], node)

    def _part(self, part: Part, phase: Phase) -> fx.Node:
        """This rank's rows of a value: what there is, or a part of the whole, taken where the whole is made."""
        held = self.held[part.node]
        if held.shard is not None:
            return held.shard
        return self._taken(part.node, part.expanded, phase, (own_part,))

    def _taken(self, node: fx.Node, expanded: tuple[int, ...], phase: Phase, take: tuple[Any, ...]) -> fx.Node:
        """This rank's rows of the whole of a value, by an operator and its arguments, once for each."""
        whole = self._whole(node, phase)
        key: tuple[object, ...] = (whole, expanded, *take)
        made_here = whole.op == "call_function"
        key = key if made_here else (*key, phase)
        if key not in self.kept:
            then = self.phase[whole.name] if made_here else phase
            self.kept[key] = self._own_rows(whole, expanded, then, take, behind=made_here)
        return self.kept[key]

    def _own_rows(
        self, whole: fx.Node, expanded: tuple[int, ...], phase: Phase, take: tuple[Any, ...], *, behind: bool
    ) -> fx.Node:
        """This rank's rows of ``whole``, written right behind it, or at the end of the graph so far."""
        last = whole

        def insert(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            with self.graph.inserting_after(last) if behind else contextlib.nullcontext():
                return self._insert(target, (last, *args), kwargs, phase, target._schema.name.partition("::")[2])

        if expanded:
            last = insert(aten.expand.default, list(expanded))
        shape = tuple(last.meta["val"].shape)
        lead = self.rows.lead(shape) or 0
        if not last.meta["val"].is_contiguous():
            last = insert(aten.clone.default, memory_format=torch.contiguous_format)
        if lead > 1:
            last = insert(aten.view.default, [self.region.tokens, *shape[lead:]])
        return insert(*take, self.region.ranks, self.group)

    def _whole(self, node: fx.Node, phase: Phase) -> fx.Node:
        """The value of ``node`` itself, for a reader in ``phase``."""
        held = self.held[node]
        if held.whole is not None:
            return held.whole
        if held.late:
            key: tuple[object, ...] = (node, phase)
            if key not in self.kept:
                self.kept[key] = self._again(node, phase)
            return self.kept[key]
        if held.shard is not None:
            return self._viewed(self._gathered(held.shard, phase), tuple(node.meta["val"].shape), phase)
        if held.rest is not None or node not in self.pending:
            raise PlanError(f"the plan leaves {node.name} a sum over the ranks, which is read as a whole")
        self._reduce_pending(phase)
        return self._whole(node, phase)

    def _gathered(self, shard: fx.Node, phase: Phase) -> fx.Node:
        if (shard, phase) not in self.kept:
            args = (shard, self.region.ranks, self.group)
            gathered = self._insert(_collective("all_gather_into_tensor"), args, {}, phase, "all_gather")
            self.kept[shard, phase] = gathered
        return self.kept[shard, phase]

    def _reduce_pending(self, reader: Phase = Phase.FORWARD) -> None:
        """Sum all addends that are there over the ranks, for a reader in this phase: one collective for each dtype."""
        buckets: dict[torch.dtype, list[fx.Node]] = {}
        for node in self.pending:
            buckets.setdefault(node.meta["val"].dtype, []).append(node)
        self.pending = []
        for bucket in buckets.values():
            phase = max(reader, *(self.old.phase[node.name] for node in bucket))
            addends = [self.held[node].addend for node in bucket]
            if len(bucket) == 1:
                once = (addends[0], "sum", self.group)
                whole = self._insert(_collective("all_reduce"), once, {}, phase, "all_reduce")
                self.held[bucket[0]] = self._reduced(bucket[0], whole, phase)
                continue
            args = (addends, "sum", self.group)
            sums = self._insert(_collective("all_reduce_coalesced"), args, {}, phase, "all_reduce_bucket")
            for position, node in enumerate(bucket):
                pick = self._insert(operator.getitem, (sums, position), {}, phase, f"sum_of_{node.name}")
                self.held[node] = self._reduced(node, pick, phase)

    def _reduced(self, node: fx.Node, whole: fx.Node, phase: Phase) -> Held:
        """A sum that is made: as the captured graph has it."""
        return Held(whole=self._viewed(whole, tuple(node.meta["val"].shape), phase))

    def _viewed(self, node: fx.Node, shape: Sequence[int], phase: Phase) -> fx.Node:
        """``node`` in another shape; a copy where it has gaps in memory. Once for each phase."""
        if tuple(node.meta["val"].shape) == tuple(shape):
            return node
        key = (node, tuple(shape), phase)
        if key not in self.kept:
            dense = node
            if not node.meta["val"].is_contiguous():
                kwargs = {"memory_format": torch.contiguous_format}
                dense = self._insert(aten.clone.default, (node,), kwargs, phase, "clone")
            self.kept[key] = self._insert(aten.view.default, (dense, list(shape)), {}, phase, "view")
        return self.kept[key]

    def _again(self, node: fx.Node, phase: Phase) -> fx.Node:
        """The operator of the captured graph on whole arguments."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: self._whole(argument, phase))
        copy = self._copied(node, args, kwargs)
        self.phase[copy.name] = phase
        pairs = list(zip(node.all_input_nodes, copy.all_input_nodes, strict=False))
        fresh = [new for old, new in pairs if new.meta.get("val") is not old.meta.get("val")]
        moved = len(node.all_input_nodes) != len(copy.all_input_nodes)
        rule = ops.rule(node.target)
        if fresh and (rule.view_of or rule.mutates or moved or any(_geometry(n) != _geometry(o) for o, n in pairs)):
            note_results(copy, self.mode)
        return copy

    def _copied(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        copy = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        copy.meta = dict(node.meta)
        return copy

    def _call(self, target: Any, args: Any, kwargs: Mapping[str, Any], like: fx.Node) -> fx.Node:
        """A new node with the name, phase and notes of ``like``, on rows or addends."""
        node = self.graph.create_node("call_function", target, args, dict(kwargs), name=like.name)
        node.meta = dict(like.meta)
        self.phase[node.name] = self.old.phase[like.name]
        note_results(node, self.mode)
        return node

    def _insert(self, target: Any, args: Any, kwargs: Mapping[str, Any], phase: Phase, name: str) -> fx.Node:
        """A new node that no node of the captured graph stands for, at the graph's insertion point."""
        node = self.graph.create_node("call_function", target, args, dict(kwargs), name=f"shard_{name}")
        if self.like is not None:
            copy_origin(node, self.like)
        self.phase[node.name] = phase
        note_results(node, self.mode)
        return node


def _geometry(node: fx.Node) -> list[tuple[object, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.dtype) for _, tensor in tensors_of(node)]

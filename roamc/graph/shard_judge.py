"""The judge of sharded graphs derives what every operator makes of the rows that a rank has, and compares it.

Both graphs are walked once, with *terms* in the place of values: a term says which operator made the elements of a
tensor, of which terms, in row-major order, whatever the shape. A rank of the sharded graph has of a term

    R   all of it, as in the captured graph
    T   its rows: the part that stands at its rank if the elements are cut into as many parts as there are ranks
    P   an addend: the term is the sum over the ranks
    C   columns of a matrix that are its rows in the matrix with the dimensions exchanged

and the states follow from the operators alone:

    own_part(R) = T               all_gather(T) = R           reduce_scatter(p) = T of all_reduce(p)
    norm, softmax, sums(T) = T    sum over the rows(T) = P    all_reduce(P) = R, reduce_scatter(P) = T
    transposed(T) = C, (C) = T, (P) = P     mm(T, R) = T                mm(C, T) = P
    own_indices(R) = T, for look-ups and losses alone, which take no other T as indices
    sum of a loss over the tokens(T) = P    its mean is the sum over that of the weights, each of all ranks
    element by element: T with T, and with an R that has one element or row for all tokens, gives T
    anything else takes R and gives R

Every term that an operator of the sharded graph makes must be one of the captured graph's, but for sums on the way to
a reduce-scatter: sums count as the same in any order, and a sum over the ranks as the sum of the sums of its addends.
In the end every output must be in state R, with the term that it has in the captured graph.

This module shares no code with pass ``shard``: which operators work on rows, and which values the ranks share, stands
here a second time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from roamc.compat import OpOverload
from roamc.compat_groups import ranks_in
from roamc.compat_operators import is_pointwise
from roamc.errors import VerifyError
from roamc.graph import Phase, TrainGraph, input_gradients, output_values, tensors_of
from roamc.graph.rank_judge import check_agreements, check_waits
from roamc.graph.shard_classes import MORE_RULES, by_class, is_by_class
from roamc.graph.shard_indices import INDEX_RULES
from roamc.graph.shard_states import (
    COLLECTIVES,
    HELPERS,
    RULES,
    WORDS,
    R,
    Rule,
    Value,
    elementwise,
    literals,
    local_shape,
    shape_of,
    single,
)
from roamc.graph.shard_terms import Term, Terms
from roamc.graph.storage_ids import StorageId, ids_of
from roamc.operators import ops
from roamc.operators.random import save_rng_state
from roamc.operators.schemas import name_of
from roamc.operators.shards import own_classes, own_indices

ALL_RULES: dict[object, Rule] = {**RULES, **INDEX_RULES, **MORE_RULES}
"""Operator to its rule where no argument is by class."""


def check(before: TrainGraph, sharded: TrainGraph, after: str) -> None:
    """Check that a sharded graph gives what the captured one gives.

    Args:
        before: the graph in front of the pass.
        sharded: what the pass left.
        after: name of the pass, for messages.

    Raises:
        VerifyError: an operator reads rows as if they were whole, or the other way round; makes a value that the
            captured graph does not have; sums over the ranks what need not be summed, twice, or in another order;
            communicates with a group of another size; what is gathered in forward is kept for backward; or an output, a
            write or a random number differs. Names the operator.
    """
    terms = Terms()
    captured = Walk(terms, before, after)
    captured.run()
    walk = Walk(terms, sharded, after, captured)
    walk.run()
    walk.compare()


class Walk:
    """One walk over a graph, which derives what a rank has of every value; a sharded graph is compared on the way.

    Args:
        terms: gives the terms; the same object for both graphs.
        graph: the graph to walk over.
        after: name of the pass, for messages.
        captured: the walk over the captured graph, which has run; None if ``graph`` is the captured one.

    Attributes:
        values: node to the values of its results.
        made: terms that operators of the captured graph make; empty for a sharded graph.
        summed: terms that the captured graph sums over ranks in one piece, to the numbers of these sums, counted from 0
            in graph order; empty for a sharded graph.
        effects: terms of random operators, of writes, and of operators with another effect, in graph order.
        writes: storage to the terms that were written to it, in graph order.
        gathers: storage of what is gathered, views of it included, to the gather's name and phase.
        draws: number of random operators so far.
        last_sum: number, in :attr:`summed` of the captured graph, of the last sum in one piece of the sharded graph.
        gathered: terms of scores of a rank's own classes that are gathered along the classes, to the gather's term and
            its group; empty for a sharded graph.
        cut: terms of which one part along the last dimension is read, and nothing else, to the part's term, its number,
            and the number of parts; empty for a sharded graph.
        same: group to a function that says whether its ranks have the same elements of a term.
        asked: group to the terms of which its ranks must have the same elements, and have; empty for a captured graph.
        common: group to the terms that its ranks get from each other, in collectives that the captured graph has not.
        drawn: terms of random operators to the phases and devices of their generators.
    """

    def __init__(self, terms: Terms, graph: TrainGraph, after: str, captured: Walk | None = None) -> None:
        self.terms, self.graph, self.after, self.captured = terms, graph, after, captured
        self.values: dict[fx.Node, tuple[Value | None, ...]] = {}
        self.made: set[Term] = set()
        self.summed: dict[Term, list[int]] = {}
        self.sums = 0
        self.effects: list[tuple[Term, str]] = []
        self.writes: dict[StorageId, tuple[Term, ...]] = {}
        self.gathers: dict[StorageId, tuple[str, Phase]] = {}
        self.draws = 0
        self.last_sum = -1
        self.gathered: dict[Term, tuple[Term, tuple[object, int]]] = {}
        self.cut: dict[Term, tuple[Term, int, int]] = {}
        self.same: dict[object, Callable[[Term], bool]] = {}
        self.asked: dict[object, set[Term]] = {}
        self.common: dict[object, set[Term]] = {}
        self.drawn: dict[Term, list[tuple[Phase, torch.device]]] = {}

    def fail(self, node: fx.Node, fault: str) -> Any:
        """Raise a VerifyError whose message names the pass, ``node`` and its operator, and goes on with ``fault``.

        Args:
            node: the operator at fault.
            fault: the end of the sentence, such as "reads rows of ranks of two groups".
        """
        raise VerifyError(f"after pass {self.after!r}: {node.name} ({name_of(node.target)}) {fault}")

    def run(self) -> None:
        """Walk over all nodes in graph order, and fill the attributes.

        Raises:
            VerifyError: an operator breaks a rule that :func:`check` lists.
        """
        for node in self.graph.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.values[node] = tuple(
                    Value(self.terms.of("input", node.name, at), R, shape_of(tensor)) for at, tensor in tensors_of(node)
                )
            elif node.op == "call_function":
                self._check_gathers(node)
                self.values[node] = self._call(node)

    def compare(self) -> None:
        """Compare outputs and effects of a sharded graph with those of the captured one; both walks have run.

        Raises:
            VerifyError: an output is not whole on every rank or is another value than in the captured graph; random
                operators, writes or checks differ in number, sequence or terms; ranks do not compare what they must
                have the same; or updates wait for another gradient.
        """
        assert self.captured is not None
        for (mine, name), (theirs, other) in zip(self.effects, self.captured.effects, strict=False):
            if mine != theirs:
                self.lost(f"{name} draws, writes or checks something else than {other} in the captured graph")
        if len(self.effects) != len(self.captured.effects):
            self.lost(f"{len(self.effects)} operators draw, write or check, {len(self.captured.effects)} are captured")
        pairs = zip(output_values(self.graph.graph), output_values(self.captured.graph.graph), strict=True)
        for position, (node, old) in enumerate(pairs):
            if (node is None) != (old is None):
                self.lost(f"output {position} is {node} in the place of {old}")
            if node is not None and old is not None:
                self._compare_output(position, node, old)
        check_agreements(self)
        check_waits(self)

    def lost(self, fault: str) -> None:
        """Raise a VerifyError that names the pass, and whose message goes on with ``fault``."""
        raise VerifyError(f"after pass {self.after!r}: {fault}")

    def _compare_output(self, position: int, node: fx.Node, old: fx.Node) -> None:
        assert self.captured is not None
        if not self.values[node] and node.name != old.name:
            self.fail(node, f"is output {position} in the place of {old.name}")
        for mine, theirs in zip(self.values[node], self.captured.values[old], strict=True):
            if mine is None or theirs is None:
                continue
            if mine.state != R:
                self.fail(node, f"is output {position}, and a rank has only {WORDS[mine.state]} of it")
            if self.read(node, mine) != self.captured.read(old, theirs) or mine.shape != theirs.shape:
                self.fail(node, f"is output {position}, which is another value than {old.name} of the captured graph")

    def _check_gathers(self, node: fx.Node) -> None:
        """Nothing that is gathered in one phase may be read in another: its rows are kept, and gathered again."""
        if ops.is_view(node.target):
            return
        for argument in node.all_input_nodes:
            for storage in ids_of(argument):
                name, phase = self.gathers.get(storage, ("", self.graph.phase[node.name]))
                if phase is not self.graph.phase[node.name]:
                    self.fail(node, f"reads {name} whole, which is gathered in {phase.name}: its rows are to be kept")

    def read(self, node: fx.Node, value: Value) -> Term:
        """Return the term of what a reader gets of ``value``, a result of ``node``, at this place of the walk.

        It is another one than ``value.term`` if the storage of ``node`` was written to since.
        """
        written = tuple(term for storage in ids_of(node) for term in self.writes.get(storage, ()))
        return self.terms.of("written", value.term, *written) if written else value.term

    def argument(self, node: fx.Node) -> Value | None:
        """Return what a rank has of the argument ``node``, as it is read now; None unless it is one tensor."""
        values = self.values[node]
        if len(values) != 1 or values[0] is None:
            return None
        return replace(values[0], term=self.read(node, values[0]))

    def _call(self, node: fx.Node) -> tuple[Value | None, ...]:
        target = node.target
        if target is operator.getitem:
            return (self.values[node.args[0]][node.args[1]],)  # type: ignore[index]
        name = str(target._schema.name) if isinstance(target, OpOverload) else ""
        if name.startswith("roamc_collective::") or name == "roamc::own_part":
            return self._collective(node, name.rpartition("::")[2])
        return self.checked(node, self._local(node))

    def _local(self, node: fx.Node) -> tuple[Value | None, ...]:
        if is_by_class(self, node):
            return by_class(self, node)
        rule = ALL_RULES.get(node.target)
        pointwise = is_pointwise(node.target)
        facts = ops.rule(node.target)
        if rule is not None:
            return rule(self, node)
        if pointwise and not facts.mutates and not facts.may_draw and single(node):
            return elementwise(self, node)
        return self.opaque(node)

    def checked(self, node: fx.Node, results: tuple[Value | None, ...]) -> tuple[Value | None, ...]:
        """Check the results of an operator: their terms, and their shapes on this rank.

        In the captured graph the terms are added to :attr:`made`. In the sharded graph each term must be among those,
        except for operators in ``HELPERS``.

        Args:
            node: the operator.
            results: what a rank has of each of its results; returned as they are.

        Raises:
            VerifyError: the captured graph makes no such value, or a result has the wrong shape for its state.
        """
        for at, value in enumerate(results):
            if value is None:
                continue
            if self.captured is None:
                self.made.add(value.term)
            elif value.term not in self.captured.made and node.target not in (*HELPERS, own_classes, own_indices):
                self.fail(node, f"makes a value that the captured graph does not have (result {at})")
            tensor = dict(tensors_of(node)).get(at)
            if tensor is not None and local_shape(value) != shape_of(tensor):
                self.fail(node, f"makes {list(tensor.shape)}, and {WORDS[value.state]} of {list(value.shape)} is due")
        return results

    def opaque(self, node: fx.Node) -> tuple[Value | None, ...]:
        """Return the results of ``node`` as whole values of whole arguments, and note what it draws and writes.

        Raises:
            VerifyError: a rank has only its rows, or only an addend, of an argument.
        """
        facts = ops.rule(node.target)

        def key(argument: fx.Node) -> object:
            values = self.values[argument]
            for value in values:
                if value is not None and value.state != R:
                    self.fail(node, f"reads {argument.name} as a whole, and a rank has only {WORDS[value.state]} of it")
            if not values:  # no tensor
                return argument.name
            return tuple((self._term(node, argument, value), value.shape) for value in values if value is not None)

        parts: list[object] = [node.target, *literals(node, key)]
        if facts.may_draw:
            self.draws += 1
            parts.append(("draw", self.draws))
        term = self.terms.of("operator", *parts)
        if facts.may_draw or node.target is save_rng_state:
            self.note_draw(node, term)
        if facts.may_draw or facts.mutates or facts.ordered:
            self.effects.append((term, node.name))
        written = ops.mutated_arguments(node)
        for storage in dict.fromkeys(storage for argument in written for storage in ids_of(argument)):
            self.writes[storage] = (*self.writes.get(storage, ()), term)
        many = isinstance(node.meta.get("val"), list | tuple)
        results = {
            at: Value(self.terms.of("result", term, at) if many else term, R, shape_of(tensor))
            for at, tensor in tensors_of(node)
        }
        return tuple(results.get(at) for at in range(len(node.meta["val"]) if many else 1))

    def note_draw(self, node: fx.Node, term: Term) -> None:
        """Note that the elements of ``term`` are random numbers of ``node``, or a state of their generator."""
        named = node.args[0] if node.target is save_rng_state else None
        devices = [tensor.device for _, tensor in tensors_of(node)] if named is None else [torch.device(named)]  # type: ignore[arg-type]
        self.drawn[term] = [(self.graph.phase[node.name], device) for device in dict.fromkeys(devices)]

    def _term(self, node: fx.Node, argument: fx.Node, value: Value) -> Term:
        return value.term if ops.is_view(node.target) else self.read(argument, value)

    def _collective(self, node: fx.Node, kind: str) -> tuple[Value | None, ...]:
        rule = COLLECTIVES.get(kind)
        if rule is None:
            return self.checked(node, self.opaque(node))
        results = rule(self, node)
        if self.captured is None:
            self.made.update(value.term for value in results if value is not None)
        return results

    def group(self, node: fx.Node, size: Any, name: Any) -> tuple[object, int]:
        """Return name and size of the group that the collective ``node`` talks to.

        Args:
            node: the collective.
            size: number of ranks that its arguments say.
            name: name of the group that its arguments say.

        Raises:
            VerifyError: the group has another number of ranks.
        """
        ranks = ranks_in(name)
        if ranks is not None and ranks != size:
            self.fail(node, f"talks to {size} ranks, and the group has {ranks}")
        return (name, int(size))

    def reduced(self, node: fx.Node, term: Term, op: Any, group: object) -> Term:
        """Return the term of ``term`` reduced over the ranks of ``group`` by the collective ``node``.

        Args:
            node: the collective.
            term: what it reduces.
            op: name of the reduction, such as "sum".
            group: the group's name.

        Raises:
            VerifyError: the captured graph does not reduce ``term``, or each of its addends, over these ranks, or does
                so in another order.
        """
        pieces = self.terms.addends(term) if op == "sum" else (term,)
        sums = [self.terms.of("all_reduce", op, group, piece) for piece in pieces]
        if self.captured is None:
            for each in sums:
                self.summed.setdefault(each, []).append(self.sums)
                self.sums += 1
            return self.terms.total(sums)
        places = [self.captured.summed.get(each, []) for each in sums]
        if not all(places):
            self.fail(node, "sums over the ranks what the captured graph does not sum over them")
        if len(places) == 1:  # sums that are added up first may be summed over the ranks later
            later = [place for place in places[0] if place >= self.last_sum]
            if not later:
                self.fail(node, "talks to the other ranks out of the captured graph's order")
            self.last_sum = later[0]
        return self.terms.total(sums)

    def is_captured(self, node: fx.Node) -> bool:
        """Whether the captured graph calls the operator of ``node`` with the same whole values; True in its walk."""
        values = [value for argument in node.all_input_nodes for value in self.values[argument] if value is not None]
        if self.captured is None or any(value.state != R for value in values):
            return self.captured is None
        (result,) = self.opaque(node)
        return result is not None and result.term in self.captured.made

    def shared(self, group: object) -> Callable[[Term], bool]:
        """Return a function that says whether all ranks of a process group have the same elements of a term.

        Args:
            group: the group's name.
        """
        if group not in self.same:
            self.same[group] = self._shared(group)

        def holds(term: Term) -> bool:
            same = self.same[group](term)
            if same:
                self.asked.setdefault(group, set()).add(term)
            return same

        return holds

    def _shared(self, group: object) -> Callable[[Term], bool]:
        source = self.captured or self
        pairs: list[tuple[Term, Term]] = []
        for node, gradient in input_gradients(source.graph):
            mine, theirs = source.values[node], source.values[gradient]
            if mine and theirs and mine[0] is not None and theirs[0] is not None:
                pairs.append((mine[0].term, theirs[0].term))
        return self.terms.shared(group, tuple(source.summed), tuple(pairs))

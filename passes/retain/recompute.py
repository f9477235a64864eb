"""Run operators a second time: the part of ``retain`` that rewrites the graph.

    before                          after
    ln   = layer_norm(x, w, b)      ln   = layer_norm(x, w, b)
    fc   = addmm(bias, ln, W)       fc   = addmm(bias, ln, W)
    ...                             ...                               ln's bytes are free here
    dW   = mm(ln.T, g)              ln_1 = layer_norm(x, w, b)
                                    dW   = mm(ln_1.T, g)

From a rerun on, whoever reads one of the storages that it renews reads the new one, and views of it are made anew.
Random operators draw what they drew the first time: the generator's state is kept from in front of the first run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from roamc import ops
from roamc.compat import FakeTensorMode
from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph, operators, output_values, placeholders, tensors_of
from roamc.memory import MemoryModel, build_memory, identity
from roamc.passes.retain.forms import rerun_form, results_of
from roamc.rewrite import mode_of, placed_in
from roamc.runtime.random import replay, save_rng_state

PLACE = torch.uint8
"""Stands for the bytes of a storage, whatever the dtypes of its tensors."""


class Rerun(NamedTuple):
    """One more run of an operator.

    Attributes:
        before: name of the operator that it runs right in front of.
        operator: name of the operator.
        renews: names of those of its storages that later readers read from this run.
    """

    before: str
    operator: str
    renews: tuple[str, ...]


def rerun(graph: TrainGraph, reruns: Iterable[Rerun]) -> TrainGraph:
    """Write ``reruns`` into the graph, in its present order; what nobody reads any more is taken out.

    Raises:
        PlanError: the graph has no such operators or storages, or they cannot run again.
    """
    mode = mode_of(graph.graph)
    if mode is None:
        raise PlanError("retain: a graph without tensors has nothing to run again")
    writer = _Writer(graph, build_memory(graph), mode)
    writer.write(list(reruns))
    _erase_dead(graph.graph, set(graph.gradients))
    by_name = {node.name: node for node in graph.graph.nodes}
    phase = {node.name: writer.phase[node.name] for node in operators(graph.graph)}
    waits = {node: gradient for node, gradient in graph.waits.items() if node in by_name}
    changed = graph.replace(phase=phase, waits=waits)
    return changed.replace(saved=_saved(changed)) if graph.boundary else changed


def may_run_again(node: fx.Node) -> bool:
    """Whether another run gives the same bits, for the same inputs and the same state of the generator."""
    target, _, _ = rerun_form(node)
    rule = ops.rule(target)
    return (rule.recomputable or rule.random) and not rule.mutates and node.target is not save_rng_state


class _Writer:
    """Walks the graph once; knows the newest version of everything.

    Attributes:
        phase: of every operator, new ones included.
        newest: node that makes or picks a renewed storage to the node of its last version.
        views: (view, the version of what it looks at) to that view of that version.
        states: random operator to the node that keeps the generator's state in front of it.
    """

    def __init__(self, graph: TrainGraph, memory: MemoryModel, mode: FakeTensorMode) -> None:
        self.graph = graph
        self.memory = memory
        self.mode = mode
        self.phase: dict[str, Phase] = dict(graph.phase)
        self.newest: dict[fx.Node, fx.Node] = {}
        self.views: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self.states: dict[fx.Node, fx.Node] = {}
        self.makers = {op.node.name: op.node for op in memory.operators}

    def write(self, reruns: list[Rerun]) -> None:
        due: dict[str, list[Rerun]] = {}
        for again in reruns:
            due.setdefault(again.before, []).append(again)
        for node in list(self.makers.values()):
            for again in due.pop(node.name, ()):
                self._run_again(again, node)
            self._redirect(node)
        if due:
            raise PlanError(f"retain: this graph has no operator {next(iter(due))!r}")

    def _redirect(self, node: fx.Node) -> None:
        if self.newest:
            node.args = fx.map_arg(node.args, lambda argument: self._version(argument, node))
            node.kwargs = fx.map_arg(node.kwargs, lambda argument: self._version(argument, node))

    def _run_again(self, again: Rerun, at: fx.Node) -> None:
        first = self.makers.get(again.operator)
        if first is None or not may_run_again(first):
            raise PlanError(f"retain: this graph has no operator {again.operator!r} that could run again")
        target, args, kwargs = rerun_form(first)
        count = results_of(target, first)
        args, kwargs = fx.map_arg((args, kwargs), lambda argument: self._version(argument, at))
        if ops.rule(first.target).random:
            target, args = replay, (self._state(first), first.target, *args)
        fresh = self._call(target, args, kwargs, first, at)
        fresh.meta["again"], fresh.meta["again_target"] = first.name, str(first.target)  # for reports
        moved = self._moved(first, {})
        fresh.meta["val"] = moved if isinstance(moved, torch.Tensor) else moved[:count]
        renewed = [node for node in self._results(first) if self.memory.storage_of(node).name in again.renews]
        missing = set(again.renews).difference(self.memory.storage_of(node).name for node in renewed)
        if missing:
            raise PlanError(f"retain: {again.operator} does not make the storage {min(missing)!r}")
        for node in renewed:
            self.newest[node] = fresh if node is first else self._picked(node, fresh, at)

    def _results(self, first: fx.Node) -> list[fx.Node]:
        """The nodes that stand for single results: the operator itself, or the picks of its results."""
        if isinstance(first.meta.get("val"), torch.Tensor):
            return [first]
        return [user for user in first.users if user.target is operator.getitem and user.name in self.graph.phase]

    def _picked(self, pick: fx.Node, fresh: fx.Node, at: fx.Node) -> fx.Node:
        made = self._call(operator.getitem, (fresh, pick.args[1]), {}, pick, at)
        made.meta["val"] = fresh.meta["val"][pick.args[1]]
        return made

    def _version(self, node: fx.Node, at: fx.Node) -> fx.Node:
        """What a reader at ``at`` reads for ``node``: its last version, or a view of the last version of its base."""
        if node in self.newest:
            return self.newest[node]
        if node.op != "call_function" or node.name in self.makers or not ops.is_view(node.target):
            return node
        base = node.args[ops.rule(node.target).view_of[0]]
        now = self._version(base, at)  # type: ignore[arg-type]
        if now is base:
            return node
        if (node, now) not in self.views:
            self.views[node, now] = self._view(node, base, now, at)  # type: ignore[arg-type]
        return self.views[node, now]

    def _view(self, node: fx.Node, base: fx.Node, now: fx.Node, at: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: now if argument is base else argument)
        made = self._call(node.target, args, kwargs, node, at)
        if node.target is operator.getitem:  # only single tensors pass from forward to backward
            now.append(made)
            self.phase[made.name] = self.phase[now.name]
        (_, old), (_, new) = next(tensors_of(base)), next(tensors_of(now))
        made.meta["val"] = self._moved(node, {identity(old): new.untyped_storage()})
        return made

    def _state(self, first: fx.Node) -> fx.Node:
        if first not in self.states:
            device = next(tensor.device for _, tensor in tensors_of(first))
            state = self._call(save_rng_state, (device,), {}, first, first)
            with self.mode:
                state.meta["val"] = torch.empty(save_rng_state(device).shape, dtype=torch.uint8)
            self.phase[state.name] = self.phase[first.name]
            self.states[first] = state
        return self.states[first]

    def _call(self, target: Any, args: Any, kwargs: Any, like: fx.Node, at: fx.Node) -> fx.Node:
        with self.graph.graph.inserting_before(at):
            made = self.graph.graph.create_node("call_function", target, args, kwargs, name=like.name)
        made.meta = dict(like.meta)
        self.phase[made.name] = self.phase[at.name]
        return made

    def _moved(self, node: fx.Node, storages: dict[int, torch.UntypedStorage]) -> Any:
        """The fake results of ``node`` with the same geometry in other storages; those it does not know are new."""
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            return self._move(value, storages)
        return type(value)(self._move(v, storages) if isinstance(v, torch.Tensor) else v for v in value)

    def _move(self, old: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        with self.mode:
            if identity(old) not in storages:
                count = int(old.untyped_storage().nbytes())
                storages[identity(old)] = torch.empty(count, dtype=PLACE, device=old.device).untyped_storage()
            return placed_in(old, storages[identity(old)])


def _erase_dead(graph: fx.Graph, kept: set[str]) -> None:
    """Take out what nobody reads, such as a first run whose results are all read from a later one."""
    for node in reversed(list(graph.nodes)):
        idle = node.op == "call_function" and not node.users and node.name not in kept
        if idle and not ops.has_effect(node.target):
            graph.erase_node(node)


def _saved(graph: TrainGraph) -> tuple[str, ...]:
    """What passes from forward to backward now, first what did before: AOTAutograd has an order of its own."""
    given = zip(placeholders(graph.graph), graph.inputs, strict=True)
    early = {node for node, port in given if port.phase is Phase.FORWARD}
    early |= {node for node in operators(graph.graph) if graph.phase[node.name] is Phase.FORWARD}
    readers = [node for node in operators(graph.graph) if node not in early]
    returned = zip(output_values(graph.graph), graph.outputs, strict=True)
    read = [argument for reader in readers for argument in reader.all_input_nodes]
    read += [node for node, port in returned if node is not None and port.phase is not Phase.FORWARD]
    crossing = dict.fromkeys(node.name for node in read if node in early)
    known = set(graph.saved)
    return (*(name for name in graph.saved if name in crossing), *(name for name in crossing if name not in known))

"""Run operators a second time: the part of ``retain`` that rewrites the graph.

    before                          after
    ln   = layer_norm(x, w, b)      ln   = layer_norm(x, w, b)
    fc   = addmm(bias, ln, W)       fc   = addmm(bias, ln, W)
    ...                             ...                               ln's bytes are free here
    dW   = mm(ln.T, g)              ln_1 = layer_norm(x, w, b)
                                    dW   = mm(ln_1.T, g)

Behind a rerun, all readers of a storage that it renews read the new version, and views of the storage are made anew.
Random operators draw what they drew the first time: the generator's state is saved in front of the first run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from roamc.errors import PlanError
from roamc.graph import Encoding, TrainGraph, maker_of, tensors_of
from roamc.graph.rewrite import keep_state
from roamc.graph.storage_ids import STORAGES, id_of, ids_of, renewed
from roamc.operators import ops
from roamc.operators.random import replay, save_rng_state
from roamc.operators.schemas import name_of
from roamc.rewriting.rerun_variants import recompute_variant, results_of
from roamc.rewriting.versions import Versions


class Rerun(NamedTuple):
    """One more run of an operator.

    Attributes:
        before: name of the operator in front of which the run is inserted.
        operator: name of the operator that runs again.
        renews: names of storages that ``operator`` makes. From ``before`` on, their readers read the version that this
            run makes; readers of other results of ``operator`` go on with the earlier version.
    """

    before: str
    operator: str
    renews: tuple[str, ...]


def rerun(graph: TrainGraph, reruns: Iterable[Rerun]) -> TrainGraph:
    """Write ``reruns`` into ``graph``, whose nodes are changed in place; nodes left without readers are erased.

    Args:
        graph: operators in the order in which they are to run.
        reruns: reruns in front of one operator are written in the sequence given.

    Returns:
        The graph with the same FX graph and with ``phase``, ``waits``, ``saved`` and ``encodings`` brought up to date.

    Raises:
        PlanError: the graph has no tensors, lacks an operator or storage that a rerun names, or the operator cannot run
            again.
    """
    writer = _Writer(graph)
    writer.write(list(reruns))
    changed = writer.finished()
    return changed.replace(encodings=_of_reruns(changed)) if changed.encodings else changed


def _of_reruns(graph: TrainGraph) -> tuple[Encoding, ...]:
    """The encodings of ``graph``; where a first run was erased, of the storage that the second run makes instead."""
    there = {node.name for node in graph.graph.nodes}
    again: dict[str, str] = {}
    for node in graph.graph.nodes:
        again.setdefault(node.meta.get("again", ""), node.name)
    moved = []
    for encoding in graph.encodings:
        maker = maker_of(encoding.storage)
        gone = maker not in there and maker in again
        moved.append(
            replace(encoding, storage=again[maker] + encoding.storage.removeprefix(maker)) if gone else encoding
        )
    return tuple(moved)


def may_run_again(node: fx.Node) -> bool:
    """Return whether another run of the operator ``node`` gives the same bits, and writes no argument.

    The inputs and, for a random operator, the state of the generator are the same in both runs.
    """
    target, _, _ = recompute_variant(node)
    rule = ops.rule(target)
    return (rule.recomputable or rule.random) and not rule.mutates and node.target is not save_rng_state


class _Writer(Versions):
    """Walks the graph once and writes each rerun in front of the operator that it names.

    Attributes:
        states: random operator to the node that keeps the generator's state in front of it.
    """

    def __init__(self, graph: TrainGraph) -> None:
        super().__init__(graph)
        self.states: dict[fx.Node, fx.Node] = {}

    def write(self, reruns: list[Rerun]) -> None:
        """Insert ``reruns``; raise PlanError for an operator or storage that the graph lacks or cannot make again."""
        due: dict[str, list[Rerun]] = {}
        for again in reruns:
            due.setdefault(again.before, []).append(again)
        for node in list(self.makers.values()):
            for again in due.pop(node.name, ()):
                self._run_again(again, node)
            self.redirect(node)
        if due:
            raise PlanError(f"this graph has no operator {next(iter(due))!r}")

    def _run_again(self, again: Rerun, at: fx.Node) -> None:
        first = self.makers.get(again.operator)
        if first is None or not may_run_again(first):
            raise PlanError(f"this graph has no operator {again.operator!r} that could run again")
        target, args, kwargs = recompute_variant(first)
        count = results_of(target, first)
        args, kwargs = fx.map_arg((args, kwargs), lambda argument: self.version(argument, at))
        if ops.rule(first.target).random:
            target, args = replay, (self._state(first), first.target, *args)
        fresh = self.call(target, args, kwargs, first, at)
        fresh.meta["again"], fresh.meta["again_target"] = first.name, name_of(first.target)  # for reports
        if not isinstance(first.meta["val"], torch.Tensor):
            fresh.meta["val"] = first.meta["val"][:count]
        fresh.meta[STORAGES] = renewed(ids_of(first)[: len(list(tensors_of(fresh)))])
        results = [node for node in self.results(first) if self.memory.storage_of(node).name in again.renews]
        missing = set(again.renews).difference(self.memory.storage_of(node).name for node in results)
        if missing:
            raise PlanError(f"{again.operator} does not make the storage {min(missing)!r}")
        for node in results:
            self.renew(node, fresh if node is first else self._picked(node, fresh, at))

    def _picked(self, pick: fx.Node, fresh: fx.Node, at: fx.Node) -> fx.Node:
        made = self.call(operator.getitem, (fresh, pick.args[1]), {}, pick, at)
        made.meta[STORAGES] = (id_of(fresh, pick.args[1]),)  # type: ignore[arg-type]
        return made

    def _state(self, first: fx.Node) -> fx.Node:
        if first not in self.states:
            state = keep_state(self.graph.graph, first, self.mode, name=first.name)
            state.meta = {**first.meta, **state.meta}
            self.phase[state.name] = self.phase[first.name]
            self.states[first] = state
        return self.states[first]

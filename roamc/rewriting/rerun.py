"""Run operators a second time: the part of ``checkpoint`` and ``retain`` that rewrites the graph.

    before                          after
    ln   = layer_norm(x, w, b)      ln   = layer_norm(x, w, b)
    fc   = addmm(bias, ln, W)       fc   = addmm(bias, ln, W)
    ...                             ...                               ln's bytes are free here
    dW   = mm(ln.T, g)              ln_1 = layer_norm(x, w, b)
                                    dW   = mm(ln_1.T, g)

The readers that a rerun names read the version that it makes, and views of the storage are made anew for them. Random
operators draw what they drew the first time: the generator's state is saved in front of the first run.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from roamc.graph import Encoding, TrainGraph, maker_of, tensors_of
from roamc.graph.rewrite import keep_state
from roamc.graph.storage_ids import STORAGES, id_of, ids_of, renewed
from roamc.operators import ops
from roamc.operators.random import replay
from roamc.operators.schemas import name_of
from roamc.rewriting.rerun_variants import recompute_variant, results_of
from roamc.rewriting.reruns import PHASES, Placed, Rerun, places
from roamc.rewriting.versions import Versions


def rerun(graph: TrainGraph, reruns: Iterable[Rerun]) -> TrainGraph:
    """Write ``reruns`` into ``graph``, whose nodes are changed in place; nodes left without readers are erased.

    Args:
        graph: operators in any legal order, such as program order.
        reruns: in any sequence; where each is written says :mod:`roamc.rewriting.reruns`.

    Returns:
        The graph with the same FX graph and with ``phase``, ``waits``, ``saved`` and ``encodings`` brought up to date.

    Raises:
        PlanError: the graph has no tensors, or the reruns do not fit it, see :func:`roamc.rewriting.reruns.places`.
    """
    writer = _Writer(graph)
    writer.write(places(graph, tuple(reruns)))
    changed = writer.finished()
    return changed.replace(encodings=tuple(_of_versions(changed))) if changed.encodings else changed


def encodings_of(graph: TrainGraph) -> dict[tuple[str, str], Encoding]:
    """Return the encodings of ``graph`` by storage and codec; a storage has the name of its operator's first run."""
    firsts = {node.name: str(node.meta.get("again", node.name)) for node in graph.graph.nodes}
    named = ((each, maker_of(each.storage)) for each in graph.encodings)
    return {(firsts.get(maker, maker) + one.storage.removeprefix(maker), one.codec): one for one, maker in named}


def _of_versions(graph: TrainGraph) -> Iterator[Encoding]:
    """The encodings of ``graph``, one for each run of what is encoded and beside it: any of these may be the first."""
    runs: dict[str, list[str]] = {}
    for node in graph.graph.nodes:
        runs.setdefault(node.meta.get("again", node.name), []).append(node.name)
    for encoding in graph.encodings:
        makers = [maker_of(storage) for storage in (encoding.storage, *encoding.beside)]
        ends = [name.removeprefix(maker_of(name)) for name in (encoding.storage, *encoding.beside)]
        for named in itertools.product(*(runs.get(maker, ()) for maker in makers)):
            storage, *beside = (run + end for run, end in zip(named, ends, strict=True))
            yield replace(encoding, storage=storage, beside=tuple(beside))


class _Writer(Versions):
    """Writes reruns at their places, then redirects their readers.

    Attributes:
        versions: name of a reader to the versions that it reads: node of a result of a first run to that of a rerun.
    """

    def __init__(self, graph: TrainGraph) -> None:
        super().__init__(graph)
        self.versions: dict[str, dict[fx.Node, fx.Node]] = {}

    def write(self, placed: Sequence[Placed]) -> None:
        """Insert reruns into the graph, in the sequence given, and exchange the arguments of their readers."""
        for one in placed:
            self.names.take(one.rerun.name)
        runs = [(one.first, self._run_again(one)) for one in placed]
        states = {
            first: self._state(first)
            for first in dict.fromkeys(first for first, fresh in runs if fresh.target is replay)
        }
        for first, fresh in runs:
            if first in states:
                fresh.args = (states[first], *fresh.args)
        for node in list(self.graph.graph.nodes):
            if node.name in self.versions:
                self.redirect(node, self.versions[node.name])

    def _run_again(self, one: Placed) -> fx.Node:
        """Insert a rerun, which still reads first versions; a replay still lacks the generator's state."""
        again, first = one.rerun, one.first
        target, args, kwargs = recompute_variant(first)
        count = results_of(target, first)
        if ops.rule(first.target).random:
            target, args = replay, (first.target, *args)
        fresh = self.call(target, args, kwargs, first, one.before, again.name)
        self.phase[fresh.name] = PHASES[again.phase]
        fresh.meta["again"], fresh.meta["again_target"] = first.name, name_of(first.target)
        if not isinstance(first.meta["val"], torch.Tensor):
            fresh.meta["val"] = first.meta["val"][:count]
        fresh.meta[STORAGES] = renewed(ids_of(first)[: len(list(tensors_of(fresh)))])
        readers = dict(again.renews)
        for result in self.results(first):
            named = readers.get(self.memory.storage_of(result).name, ())
            if named:
                version = fresh if result is first else self._picked(result, fresh, one.before)
                self.first[version] = result
                for reader in named:
                    self.versions.setdefault(reader, {})[result] = version
        return fresh

    def _picked(self, pick: fx.Node, fresh: fx.Node, at: fx.Node) -> fx.Node:
        picked = self.call(operator.getitem, (fresh, pick.args[1]), {}, pick, at)
        self.phase[picked.name] = self.phase[fresh.name]
        picked.meta[STORAGES] = (id_of(fresh, pick.args[1]),)  # type: ignore[arg-type]
        return picked

    def _state(self, first: fx.Node) -> fx.Node:
        """Save the generator's state right in front of ``first``."""
        state = keep_state(self.graph.graph, first, self.mode, name=first.name)
        state.name = self.names.fresh(first.name)
        state.meta = {**first.meta, **state.meta}
        self.phase[state.name] = self.phase[first.name]
        return state

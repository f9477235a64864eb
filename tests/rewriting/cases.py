"""Graphs and reruns that the tests of rewriting share, and the check that reruns leave every bit."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from roamc.graph import TrainGraph, operators, tensors_of, verify
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from roamc.options import Options
from roamc.passes import normalize
from roamc.rewriting.expiry import droppable, expiries
from roamc.rewriting.names import Names
from roamc.rewriting.rerun import rerun
from roamc.rewriting.rerun_variants import may_run_again, recompute_variant
from roamc.rewriting.reruns import Rerun
from tests.graphs import assert_same, clones, run_real, traced

X = torch.randn(8, 8)


def cleaned(graph: TrainGraph) -> TrainGraph:
    return normalize.apply(graph, normalize.decide(graph, Options()))


class At(NamedTuple):
    """A rerun in front of an operator: from there on, readers of the storages ``renews`` read what it makes."""

    before: str
    operator: str
    renews: tuple[str, ...]


def named(graph: TrainGraph, spots: Sequence[At]) -> list[Rerun]:
    """The same reruns with their names and readers, by the book; those that nothing reads are left out."""
    memory = build_memory(graph)
    first = {node.name: node for node in operators(graph.graph)}
    names = Names(graph.graph)
    newest: dict[str, dict[str, list[str]]] = {}
    runs: list[tuple[str, At, str, dict[str, list[str]]]] = []

    def note(reader: str, args: Any) -> None:
        storages = [memory.storage_of(node, at).name for node in _nodes(args) for at, _ in tensors_of(node)]
        for storage in {*storages} & newest.keys():
            newest[storage].setdefault(storage, []).append(reader)

    for op in memory.operators:
        for spot in [spot for spot in spots if spot.before == op.node.name]:
            runs.append((names.fresh(spot.operator), spot, op.phase.name.lower(), {}))
            note(runs[-1][0], recompute_variant(first[spot.operator])[1:])
            newest |= dict.fromkeys(spot.renews, runs[-1][3])
        note(op.node.name, (op.node.args, op.node.kwargs))
    while dead := [name for name, _, _, read in runs if not read]:
        runs = [run for run in runs if run[0] not in dead]
        for *_, read in runs:
            for storage, readers in list(read.items()):
                read[storage] = [reader for reader in readers if reader not in dead]
                if not read[storage]:
                    del read[storage]
    return [
        Rerun(
            name,
            spot.operator,
            phase,
            tuple((storage, tuple(read[storage])) for storage in spot.renews if storage in read),
        )
        for name, spot, phase, read in runs
    ]


def _nodes(args: Any) -> list[fx.Node]:
    nodes: dict[fx.Node, None] = {}
    fx.map_arg(args, lambda node: nodes.setdefault(node))
    return list(nodes)


def some_reruns(graph: TrainGraph, seed: int, share: float, ahead: bool = False) -> list[At]:
    """Of all operators and their readers, a random share: the operator runs again in front of the reader, or ahead."""
    rng = random.Random(seed)
    memory = build_memory(graph)
    names = [op.node.name for op in memory.operators]
    nodes = {op.node.name: op.node for op in memory.operators}
    until = expiries(memory, nodes, names, range(len(names)), boundary=graph.boundary)
    chosen = []
    able = functools.partial(may_run_again, same_plan=graph.same_plan)
    for storage, may_drop in zip(memory.counted, droppable(memory, memory.counted, able), strict=True):
        for user in memory.uses[storage.index] if may_drop else ():
            if user < until[storage.producer] and rng.random() < share:
                at = rng.randint(storage.producer + 1, user) if ahead else user
                chosen.append((at, storage.producer, storage.name))
    return [At(names[at], names[maker], (storage,)) for at, maker, storage in sorted(chosen)]


def check(graph: TrainGraph, inputs: list[Any], reruns: Sequence[At], said: str, *, deep: bool = True) -> TrainGraph:
    """Run before and after: results, written inputs and the generator are the same, and all bytes are foreseen."""
    used, again = clones(inputs), clones(inputs)
    torch.manual_seed(5)
    expected, _ = run_real(graph, used)
    state = torch.get_rng_state()
    kept = verify.constraints(graph)
    after = rerun(graph, named(graph, reruns))
    verify.check_graph(after, "retain", kept, deep=deep)
    torch.manual_seed(5)
    got, measured = run_real(after, again)
    assert torch.equal(torch.get_rng_state(), state), said
    assert_same([*expected, *used], [*got, *again], said)
    assert measured == live_bytes(build_memory(after)).tolist(), said
    return after


def chain(function: Callable[..., Any], phases: str, *inputs: Tensor) -> tuple[TrainGraph, list[Any]]:
    arguments = list(inputs or (X,))
    return cleaned(traced(function, *arguments, phases=phases)), arguments

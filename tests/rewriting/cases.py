"""Graphs and reruns that the tests of rewriting share, and the check that reruns leave every bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from roamc.graph import TrainGraph, verify
from roamc.graph.memory import build_memory, live_bytes
from roamc.options import Options
from roamc.passes import normalize
from roamc.rewriting.expiry import droppable, expiries
from roamc.rewriting.rerun import Rerun, rerun
from tests.graphs import assert_same, clones, run_real, traced

X = torch.randn(8, 8)


def cleaned(graph: TrainGraph) -> TrainGraph:
    return normalize.apply(graph, normalize.decide(graph, Options()))


def some_reruns(graph: TrainGraph, seed: int, share: float, ahead: bool = False) -> list[Rerun]:
    """Of all operators and their readers, a random share: the operator runs again in front of the reader, or ahead."""
    rng = random.Random(seed)
    memory = build_memory(graph)
    names = [op.node.name for op in memory.operators]
    nodes = {op.node.name: op.node for op in memory.operators}
    until = expiries(memory, nodes, names, range(len(names)), boundary=graph.boundary)
    chosen = []
    for storage, may_drop in zip(memory.counted, droppable(memory, memory.counted), strict=True):
        for user in memory.uses[storage.index] if may_drop else ():
            if user < until[storage.producer] and rng.random() < share:
                at = rng.randint(storage.producer + 1, user) if ahead else user
                chosen.append((at, storage.producer, storage.name))
    return [Rerun(names[at], names[maker], (storage,)) for at, maker, storage in sorted(chosen)]


def check(graph: TrainGraph, inputs: list[Any], reruns: Sequence[Rerun], said: str, *, deep: bool = True) -> TrainGraph:
    """Run before and after: results, written inputs and the generator are the same, and all bytes are foreseen."""
    used, again = clones(inputs), clones(inputs)
    torch.manual_seed(5)
    expected, _ = run_real(graph, used)
    state = torch.get_rng_state()
    kept = verify.constraints(graph)
    after = rerun(graph, reruns)
    verify.check_graph(after, "retain", kept, deep=deep)
    torch.manual_seed(5)
    got, measured = run_real(after, again)
    assert torch.equal(torch.get_rng_state(), state), said
    assert_same([*expected, *used], [*got, *again], said)
    assert measured == live_bytes(build_memory(after)).tolist(), said
    return after


def chain(function: Callable[..., Any], phases: str, *inputs: Tensor) -> tuple[TrainGraph, list[Any]]:
    given = list(inputs or (X,))
    return cleaned(traced(function, *given, phases=phases)), given

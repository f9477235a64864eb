"""Reruns: any legal choice of them leaves every bit as it is, and the bytes are free in between."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from roamc import pipeline, verify
from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph
from roamc.memory import build_memory, live_bytes
from roamc.options import Options
from roamc.passes import normalize
from roamc.passes.retain import Rerun, rerun
from roamc.passes.retain.decide import droppable, expiries
from tests.graphs import assert_same, clones, graph_and_inputs, model_graph, run_real, traced
from tests.models import MODELS
from tests.random_graphs import random_model

X = torch.randn(8, 8)


def cleaned(graph: TrainGraph) -> TrainGraph:
    return normalize.apply(graph, normalize.decide(graph, Options()))


def some_reruns(graph: TrainGraph, seed: int, share: float) -> list[Rerun]:
    """Of all operators and their readers, a random share: the operator runs again in front of the reader."""
    rng = random.Random(seed)
    memory = build_memory(graph)
    names = [op.node.name for op in memory.operators]
    nodes = {op.node.name: op.node for op in memory.operators}
    until = expiries(memory, nodes, names, range(len(names)))
    chosen = []
    for storage, may_drop in zip(memory.counted, droppable(memory, memory.counted), strict=True):
        for user in memory.uses[storage.index] if may_drop else ():
            if user < until[storage.producer] and rng.random() < share:
                chosen.append((user, storage.producer, storage.name))
    return [Rerun(names[user], names[maker], (storage,)) for user, maker, storage in sorted(chosen)]


def check(graph: TrainGraph, inputs: list[Any], reruns: Sequence[Rerun], said: str) -> TrainGraph:
    """Run before and after: results, written inputs and the generator are the same, and all bytes are foreseen."""
    used, again = clones(inputs), clones(inputs)
    torch.manual_seed(5)
    expected, _ = run_real(graph, used)
    state = torch.get_rng_state()
    kept = verify.constraints(graph)
    after = rerun(graph, reruns)
    verify.check_graph(after, "retain", kept, deep=True)
    torch.manual_seed(5)
    got, measured = run_real(after, again)
    assert torch.equal(torch.get_rng_state(), state), said
    assert_same([*expected, *used], [*got, *again], said)
    assert measured == live_bytes(build_memory(after)).tolist(), said
    return after


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(40))
def test_random_reruns_of_random_graphs_leave_every_bit(seed: int, route: str) -> None:
    graph, inputs = graph_and_inputs(*random_model(seed), route)
    graph = cleaned(graph)
    reruns = some_reruns(graph, seed, (0.1, 0.5, 1.0)[seed % 3])
    check(graph, inputs, reruns, f"seed {seed}, {route}")


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("name", MODELS)
def test_random_reruns_of_models_leave_every_bit(name: str, route: str) -> None:
    graph, inputs = model_graph(name, route)
    graph = cleaned(graph)
    reruns = some_reruns(graph, 7, 0.3)
    assert reruns
    check(graph, inputs, reruns, f"{name}, {route}")

"""The models of the planning tables are the ones that everybody means, and their graphs are whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import planning_models
from benchmarks.planning_models import KINDS, MODELS
from roamc.graph import Phase
from roamc.graph.memory import input_bytes
from roamc.graph.verify import check_graph
from roamc.rewriting.in_place import all_reuses
from roamc.rewriting.order_problem import order_problem

PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "mnasnet": 2_218_512,
    "mobilenet": 3_504_872,
    "efficientnet": 5_288_548,
    "vit": 86_567_656,
    "bert": 109_514_298,
    "gpt2": 124_439_808,
    "gpt2-xl-s128": 1_557_611_200,
    "gpt2-xl-s1024": 1_557_611_200,
}


@pytest.mark.parametrize("name", MODELS)
def test_parameter_count_is_the_published_one(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name].build()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("kind", KINDS)
def test_graph_is_the_whole_step(kind: str) -> None:
    graph = planning_models.graph("alexnet", 1, kind)
    check_graph(graph, "capture")
    assert graph.boundary == (kind == "compiled")
    assert (Phase.UPDATE in graph.phase.values()) == (kind != "compiled")
    parameters, states = 4 * PARAMETERS["alexnet"], {"adam": 2}.get(kind, 0)
    pixels = 4 * 3 * 224 * 224 + 8
    assert sum(input_bytes(graph).values()) == parameters * (1 + states) + pixels


def test_a_written_problem_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "alexnet-b1-sgd.npz"
    planning_models.dump(tmp_path, "alexnet", 1, "sgd")
    stored = planning_models.load(path)
    clean, memory = planning_models.normalized(planning_models.graph("alexnet", 1, "sgd"))
    problem, _ = order_problem(clean, memory, all_reuses(memory))
    assert len(problem.reusable) > 0
    assert list(tmp_path.iterdir()) == [path]
    for field in planning_models.fields(problem):
        left, right = getattr(problem, field.name), getattr(stored, field.name)
        assert left.dtype == right.dtype
        assert np.array_equal(left, right)


def test_small_models_come_first() -> None:
    choices = list(planning_models.choices(["vit", "alexnet"], [1]))
    assert choices == [(name, 1, kind) for name in ("alexnet", "vit") for kind in KINDS]

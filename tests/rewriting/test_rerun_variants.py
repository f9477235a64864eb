"""Variants: what another run calls where the operator itself cannot be called again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graphs import graph_and_inputs
from tests.rewriting.cases import check, cleaned, some_reruns


@pytest.mark.parametrize("route", ["step", "joint"])
def test_batch_norm_runs_again_without_the_old_statistics(route: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    graph, inputs = graph_and_inputs(model, (torch.randn(2, 3, 9, 9),), lambda m, x: m(x).square().mean(), route)
    graph = cleaned(graph)
    reruns = [again for again in some_reruns(graph, 3, 1.0) if "batch_norm_legit" in again.operator]
    assert reruns
    after = check(graph, inputs, reruns, "batch norm", deep=False)
    again = [node for node in after.graph.nodes if node.target is torch.ops.aten._native_batch_norm_legit.no_stats]
    assert len(again) == len(reruns)

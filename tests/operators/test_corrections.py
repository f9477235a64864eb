"""Fake results that are not what the kernels give, found on graphs that are run for real."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from roamc.graph import operators, tensors_of
from roamc.operators.corrections import correct
from tests.graphs import run_real, traced

aten = torch.ops.aten

COLUMN, ROW = torch.arange(3.0).view(3, 1), torch.ones(4)
SCATTERED = {
    "slice": lambda x, row: aten.slice_scatter.default(x.expand(3, 4), row[None], 0, 0, 1) * 1,
    "select": lambda x, row: aten.select_scatter.default(x.expand(3, 4), row, 0, 1) * 1,
    "diagonal": lambda x, row: aten.diagonal_scatter.default(x.expand(3, 4), row[:3]) * 1,
}


@pytest.mark.parametrize("name", SCATTERED)
def test_a_result_over_an_expanded_base_is_dense(name: str) -> None:
    graph = traced(SCATTERED[name], COLUMN, ROW)
    correct(graph.graph)
    (scatter,) = (node for node in operators(graph.graph) if "scatter" in str(node.target))
    ((_, noted),) = tensors_of(scatter)
    real: Tensor = SCATTERED[name](COLUMN, ROW)
    assert (noted.shape, noted.stride()) == (real.shape, real.stride())
    assert run_real(graph, [COLUMN, ROW])[0][0].tolist() == real.tolist()

"""Fake results that are not what the kernels give, found on graphs that are run for real."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import roamc
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


VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "expand": (lambda x: x.expand(3, 2, 1, 2, 2), (2,)),
    "expand of a permuted tensor": (lambda x: x.t().expand(1, 3, 1, 2), (2, 1)),
    "diagonal": (lambda x: x.diagonal(-1), (0, 3)),
    "unflatten": (lambda x: x[:, :1, :1].unflatten(0, (1, 3)), (3, 2, 2)),
    "flatten": (lambda x: x[:1, :1].flatten(), (2, 2)),
    "unsafe view": (lambda x: x[:, :1] @ torch.ones(1, 1, 1, 2), (2, 2)),
    "quantile": (lambda x: torch.ones(3, 2, 1, 2).quantile(x.sigmoid(), 2, interpolation="midpoint").sum() * x, (2,)),
}
"""Views with dimensions of one element or without elements, and the shape of what they are of."""


@pytest.mark.parametrize("name", VIEWS)
def test_a_step_with_a_view_of_such_a_shape_has_eagers_bits(name: str) -> None:
    view, shape = VIEWS[name]

    def loss(model: nn.Module) -> Tensor:
        return (view(model.weight * 1) * 1.5).sum()

    results = []
    for by_roamc in (False, True):
        model = nn.Module()
        torch.manual_seed(0)
        model.weight = nn.Parameter(torch.randn(shape))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if by_roamc:
            value = roamc.train_step(model, loss, optimizer, strict=True)()
        else:
            value = loss(model)
            value.backward()
            optimizer.step()
        results.append((value.detach(), model.weight.detach()))
    assert all(map(torch.equal, *results))

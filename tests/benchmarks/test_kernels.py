"""What the benchmark of kernels counts."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks import inductor_kernels, kernels
from roamc.graph import operators
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.passes import fuse
from tests.graphs import traced
from tests.operators.test_gpu_kernels import on_gpu

aten = torch.ops.aten


def gates(x: Tensor, y: Tensor, bias: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
    """A product of which a part is expanded, its sum over rows, and a matrix product."""
    gated = torch.nn.functional.silu(x) * y.expand(4096, 64) + bias
    return gated @ matrix, gated.float().sum([0])


def test_bytes_are_those_of_operands_and_results_and_partial_sums_twice() -> None:
    with torch.no_grad():
        graph = traced(gates, *on_gpu((4096, 64), (4096, 1), (64,), (64, 64)))
    assert kernels.launches(graph) == 6
    graph = fuse.apply(graph, fuse.decide(graph, kernels.FAST))
    assert kernels.launches(graph) == 3
    (group,) = [node.target for node in operators(graph.graph) if isinstance(node.target, FusedKernel)]
    moved, least = kernels.bytes_moved(group)
    assert least == 2 * (4096 * 64 + 4096 + 64 + 4096 * 64) + 4 * 64
    assert moved == least + 2 * 4 * (4096 * 64 // 4096) * 64


def test_inductor_fuses_a_graph_for_a_gpu_that_is_not_here() -> None:
    with torch.no_grad():
        graph = traced(gates, *on_gpu((4096, 64), (4096, 1), (64,), (64, 64)))
    counts = inductor_kernels.kernels(graph)
    assert counts["extern"] == 1
    assert 1 <= counts["triton"] <= 3

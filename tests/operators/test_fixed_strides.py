"""Results of activations and losses lie as their kernels lay them, on operands in any order and of several dtypes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.graph import operators
from roamc.operators.corrections import FIXES, correct
from roamc.operators.table import ROWS
from tests.end_to_end.helpers import TORCH
from tests.graphs import traced
from tests.operators.test_pointwise import FLOATS, operand, strides

aten = torch.ops.aten

CASES: list[tuple[Any, int, tuple[Any, ...]]] = [
    (aten.huber_loss.default, 2, (0, 1.0)),
    (aten.soft_margin_loss.default, 2, (0,)),
    (aten.mse_loss_backward.default, 3, (0,)),
    (aten.smooth_l1_loss_backward.default, 3, (0, 1.0)),
    (aten.huber_loss_backward.default, 3, (0, 1.0)),
    (aten.soft_margin_loss_backward.default, 3, (0,)),
    (aten._prelu_kernel_backward.default, 3, ()),
    (aten.rrelu_with_noise_backward.default, 3, (0.1, 0.3, True, False)),
    (aten.rrelu_with_noise_backward.default, 3, (0.1, 0.3, False, False)),
    (aten.complex.default, 2, ()),
]
"""Operator, the number of its tensors, and the arguments behind them."""

ONE_DTYPE = {
    *(aten.huber_loss_backward.default, aten.log_sigmoid_backward.default, aten._prelu_kernel_backward.default),
    aten.complex.default,
    *([aten.mse_loss_backward.default] if TORCH < (2, 13) else []),
}
"""Operators that refuse operands of several dtypes."""


def operands(op: Any, count: int, seed: int) -> list[Tensor]:
    """Operands of one shape; those of every third seed have several dtypes, where ``op`` takes them."""
    rng = random.Random(seed)
    shape = [rng.choice((2, 3, 4)) for _ in range(rng.choice((2, 3, 4)))]
    choice = (torch.float32, torch.float64) if op is aten.complex.default else FLOATS
    first = rng.choice(choice)
    several = seed % 3 == 0 and op not in ONE_DTYPE
    return [operand(rng, shape, rng.choice(choice) if several else first) for _ in range(count)]


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    """What says how many bytes a tensor has and where its elements lie in them."""
    return tuple(tensor.shape), strides(tensor), tensor.dtype, tensor.storage_offset()


def check(function: Any, arguments: list[Tensor]) -> None:
    """Compare the results that the graph of ``function`` notes with those that it gives."""
    graph = traced(function, *arguments)
    correct(graph.graph)
    noted = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    real = function(*arguments)
    results = real if isinstance(real, tuple) else (real,)
    foretold = [geometry(node.meta["val"]) for node in noted]
    assert foretold == [geometry(result) for result in results], [(x.shape, x.stride(), x.dtype) for x in arguments]
    assert operators(graph.graph)


@pytest.mark.parametrize(("op", "count", "rest"), CASES, ids=str)
def test_results_have_the_geometry_that_the_kernel_gives_them(op: Any, count: int, rest: tuple[Any, ...]) -> None:
    for seed in range(60):
        check(lambda *arguments: op(*arguments, *rest), operands(op, count, seed))


def test_gradients_of_log_sigmoid_lie_like_the_gradient_read() -> None:
    op = aten.log_sigmoid_backward.default
    for seed in range(60):
        gradient, read = operands(op, 2, seed)
        check(op, [gradient, read, aten.log_sigmoid_forward.default(read)[1]])


def test_no_operator_has_both_a_fix_and_a_row_of_strides() -> None:
    rowed = {name for name, row in ROWS.items() if row.strides is not None}
    names = {(op._schema.name, f"{op._schema.name}.{op._schema.overload_name or 'default'}") for op in FIXES}
    assert [pair for pair in sorted(names) if not rowed.isdisjoint(pair)] == []

"""Where results of pointwise operators lie, against the kernels themselves, on operands in any order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from roamc.graph import operators, tensors_of
from roamc.operators.corrections import correct
from tests.graphs import traced

aten = torch.ops.aten

OPERATORS: dict[Any, tuple[Any, ...]] = {
    **dict.fromkeys((aten.mul.Tensor, aten.add.Tensor, aten.div.Tensor, aten.maximum.default, aten.le.Tensor), ()),
    **dict.fromkeys((aten.xlogy.Tensor, aten.copysign.Tensor, aten.hypot.default, aten.logaddexp.default), ()),
    **dict.fromkeys((aten.sigmoid_backward.default, aten.gelu_backward.default, aten.logical_and.default), ()),
    aten.native_dropout_backward.default: (2.0,),
    aten.threshold_backward.default: (0.5,),
    aten.lerp.Scalar: (0.25,),
    **dict.fromkeys((aten.silu_backward.default, aten.mish_backward.default, aten.hardswish_backward.default), ()),
    **dict.fromkeys((aten.hardsigmoid_backward.default, aten.floor_divide.default), ()),
    **dict.fromkeys((aten.mse_loss.default, aten.smooth_l1_loss.default), (0,)),
    **dict.fromkeys((aten.hardshrink_backward.default, aten.softshrink_backward.default), (0.5,)),
    aten.hardtanh_backward.default: (1.25, 1.75),
    aten.softplus_backward.default: (1.0, 20.0),
    aten.leaky_relu_backward.default: (0.1, False),
}
ONE_DTYPE = {aten.gelu_backward.default, aten.lerp.Scalar, aten.mish_backward.default}
"""Operators that refuse operands of several dtypes, or of which the CPU gives other dtypes than torch notes."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def operand(rng: random.Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor of ``shape`` whose dimensions lie in any order, some of them expanded or every second row of more."""
    order = rng.sample(range(len(shape)), len(shape))
    kinds = [rng.choice(("dense", "dense", "expanded", "strided")) for _ in shape]
    sizes = {"dense": lambda size: size, "expanded": lambda size: 1, "strided": lambda size: 2 * size}
    whole = (torch.rand([sizes[kind](shape[at]) for at, kind in zip(order, kinds, strict=True)]) + 1).to(dtype)
    part = whole[tuple(slice(None, None, 2) if kind == "strided" else slice(None) for kind in kinds)]
    return part.expand([shape[at] for at in order]).permute([order.index(at) for at in range(len(shape))])


def strides(tensor: Tensor) -> list[int]:
    """Those that say where elements lie."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@pytest.mark.parametrize("op", OPERATORS, ids=str)
def test_results_lie_as_the_kernel_lays_them(op: Any) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        shape = [rng.choice((2, 3, 4)) for _ in range(rng.choice((2, 3, 4)))]
        first = rng.choice(FLOATS)
        second = first if rng.random() < 0.7 else rng.choice((*FLOATS, torch.bool))
        if op in ONE_DTYPE:
            second = first
        arguments = operand(rng, shape, first), operand(rng, shape, second)
        graph = traced(lambda x, y: op(x, y, *OPERATORS[op]), *arguments)
        (node,) = (node for node in operators(graph.graph) if node.target is op)
        correct(graph.graph)
        real = op(*arguments, *OPERATORS[op])
        assert strides(noted(node)) == strides(real), [(x.shape, x.stride(), x.dtype) for x in arguments]


def noted(node: Node) -> Tensor:
    """What the graph says of a result."""
    ((_, tensor),) = tensors_of(node)
    return tensor

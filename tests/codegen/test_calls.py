"""Arguments of a call by name, and which functions stand for an operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roamc.codegen.calls import by_name, outs_of, same_literal
from roamc.operators import kernels

aten = torch.ops.aten


def test_arguments_have_their_names_and_defaults() -> None:
    assert by_name(aten.sum.dim_IntList, (1, [2]), {"dtype": torch.int32}) == {
        "self": 1,
        "dim": [2],
        "keepdim": False,
        "dtype": torch.int32,
    }


@pytest.mark.parametrize(
    ("args", "keywords"),
    [((1, 2, 3), {}), ((1, 2), {"other": 2}), ((1, 2), {"nothing": 2})],
    ids=["many", "twice", "?"],
)
def test_arguments_that_an_operator_does_not_take_are_refused(args: tuple[int, ...], keywords: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"aten\.mul\.Tensor does not take"):
        by_name(aten.mul.Tensor, args, keywords)


@pytest.mark.parametrize(
    ("operator", "target", "outs"),
    [
        (aten.mul.Tensor, aten.mul.Tensor, ()),
        (aten.mul.Tensor, aten.mul.out, ("out",)),
        (aten.silu_backward.default, aten.silu_backward.grad_input, ("grad_input",)),
        (aten._to_copy.default, kernels.copy, ("out",)),
        (aten.mul.Tensor, aten.add.out, None),
        (aten.sum.dim_IntList, aten.sum.IntList_out, ("out",)),
        (aten.sum.default, aten.sum.IntList_out, None),
        (aten.mul.Tensor, kernels.copy, None),
    ],
    ids=["itself", "out", "another keyword", "kernel", "another operator", "a dimension", "all", "another kernel"],
)
def test_what_stands_for_an_operator(operator: Any, target: Any, outs: tuple[str, ...] | None) -> None:
    assert outs_of(operator, target) == outs


@pytest.mark.parametrize(("one", "other"), [(1, True), (0.0, -0.0), ([1], [1, 2]), (1, 1.0), ("a", "b")])
def test_literals_differ_in_type_and_bits(one: object, other: object) -> None:
    assert same_literal(one, one)
    assert not same_literal(one, other)

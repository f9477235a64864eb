"""Groups are alike exactly where they work alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from roamc.graph import operators
from roamc.operators import ops
from roamc.operators.alike import Alike
from tests.graphs import traced

Function = Callable[[Tensor, Tensor], Tensor]


def twice(first: Function, second: Function, *, shape: tuple[int, ...] = (4, 8)) -> list[list[fx.Node]]:
    """The operators of two functions, in one graph; the second has as many operators, or one more."""
    x, y = torch.rand(4, 8), torch.rand(shape)

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return first(x, x), second(y, x)

    nodes = [node for node in operators(traced(both, x, y).graph) if not ops.is_view(node.target)]
    return [nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]]


def same(groups: list[list[fx.Node]], results: tuple[int, int] = (-1, -1)) -> bool:
    """Whether both groups have one key."""
    alike = Alike()
    first, second = (alike.key(group, [group[at]]) for group, at in zip(groups, results, strict=True))
    return first == second


def gated(x: Tensor, y: Tensor) -> Tensor:
    return x.sigmoid() * x


def test_the_same_operators_on_other_tensors_are_alike() -> None:
    assert same(twice(gated, gated))


def test_another_result_is_another_group() -> None:
    assert not same(twice(gated, gated), (-1, 0))


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y: x.tanh() * x,
        lambda x, y: x.sigmoid() * y,
        lambda x, y: x.sigmoid() * x.sigmoid(),
        lambda x, y: x.sigmoid() * 2,
    ],
    ids=["operator", "operand", "reader", "number"],
)
def test_a_change_makes_another_key(other: Function) -> None:
    assert not same(twice(gated, other))


def test_numbers_that_are_equal_and_of_another_type_differ() -> None:
    assert not same(twice(lambda x, y: x.mul(2).add(1), lambda x, y: x.mul(2.0).add(1)))


def test_another_shape_makes_another_key() -> None:
    assert not same(twice(gated, gated, shape=(8, 8)))


def test_a_changed_argument_is_noticed() -> None:
    first, second = twice(gated, gated)
    alike = Alike()
    assert alike.key(first) == alike.key(second)
    second[1].args = (second[0], second[0])
    assert alike.key(first) != alike.key(second)

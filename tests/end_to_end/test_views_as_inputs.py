"""Inputs that are views of one tensor with a gradient, one of which forward writes: AOTAutograd takes that tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.end_to_end.helpers import assert_same

SIZE = 1024
"""Rows and columns of a matrix that is large enough for an arena."""


def row_and_row(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[0], x[0]


def row_and_all(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[0], x


def flat_and_flat(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.view(-1), x.view(-1)


def columns(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :600], x[:, 400:1000]


def added(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    return (a + b).sin()


def written_after_its_use(a: Tensor, b: Tensor) -> Tensor:
    y = a * 2
    a.mul_(3)
    return y.exp() * b


def returned(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    return b.view(b.shape)


Views = Callable[[Tensor], tuple[Tensor, Tensor]]


def trained(function: Callable[..., Tensor], views: Views) -> list[Tensor | None]:
    """What a call with two views of a tensor gives, the tensor afterwards, and the gradient of what it is made of."""
    torch.manual_seed(0)
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    whole = leaf * 0.5
    out = function(*views(whole))
    torch.autograd.backward([out, whole], [torch.randn_like(out), torch.randn_like(whole)])
    return [out.detach(), whole.detach(), leaf.grad]


CASES = [(added, row_and_row), (added, columns), (written_after_its_use, row_and_all), (returned, flat_and_flat)]


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize(("function", "views"), CASES, ids=lambda function: function.__name__)
def test_views_of_a_tensor_that_one_of_them_writes_equal_aot_eager(
    function: Callable[..., Tensor], views: Views, budget: str | None
) -> None:
    torch._dynamo.reset()
    options = {"strict": True, "memory_budget": budget}
    compiled = torch.compile(function, backend="roamc", dynamic=False, options=options)
    assert_same(trained(compiled, views), trained(torch.compile(function, backend="aot_eager", dynamic=False), views))

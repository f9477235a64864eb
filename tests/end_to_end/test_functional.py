"""Function transforms of torch.func inside a training step have the bits of eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, func, nn
from torch.nn import functional as F

from tests.end_to_end.cases import Apply
from tests.end_to_end.helpers import assert_steps_equal, noise, sgd, square


def gradient_per_row(m: nn.Module, x: Tensor) -> Tensor:
    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return func.functional_call(m.last, parameters, (row,)).square().sum()

    gradients = func.vmap(func.grad(loss), (None, 0))(dict(m.last.named_parameters()), x)
    return x * gradients["weight"].mean((1, 2))[:, None] + gradients["bias"]


def inner_update(m: nn.Module, x: Tensor) -> Tensor:
    """One step of SGD inside the step, as meta-learning does."""
    parameters = dict(m.last.named_parameters())
    gradients = func.grad(lambda values: func.functional_call(m.last, values, (x,)).square().mean())(parameters)
    return func.functional_call(m.last, {name: p - 0.1 * gradients[name] for name, p in parameters.items()}, (x,))


def ensemble(m: nn.Module, x: Tensor) -> Tensor:
    weights = torch.stack([m.last.weight, m.last.weight * 2])
    return func.vmap(lambda weight, y: torch.tanh(y @ weight), (0, None))(weights, x).sum(0)


TRANSFORMED: dict[str, Callable[..., Tensor]] = {
    "a gradient per row": gradient_per_row,
    "an inner update": inner_update,
    "an ensemble": ensemble,
    "jvp": lambda m, x: func.jvp(lambda y: m.last(y).tanh(), (x,), (x * 2,))[1],
    "jacrev": lambda m, x: x + func.jacrev(lambda y: m.last(y).tanh())(x[0]),
    "hessian": lambda m, x: x + func.hessian(lambda y: m.last(y).tanh().sum())(x[0]),
    "vmap of dropout": lambda m, x: func.vmap(lambda row: F.dropout(m.last(row), 0.5), randomness="different")(x),
    "vmap of a convolution": lambda m, x: (
        x + func.vmap(lambda row: F.conv1d(row[None], m.scale[None, None, :1]))(x)[:, 0]
    ),
    "vmap of vmap": lambda m, x: func.vmap(func.vmap(m.last))(x[None]).sum(0),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transform_in_a_step_equals_eager(name: str) -> None:
    assert_steps_equal(Apply(TRANSFORMED[name]), square, sgd, [(noise(8, 8),)])


def test_a_second_model_may_differentiate_forward_through_a_view() -> None:
    """torch keeps results of fake tensors for the whole process; that of a view's tangent is too small."""

    def along(m: nn.Module, x: Tensor) -> Tensor:
        return func.jvp(lambda row: m.last(row).tanh(), (x[0],), (torch.ones(8),))[1]

    for _ in range(2):
        assert_steps_equal(Apply(along), square, sgd, [(noise(3, 8),)])

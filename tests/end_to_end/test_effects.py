"""Operators with an effect, such as the checks behind ``torch.linalg``: they run, in order, and errors are eager's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import roamc
from tests.end_to_end.helpers import (
    assert_backward_equal,
    assert_same,
    assert_steps_equal,
    optimized,
    sgd,
    tensors_of,
)
from tests.end_to_end.helpers import square as loss

X = torch.eye(8) + 0.1
Y = torch.eye(8) + 0.2
SINGULAR = torch.zeros(8, 8)


class Linalg(nn.Module):
    """Applies ``function`` to inputs that depend on a parameter."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*(x * self.weight for x in inputs))


class InverseInBackward(torch.autograd.Function):
    """Its check runs in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.linalg.inv(ctx.saved_tensors[0]) * gradient


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "inv": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, x.sin()),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT),
    "two in a row": lambda x: torch.linalg.inv(torch.linalg.inv(x).sin() + x),
    "in a checkpoint": lambda x: checkpoint(lambda y: torch.linalg.inv(y).sin(), x, use_reentrant=False),
    "in backward": lambda x: InverseInBackward.apply(x),
    "in both": lambda x: InverseInBackward.apply(torch.linalg.inv(x)),
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


@each_function
@pytest.mark.parametrize("budget", [None, "min"])
def test_numbers_of_a_compiled_module(name: str, budget: str | None) -> None:
    assert_backward_equal(Linalg(FUNCTIONS[name]), loss, [(X,), (Y,)], way=partial(optimized, memory_budget=budget))


@each_function
def test_numbers_of_a_train_step(name: str) -> None:
    assert_steps_equal(Linalg(FUNCTIONS[name]), loss, sgd, [(X,), (Y,)])


def test_inference() -> None:
    model = Linalg(torch.linalg.inv)
    wanted = model(X).detach()
    model = optimized(model)
    with torch.no_grad():
        assert_same(model(X), wanted)
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            model(SINGULAR)


@each_function
def test_a_singular_matrix_is_an_error_and_training_goes_on(name: str) -> None:
    model = optimized(Linalg(FUNCTIONS[name]))
    for _ in range(2):
        with pytest.raises(torch.linalg.LinAlgError):
            loss(model, SINGULAR).backward()
        loss(model, X).backward()


@each_function
def test_a_singular_matrix_stops_a_train_step_before_it_has_changed_anything(name: str) -> None:
    model = Linalg(FUNCTIONS[name])
    step = roamc.train_step(model, loss, sgd(model), strict=True)
    step(X)
    before = tensors_of(model)
    with pytest.raises(torch.linalg.LinAlgError):
        step(SINGULAR)
    assert_same(tensors_of(model), before)
    step(X)


def test_the_first_of_two_checks_speaks() -> None:
    model = optimized(Linalg(lambda x, y: torch.linalg.inv(x) + torch.linalg.cholesky(y)))
    with pytest.raises(torch.linalg.LinAlgError, match=r"linalg\.inv"):
        model(SINGULAR, SINGULAR)
    with pytest.raises(torch.linalg.LinAlgError, match=r"linalg\.cholesky"):
        model(X, SINGULAR)


def test_a_check_whose_result_nobody_reads() -> None:
    def checked(x: Tensor) -> Tensor:
        torch.linalg.inv(x)
        return x.sin()

    model = optimized(Linalg(checked))
    loss(model, X).backward()
    with pytest.raises(torch.linalg.LinAlgError):
        model(SINGULAR)


def test_plan_counts_no_tokens() -> None:
    model = Linalg(torch.linalg.inv)
    planned = roamc.plan(model, X)
    loss(optimized(model), X).backward()
    assert planned.needed_bytes == roamc.plans(model)[0].needed_bytes

"""Operators that raise an error which the step catches, and submodules that torch.jit has made: eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import roamc
from tests.end_to_end.helpers import assert_same, assert_steps_equal, eager_step, noise, sgd, tensors_of


def _cat(h: Tensor) -> Tensor:
    return torch.cat([h, torch.ones(3, 3, 3)])


def _view(h: Tensor) -> Tensor:
    return h.view(7, -1)


def _product(h: Tensor) -> Tensor:
    return h @ torch.ones(5, 5)


def _in_place(h: Tensor) -> Tensor:
    return h.add_(torch.ones(3, 3, 3))


def _foreach(h: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_add_([torch.zeros(4, 8)], [torch.ones(3, 3, 3)])  # type: ignore[attr-defined]
    return h


FAIL: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": _cat, "view": _view, "product": _product, "in place": _in_place, "foreach": _foreach,
}  # fmt: skip


class InBackward(torch.autograd.Function):
    """Its backward catches an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return _or_twice(_view, grad)


def _or_twice(fail: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    try:
        return fail(h)
    except RuntimeError:
        return h * 2


def _hooked(fail: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    h = h.tanh()
    h.register_hook(lambda grad: _or_twice(fail, grad))
    return h


WHERE: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "forward": _or_twice,
    "checkpoint": lambda fail, h: checkpoint(_or_twice, fail, h, use_reentrant=False),
    "hook": _hooked,
}


class Catching(nn.Module):
    def __init__(self, fail: Callable[[Tensor], Tensor], where: str) -> None:
        super().__init__()
        self.layer, self.fail, self.where = nn.Linear(8, 8), fail, where

    def forward(self, x: Tensor) -> Tensor:
        return WHERE[self.where](self.fail, self.layer(x)).tanh()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("fail", FAIL)
def test_a_step_that_catches_an_operators_error(fail: str, where: str) -> None:
    assert_steps_equal(Catching(FAIL[fail], where), loss, sgd, [(noise(4, 8),)] * 2)


def test_a_function_whose_backward_catches_an_error() -> None:
    def through(model: nn.Module, x: Tensor) -> Tensor:
        return InBackward.apply(model(x)).square().mean()  # type: ignore[no-any-return, no-untyped-call]

    assert_steps_equal(nn.Linear(8, 8), through, sgd, [(noise(4, 8),)] * 2)


def test_an_error_that_nobody_catches_is_the_users() -> None:
    model = nn.Linear(8, 8)
    step = roamc.train_step(model, lambda model, x: _view(model(x)).sum(), torch.optim.SGD(model.parameters()))
    with pytest.raises(RuntimeError, match=r"invalid for input of size 32"):
        step(noise(4, 8))


class Around(nn.Module):
    def __init__(self, part: Any) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(8, 8), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.layer(x))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("make", [lambda part: torch.jit.trace(part, noise(2, 8)), torch.jit.script])
def test_submodules_of_jit(make: Callable[[nn.Module], Any]) -> None:
    models = []
    for _ in range(2):  # copies of modules of torch.jit have parameters that no optimizer takes
        torch.manual_seed(0)
        models.append(Around(make(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))))
    model, twin = models
    step, reference = roamc.train_step(model, loss, sgd(model), strict=True), sgd(twin)
    for rows in (4, 6):
        x = noise(rows, 8)
        assert_same(step(x), eager_step(twin, loss, reference, x).detach())
        assert_same(tensors_of(model), tensors_of(twin))
        reference.zero_grad()

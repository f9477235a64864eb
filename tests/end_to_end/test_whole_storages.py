"""Readers that go by offsets into a storage read what lies around a saved tensor: eager's bits wherever it is kept."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import assert_same, noise

FAILS: list[int] = []


class Window(torch.autograd.Function):
    """Its backward reads rows of the storage of what was saved, those in front of it, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        window = torch.as_strided(x, (16, 64), (64, 1), 512)
        return gradients[0] * 2 + torch.sin(window).exp()


@torch.library.custom_op(
    "roamc_test_whole_storages::pass_on", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def pass_on(x: Tensor) -> Tensor:
    """Raises once after each ``FAILS.append``. By its tag it draws at most, so that it may be called again."""
    if FAILS:
        FAILS.pop()
        raise RuntimeError("once")
    return x.clone()


@pass_on.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


pass_on.register_autograd(lambda ctx, gradient: gradient)


class Slices(nn.Module):
    """Keeps a part of an activation that does not begin its storage; backward writes over that storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        part: Any = Window.apply(hidden[16:])  # type: ignore[no-untyped-call]
        passed: Any = pass_on(torch.exp(part * 0.01))
        loss: Tensor = self.last(passed).tanh().sum() + torch.sin(hidden).sum()
        return loss


class Behind(Slices):
    """Reads by offsets behind the operator that fails, of an activation in front of it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sin(self.first(x))
        part = hidden[16:]
        mean: Any = pass_on(hidden)
        window = torch.as_strided(part, (16, 64), (64, 1), 512)
        copied = torch.as_strided_copy(hidden, (16, 64), (64, 1), 512)
        spread = torch.as_strided_scatter(hidden, part.cos(), (16, 64), (64, 1), 512)
        return (part.exp() * window.cos() * copied.tanh()).sum() * mean.mean() + spread.square().sum()


def plain(loss: Callable[[], Tensor]) -> None:
    loss().backward()


def retained(loss: Callable[[], Tensor]) -> None:
    value = loss()
    value.backward(retain_graph=True)
    value.backward()


def kept_by_hooks(loss: Callable[[], Tensor]) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        value = loss()
    value.backward()


USES = {use.__name__: use for use in (plain, retained, kept_by_hooks)}


def gradients(model: nn.Module, use: Callable[[Callable[[], Tensor]], None]) -> list[Tensor | None]:
    use(lambda: model(noise(32, 64)))
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("kind", [Slices, Behind])
def test_saved_tensors_keep_what_lies_around_them(
    kind: type[nn.Module], use: Callable[[Callable[[], Tensor]], None], budget: str | None
) -> None:
    torch.manual_seed(0)
    model = kind()
    twin = copy.deepcopy(model)
    planned = roamc.optimize(model, strict=True, memory_budget=budget)
    assert_same(gradients(planned, use), gradients(twin, use))


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("kind", [Slices, Behind])
def test_a_step_that_is_finished_without_its_program(
    kind: type[nn.Module], use: Callable[[Callable[[], Tensor]], None]
) -> None:
    torch.manual_seed(0)
    model = kind()
    twin = copy.deepcopy(model)
    planned = roamc.optimize(model)
    wanted = gradients(twin, use)
    assert_same(gradients(planned, use), wanted)
    planned.zero_grad()
    FAILS.append(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_same(gradients(planned, use), wanted)
    assert not FAILS


@pytest.mark.parametrize("kind", [Slices, Behind])
def test_a_backward_whose_program_has_failed_meanwhile(kind: type[nn.Module]) -> None:
    """Two forwards are in flight; the second fails, and the first one's backward finds its tensors in an arena."""
    torch.manual_seed(0)
    model = kind()
    twin = copy.deepcopy(model)
    planned = roamc.optimize(model)
    wanted = gradients(twin, plain)
    loss = planned(noise(32, 64))
    FAILS.append(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        planned(noise(32, 64, seed=1))
    loss.backward()
    assert_same([parameter.grad for parameter in planned.parameters()], wanted)

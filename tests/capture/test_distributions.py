"""Steps with torch.distributions, whose checks of arguments read values."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Distribution, MultivariateNormal, Normal, kl_divergence

import roamc
from tests.end_to_end.helpers import assert_same, eager_step, noise, seeded, sgd, tensors_of


@pytest.fixture(params=[True, False])
def checked(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether distributions are checked by default; torch.compile turns that off for the process."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(request.param)
    yield request.param
    Distribution.set_default_validate_args(before)


class Policy(nn.Module):
    """A loss of several distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        latent = Normal(h, torch.ones(4))
        prior = kl_divergence(latent, Normal(0.0, 1.0)).mean()
        chosen = Categorical(logits=h).log_prob(torch.zeros(4, dtype=torch.long)).mean()
        spread = MultivariateNormal(h, torch.eye(4)).rsample().mean() + Beta(h.exp(), torch.ones(4)).rsample().mean()
        return prior - chosen + spread + latent.rsample().mean()


def forward(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    return loss


def test_a_step_equals_eager_whatever_the_default(checked: bool) -> None:
    model = Policy()
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, forward, sgd(model)), sgd(twin)
    for seed in range(2):
        wanted = seeded(eager_step, twin, forward, reference, noise(4, 8, seed=seed), seed=seed)
        assert_same(seeded(step, noise(4, 8, seed=seed), seed=seed), wanted)
    assert_same(tensors_of(model), tensors_of(twin))
    assert Distribution._validate_args is checked


def test_a_module_is_planned_whatever_the_default(checked: bool) -> None:
    assert roamc.plan(Policy(), noise(4, 8)).peak_bytes > 0
    assert Distribution._validate_args is checked


def test_a_check_that_was_asked_for_is_refused_in_one_line() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return Normal(model(x), 1.0, validate_args=True).rsample().mean()

    model = nn.Linear(8, 4)
    with pytest.raises(
        roamc.CaptureError,
        match=r"^test_\w+.py:\d+: the step reads.*pass validate_args=False",
    ):
        roamc.train_step(model, loss, sgd(model))(noise(4, 8))


def test_a_print_is_refused_in_one_line() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        mean: Tensor = model(x).mean()
        print(f"{mean:.3f}")
        return mean

    model = nn.Linear(8, 4)
    with pytest.raises(roamc.CaptureError, match=r"prints a tensor's value.*print the loss that the step returns"):
        roamc.train_step(model, loss, sgd(model))(noise(4, 8))

"""Dropouts of whole steps have eager's bits, forward and backward, and draw what eager draws."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import roamc
from roamc.capture.dropouts import scale_of
from tests.end_to_end.helpers import SEED, assert_same, noise, seeded

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHARES = 1000
AT_ONCE = 25
"""Dropouts of one step."""


class Scaled(nn.Module):
    """A function of weights times a batch, so that gradients pass its backward."""

    def __init__(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(noise(16, 64).to(dtype))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight * x)


def trained(whole: bool, function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Loss, weights and the generator's state after a step, planned or in plain eager."""
    model = Scaled(function, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = noise(16, 64, seed=1).to(dtype)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x).double() * 1.3).sin().sum()

    if whole:
        step = roamc.train_step(model, loss_of, optimizer, strict=True)
        loss = seeded(step, batch)
    else:
        loss = seeded(loss_of, model, batch)
        loss.backward()
        optimizer.step()
    return [loss.detach(), model.weight.detach(), torch.get_rng_state()]


def assert_eager(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    assert_same(trained(True, function, dtype), trained(False, function, dtype), f"seed {SEED}")


def shares() -> list[float]:
    """Random probabilities, many near 0 or 1."""
    draw = random.Random(0)
    near = [draw.choice((1e-3, 1e-6, 1e-9, 1e-16)) * draw.random() for _ in range(SHARES // 4)]
    return [*(draw.random() for _ in range(SHARES // 2)), *near, *(1 - small for small in near)]


def of_rows(some: list[float]) -> Callable[[Tensor], Tensor]:
    """A dropout of every row, each with a probability of its own."""
    return lambda x: torch.stack([F.dropout(x[at % len(x)], share) for at, share in enumerate(some)])


@pytest.mark.parametrize("first", range(0, SHARES, AT_ONCE))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_probability(dtype: torch.dtype, first: int) -> None:
    assert_eager(of_rows(shares()[first :: SHARES // AT_ONCE]), dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scales_are_what_eager_divides_to(dtype: torch.dtype) -> None:
    for share in shares():
        if 0 < share < 1:
            scale = torch.ones((), dtype=dtype).div_(1 - share)
            assert scale_of(1 - share, dtype) == float(scale), share


def double_backward(x: Tensor) -> Tensor:
    dropped = F.dropout(x, 0.15)
    (slope,) = torch.autograd.grad(dropped.square().sum(), x, create_graph=True)
    return slope * dropped


def written(x: Tensor, share: float, *, training: bool) -> Tensor:
    """A dropout that drops nothing is its input."""
    F.dropout(x, share, training).mul_(2.0)
    return x


def attention(x: Tensor) -> Tensor:
    heads = x.view(2, 8, 4, 16)
    return F.scaled_dot_product_attention(heads, heads.flip(0), heads.sin(), dropout_p=0.15)


def image(x: Tensor) -> Tensor:
    return x.view(2, 8, 8, 8)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.15),
    "twice": lambda x: F.dropout(F.dropout(x, 0.15).sin(), 0.35),
    "in place": lambda x: F.dropout(x * 1, 0.15, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.15, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.15, True)[0],
    "nothing dropped, written to": lambda x: written(x * 1, 0.0, training=True),
    "evaluation, written to": lambda x: written(x * 1, 0.3, training=False),
    "all dropped, then some": lambda x: F.dropout(F.dropout(x, 1.0) + x, 0.3),
    "no elements": lambda x: F.dropout(x[:0], 0.5).sum() + F.dropout(x, 0.3),
    "hardly any": lambda x: F.dropout(x, 1e-30),
    "nearly all": lambda x: F.dropout(x, 1 - 1e-12),
    "all but one ulp": lambda x: F.dropout(x, 1 - 2**-53),
    "transposed": lambda x: F.dropout(x.t(), 0.15),
    "expanded": lambda x: F.dropout(x[:, :1].expand(16, 64), 0.15),
    "every other column": lambda x: F.dropout(x[:, ::2], 0.15),
    "channels last": lambda x: F.dropout(image(x).to(memory_format=torch.channels_last), 0.15),
    "checkpoint": lambda x: checkpoint(lambda x: F.dropout(x.sin(), 0.15), x, use_reentrant=False),
    "double backward": double_backward,
    "vmap": lambda x: vmap(lambda row: F.dropout(row, 0.15), randomness="different")(x),
    "alpha": lambda x: F.alpha_dropout(x, 0.15, training=True),
    "features 1d": lambda x: F.dropout1d(x, 0.15),
    "features 2d": lambda x: F.dropout2d(image(x), 0.15),
    "features 3d": lambda x: F.dropout3d(x.view(2, 8, 2, 4, 8), 0.15),
    "alpha of features": lambda x: F.feature_alpha_dropout(image(x), 0.15, training=True),
    "attention": attention,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_kind(dtype: torch.dtype, kind: str) -> None:
    assert_eager(KINDS[kind], dtype)


def test_masks_of_traces_are_of_bools() -> None:
    model = Scaled(KINDS["twice"], torch.float32)
    step = roamc.train_step(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters()), strict=True)
    step(noise(16, 64))
    (plan,) = step.plans
    assert "dropout_mask" in plan.to_json()
    assert "bernoulli" not in plan.to_json()

"""Training loops of strangers: two optimizers, averages of weights, things that change between steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sweeps.strangers import (
    DOUBLE,
    IN_EAGER,
    MakeOptimizer,
    Stranger,
    adamw,
    classes,
    labelled,
    mlp,
    sgd,
    under_autocast,
)

Optimizers = Sequence[torch.optim.Optimizer]


class GAN(nn.Module):
    """A generator and a discriminator; a call gives the scores of real and made, and of points between them."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.judge = mlp(8, 64, 16), mlp(16, 64, 1)

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.make(z)
        return self.judge(torch.cat([x, fake.detach()])), self.judge(fake)


class Penalised(GAN):
    """The same whose first result is the loss of the discriminator of a Wasserstein GAN."""

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        scores, of_fake = super().forward(x, z)
        with torch.no_grad():
            between = 0.5 * (x + self.make(z))
        between.requires_grad_()
        (slope,) = torch.autograd.grad(self.judge(between).sum(), between, create_graph=True)
        real, fake = scores.chunk(2)
        return fake.mean() - real.mean() + 10 * (slope.norm(2, 1) - 1).square().mean(), of_fake


def critic_of_gan(model: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    real, fake = model(x, z)[0].chunk(2)
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def critic_of_penalised(model: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    return model(x, z)[0]


def generator(model: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    return F.softplus(-model(x, z)[1]).mean()


def part(name: str) -> MakeOptimizer:
    """Adam of one of the modules of a model."""
    return lambda model: torch.optim.Adam(getattr(model, name).parameters(), lr=1e-3, betas=(0.5, 0.9))


def points() -> tuple[Tensor, ...]:
    return torch.randn(64, 16), torch.randn(64, 8)


class Averaged(nn.Module):
    """A model beside the moving average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(mlp(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), mlp(64, 64, 10))
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@torch.no_grad()
def average(model: Any, optimizers: Optimizers, turn: int) -> None:
    for old, new in zip(model.average.parameters(), model.net.parameters(), strict=True):
        old.lerp_(new, 0.1)


class BYOL(Averaged):
    """The average is what the prediction of another view is compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.predict = mlp(10, 32, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.average(x)
        return self.predict(self.net(x)), wanted


def byol(model: nn.Module, x: Tensor) -> Tensor:
    one, other = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
    (mine, theirs), (again, target) = model(one), model(other)
    return 4 - 2 * (F.cosine_similarity(mine, target) + F.cosine_similarity(again, theirs)).mean()


def accumulated(model: nn.Module, x: Tensor, y: Tensor, later_x: Tensor, later_y: Tensor) -> Tensor:
    """Two micro-batches of one step."""
    return (under_autocast(model, x, y) + under_autocast(model, later_x, later_y)) / 2


def micro_batches() -> tuple[Tensor, ...]:
    one = labelled(16, 32)
    return *one(), *one()


def cosine(model: nn.Module, optimizers: Optimizers, turn: int) -> None:
    for group in optimizers[0].param_groups:
        group["lr"] = 1e-3 * (1 - turn / 10)


def changes(model: Any, optimizers: Optimizers, turn: int) -> None:
    """After the first turn a part is frozen and dropout is other; after the next, normalisation is fixed too."""
    if turn == 0:
        model.net[0].requires_grad_(False)
        model.net[2].p = 0.4
    else:
        model.net[1].eval()
        optimizers[0].param_groups[0]["lr"] = 5e-3


def _gan(model: type[GAN], critic: Any, **more: Any) -> Stranger:
    return Stranger(model, points, critic, part("judge"), more=((generator, part("make")),), **more)


class Cells(nn.Module):
    """A cell that is called step by step on what a recurrent layer gives: many small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(53, 19), nn.GRU(19, 23, 2, bidirectional=True, batch_first=True)
        self.cell, self.head = nn.LSTMCell(46, 31), nn.Linear(31, 53)

    def forward(self, x: Tensor) -> Tensor:
        hidden, state, results = self.layer(self.embed(x))[0], None, []
        for at in range(hidden.shape[1]):
            state = self.cell(hidden[:, at], state)
            results.append(state[0])
        return self.head(torch.stack(results, 1))


def next_number(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


LOOPS: dict[str, Stranger] = {
    "gan": _gan(GAN, critic_of_gan),
    "gan_gp": _gan(Penalised, critic_of_penalised, limits={"optimize": DOUBLE, "compile": DOUBLE}),
    "ema": Stranger(Averaged, labelled(64, 32), classes, adamw, after=average),
    "byol": Stranger(BYOL, lambda: (torch.randn(64, 32),), byol, sgd, after=average),
    "accum": Stranger(lambda: mlp(32, 64, 64, 10), micro_batches, accumulated, adamw, after=cosine, clip=1.0),
    "changes": Stranger(Averaged, labelled(64, 32), classes, sgd, after=changes),
    "cells": Stranger(Cells, lambda: (torch.randint(0, 53, (3, 5)),), next_number, limits={"compile": IN_EAGER}),
}

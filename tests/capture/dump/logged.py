"""Compiles models with roamc in a process whose TORCH_TRACE is a folder, and writes the plans that it made.

    TORCH_TRACE=FOLDER python -m tests.capture.dump.logged OUT.json BUDGET NAME...

A name is that of a model of tests.models, or ``small:SEED`` or ``in-place:SEED`` for random ones. With ``@aot_eager``
or another backend of torch behind it, that backend compiles it, and there are no plans.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from roamc.frontends import backend
from tests import models, small_models
from tests.sweeps import in_place_models


class Checkpointed(nn.Module):
    """Layers with dropout that run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        layer = {"dim_feedforward": 128, "dropout": 0.1, "batch_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, **layer) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x).square().mean()


class Gated(nn.Module):
    """Experts of which each token takes two, and a second loss that balances them."""

    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        share = torch.softmax(self.router(x), -1)
        weight, chosen = share.topk(2, -1)
        kept = torch.zeros_like(share).scatter(-1, chosen, weight)
        each = torch.einsum("bsef,efd->bsed", torch.einsum("bsd,edf->bsef", x, self.up).relu(), self.down)
        return (x + (each * kept.unsqueeze(-1)).sum(2)).square().mean() + share.mean((0, 1)).square().sum()


class Written(nn.Module):
    """Writes in place to activations, to a part of one, and to a buffer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.register_buffer("count", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu_().clone()
            x[:, :8] += 1
            x.mul_(0.9)
        self.count.add_(x.detach().mean(0))
        return x.square().mean()


class Frozen(nn.Module):
    """A head that shares its weight with an embedding, in bfloat16, behind a layer that is not trained."""

    def __init__(self, width: int = 32, words: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width, dtype=torch.bfloat16)
        self.still = nn.Linear(width, width, dtype=torch.bfloat16).requires_grad_(False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.norm(self.still(self.table(x.argmax(-1))).float())
        return self.head(mixed.bfloat16()).float().square().mean()


OWN = {
    "frozen": (Frozen, (2, 8, 64)),
    "checkpointed": (Checkpointed, (4, 16, 32)),
    "gated": (Gated, (2, 16, 32)),
    "written": (Written, (16, 32)),
}


def made(name: str) -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    """Return the model of a name, its batch and its loss."""
    if name not in OWN:
        return models.make(name)
    make, shape = OWN[name]
    return make(), (torch.randn(shape),), lambda model, *batch: model(*batch)


def _squares(model: nn.Module, *batch: Any) -> Tensor:
    """A loss of all that ``model`` returns."""
    result = model(*batch)
    values = result if isinstance(result, tuple) else (result,)
    return torch.stack([value.square().mean() for value in values if value.requires_grad]).sum()


def run(name: str, budget: str | None) -> None:
    """Compile one model and take a step, forward and backward."""
    name, _, compiler = name.partition("@")
    kind, _, seed = name.partition(":")
    options: dict[str, Any] = {"options": {"memory_budget": budget}} if budget else {}
    torch._dynamo.reset()
    torch.manual_seed(0)
    if kind == "in-place":
        example = in_place_models.example(int(seed))
        model, (batch, *_) = example.make(), example.batches
        loss = _squares
    elif kind == "small":
        model, batch, loss = small_models.small_model(int(seed))
    else:
        model, batch, loss = made(name)
    loss(torch.compile(model, backend=compiler or "roamc", **options), *batch).backward()


def main() -> None:
    """Write a list of pairs of a model's name and its plans, as JSON texts."""
    out, budget, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    rows = []
    for name in names:
        backend.LATEST.clear()
        run(name, budget if budget != "none" else None)
        rows.append((name, [plan.to_json() for plan in backend.LATEST]))
    Path(out).write_text(json.dumps(rows), "utf-8")


if __name__ == "__main__":
    main()

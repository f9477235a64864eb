"""A small language model on bytes trains with codec tempo as it does exactly."""

from __future__ import annotations

import argparse
import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from tests.passes.retain.test_tempo import Mlp

LAYERS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 2, 64, 4, 64, 8, 300


class Attention(nn.Module):
    """The other half of a transformer's block; the norm's output is kept by hand, as the GELU's in ``Mlp``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        with roamc.keep():
            inner = self.norm(x)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(inner).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + F.dropout(self.proj(mixed.transpose(1, 2).flatten(2)), 0.1)


def language_model() -> nn.Module:
    torch.manual_seed(0)
    halves = (half for _ in range(LAYERS) for half in (Attention(), Mlp(WIDTH, "gelu", keep=True, dropout=0.1)))
    return nn.Sequential(nn.Embedding(256, WIDTH), *halves, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))


def loss(model: nn.Module, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


@pytest.mark.thorough
def test_loss_of_a_language_model_on_bytes_is_that_of_exact_training() -> None:
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    losses = {}
    for codecs in ((), ("tempo",)):
        model, draw = language_model(), torch.Generator().manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        step = roamc.train_step(model, loss, optimizer, memory_budget="light", codecs=codecs, strict=True)
        torch.manual_seed(2)
        starts = (torch.randint(len(text) - LENGTH, (BATCH, 1), generator=draw) for _ in range(STEPS))
        losses[codecs] = [float(step(text[start + torch.arange(LENGTH + 1)])) for start in starts]
        taken = [code[1] for code in roamc.plans(step)[-1].decisions["retain"]["codes"]]
        assert taken.count("tempo") >= (2 * LAYERS - 1 if codecs else 0), taken
    exact, lossy = (torch.tensor(losses[codecs]) for codecs in ((), ("tempo",)))
    assert exact[-20:].mean() < 0.7 * exact[:20].mean()
    assert (exact - lossy).abs().max() <= 0.005

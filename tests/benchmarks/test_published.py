"""Layers and optimizers of papers by hand, for comparison: their gradients and steps against torch's and roamc's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from benchmarks.rivals import compact, tempo
from roamc.operators.projection import projection


def test_slopes_of_tempo_are_those_of_gelu() -> None:
    """Nearly: the sums of its first two pieces cancel in float32, as in the published kernel."""
    torch.manual_seed(0)
    x = torch.randn(100_000)
    exact = torch.ops.aten.gelu_backward(torch.ones_like(x), x)
    error = tempo.slope(F.gelu(x), x >= tempo.LEAST) - exact
    assert error.norm() < 0.02 * exact.norm()
    assert error[(x > 0.5) & (x < 2)].abs().max() < 1e-5


def test_norm_of_tempo_has_the_gradients_of_a_norm() -> None:
    torch.manual_seed(0)
    norm, x = nn.LayerNorm(16), torch.randn(8, 3, 16, requires_grad=True)
    torch.nn.init.uniform_(norm.weight, 0.5, 2)
    leaves = [x, *norm.parameters()]
    grad = torch.randn(8, 3, 16)
    expected = torch.autograd.grad(norm(x), leaves, grad)
    norm.__class__ = tempo._Norm
    torch.testing.assert_close(torch.autograd.grad(norm(x), leaves, grad), expected, rtol=1e-4, atol=1e-5)


def test_compact_by_hand_steps_as_the_optimizer_given_its_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    def matrix(own: compact.Projector, like: Tensor) -> Tensor:
        numbers = 0.0, 0, own.seed - 1, own.size, own.rank, "gaussian"  # the first name is that of the whole model
        p: Tensor = projection(*numbers, dtype=like.dtype, device=like.device)
        return p

    monkeypatch.setattr(compact.Projector, "matrix", matrix)
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8))
    rival = copy.deepcopy(own)
    compact.rewrite(rival, 1 / 4, ())
    one = roamc.optim.CompAct(own.named_parameters(), lr=1e-2, rank=1 / 4, scale=0.5, dense=())
    other = compact.Adam(rival, 1e-2, 0.5, 50)
    for _ in range(3):
        x = torch.randn(32, 16)
        for model, optimizer in ((own, one), (rival, other)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for got, expected in zip(rival.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)

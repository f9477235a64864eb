"""Operators whose ``out=`` form is not what the operator is: compiled, they give the numbers of ``aot_eager``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.end_to_end.helpers import assert_same


def both_factors(x: Tensor) -> Tensor:
    q, r = torch.linalg.qr(x)
    return q.square().sum() + (r * r).sum()


def low_rank(x: Tensor) -> Tensor:
    u, s, v = torch.svd_lowrank(x, q=3, niter=1)
    return u.square().sum() + (s * s).sum() + v.abs().sum()


def principal_components(x: Tensor) -> Tensor:
    u, s, v = torch.pca_lowrank(x, q=3, niter=1)
    return u.square().sum() + (s * s).sum() + v.abs().sum()


def binary_cross_entropy(x: Tensor) -> Tensor:
    shares = (x @ x.mT).sigmoid()
    later = shares.exp()
    loss = F.binary_cross_entropy(shares, torch.full_like(shares, 0.25))
    return loss.exp() * (later * later).mean() + (later.sin() * loss).mean()


def huber(x: Tensor) -> Tensor:
    shares = (x @ x.mT).sigmoid()
    later = shares.exp()
    loss = F.huber_loss(shares, torch.full_like(shares, 0.25), reduction="sum")
    return loss.exp() * (later * later).mean() + (later.sin() * loss).mean()


def copy_of_a_strided_view(x: Tensor) -> Tensor:
    later = x.exp()
    return (torch.as_strided_copy(later, (2, 3), (3, 1), 1) * later[:2, :3]).sum()


def complex_quotient(x: Tensor) -> Tensor:
    z = torch.complex(x, x.cos())
    return ((z * 2) / z[0].exp()).abs().sum()


def bilinear(x: Tensor) -> Tensor:
    """Of no rows: fake views of a tensor without elements do not share its storage."""
    return F.bilinear(x, torch.zeros(x.shape[0], 4), torch.ones(5, x.shape[1], 4)).sum()


CASES = [
    *((bilinear, shape) for shape in ((0, 3), (4, 3))),
    *((both_factors, shape) for shape in ((5, 5), (9, 4))),
    *((function, (6, 7)) for function in (low_rank, principal_components, huber, copy_of_a_strided_view)),
    (binary_cross_entropy, (64, 64)),
    (complex_quotient, (64, 33)),
]


@pytest.mark.parametrize(("function", "shape"), CASES)
def test_function_gives_the_bits_of_aot_eager(function: Callable[[Tensor], Tensor], shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    wanted = value_and_gradient(function, x, "aot_eager", None)
    assert_same(value_and_gradient(function, x, "roamc", {"strict": True}), wanted)


def value_and_gradient(
    function: Callable[[Tensor], Tensor], x: Tensor, backend: str, options: dict[str, object] | None
) -> tuple[Tensor, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(1)
    value = torch.compile(function, backend=backend, options=options, dynamic=False)(x)
    (gradient,) = torch.autograd.grad(value, x)
    return value.detach(), gradient


LOSSES = (F.binary_cross_entropy, F.huber_loss, F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_loss_keeps_the_bytes_of_its_one_number(loss: Callable[..., Tensor], reduction: str) -> None:
    torch.manual_seed(0)
    shares = torch.rand(40, 50, requires_grad=True)
    wanted = torch.rand(40, 50)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        inner = loss(x.sin().square(), wanted, reduction=reduction)
        return loss(x, wanted, reduction=reduction), inner * x.exp().sum()

    value, other = torch.compile(both, backend="roamc", options={"strict": True}, dynamic=False)(shares)
    assert value.untyped_storage().nbytes() == value.nbytes
    expected = both(shares)
    assert_same((value.detach(), other.detach()), (expected[0].detach(), expected[1].detach()))

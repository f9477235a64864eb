"""What a loss function may not do to parameters: each case is refused, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import roamc


def backward_of_another(model: nn.Module, x: Tensor) -> Tensor:
    model(x).square().mean().backward()
    return model(x).sum()


def backward_of_the_loss(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def backward_alone(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def freezes(model: nn.Module, x: Tensor) -> Tensor:
    dict(model.named_parameters())["0.weight"].requires_grad_(False)
    return model(x).sum()


def unfreezes(model: nn.Module, x: Tensor) -> Tensor:
    dict(model.named_parameters())["1.weight"].requires_grad_(True)
    return model(x).sum()


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (backward_of_another, r"runs backward itself: .* lose the \.grad of 0\.weight"),
        (backward_of_the_loss, "let it return the loss alone, or the sum of several"),
        (backward_alone, "runs backward itself"),
        (freezes, r"sets requires_grad of 0\.weight to False; set it before the step"),
        (unfreezes, r"sets requires_grad of 1\.weight to True; set it before the step"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused(loss_fn: Callable[[nn.Module, Tensor], Tensor], said: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model.get_parameter("1.weight").requires_grad_(False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = roamc.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(roamc.CaptureError, match=said):
        step(torch.ones(4, 8))
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, True, False, True]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_freezing_for_a_part_of_the_loss_is_as_in_eager() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        weight = dict(model.named_parameters())["0.weight"]
        weight.requires_grad_(False)
        frozen = model(x).square().sum()
        weight.requires_grad_(True)
        return frozen + model(x).sum()

    models = []
    for eager in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if eager:
            loss_fn(model, torch.ones(4, 8)).backward()
            optimizer.step()
        else:
            roamc.train_step(model, loss_fn, optimizer)(torch.ones(4, 8))
        models.append(model)
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))

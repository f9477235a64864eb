"""A batch tensor that requires a gradient gets it in ``.grad``, as from eager's backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.compat import identity
from tests.end_to_end.helpers import Loss, assert_same, noise, sgd

Batch = tuple[Tensor, ...]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def wanting(*tensors: Tensor) -> Batch:
    return tuple(tensor.requires_grad_() for tensor in tensors)


def of_one(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def of_a_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Both have one gradient, which autograd copies for one of them."""
    return of_one(model, x + y)


def of_the_second(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return of_one(model, y) + 0 * x.detach().sum()


def beside_the_model(model: nn.Module, x: Tensor) -> Tensor:
    """The gradient is one number, expanded."""
    return of_one(model, x.detach()) + x.sum()


def of_both(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) * model(y)).mean()  # type: ignore[no-any-return]


class Same(torch.autograd.Function):
    """Its backward hands out a tensor of the batch: in eager ``x.grad`` is ``y`` then, and changes with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def of_an_input(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return of_one(model, Same.apply(x, y.detach())) + of_one(model, y)  # type: ignore[no-untyped-call]


def twice() -> Batch:
    (x,) = wanting(noise(4, 8))
    return x, x


CASES: dict[str, tuple[Loss, Callable[[], Batch]]] = {
    "one": (of_one, lambda: wanting(noise(4, 8))),
    "parameter": (of_one, lambda: (nn.Parameter(noise(4, 8)),)),
    "one of two": (of_both, lambda: (noise(4, 8), *wanting(noise(4, 8)))),
    "none needed": (of_the_second, lambda: wanting(noise(4, 8), noise(4, 8, seed=5))),
    "shared gradient": (of_a_sum, lambda: wanting(noise(4, 8), noise(4, 8, seed=5))),
    "expanded gradient": (beside_the_model, lambda: wanting(noise(4, 8))),
    "one tensor twice": (of_both, twice),
    "transposed": (of_one, lambda: wanting(noise(8, 4).t())),
    "gaps": (of_one, lambda: wanting(noise(4, 16)[:, ::2])),
    "expanded": (of_one, lambda: wanting(noise(1, 8).expand(4, 8))),
    "empty": (lambda model, x: model(x).sum(), lambda: wanting(noise(0, 8))),
}


def trained(loss_fn: Loss, batch: Batch, eager: bool, **options: Any) -> list[Any]:
    """Three steps on one batch, whose gradients add up; all that they leave."""
    torch.manual_seed(0)
    model = net()
    optimizer = sgd(model)
    step = roamc.train_step(model, loss_fn, optimizer, strict=True, **options)
    losses, gradients = [], []
    for _ in range(3):
        if eager:
            optimizer.zero_grad()
            loss = loss_fn(model, *batch)
            loss.backward()
            optimizer.step()
        else:
            loss = step(*batch)
        losses.append(loss.detach())
        gradients.append([None if x.grad is None else x.grad.clone() for x in batch])
    return [losses, gradients, [p.detach() for p in model.parameters()]]


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_batch_are_those_of_eager(name: str) -> None:
    loss_fn, make = CASES[name]
    mine, theirs = make(), make()
    assert_same(trained(loss_fn, mine, eager=False), trained(loss_fn, theirs, eager=True), name)
    pairs = [(x.grad, y.grad) for x, y in zip(mine, theirs, strict=True) if x.grad is not None and y.grad is not None]
    assert [x.stride() for x, _ in pairs] == [y.stride() for _, y in pairs]


@pytest.mark.parametrize(("loss_fn", "budget"), [(of_a_sum, None), (of_a_sum, "min"), (of_an_input, None)])
def test_gradients_lie_alone_in_their_memory(loss_fn: Loss, budget: str | None) -> None:
    batch = wanting(noise(4, 8), noise(4, 8))
    step = roamc.train_step(model := net(), loss_fn, sgd(model), strict=True, memory_budget=budget)
    step(*batch)
    kept = [x.grad.clone() for x in batch if x.grad is not None]
    memory = [identity(x.grad) for x in batch if x.grad is not None]
    assert len({*memory, *map(identity, batch), *map(identity, model.parameters())}) == 4 + len(
        list(model.parameters())
    )
    step(noise(4, 8), noise(4, 8))
    assert_same([x.grad for x in batch], kept, "after a step on another batch")


def test_the_plan_counts_them_among_the_outputs() -> None:
    step = roamc.train_step(model := net(), of_one, sgd(model))
    x = noise(512, 8)
    with_gradient, without = step.plan(x.clone().requires_grad_()), step.plan(x)
    assert (
        with_gradient.decisions["layout"]["outside_bytes"] == without.decisions["layout"]["outside_bytes"] + 4 * 512 * 8
    )


def test_a_tensor_that_wants_no_gradient_gets_none_from_the_same_step() -> None:
    step = roamc.train_step(model := net(), of_one, sgd(model), strict=True)
    x, (y,) = noise(4, 8), wanting(noise(4, 8))
    step(x)
    step(y)
    assert x.grad is None
    assert y.grad is not None
    assert len(step.plans) == 2


def test_a_tensor_that_the_loss_makes_require_a_gradient_is_as_eager_leaves_it() -> None:
    """As losses with a gradient penalty do; a second step on the tensor raised behind the update of the parameters."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return of_one(model, x.requires_grad_())

    mine, theirs = (noise(4, 8),), (noise(4, 8),)
    assert_same(trained(loss_fn, mine, eager=False), trained(loss_fn, theirs, eager=True))
    assert mine[0].requires_grad


def test_a_tensor_that_the_loss_writes_to_with_gradients_gets_none() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return of_one(model, x.mul_(model[0].weight.sum()))  # type: ignore[index]

    x = noise(4, 8)
    roamc.train_step(model := net(), loss_fn, sgd(model), strict=True)(x)
    assert x.grad is None
    assert not x.requires_grad


def test_a_parameter_of_the_batch_is_one_to_the_loss() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return of_one(model, x) * (2 if isinstance(x, nn.Parameter) else 1)

    mine, theirs = (nn.Parameter(noise(4, 8)),), (nn.Parameter(noise(4, 8)),)
    assert_same(trained(loss_fn, mine, eager=False), trained(loss_fn, theirs, eager=True))


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_gradients_of_another_dtype_are_refused_before_anything_changes(dtype: torch.dtype | None) -> None:
    model, x = net(), noise(4, 8).bfloat16().requires_grad_()
    before = [p.detach().clone() for p in model.parameters()]
    x.grad_dtype = dtype
    with pytest.raises(roamc.CaptureError, match="grad_dtype"):
        roamc.train_step(model, lambda model, x: of_one(model, x.float()), sgd(model))(x)
    assert_same([p.detach() for p in model.parameters()], before)
    (first, *_) = model.bfloat16().parameters()
    first.grad_dtype = dtype
    with pytest.raises(roamc.CaptureError, match=r"0\.weight .* grad_dtype"):
        roamc.train_step(model, of_one, sgd(model))(noise(4, 8).bfloat16())


def test_a_gradient_that_the_loss_assigns_is_refused() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        x.grad = torch.ones_like(x)
        return model(x).square().sum()

    model = nn.Linear(8, 4)
    step = roamc.train_step(model, loss_fn, sgd(model))
    with pytest.raises(roamc.CaptureError, match=r"assigns \.grad of a batch tensor of shape \(4, 8\)"):
        step(noise(4, 8).requires_grad_())

"""DTensors in a step of one rank: all is taken apart and put together; test_parallel_steps.py has several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import roamc
from roamc.errors import CaptureError
from tests.end_to_end.helpers import TORCH, assert_same, eager_step, noise, sgd
from tests.kernel_cases import alone

X = noise(3, 4)


def mesh() -> Any:
    alone()
    return init_device_mesh("cpu", (1,))


def build() -> nn.Module:
    """Two layers in parts, and a norm between them that every rank has whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4))
    return parallelize_module(model, mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


class Centred(nn.Module):
    """Takes away a running mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(width))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean + self.shift


def all_in_parts(norm: type[nn.Module]) -> nn.Module:
    """A model whose norm and buffers are DTensors as well, on all ranks the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), norm(8))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter, mesh(), [Replicate()])))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, distribute_tensor(buffer, mesh(), [Replicate()]))
    return model


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def plain(tensors: dict[Any, Any]) -> dict[Any, Any]:
    """Copies of tensors, those of one rank for a DTensor."""
    return {key: (t.to_local() if isinstance(t, DTensor) else t).detach().clone() for key, t in tensors.items()}


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    kept = {(name, key): t for name, p in model.named_parameters() for key, t in optimizer.state[p].items()}
    return plain({**dict(model.named_parameters()), **dict(model.named_buffers()), **kept})


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_are_those_of_eager_and_dtensors_stay(kind: Any) -> None:
    model, twin = build(), build()
    settings = {"lr": 0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}
    optimizer, reference = kind(model.parameters(), **settings), kind(twin.parameters(), **settings)
    step = roamc.train_step(model, loss_of, optimizer, strict=True)
    places = [parameter.to_local().data_ptr() for parameter in (model[0].weight, model[2].bias)]
    for _ in range(3):
        assert_same(step(X), eager_step(twin, loss_of, reference, X))
    assert_same(state(model, optimizer), state(twin, reference))
    assert len(step.plans) == 1
    kept = [*optimizer.state[model[0].weight].values(), model.state_dict()["0.weight"]]
    assert [isinstance(tensor, DTensor) for tensor in kept if tensor.dim()] == [True] * (len(kept) - (len(kept) > 2))
    assert [parameter.to_local().data_ptr() for parameter in (model[0].weight, model[2].bias)] == places


@pytest.mark.parametrize(
    "norm",
    [
        pytest.param(
            nn.BatchNorm1d,
            marks=pytest.mark.skipif(TORCH < (2, 13), reason="DTensor has no batch norm before torch 2.13"),
        ),
        Centred,
    ],
)
def test_batch_buffers_and_loss_may_be_dtensors(norm: type[nn.Module]) -> None:
    model, twin = all_in_parts(norm), all_in_parts(norm)
    x = distribute_tensor(X, mesh(), [Shard(0)])
    optimizer, reference = sgd(model), sgd(twin)
    step = roamc.train_step(model, loss_of, optimizer, strict=True)
    for _ in range(2):
        loss, wanted = step(x), eager_step(twin, loss_of, reference, x)
        assert type(loss) is Tensor
        assert_same(loss, wanted.full_tensor())  # type: ignore[attr-defined]
    assert_same(state(model, optimizer), state(twin, reference))


def test_clipping_is_that_of_eager_and_hooks_see_dtensors() -> None:
    model, twin = build(), build()
    for one in (model, twin):
        one[0].weight.register_hook(lambda grad: 2 * grad if isinstance(grad, DTensor) else None)
    step = roamc.train_step(model, loss_of, sgd(model), clip_grad_norm=0.01, strict=True)
    step(X)
    loss_of(twin, X).backward()
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in twin.parameters()]
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))  # type: ignore[arg-type]
    for parameter in twin.parameters():
        parameter.grad *= (0.01 / (total + 1e-6)).clamp(max=1.0)
    reference = sgd(twin)
    reference.step()
    for (name, tensor), wanted in zip(plain(dict(model.named_parameters())).items(), twin.parameters(), strict=True):
        whole = wanted.to_local() if isinstance(wanted, DTensor) else wanted
        torch.testing.assert_close(tensor, whole.detach(), rtol=1e-6, atol=1e-7, msg=name)


def test_step_counts_as_a_write_to_each_dtensor() -> None:
    model = build()
    step = roamc.train_step(model, loss_of, sgd(model), strict=True)
    loss = loss_of(model, X)
    step(X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_step_on_the_meta_device_is_planned_and_not_run() -> None:
    with torch.device("meta"):
        model = build()
    step = roamc.train_step(model, loss_of, torch.optim.AdamW(model.parameters()))
    real = build()
    on_cpu = roamc.train_step(real, loss_of, torch.optim.AdamW(real.parameters()))
    assert step.plan(X).decisions == on_cpu.plan(X).decisions
    with pytest.raises(CaptureError, match="on the meta device, where nothing is computed"):
        step(X)


def test_state_that_is_not_placed_as_its_parameter_is_refused() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    roamc.train_step(model, loss_of, optimizer)(X)
    held = optimizer.state[model[0].weight]
    held["exp_avg"] = held["exp_avg"].to_local()
    with pytest.raises(CaptureError, match=r"exp_avg of 0\.weight is .*, the parameter .* on cpu, \(Shard\(dim=0\),\)"):
        roamc.train_step(model, loss_of, optimizer)(X)


def test_state_that_is_placed_otherwise_after_the_first_step_is_refused() -> None:
    model = build()
    optimizer = sgd(model)
    step = roamc.train_step(model, loss_of, optimizer)
    step(X)
    held = optimizer.state[model[2].bias]
    held["momentum_buffer"] = DTensor.from_local(held["momentum_buffer"].to_local(), mesh(), [Partial()])
    before = plain(dict(model.named_parameters()))
    with pytest.raises(CaptureError, match=r"momentum_buffer of 2\.bias is .*Partial.*, the parameter .*Replicate"):
        step(X)
    assert_same(plain(dict(model.named_parameters())), before)


def test_parameter_that_is_a_sum_over_the_ranks_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh(), [Partial()]))
    with pytest.raises(CaptureError, match=r"weight is placed as \(Partial\(sum\),\) .* redistribute it"):
        roamc.train_step(model, loss_of, sgd(model))(X)

"""What a loss function may do with the model beside calling it: the same as in eager, by every way in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm, parameters_to_vector

import roamc
from tests.end_to_end.helpers import Loss, assert_same, noise, square, state_of, tensors_of


class Model(nn.Module):
    """Layers of several kinds, a buffer and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.head.weight = self.inner.weight
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.inner(x)) * self.scale))  # type: ignore[no-any-return]


def looks_up(model: nn.Module, x: Tensor) -> Tensor:
    weight, scale = model.get_parameter("inner.weight"), model.get_buffer("scale")
    tied = model.get_submodule("head").weight is weight
    return square(model, x) + (weight * scale).square().sum() * (2 if tied else 3)


def decays(model: nn.Module, x: Tensor) -> Tensor:
    """Weight decay as libraries write it."""
    decayed = [p for p in model.parameters() if isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf]
    named = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    layers = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    parts = (get_total_norm(decayed), parameters_to_vector(named).abs().mean(), *(w.square().sum() for w in layers))
    return square(model, x) + sum(parts)  # type: ignore[return-value]


def reads_its_state(model: nn.Module, x: Tensor) -> Tensor:
    held, moved = model.state_dict(keep_vars=True), model.state_dict()["inner.weight"].roll(1, 0)
    return square(model, x) + (held["inner.weight"] - moved).square().sum() / sum(p.numel() for p in model.parameters())


def calls_with_others(model: nn.Module, x: Tensor) -> Tensor:
    halves = {name: value * 0.5 for name, value in model.named_parameters()}
    return torch.func.functional_call(model, halves, (x,)).square().mean() + square(model, x)  # type: ignore[no-any-return]


def calls_a_copy(model: nn.Module, x: Tensor) -> Tensor:
    teacher = copy.deepcopy(model).eval()
    with torch.no_grad():
        wanted = teacher(x)
    return (model(x) - 2 * wanted).square().mean()  # type: ignore[no-any-return]


def maps(model: nn.Module, x: Tensor) -> Tensor:
    inner: Callable[[Tensor], Tensor] = model.get_submodule("inner")
    rows = torch.vmap(inner)(x).square().mean()
    return rows + torch.func.jvp(inner, (x,), (x,))[1].sum() + torch.func.jacrev(inner)(x[0]).square().sum()


def punishes_gradients(model: nn.Module, x: Tensor) -> Tensor:
    loss = square(model, x)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(g.square().sum() for g in gradients)


def changes_modes(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        before = model(x)
    model.train().zero_grad()
    return (model(x) - before).square().mean()  # type: ignore[no-any-return]


def writes(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.get_parameter("inner.weight").mul_(0.9)
    model.get_parameter("inner.bias").data.clamp_(-0.1, 0.1)
    model.get_buffer("scale").mul_(1.1)
    model.load_state_dict(model.state_dict())
    return square(model, x)


USES: tuple[Loss, ...] = (
    looks_up, decays, reads_its_state, calls_with_others, calls_a_copy, maps, punishes_gradients, changes_modes, writes,
)  # fmt: skip


def trained(loss_fn: Loss, way: str) -> list[Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    planned = roamc.train_step(model, loss_fn, optimizer, strict=True)
    if way == "optimize":
        roamc.optimize(model, strict=True)
    if way == "backend":
        model.compile(backend="roamc", options={"strict": True})
    if way == "aot_eager":
        model.compile(backend="aot_eager")

    def step(x: Tensor) -> Tensor:
        if way == "train_step":
            return planned(x)
        optimizer.zero_grad()
        loss = loss_fn(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [step(noise(4, 8, seed=seed)) for seed in range(2)]
    return [losses, tensors_of(model), state_of(optimizer)]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # by torch's deepcopy of a tensor
@pytest.mark.parametrize("loss_fn", USES, ids=lambda use: str(use.__name__))
def test_a_step_is_that_of_eager(loss_fn: Loss) -> None:
    assert_same(trained(loss_fn, "train_step"), trained(loss_fn, "eager"), loss_fn.__name__)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["optimize", "backend"])
@pytest.mark.parametrize(
    "loss_fn", [use for use in USES if use is not punishes_gradients], ids=lambda use: str(use.__name__)
)
def test_a_compiled_model_is_that_of_aot_eager(loss_fn: Loss, way: str) -> None:
    """Which does not differentiate twice, and has other last bits than eager."""
    assert_same(trained(loss_fn, way), trained(loss_fn, "aot_eager"), loss_fn.__name__)


def assert_refused(loss_fn: Loss, message: str) -> None:
    """A step with ``loss_fn`` is refused in one line, and has changed nothing of the model."""
    model = Model()
    before = tensors_of(model)
    with pytest.raises(roamc.CaptureError, match=message) as refused:
        roamc.train_step(model, loss_fn, torch.optim.SGD(model.parameters()))(noise(4, 8))
    assert "\n" not in str(refused.value)
    assert_same(tensors_of(model), before)


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.bfloat16, lambda model: model.to("cpu")])
def test_a_conversion_of_the_model_is_refused_in_one_line(convert: Callable[[nn.Module], nn.Module]) -> None:
    assert_refused(lambda model, x: square(convert(model), x), r"converts parameters .* before the first step")


@pytest.mark.parametrize("name", ["inner.weight", "scale", "x"])
def test_data_that_is_assigned_is_refused(name: str) -> None:
    """It was passed over without a word: the step went on with the values before."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        tensor = {**model.state_dict(keep_vars=True), "x": x}[name]
        tensor.data = tensor.data * 0.5
        return square(model, x)

    assert_refused(loss_fn, r"assigns \.data of .*, and would")


@pytest.mark.parametrize("name", ["weight", "extra"])
def test_a_new_parameter_is_refused(name: str) -> None:
    """The second step went on with the first one's values, without a word."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        model.inner.register_parameter(name, nn.Parameter(torch.ones(8, 8)))  # type: ignore[operator]
        return square(model, x)

    assert_refused(loss_fn, rf"puts another parameter into inner\.{name}")

"""Optimizers of train_step against torch.optim: parameters and states, bit for bit."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, StepLR

import roamc
from tests.end_to_end.helpers import (
    assert_same,
    assert_steps_equal,
    eager_step,
    noise,
    sgd,
    square,
    state_of,
    tensors_of,
)

BATCHES = [(noise(4, 8, seed=seed),) for seed in range(4)]
SETTINGS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {}),
    (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "dampening": 0.3}),
    (SGD, {"momentum": 0.9, "nesterov": True}),
    (SGD, {"weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "maximize": True}),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.1, "foreach": True}),
    *(
        (kind, settings)
        for kind in (Adam, AdamW)
        for settings in (
            {},
            {"weight_decay": 0.0},
            {"weight_decay": 0.1},
            {"amsgrad": True, "weight_decay": 0.1},
            {"maximize": True, "amsgrad": True},
            {"betas": (0.5, 0.7), "eps": 1e-3},
            {"foreach": False},
            {"foreach": True, "weight_decay": 0.1, "amsgrad": True},
            {"fused": True},
            {"fused": True, "weight_decay": 0.1, "amsgrad": True},
            {"fused": True, "maximize": True},
        )
    ),
    (Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
]


def name_of(value: object) -> str:
    if isinstance(value, type):
        return value.__name__
    return (
        ",".join(f"{key}={value}" for key, value in value.items()) or "plain" if isinstance(value, dict) else str(value)
    )


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8, bias=False))


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def pair(make: Callable[[nn.Module], Optimizer]) -> tuple[roamc.TrainStep, nn.Module, Optimizer]:
    """A train step, and a twin of its model with an optimizer for eager."""
    model = net()
    twin = copy.deepcopy(model)
    return roamc.train_step(model, square, make(model), strict=True), twin, make(twin)


def assert_trained_alike(step: roamc.TrainStep, twin: nn.Module, reference: Optimizer) -> None:
    assert_same(tensors_of(step.model), tensors_of(twin))
    assert_same(state_of(step.optimizer), state_of(reference))


@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=name_of)
def test_settings(kind: type[Optimizer], settings: dict[str, Any]) -> None:
    # foreach changes speed only: it is compared with the single-tensor form, which is what runs.
    plain = {**settings, "foreach": False} if settings.get("foreach") else settings
    optimizers: list[Optimizer] = []

    def make(model: nn.Module) -> Optimizer:
        optimizers.append(kind(model.parameters(), lr=0.05, **(plain if optimizers else settings)))
        return optimizers[-1]

    step = assert_steps_equal(net(), square, make, BATCHES)
    assert len(step.plans) == 1
    assert step.optimizer is optimizers[0]


def test_momentum_begins_with_the_gradient_and_the_sign_of_its_zeros() -> None:
    def sgd_up(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1, momentum=0.9, maximize=True)

    model, twin = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer, reference = sgd_up(model), sgd_up(twin)
    roamc.train_step(model, lambda m, x: (m(x) * 0).sum(), optimizer, strict=True)(noise(2, 4).abs())
    eager_step(twin, lambda m, x: (m(x) * 0).sum(), reference, noise(2, 4).abs())
    signs = [[torch.signbit(s["momentum_buffer"]) for s in o.state.values()] for o in (optimizer, reference)]
    assert all(map(torch.all, signs[1]))
    assert_same(signs[0], signs[1])


@pytest.mark.parametrize(("setting", "value"), [("differentiable", True), ("betas", (torch.tensor(0.9), 0.99))])
def test_setting_that_is_not_supported_is_refused_after_the_first_step_too(setting: str, value: object) -> None:
    step, *_ = pair(lambda model: Adam(model.parameters()))
    step(*BATCHES[0])
    before = tensors_of(step.model)
    step.optimizer.param_groups[0][setting] = value
    with pytest.raises(roamc.CaptureError, match=setting):
        step(*BATCHES[1])
    assert_same(tensors_of(step.model), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW], ids=name_of)
def test_other_dtypes(kind: type[Optimizer], dtype: torch.dtype) -> None:
    batches = [(noise(4, 8, seed=seed).to(dtype),) for seed in range(3)]
    assert_steps_equal(
        net().to(dtype), square, lambda m: kind(m.parameters(), lr=0.05, weight_decay=0.1), batches, clip=0.5
    )


@pytest.mark.parametrize("fused", [False, True])
def test_the_step_count_has_the_dtype_that_torch_gives_it(fused: bool) -> None:
    step, twin, reference = pair(lambda model: Adam(model.parameters(), fused=fused))
    torch.set_default_dtype(torch.float64)
    try:
        step(*BATCHES[0])
        eager_step(twin, square, reference, *BATCHES[0])
    finally:
        torch.set_default_dtype(torch.float32)
    assert_trained_alike(step, twin, reference)


def test_a_gradient_has_the_strides_of_its_parameter() -> None:
    """Of an image with its channels last, that of the kernel has others, and sums in 16 bits other last bits."""
    batches = [(noise(2, 8, 8, 8, seed=seed).bfloat16().to(memory_format=torch.channels_last),) for seed in range(2)]
    assert_steps_equal(
        nn.Conv2d(8, 8, 4, 4).bfloat16(), square, lambda m: SGD(m.parameters(), lr=0.1, weight_decay=0.1), batches
    )


def two_groups(model: nn.Module) -> Optimizer:
    groups = [
        {"params": [model[2].weight, model[0].bias], "lr": 0.01, "weight_decay": 0.0},
        {"params": [model[0].weight], "betas": (0.8, 0.9), "amsgrad": True},
    ]
    return AdamW(groups, lr=0.03, weight_decay=0.2)


def test_parameter_groups() -> None:
    assert_steps_equal(net(), square, two_groups, BATCHES)


def test_group_without_parameters_and_parameters_without_group() -> None:
    assert_steps_equal(
        net(), square, lambda m: SGD([{"params": [m[0].bias]}, {"params": []}], lr=0.1, momentum=0.9), BATCHES
    )


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "StepLR": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.1),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, T_max=5),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("make", [sgd, adamw, two_groups], ids=lambda f: f.__name__)
@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers(scheduler: Callable[[Optimizer], LRScheduler], make: Callable[[nn.Module], Optimizer]) -> None:
    step, twin, reference = pair(make)
    schedules = scheduler(step.optimizer), scheduler(reference)
    for batch in BATCHES:
        assert_same(step(*batch), eager_step(twin, square, reference, *batch))
        for schedule in schedules:
            schedule.step()
    assert_trained_alike(step, twin, reference)
    assert len(step.plans) == 1


def test_scheduler_does_not_take_the_train_step_for_a_forgotten_one() -> None:
    # A scheduler warns when its step() comes before the first optimizer.step().
    step, _, _ = pair(sgd)
    schedule = StepLR(step.optimizer, step_size=1)
    step(*BATCHES[0])
    schedule.step()
    assert step.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


@pytest.mark.parametrize("make", [sgd, adamw], ids=lambda f: f.__name__)
def test_new_learning_rate_needs_no_new_plan(make: Callable[[nn.Module], Optimizer]) -> None:
    step, twin, reference = pair(make)
    for lr, batch in zip((0.1, 0.05, 0.0, 0.2), BATCHES, strict=True):
        for optimizer in (step.optimizer, reference):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.param_groups[0]["weight_decay"] = lr / 2 + 0.1
        assert_same(step(*batch), eager_step(twin, square, reference, *batch))
    assert_trained_alike(step, twin, reference)
    assert len(step.plans) <= 2, "weight decay may come in once"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(SGD, {"momentum": 0.9}), (AdamW, {"foreach": False}), (Adam, {"fused": True})],
    ids=name_of,
)
def test_learning_rate_as_a_tensor(kind: type[Optimizer], settings: dict[str, Any]) -> None:
    step, twin, reference = pair(lambda m: kind(m.parameters(), lr=torch.tensor(0.05), **settings))
    for batch in BATCHES:
        step(*batch)
        eager_step(twin, square, reference, *batch)
        for optimizer in (step.optimizer, reference):
            optimizer.param_groups[0]["lr"].mul_(0.9)
    assert_trained_alike(step, twin, reference)
    assert len(step.plans) == 1


@pytest.mark.parametrize("limit", [1e-3, 0.1, 1e3])
@pytest.mark.parametrize("make", [sgd, adamw, two_groups], ids=lambda f: f.__name__)
def test_clipping(make: Callable[[nn.Module], Optimizer], limit: float) -> None:
    step = assert_steps_equal(net(), square, make, BATCHES, clip=limit)
    assert "clip_grad_norm" in step.plans[0].notes[0]


class Several(nn.Module):
    """Layers of several widths, with a frozen, a tied and an idle one, and one in bfloat16 or not."""

    def __init__(self, narrow: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8 * width) for width in (3, 1, 5, 2))
        self.back = nn.ModuleList(nn.Linear(8 * width, 8) for width in (3, 1, 5, 2))
        self.narrow, self.idle = nn.Linear(8, 24, dtype=narrow), nn.Linear(8, 8)
        self.back[1].weight = self.layers[1].weight
        self.layers[2].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer, back in zip(self.layers, self.back, strict=True):
            x = x + back(layer(x).tanh())
        return self.narrow(x.to(self.narrow.weight.dtype)).float()


def ordered(of: Callable[[list[nn.Parameter]], list[Any]]) -> Callable[[nn.Module], Optimizer]:
    """SGD whose momentum shows the clipped gradients, of the parameters in another order, or of groups of them."""
    return lambda model: SGD(of(list(model.parameters())), lr=0.05, momentum=0.9)


ORDERS: dict[str, Callable[[list[nn.Parameter]], list[Any]]] = {
    "the model's": list,
    "reverse": lambda p: p[::-1],
    "shuffled": lambda p: random.Random(0).sample(p, len(p)),
    "shuffled again": lambda p: random.Random(1).sample(p, len(p)),
    "biases last": lambda p: [{"params": [x for x in p if x.dim() == dim]} for dim in (2, 1)],
    "biases first": lambda p: [{"params": [x for x in p if x.dim() == dim], "lr": 0.1 * dim} for dim in (1, 2)],
    "a group each, reverse": lambda p: [{"params": [x]} for x in p[::-1]],
    "interleaved": lambda p: [{"params": p[at::3]} for at in (2, 0, 1)],
}


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_clipping_adds_up_norms_in_the_models_order(order: str, narrow: torch.dtype) -> None:
    batches = [(noise(4, 8, seed=seed),) for seed in range(10)]
    assert_steps_equal(Several(narrow), square, ordered(ORDERS[order]), batches, clip=0.1)


def test_clipping_counts_what_the_optimizer_holds() -> None:
    def some(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        return parameters[:1:-1]

    model = net()
    twin = copy.deepcopy(model)
    step = roamc.train_step(model, square, ordered(some)(model), clip_grad_norm=0.01, strict=True)
    reference, (x,) = ordered(some)(twin), BATCHES[0]
    step(x)
    square(twin, x).backward()
    nn.utils.clip_grad_norm_(some(list(twin.parameters()))[::-1], 0.01)
    reference.step()
    assert_same(tensors_of(model), tensors_of(twin))
    assert_same(state_of(step.optimizer), state_of(reference))


def test_clipping_with_a_tied_weight_and_an_unused_one() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)
            self.last = nn.Linear(8, 8)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).tanh())

    assert_steps_equal(Net(), square, adamw, BATCHES, clip=0.01)


def saved(*objects: Any) -> list[Any]:
    """The state dicts of the objects, by way of a file."""
    file = io.BytesIO()
    torch.save([thing.state_dict() for thing in objects], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("make", [sgd, adamw, two_groups], ids=lambda f: f.__name__)
def test_saved_and_loaded_half_way_equals_uninterrupted(make: Callable[[nn.Module], Optimizer]) -> None:
    step, twin, reference = pair(make)
    for batch in BATCHES:
        step(*batch)
    fresh = roamc.train_step(twin, square, reference, strict=True)
    for batch in BATCHES[:2]:
        fresh(*batch)
    model = net()
    for value in model.parameters():
        value.data.fill_(7)
    optimizer = make(model)
    resumed = roamc.train_step(model, square, optimizer, strict=True)
    resumed(*BATCHES[0])
    for target, state in zip((model, optimizer), saved(twin, reference), strict=True):
        target.load_state_dict(state)
    for batch in BATCHES[2:]:
        resumed(*batch)
    assert_trained_alike(step, model, optimizer)


@pytest.mark.parametrize("make", [sgd, adamw, two_groups], ids=lambda f: f.__name__)
def test_eager_and_train_step_in_turn(make: Callable[[nn.Module], Optimizer]) -> None:
    step, twin, reference = pair(make)
    for number, batch in enumerate(BATCHES):
        eager_step(twin, square, reference, *batch)
        if number % 2:
            step(*batch)
        else:
            eager_step(step.model, square, step.optimizer, *batch)
    assert_trained_alike(step, twin, reference)


def test_parameters_with_different_step_counts() -> None:
    step, twin, reference = pair(adamw)
    for optimizer, model in ((step.optimizer, step.model), (reference, twin)):
        model[0].requires_grad_(False)
        eager_step(model, square, optimizer, *BATCHES[0])
        model[0].requires_grad_(True)
    for batch in BATCHES:
        assert_same(step(*batch), eager_step(twin, square, reference, *batch))
    assert_trained_alike(step, twin, reference)


def test_group_added_later() -> None:
    step, twin, reference = pair(lambda m: SGD([m[0].weight], lr=0.1, momentum=0.9))
    for number, batch in enumerate(BATCHES):
        if number == 2:
            step.optimizer.add_param_group({"params": [step.model[2].weight], "lr": 0.3})
            reference.add_param_group({"params": [twin[2].weight], "lr": 0.3})
        step(*batch)
        eager_step(twin, square, reference, *batch)
    assert_trained_alike(step, twin, reference)


def duplicate_within(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"].append(groups[0]["params"][0])


def duplicate_across(groups: list[dict[str, Any]]) -> None:
    groups.append({**groups[0], "params": groups[0]["params"][:1], "lr": 0.3})


@pytest.mark.parametrize("duplicate", [duplicate_within, duplicate_across], ids=["within", "across"])
@pytest.mark.parametrize("later", [False, True])
def test_a_parameter_that_the_optimizer_holds_twice_is_refused(
    duplicate: Callable[[list[dict[str, Any]]], None], later: bool
) -> None:
    step, *_ = pair(sgd)
    if later:
        step(*BATCHES[0])
    before = tensors_of(step.model)
    duplicate(step.optimizer.param_groups)
    with pytest.raises(roamc.CaptureError, match=r"'0\.weight' more than once"):
        step(*BATCHES[1])
    assert_same(tensors_of(step.model), before)


def test_parameter_exchanged_in_place_of_another() -> None:
    step, twin, reference = pair(adamw)
    step(*BATCHES[0])
    eager_step(twin, square, reference, *BATCHES[0])
    for model in (step.model, twin):
        model[0].weight.data = noise(16, 8, seed=9)
    step(*BATCHES[1])
    eager_step(twin, square, reference, *BATCHES[1])
    assert_trained_alike(step, twin, reference)

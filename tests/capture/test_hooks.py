"""Hooks of the user in a training step: those of parameters against eager, and those that no plan can keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn.modules import module as all_modules
from torch.optim import Optimizer

import roamc
from roamc import compat_hooks
from tests.end_to_end.helpers import assert_same, eager_step, noise, sgd, square, state_of, tensors_of

X = noise(4, 8)
MASK = (torch.arange(64).view(8, 8) % 3 == 0).float()
Install = Callable[[Any, Optimizer], object]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def assert_hooked_alike(install: Install, steps: int = 3, **settings: Any) -> roamc.TrainStep:
    """Two models get the same hooks; one trains by train_step, one in eager; all is equal after every step."""
    model, twin = net(), net()
    optimizer, reference = sgd(model), sgd(twin)
    install(model, optimizer), install(twin, reference)
    step = roamc.train_step(model, square, optimizer, clip_grad_norm=settings.get("clip"), strict=True)
    for number in range(steps):
        assert_same(step(X), eager_step(twin, square, reference, X, **settings), f"loss {number}")
        assert_same(tensors_of(model), tensors_of(twin), f"after step {number}")
        assert_same(state_of(optimizer), state_of(reference), f"after step {number}")
    return step


def two_in_order(model: Any, _: Optimizer) -> None:
    model[0].weight.register_hook(lambda grad: grad + 1)
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.5, 1.01))


def in_place(model: Any, _: Optimizer) -> None:
    def halve(grad: Tensor) -> None:
        grad.mul_(0.5)

    model[0].weight.register_hook(halve)


def by_the_parameter(model: Any, _: Optimizer) -> None:
    weight = model[2].weight
    weight.register_hook(lambda grad: grad + 0.1 * weight)


def late_hook(layer: Any, _: object) -> None:
    """As tensor parallelism of transformers sums the gradients of norms in forward, on what it is called with first."""
    layer.bias.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))


def by_the_parameter_of(layer: Any) -> None:
    layer.weight.register_hook(lambda grad: grad * 2)


def of_an_unused_parameter(model: Any, _: Optimizer) -> None:
    model[0].register_parameter("unused", nn.Parameter(torch.ones(3)))
    model[0].unused.register_hook(lambda grad: grad / 0)


KEPT: dict[str, Install] = {
    "mask": lambda m, o: m[0].weight.register_hook(lambda grad: grad * MASK),
    "zero": lambda m, o: m[0].weight.register_hook(lambda grad: grad * 0),
    "each by its own norm": lambda m, o: [p.register_hook(lambda g: g / (g.norm() + 1)) for p in m.parameters()],
    "two in order": two_in_order,
    "in place": in_place,
    "reads its parameter": by_the_parameter,
    "unused parameter": of_an_unused_parameter,
    "forward pre-hook with keywords": lambda m, o: m[2].register_forward_pre_hook(
        lambda _, args, named: ((args[0] * 2,), named), with_kwargs=True
    ),
    "full backward hook": lambda m, o: m[2].register_full_backward_hook(lambda _, got, __: (got[0] * 3,)),
    "full backward pre-hook": lambda m, o: m[2].register_full_backward_pre_hook(lambda _, got: (got[0] * 3,)),
}


@pytest.mark.parametrize("name", KEPT)
def test_hook_runs_as_in_eager(name: str) -> None:
    assert_hooked_alike(KEPT[name])


def test_hooks_run_before_clipping() -> None:
    assert_hooked_alike(lambda m, _: m[0].weight.register_hook(lambda grad: grad * 50), clip=0.1)


def test_mask_is_read_at_every_step() -> None:
    model, mask = net(), MASK.clone()
    model[0].weight.register_hook(lambda grad: grad * mask)
    step = roamc.train_step(model, square, torch.optim.SGD(model.parameters(), lr=0.1))
    step(X)
    mask.zero_()
    before = model[0].weight.detach().clone()
    step(X)
    assert_same(model[0].weight.detach(), before)


def test_hooks_inside_the_model_run() -> None:
    def loss_fn(model: Any, x: Tensor) -> Tensor:
        hidden = model[0](x)
        hidden.register_hook(lambda grad: grad * 3)
        hidden.grad_fn.register_prehook(lambda grads: tuple(grad + 1 for grad in grads))
        return model[2](model[1](hidden)).square().mean()

    model, twin = net(), net()
    step = roamc.train_step(model, loss_fn, sgd(model), strict=True)
    reference = sgd(twin)
    for _ in range(2):
        assert_same(step(X), eager_step(twin, loss_fn, reference, X))
    assert_same(tensors_of(model), tensors_of(twin))


def test_hooks_of_all_modules_run() -> None:
    handle = all_modules.register_module_forward_hook(
        lambda module, _, result: result * 2 if isinstance(module, nn.Linear) else None
    )
    try:
        assert_hooked_alike(lambda m, o: None)
    finally:
        handle.remove()


LATER: dict[str, Callable[[Any], Any]] = {
    "of a parameter": lambda m: m[0].weight.register_hook(lambda grad: grad * 0),
    "of a module": lambda m: m[0].register_forward_hook(lambda _, __, result: result * 0),
    "of the backward of a module": lambda m: m[2].register_full_backward_hook(lambda _, got, __: (got[0] * 0,)),
    "of all modules": lambda m: all_modules.register_module_forward_pre_hook(lambda _, args: (args[0] * 0,)),
}


@pytest.mark.parametrize("name", LATER)
def test_hook_added_and_removed_later_is_followed(name: str) -> None:
    model, twin = net(), net()
    optimizer, reference = sgd(model), sgd(twin)
    step = roamc.train_step(model, square, optimizer, strict=True)
    for hooked in (False, True, False):
        handles = [LATER[name](one) for one in (model, twin)] if hooked else []
        assert_same(step(X), eager_step(twin, square, reference, X), f"loss, hooked: {hooked}")
        assert_same(tensors_of(model), tensors_of(twin), f"hooked: {hooked}")
        for handle in handles:
            handle.remove()
    assert len(step.plans) == 2


def raises_on_nan(grad: Tensor) -> Tensor:
    if grad.isnan().any():
        raise ValueError("nan")
    return grad


def node_hook(model: Any, _: Optimizer) -> None:
    model.kept = get_gradient_edge(model[0].weight).node  # the node lives as long as somebody holds it
    model.kept.register_prehook(lambda grads: tuple(grad * 0 for grad in grads))


REFUSED: dict[str, tuple[Install, tuple[str, ...]]] = {
    "depends on data": (
        lambda m, o: m[0].weight.register_hook(raises_on_nan),
        ("hook raises_on_nan of parameter '0.weight' cannot be traced", "torch.where", "roamc.optimize"),
    ),
    "goes through numpy": (
        lambda m, o: m[2].bias.register_hook(lambda grad: torch.from_numpy(grad.numpy() * 2)),
        ("parameter '2.bias' cannot be traced", ".numpy()", "roamc.optimize"),
    ),
    "only looks": (
        lambda m, o: m[2].weight.register_hook(lambda grad: None),
        ("parameter '2.weight' gives no new gradient", "remove it", "roamc.optimize"),
    ),
    "several gradients": (
        lambda m, o: register_multi_grad_hook(tuple(m.parameters()), lambda grads: None),
        ("register_multi_grad_hook", "parameter '2.bias' gives no new gradient"),
    ),
    "post-accumulate-grad": (
        lambda m, o: m[0].bias.register_post_accumulate_grad_hook(square),
        ("parameter '0.bias' has a post-accumulate-grad hook (square)", "no .grad", "roamc.optimize"),
    ),
    "post-accumulate-grad, by the step": (
        lambda m, o: m[0].register_forward_pre_hook(late_hook),
        ("the step registers a gradient hook on parameter '0.bias'", "before the step", "roamc.optimize"),
    ),
    "on a gradient, by the step": (
        lambda m, o: m[0].register_forward_pre_hook(lambda layer, _: by_the_parameter_of(layer)),
        ("the step registers a gradient hook on parameter '0.weight'", "register_hook"),
    ),
    "on the gradient's node": (node_hook, ("parameter '0.weight' has a hook on the autograd node", "register_hook")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hook_that_no_plan_can_keep_is_refused_by_name(name: str) -> None:
    install, parts = REFUSED[name]
    model = net()
    optimizer = sgd(model)
    install(model, optimizer)
    before = tensors_of(model)
    with pytest.raises(roamc.CaptureError) as caught:
        roamc.train_step(model, square, optimizer)(X)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
    assert "\n" not in str(caught.value)
    assert_same(tensors_of(model), before)


@pytest.mark.parametrize("name", ["on the gradient's node", "post-accumulate-grad"])
def test_hook_that_no_plan_can_keep_is_refused_after_steps_too(name: str) -> None:
    install, parts = REFUSED[name]
    model = net()
    optimizer = sgd(model)
    step = roamc.train_step(model, square, optimizer)
    step(X), step(X)
    install(model, optimizer)
    before = tensors_of(model)
    for _ in range(2):
        with pytest.raises(roamc.CaptureError, match=parts[0].partition("(")[0]):
            step(X)
    assert_same(tensors_of(model), before)


def test_step_goes_on_with_its_plan_once_a_hook_on_the_gradients_node_is_removed() -> None:
    model = net()
    step = roamc.train_step(model, square, sgd(model))
    step(X)
    node = get_gradient_edge(model[0].weight).node
    handle = node.register_hook(lambda *_: None)
    with pytest.raises(roamc.CaptureError, match="autograd node"):
        step(X)
    handle.remove()
    step(X)
    assert len(step.plans) == 1


def test_gradients_nodes_are_asked_for_hooks_only_after_one_was_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []
    ask = compat_hooks.has_gradient_node_hooks
    models = net(), net()
    steps = [roamc.train_step(model, square, sgd(model)) for model in models]
    for step in (*steps, *steps):
        step(X)
    monkeypatch.setattr(compat_hooks, "has_gradient_node_hooks", lambda p: (asked.append(p), ask(p))[1])
    for step in (*steps, *steps):
        step(X)
    assert not asked
    torch.ones(2, requires_grad=True).register_hook(lambda grad: None)
    for step in (*steps, *steps):
        step(X)
    assert len(asked) == sum(len(list(model.parameters())) for model in models)


def test_errors_of_a_hook_arrive_as_they_are() -> None:
    def broken(grad: Tensor) -> Tensor:
        raise KeyError("mine")

    model = net()
    model[0].weight.register_hook(broken)
    with pytest.raises(KeyError, match="mine"):
        roamc.train_step(model, square, sgd(model))(X)


def test_saved_tensors_hooks_around_a_step_are_refused() -> None:
    model = net()
    step = roamc.train_step(model, square, sgd(model))
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu(), pytest.raises(roamc.CaptureError, match="save_on_cpu, are around"):
            step(X)
        step(X)

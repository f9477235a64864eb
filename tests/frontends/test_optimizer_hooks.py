"""Hooks of an optimizer's step around a planned step, against eager; and those that see another order of things."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import roamc
from tests.capture.test_hooks import X, assert_hooked_alike, net
from tests.end_to_end.helpers import assert_same, sgd, square, tensors_of


def halve_lr(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] /= 2


def decay(optimizer: Optimizer, *_: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] += 0.1


def clamp(optimizer: Optimizer, *_: Any) -> None:
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].clamp_(-0.2, 0.2)


def test_pre_hook_sets_the_learning_rate_of_its_step() -> None:
    assert_hooked_alike(lambda _, o: o.register_step_pre_hook(halve_lr))


def test_pre_hook_may_change_the_operators_of_the_update() -> None:
    step = assert_hooked_alike(lambda _, o: o.register_step_pre_hook(decay))
    assert len(step.plans) == 2


def test_post_hook_sees_and_writes_what_the_step_has_left() -> None:
    assert_hooked_alike(lambda _, o: o.register_step_post_hook(clamp))


def test_hooks_run_in_torchs_order_with_its_arguments() -> None:
    calls: list[tuple[str, bool]] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda optimizer, args, kwargs: calls.append((name, args == (optimizer,) and kwargs == {}))

    model, twin = net(), net()
    optimizer, reference = sgd(model), sgd(twin)
    handles = [
        register_optimizer_step_pre_hook(noted("all before")),
        register_optimizer_step_post_hook(noted("all after")),
    ]
    try:
        for one in (optimizer, reference):
            one.register_step_pre_hook(noted("before"))
            one.register_step_post_hook(noted("after"))
        roamc.train_step(model, square, optimizer)(X)
        step_calls, calls = calls, []
        reference.step()
    finally:
        for handle in handles:
            handle.remove()
    assert step_calls == calls == [("all before", True), ("before", True), ("after", True), ("all after", True)]


def test_post_hook_may_zero_gradients() -> None:
    assert_hooked_alike(lambda _, o: o.register_step_post_hook(lambda optimizer, *__: optimizer.zero_grad()))


def test_hooks_do_not_run_for_a_plan() -> None:
    model = net()
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(halve_lr)
    roamc.train_step(model, square, optimizer).plan(X)
    assert optimizer.param_groups[0]["lr"] == 0.05


def clip(optimizer: Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)


def scale_first(optimizer: Optimizer, *_: Any) -> None:
    optimizer.param_groups[0]["params"][0].grad *= 2


def set_first(optimizer: Optimizer, *_: Any) -> None:
    optimizer.param_groups[0]["params"][0].grad = None


def write_data(optimizer: Optimizer, *_: Any) -> None:
    optimizer.param_groups[0]["params"][1].data.mul_(0.5)


def give_data(optimizer: Optimizer, *_: Any) -> None:
    optimizer.param_groups[0]["params"][1].data = torch.ones(8)


def add_closure(optimizer: Optimizer, *_: Any) -> tuple[tuple[object, ...], dict[str, Any]]:
    return (optimizer, clip), {}


BEFORE: dict[Callable[..., Any], tuple[str, ...]] = {
    clip: ("uses .grad of", "clip_grad_norm=", "register_hook"),
    scale_first: ("uses .grad of '0.weight'", "roamc.optimize"),
    set_first: ("(set_first) sets .grad of '0.weight'", "register_hook"),
    clamp: ("(clamp) writes to '0.weight'", "post-hook", "roamc.optimize"),
    write_data: ("(write_data) writes to '0.bias'", "post-hook"),
    give_data: ("(give_data) writes to '0.bias'", "post-hook"),
    add_closure: ("add_closure hands the optimizer's step other arguments",),
}


@pytest.mark.parametrize("hook", BEFORE, ids=lambda hook: hook.__name__)
def test_pre_hook_that_needs_eagers_order_is_refused_before_the_step(hook: Callable[..., Any]) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(hook)
    weight = model[2].weight.detach().clone()
    refused(lambda: roamc.train_step(model, square, optimizer)(X), BEFORE[hook])
    assert_same(model[2].weight.detach(), weight)
    assert all(parameter.grad is None for parameter in model.parameters())


def refused(run: Callable[[], object], parts: tuple[str, ...]) -> None:
    with pytest.raises(roamc.CaptureError) as caught:
        run()
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
    assert "\n" not in str(caught.value)


def test_post_hook_that_reads_gradients_is_refused() -> None:
    model = net()
    optimizer = sgd(model)
    optimizer.register_step_post_hook(clip)
    refused(lambda: roamc.train_step(model, square, optimizer)(X), BEFORE[clip])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_hook_that_returns_something_else_is_an_error_as_in_torch() -> None:
    model = net()
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: 3)
    with pytest.raises(RuntimeError, match="must return None or"):
        roamc.train_step(model, square, optimizer)(X)


def test_replaced_step_is_refused_and_a_schedulers_is_not() -> None:
    model = net()
    optimizer = sgd(model)
    step = roamc.train_step(model, square, optimizer)
    StepLR(optimizer, 1)
    step(X)
    before = tensors_of(model)
    plain = optimizer.step

    def doubled(*args: Any) -> Any:
        plain(*args)
        return plain(*args)

    optimizer.step = doubled  # type: ignore[method-assign]
    refused(lambda: step(X), ("step of this SGD was replaced by", "doubled", "register_step_pre_hook"))
    assert_same(tensors_of(model), before)


def test_hooks_of_the_state_dict_run() -> None:
    model = net()
    optimizer = sgd(model)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
    roamc.train_step(model, square, optimizer)(X)
    assert optimizer.state_dict()["mine"] == 1


def silent(run: Callable[[], Any]) -> None:
    """``run`` does not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()


def test_optimizer_step_beside_a_train_step_warns_once_at_the_users_line() -> None:
    model = net()
    optimizer = sgd(model)
    step = roamc.train_step(model, square, optimizer)
    silent(lambda: step(X))
    before = tensors_of(model)
    with pytest.warns(UserWarning, match=r"SGD\.step\(\) finds no gradients: .* remove backward") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    assert_same(tensors_of(model), before)
    silent(optimizer.step)
    silent(lambda: step(X))
    assert len(step.plans) == 1


def test_optimizer_step_with_gradients_or_without_a_train_step_does_not_warn() -> None:
    model = net()
    optimizer = sgd(model)
    step = roamc.train_step(model, square, optimizer)
    square(model, X).backward()
    silent(optimizer.step)
    optimizer.zero_grad()
    silent(lambda: optimizer.step(lambda: square(model, X).backward()))
    optimizer.zero_grad()
    silent(pickle.loads(pickle.dumps(optimizer)).step)
    silent(copy.deepcopy(optimizer).step)
    other = roamc.train_step(model, square, optimizer)
    del step, other
    gc.collect()
    silent(optimizer.step)


def test_copy_of_a_train_step_watches_its_own_optimizer() -> None:
    model = net()
    step = copy.deepcopy(roamc.train_step(model, square, sgd(model)))
    with pytest.warns(UserWarning, match="finds no gradients"):
        step.optimizer.step()

"""What train_step says to ``fully_shard``; tests/end_to_end/test_fully_sharded.py has several ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
)

import roamc
from roamc.capture.fully_sharded import check_sequence, groups_of
from roamc.errors import CaptureError
from tests.end_to_end.helpers import assert_same, eager_step, noise, sgd
from tests.kernel_cases import alone

X = noise(3, 4)


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def sharded(**settings: Any) -> Any:
    """A model of which one rank has all."""
    alone()
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), mesh=init_device_mesh("cpu", (1,)), **settings)


def changed(change: Callable[[Any], object]) -> Any:
    model = sharded()
    change(model)
    return model


def test_groups_come_in_one_order_on_all_ranks_whatever_their_names() -> None:
    def names(part: str, copy: str | None) -> tuple[str, ...]:
        held = SimpleNamespace(group=part, copies_group=copy)
        return groups_of({"first": held, "second": held})

    assert names("11", "9") == ("11", "9")
    assert names("11", "10") == ("11", "10")
    assert names("9", None) == ("9",)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: changed(lambda m: m.set_requires_gradient_sync(False)), r"set_requires_gradient_sync\(False\)"),
        (lambda: changed(lambda m: m.set_requires_all_reduce(False)), r"set_requires_all_reduce\(False\)"),
        (lambda: changed(lambda m: m.set_all_reduce_hook(lambda x: None)), "has an all-reduce hook"),
        (lambda: changed(lambda m: m.set_custom_all_gather(object())), "by a function of yours"),
        (lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), "CPUOffloadPolicy"),
    ],
)
def test_what_only_hooks_can_do_is_refused(make: Callable[[], Any], said: str) -> None:
    model = make()
    with pytest.raises(CaptureError, match=f"a fully_shard module .*{said}.*, which train_step does not support"):
        roamc.train_step(model, loss_of, sgd(model))(X)


def test_division_by_a_factor_is_refused_unless_by_sums() -> None:
    model, twin = sharded(), sharded()
    model.set_gradient_divide_factor(3.0)
    with pytest.raises(CaptureError, match=r"divided by a factor of yours .*set_force_sum_reduction_for_comms\(True\)"):
        roamc.train_step(model, loss_of, sgd(model))(X)
    model.set_force_sum_reduction_for_comms(True)
    roamc.train_step(model, loss_of, torch.optim.SGD(model.parameters(), 0.3))(X)
    roamc.train_step(twin, loss_of, torch.optim.SGD(twin.parameters(), 0.1))(X)
    torch.testing.assert_close(model[0].weight.to_local(), twin[0].weight.to_local())


def test_hooks_of_parameters_that_eager_never_calls_are_refused() -> None:
    model = sharded()
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(CaptureError, match=r"'0\.weight' has a gradient hook, which fully_shard never calls"):
        roamc.train_step(model, loss_of, sgd(model))(X)


def test_write_to_a_gathered_parameter_is_refused() -> None:
    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    alone()
    model = fully_shard(Clamped(4, 4), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(CaptureError, match="writes to a parameter, of which fully_shard gathers a copy"):
        roamc.train_step(model, loss_of, sgd(model))(X)


def test_another_way_through_the_model_is_refused_at_a_later_batch() -> None:
    check_sequence((), ("gather a",))
    check_sequence(("gather a", "reduce a"), ("gather a", "reduce a"))
    with pytest.raises(CaptureError, match="'gather b' in the place of 'gather a'"):
        check_sequence(("gather a", "reduce a"), ("gather b", "reduce b"))


def test_the_wrapper_that_came_before_is_refused_at_once() -> None:
    alone()
    device, strategy = torch.device("cpu"), ShardingStrategy.NO_SHARD
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=device, sharding_strategy=strategy)
    with pytest.raises(CaptureError, match=r"does not take FullyShardedDataParallel: use torch\.distributed\.fsdp"):
        roamc.train_step(model, loss_of, sgd(model))


class Other(nn.Module):
    """Called by a method that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def embed(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_casts_of_hooks_stay_and_hooks_of_yours_run() -> None:
    alone()
    dtypes, seen = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32), []

    def build() -> Any:
        torch.manual_seed(0)
        model = Other()
        model.layer.register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=dtypes)
        register_fsdp_forward_method(model, "embed")
        return model

    def loss(model: Any, x: Tensor) -> Tensor:
        return model.embed(x).square().mean()

    model, twin = build(), build()
    optimizer, reference = sgd(model), sgd(twin)
    step = roamc.train_step(model, loss, optimizer, strict=True)
    for _ in range(2):
        assert_same(step(X), eager_step(twin, loss, reference, X))
        twin.reshard()
    assert_same([p.to_local() for p in model.parameters()], [p.to_local() for p in twin.parameters()])
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert loss(model, X).dtype is torch.float32

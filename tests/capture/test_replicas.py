"""What train_step says to models that several ranks hold; tests/end_to_end/test_ddp.py has the numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import roamc
from roamc.errors import CaptureError
from roamc.graph import operators, source_line
from tests.end_to_end.helpers import sgd
from tests.graphs import captured_step
from tests.kernel_cases import alone

X = torch.ones(2, 4)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


def wrapped(**settings: Any) -> DistributedDataParallel:
    """A module that one rank holds."""
    alone()
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), **settings)


def test_buffers_come_from_the_first_rank_and_gradients_are_averaged_in_backward_order() -> None:
    captured = captured_step(wrapped(), (X,), loss_of, torch.optim.SGD)
    sent = [node for node in operators(captured.graph.graph) if "roamc_collective" in str(node.target)]
    assert [node.target.overloadpacket.__name__ for node in sent] == ["broadcast"] * 2 + ["all_reduce"] * 4  # type: ignore[union-attr]
    assert set(captured.reduced[:2]) == {"module.1.weight", "module.1.bias"}
    assert set(captured.graph.gradients) == {node.name for node in sent[2:]}
    lines = {source_line(node) for node in operators(captured.graph.graph)}
    assert not [line for line in lines if line.startswith("replicas.py")], "lines of the user's only"


def changed(hook: Callable[[DistributedDataParallel], object]) -> DistributedDataParallel:
    model = wrapped()
    hook(model)
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: changed(lambda m: m.register_comm_hook(None, fp16_compress_hook)), "has a communication hook"),
        (
            lambda: changed(lambda m: m._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)),
            "has a communication hook",
        ),
        (
            lambda: changed(lambda m: m._register_buffer_comm_hook(None, lambda state, buffers: None)),
            "has a hook for its buffers",
        ),
    ],
)
def test_what_only_the_reducer_can_do_is_refused(model: Any, said: str) -> None:
    step = roamc.train_step(model(), loss_of, sgd(model()))
    with pytest.raises(CaptureError, match=f"DistributedDataParallel module {said}, which train_step does not support"):
        step(X)


def test_step_under_no_sync_or_join_is_refused() -> None:
    model = wrapped()
    step = roamc.train_step(model, loss_of, sgd(model))
    with pytest.raises(CaptureError, match=r"is inside no_sync\(\)"), model.no_sync():
        step(X)
    assert step(X).isfinite()
    with pytest.raises(CaptureError, match=r"is used with join\(\)"), model.join():
        step(X)


def test_step_that_goes_past_the_module_is_refused() -> None:
    model = wrapped()
    step = roamc.train_step(model, lambda model, x: model.module(x).sum(), sgd(model))
    with pytest.raises(CaptureError, match="loss_fn does not call the DistributedDataParallel module"):
        step(X)


def test_parameters_that_only_a_later_batch_uses_are_refused() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) if len(x) == 2 else self.b(self.a(x))

    alone()
    model = DistributedDataParallel(Fork(), find_unused_parameters=True)
    step = roamc.train_step(model, loss_of, sgd(model))
    step(X)
    with pytest.raises(CaptureError, match=r"gradients to other parameters than the first one did \(module\.b\.bias\)"):
        step(torch.ones(3, 4))


def test_model_inside_which_a_part_is_wrapped() -> None:
    alone()
    model = nn.Sequential(DistributedDataParallel(nn.Linear(4, 4)), nn.Linear(4, 2))
    twin = copy.deepcopy(nn.Sequential(model[0].module, model[1]))
    captured = captured_step(model, (X,), loss_of, torch.optim.SGD)
    assert captured.reduced == ("0.module.bias", "0.module.weight")
    roamc.train_step(model, loss_of, torch.optim.SGD(model.parameters(), 0.1))(X)
    roamc.train_step(twin, loss_of, torch.optim.SGD(twin.parameters(), 0.1))(X)
    assert torch.equal(model[0].module.weight, twin[0].weight)

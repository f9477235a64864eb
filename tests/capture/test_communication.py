"""Calls of torch.distributed in a step of one rank; tests/end_to_end/test_parallel_steps.py has several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import roamc
from roamc.errors import CaptureError
from roamc.operators.ops import rule
from tests.end_to_end.helpers import assert_same, eager_step, sgd, tensors_of
from tests.graphs import captured_step
from tests.kernel_cases import alone

X = torch.arange(8.0).view(2, 4)
Calls = Callable[[Tensor], Tensor]


def reduced(x: Tensor) -> Tensor:
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def reduced_meanwhile(x: Tensor) -> Tensor:
    work = dist.all_reduce(x, group=dist.group.WORLD, async_op=True)
    y = torch.ones(4).exp()
    assert work is not None
    work.wait()
    (written,) = work.get_future().wait()
    return written * y


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x)]
    dist.all_gather(parts, x)
    return parts[0]


def gathered_into(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_gather_into_tensor(out, x)
    return out


def scattered(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.reduce_scatter_tensor(out, x.t().contiguous().t())
    return out


class Sent(torch.autograd.Function):
    """Sends both ways by the function that it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Calls) -> Tensor:
        ctx.send = send
        return send(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.send(grad.clone()), None


@pytest.mark.parametrize("send", [reduced, reduced_meanwhile, gathered, gathered_into, scattered])
def test_calls_are_operators_of_the_graph_and_the_step_is_that_of_eager(send: Calls) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return Sent.apply(model(x), send).square().sum()

    alone()
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 4), nn.Linear(4, 4)
    twin.load_state_dict(model.state_dict())
    graph = captured_step(model, (X,), loss_fn, torch.optim.SGD).graph
    assert sum(rule(node.target).collective for node in graph.graph.nodes if node.op == "call_function") == 2
    step, reference = roamc.train_step(model, loss_fn, sgd(model), strict=True), sgd(twin)
    for _ in range(2):
        wanted = eager_step(twin, loss_fn, reference, X)
        assert_same(step(X), wanted)
    assert_same(tensors_of(model), tensors_of(twin))


def check_refused(loss_fn: Callable[..., Tensor], message: str, **options: Any) -> None:
    alone()
    model = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match=message):
        roamc.train_step(model, loss_fn, sgd(model), **options)(X)


def test_bare_call_on_what_has_a_gradient_is_refused() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return reduced(model(x)).sum()

    check_refused(loss_fn, r"all_reduce has no gradient in torch; call it in an autograd\.Function")


def test_clipping_is_refused_where_nothing_says_what_is_a_part() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return Sent.apply(model(x), reduced).sum()

    check_refused(loss_fn, "clip_grad_norm needs to know which parameters are parts of larger ones", clip_grad_norm=1.0)


@pytest.mark.parametrize("name", ["barrier", "broadcast", "all_gather_object"])
def test_calls_that_would_run_in_the_first_step_alone_are_refused(name: str) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        getattr(dist, name)(x)
        return model(x).sum()

    check_refused(loss_fn, rf"calls torch\.distributed\.{name}, .*takes all_reduce, all_gather")


def test_reductions_that_no_graph_has_are_refused() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        mask = (x > 1).int()
        dist.all_reduce(mask, dist.ReduceOp.BAND)
        return (model(x) * mask).sum()

    check_refused(loss_fn, "reduces by SUM, AVG, PRODUCT, MIN, MAX, not by")

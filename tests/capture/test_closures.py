"""Parameters and buffers that a step reads past its model: as in eager where the trace can see them, else refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import assert_same, eager_step, noise, onednn, sgd, square, tensors_of

X = noise(4, 8)
Loss = Callable[[Any, Tensor], Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


def penalty(model: Any) -> Loss:
    parameters = list(model.parameters())
    return lambda m, x: square(m, x) + 0.1 * sum(p.square().sum() for p in parameters)


def detached(model: Any) -> Loss:
    weight = model[0].weight
    return lambda m, x: square(m, x) * weight.detach().square().sum()


def in_a_list(model: Any) -> Loss:
    weights = [model[0].weight, model[2].weight]
    return lambda m, x: square(m, x) + torch.cat(weights, dim=1).abs().mean()


def buffer(model: Any) -> Loss:
    average = model[1].running_mean
    return lambda m, x: square(m, x) + (m[0](x) - average).square().mean()


@pytest.mark.parametrize("make", [penalty, detached, in_a_list, buffer], ids=lambda f: f.__name__)
def test_loss_reads_parameters_by_a_name_of_its_own(make: Callable[[Any], Loss]) -> None:
    model, twin = net(), net()
    loss_fn, reference_loss, optimizer, reference = make(model), make(twin), sgd(model), sgd(twin)
    step = roamc.train_step(model, loss_fn, optimizer, strict=True)
    for number in range(3):
        assert_same(step(X), eager_step(twin, reference_loss, reference, X), f"loss {number}")
        assert_same(tensors_of(model), tensors_of(twin), f"after step {number}")


def view_made_before(model: Any) -> Loss:
    view = model[0].weight.t()
    return lambda m, x: square(m, x) + view.square().sum()


def data_made_before(model: Any) -> Loss:
    data = model[0].weight.data
    return lambda m, x: square(m, x) * data.square().sum()


def computed_before(model: Any) -> Loss:
    norm = model[0].weight.square().sum()
    return lambda m, x: square(m, x) + norm


REFUSED = {
    view_made_before: ("the memory of '0.weight'", "inside the step", "clone"),
    data_made_before: ("the memory of '0.weight'", "inside the step", "clone"),
    computed_before: ("computed from parameter '0.weight' before", "inside loss_fn", "detach"),
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda f: f.__name__)
def test_tensor_made_of_a_parameter_before_the_step_is_refused(make: Callable[[Any], Loss]) -> None:
    model = net()
    before = tensors_of(model)
    with pytest.raises(roamc.CaptureError) as caught:
        roamc.train_step(model, make(model), sgd(model))(X)
    assert [part for part in REFUSED[make] if part not in str(caught.value)] == [], str(caught.value)
    assert_same(tensors_of(model), before)


class Views(nn.Module):
    """Reads a view of its buffer that was made when it was."""

    def __init__(self, moves: str = "") -> None:
        super().__init__()
        self.linear, self.moves = nn.Linear(8, 8), moves
        self.register_buffer("table", noise(4, 8, seed=5))
        self.rows = self.table[:2]

    def forward(self, x: Tensor) -> Tensor:
        if self.moves == "buffer":
            self.table.mul_(0.5)
        elif self.moves == "view":
            self.rows.mul_(0.5)
        return self.linear(x) * self.rows.sum(0)


def test_view_of_a_buffer_that_nobody_writes_is_read() -> None:
    model, twin = Views(), Views()
    twin.load_state_dict(model.state_dict())
    assert_same(roamc.train_step(model, square, sgd(model))(X), eager_step(twin, square, sgd(twin), X))


@pytest.mark.parametrize("moves", ["buffer", "view"])
def test_view_of_a_buffer_that_is_written_is_refused(moves: str) -> None:
    model = Views(moves)
    before = tensors_of(model)
    with pytest.raises(roamc.CaptureError, match="the memory of 'table' through a tensor that was made before"):
        roamc.train_step(model, square, sgd(model))(X)
    assert_same(tensors_of(model), before)


def test_parameter_in_a_named_tuple_is_read_as_the_parameter() -> None:
    class Pair(NamedTuple):
        first: Tensor
        second: Tensor

    model, twin = net(), net()
    twin.load_state_dict(model.state_dict())

    def loss_with(pair: Pair) -> Callable[..., Tensor]:
        return lambda m, x: m(x).square().mean() + torch.cat(pair).square().sum()

    losses = [loss_with(Pair(m[0].weight, m[0].weight)) for m in (model, twin)]
    step, optimizer = roamc.train_step(model, losses[0], sgd(model)), sgd(twin)
    for _ in range(2):
        assert_same(step(X), eager_step(twin, losses[1], optimizer, X))
    assert_same(tensors_of(model), tensors_of(twin))


def test_a_size_reaches_a_function_as_a_size() -> None:
    model, twin = net(), net()

    def loss_fn(m: Any, x: Tensor) -> Tensor:
        return square(m, x) * x.new(x.shape).zero_().numel()  # type: ignore[call-arg]

    wanted = eager_step(twin, loss_fn, sgd(twin), X)
    assert_same(roamc.train_step(model, loss_fn, sgd(model), strict=True)(X), wanted)


def test_frozen_teacher_in_a_closure_is_a_constant() -> None:
    model, teacher = net(), net().eval()
    step = roamc.train_step(model, lambda m, x: (m(x) - teacher(x).detach()).square().mean(), sgd(model))
    step(X)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_gradient_of_a_tensor_outside_the_model_is_warned_of_once() -> None:
    model, criterion = net(), nn.Linear(8, 1)
    step = roamc.train_step(model, lambda m, x: criterion(m(x)).square().mean(), sgd(model))
    with pytest.warns(UserWarning, match=r"of shape \(.*no parameter of the model: .* no gradient for it") as said:
        step(X)
    assert len(said) == 1
    step(X[:3])
    assert criterion.weight.grad is None


def test_a_tensor_of_nobodys_that_is_read_twice_by_views_has_one_storage() -> None:
    rows = torch.arange(16).view(4, 4) % 8

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            x = model(x) + model[0].weight[rows.view(-1)].view(4, 4, 8).sum(0)
        return square(nn.Identity(), x)

    model, twin = net(), net()
    step, reference = roamc.train_step(model, loss_fn, sgd(model), strict=True), sgd(twin)
    for number in range(2):
        assert_same(step(X), eager_step(twin, loss_fn, reference, X), f"loss {number}")
    graph = step.latest.executable.planned.graph
    held = [node for node in graph.graph.nodes if node.op == "get_attr"]
    assert [len(node.users) for node in held] == [2]


def in_a_thread(compute: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(compute()))
    thread.start()
    thread.join()
    return results[0]


def modes_off(compute: Callable[[], Any]) -> Any:
    with torch.utils._python_dispatch._disable_current_modes():
        return compute()


THREADED: dict[str, Loss] = {
    "all": lambda m, x: in_a_thread(lambda: square(m, x)),
    "one layer": lambda m, x: square(m[2], in_a_thread(lambda: m[0](x))),
    "a factor": lambda m, x: square(m, x) * in_a_thread(lambda: m[0](x).detach().mean()),
    "a write to a buffer": lambda m, x: 0 * len(in_a_thread(lambda: m[1].running_mean.mul_(0.5))) + square(m, x),
    "a factor without modes": lambda m, x: square(m, x) * modes_off(lambda: x * 2).mean(),
}


@pytest.mark.parametrize("name", THREADED)
def test_what_no_trace_follows_is_refused(name: str) -> None:
    model = net()
    step = roamc.train_step(model, THREADED[name], sgd(model), strict=True)
    with pytest.raises(roamc.CaptureError, match="no trace follows"):
        step(X)


def without_onednn(m: Any, x: Tensor) -> Tensor:
    with onednn(enabled=False):
        return square(m, x)


def deterministic_behind(m: Any, x: Tensor) -> Tensor:
    loss = square(m, x)
    torch.use_deterministic_algorithms(True)
    return loss


@pytest.mark.parametrize(
    ("loss", "says"), [(without_onednn, r"mkldnn\.enabled from True to False"), (deterministic_behind, "determin")]
)
def test_a_loss_that_changes_which_kernels_run_is_refused(loss: Loss, says: str) -> None:
    model = net()
    step = roamc.train_step(model, loss, sgd(model), strict=True)
    try:
        with pytest.raises(roamc.CaptureError, match=says):
            step(X)
    finally:
        torch.use_deterministic_algorithms(False)
    with onednn(enabled=False):
        roamc.train_step(model, square, sgd(model), strict=True)(X)

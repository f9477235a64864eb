"""What a step was traced with, and a script changes before the next: a train_step follows, as eager does."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import adamw, assert_same, eager_step, noise, square, tensors_of
from tests.small_models import small_model

X = noise(4, 8)
Change = Callable[[nn.Module, torch.optim.Optimizer], object]
Make = Callable[[nn.Module], torch.optim.Optimizer]


@dataclasses.dataclass
class Settings:
    """Of a model."""

    scale: float = 1.0
    inner: SimpleNamespace = dataclasses.field(default_factory=lambda: SimpleNamespace(shift=0.0))


class Watched(nn.Module):
    """Reads all kinds of attributes while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.middle.weight = self.first.weight
        self.act = torch.relu
        self.factor = torch.tensor(2.0)
        self._private = 1.0
        self.weights = {"loss": [1.0, 2.0]}
        self.config = Settings()

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(self.middle(self.act(self.first(x)))) * self.factor * self._private
        return h * self.weights["loss"][1] * self.config.scale + self.config.inner.shift


def sgd_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    one, other = in_groups(model)
    return torch.optim.SGD([{"params": one, "lr": 0.1}, {"params": other, "lr": 0.01}])


def in_groups(model: nn.Module) -> list[list[nn.Parameter]]:
    return [list(model.first.parameters()), list(model.last.parameters())]


def another_layer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model.last = nn.Linear(8, 8, bias=False)


def another_trained_layer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    another_layer(model, optimizer)
    for group, parameters in zip(optimizer.param_groups, in_groups(model), strict=True):
        group["params"] = parameters


def exchange(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    one, other = (group["params"] for group in optimizer.param_groups)
    one[0], other[0] = other[0], one[0]


def tie_otherwise(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.middle.weight = model.last.weight


CHANGES: dict[str, Change] = {
    "a layer, trained": another_trained_layer,
    "groups of two parameters": exchange,
    "which weights are tied": tie_otherwise,
    "forward": lambda m, o: setattr(m, "forward", lambda x: m.last(m.first(x))),
    "a function": lambda m, o: setattr(m, "act", torch.tanh),
    "a tensor that is no buffer": lambda m, o: setattr(m, "factor", torch.tensor(3.0)),
    "a private number": lambda m, o: setattr(m, "_private", 3.0),
    "a number in a list in a dict": lambda m, o: m.weights["loss"].__setitem__(1, 3.0),
    "a setting": lambda m, o: setattr(m.config, "scale", 3.0),
    "a setting inside of another": lambda m, o: setattr(m.config.inner, "shift", 3.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_next_step_is_that_of_eager(name: str) -> None:
    model = Watched()
    twin = copy.deepcopy(model)
    optimizer, reference = sgd_in_groups(model), sgd_in_groups(twin)
    step = roamc.train_step(model, square, optimizer, strict=True)
    for number in range(3):
        if number == 1:
            CHANGES[name](model, optimizer)
            CHANGES[name](twin, reference)
        assert_same(step(X), eager_step(twin, square, reference, X), f"loss of step {number}")
        assert_same(tensors_of(model), tensors_of(twin), f"after step {number}")


@pytest.mark.parametrize("make", [sgd_in_groups, adamw])
def test_a_layer_that_the_optimizer_does_not_hold_is_refused(make: Make) -> None:
    model = Watched()
    optimizer = make(model)
    step = roamc.train_step(model, square, optimizer, strict=True)
    step(X)
    another_layer(model, optimizer)
    before = tensors_of(model)
    with pytest.raises(roamc.CaptureError, match=r"model\.parameters\(\)"):
        step(X)
    assert_same(tensors_of(model), before)


def test_a_parameter_that_a_stateless_optimizer_does_not_hold_is_refused() -> None:
    model = Watched()
    step = roamc.train_step(model, square, sgd_in_groups(model), strict=True)
    step(X)
    model.last.weight = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(roamc.CaptureError, match=r"model\.parameters\(\)"):
        step(X)


def test_a_layer_put_back_has_its_plan_still() -> None:
    model = Watched()
    model.factor = 2.0
    step = roamc.train_step(model, square, torch.optim.SGD([model.first.bias], lr=0.1), strict=True)
    step(X)
    before, plan = model.last, step.plans[0]
    for layer in (nn.Linear(8, 8, bias=False), before):
        model.last = layer
        wanted = square(model, X).detach()
        assert_same(step(X), wanted)
    assert step.plans == [plan], "another layer of the same shapes needs no other plan"


def test_a_step_traced_again_with_the_same_constants_has_its_plan_still() -> None:
    class Late(Watched):
        """Settles in its first forward, as models do that register hooks there."""

        def forward(self, x: Tensor) -> Tensor:
            self.settled = True
            return super().forward(x) * torch.tensor([1.0, 2.0] * 4)

    model = Late()
    twin = copy.deepcopy(model)
    optimizer, reference = sgd_in_groups(model), sgd_in_groups(twin)
    step = roamc.train_step(model, square, optimizer, strict=True)
    for _ in range(2):
        assert_same(step(X), eager_step(twin, square, reference, X))
    assert len(step.plans) == 1


def test_loss_function_and_clipping_of_a_step_may_be_set() -> None:
    model = Watched()
    step = roamc.train_step(model, square, sgd_in_groups(model), clip_grad_norm=1e-9, strict=True)
    step(X)
    before = tensors_of(model)
    step.clip_grad_norm = None
    first = step(X)
    assert float((tensors_of(model)["last.weight"] - before["last.weight"]).abs().max()) > 1e-6
    step.loss_fn = lambda m, x: square(m, x) * 100
    assert float(step(X)) > float(first)


def test_what_forward_notes_on_the_model_makes_no_other_plan() -> None:
    class Noting(Watched):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = super().forward(x)
            self.all_seen = [self.seen]
            return self.seen

    model = Noting()
    step = roamc.train_step(model, square, sgd_in_groups(model), strict=True)
    for _ in range(3):
        step(X)
    assert len(step._steps) == 1


def called_with(step: roamc.TrainStep, *batches: Tensor) -> None:
    for batch in batches:
        step(batch)


def test_more_changes_than_plans_are_named_once() -> None:
    model = Watched()
    step = roamc.train_step(model, square, sgd_in_groups(model), max_plans=2, strict=True)

    def change_and_call() -> None:
        for value in range(5):
            model._private = float(value)
            step(X)

    with pytest.warns(UserWarning, match=r"max_plans=2 .*what forward, hooks and loss read") as caught:
        change_and_call()
    assert len(caught) == 1


def test_more_sizes_than_plans_are_named_once() -> None:
    model = Watched()
    step = roamc.train_step(model, square, sgd_in_groups(model), max_plans=2, strict=True)
    with pytest.warns(UserWarning, match=r"max_plans=2 .*the batch's sizes") as caught:
        called_with(step, *(noise(size, 8) for size in range(1, 6)))
    assert len(caught) == 1


class Recurrent(nn.Module):
    """A recurrent layer, which notes on the side which weights it was called with last."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(8, 8, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)[0]
        return result


SAME: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]]] = {
    "attributes": lambda: (Watched(), (X,), square),
    **{kind.__name__: lambda kind=kind: (Recurrent(kind), (X,), square) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    **{f"small model {seed}": lambda seed=seed: small_model(seed) for seed in (0, 1, 2, 3, 4, 7, 8, 9, 11)},
}


@pytest.mark.parametrize("name", SAME)
def test_nothing_has_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is called as before is captured once."""
    torch.manual_seed(0)
    model, batch, loss_of = SAME[name]()
    here = sys.modules["roamc.frontends.train_step"]
    captures, capture = [], here._captured
    monkeypatch.setattr(here, "_captured", lambda request: captures.append(request) or capture(request))
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    step = roamc.train_step(model, loss_of, optimizer, order="lpmf", layout_nodes=0)
    for _ in range(3):
        step(*batch)
    assert len(captures) == 1


def test_more_threads_need_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8)
    step = roamc.train_step(model, square, torch.optim.SGD(model.parameters(), lr=0.1), strict=True)
    for threads, planned_for in ((2, [2]), (6, [2, 6]), (1, [2, 6])):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        step(X)
        assert sorted(plan.threads for plan in step.plans) == planned_for


def test_fewer_threads_need_another_plan_where_a_group_would_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(64, 1024, bias=False), nn.Linear(1024, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.wide(x)
            return self.narrow((nn.functional.silu(hidden) * hidden.sigmoid()).tanh().exp().sin())

    model = Chain()
    step = roamc.train_step(model, square, torch.optim.SGD(model.parameters(), lr=0.1), strict=True)
    for threads, planned_for in ((4, [4]), (2, [4]), (3, [3, 4])):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        step(torch.ones(1024, 64))
        assert sorted(plan.threads for plan in step.plans) == planned_for
    by_threads = {plan.threads: plan.needed_bytes for plan in step.plans}
    assert by_threads[3] > by_threads[4]

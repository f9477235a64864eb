"""What hooks read may change between two steps: the next one has eager's bits, through every way in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

import roamc
from tests.end_to_end import hook_cases
from tests.end_to_end.helpers import assert_same, eager_step, noise, sgd, square, tensors_of
from tests.end_to_end.hook_cases import HOOKS, IN_EAGER, MORE_READS, READS, REFUSED, Net
from tests.end_to_end.test_python_state import changes_between_steps

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

X = noise(3, 4)
VALUES = (1.0, 0.5, 0.5, 3.0)
ALL_READS = {**READS, **MORE_READS}
AS_TORCH = ("several gradients",)
"""Hooks that write into a gradient that eager has handed on already: what comes of it depends on the backend."""


def trained(way: str, kind: str, read: str, values: Sequence[float] = VALUES) -> list[dict[str, Tensor]]:
    """Return the loss and all parameters after every step, in each of which the hook reads one of ``values``.

    ``way`` is "eager", "train_step", "optimize" or a backend of ``torch.compile``.
    """
    with hook_cases.fresh_values():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        act, install = HOOKS[kind]
        hook, put = ALL_READS[read](act)
        install(model, optimizer, hook)
        if way == "train_step":
            run: Callable[[Tensor], Tensor] = roamc.train_step(model, square, optimizer, strict=True)
        else:
            torch._dynamo.reset()
            if way == "optimize":
                model = roamc.optimize(model, strict=True)
            elif way != "eager":
                model.compile(backend=way, options={"strict": True} if way == "roamc" else None)
            run = lambda x: plainly(model, optimizer, x)  # noqa: E731
        results = []
        for value in values:
            put(value)
            results.append({"loss": run(X).clone(), **tensors_of(model)})
        return results


def plainly(called: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = square(called, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("read", ALL_READS)
@pytest.mark.parametrize("kind", HOOKS)
def test_a_step_follows_what_hooks_read(kind: str, read: str) -> None:
    if kind in REFUSED:
        with pytest.raises(roamc.CaptureError, match=REFUSED[kind]):
            trained("train_step", kind, read)
        return
    wanted = trained("eager", kind, read)
    assert_same(trained("train_step", kind, read), wanted)
    unchanged = trained("eager", kind, read, (1.0,) * len(VALUES))
    assert not torch.equal(wanted[-1]["first.weight"], unchanged[-1]["first.weight"]), "the hook does nothing"


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("way", ["optimize", "roamc"])
def test_a_compiled_model_follows_what_hooks_read(way: str, kind: str, read: str) -> None:
    if way == "optimize" and kind in IN_EAGER:
        with pytest.raises(roamc.CaptureError, match="runs all of 'Net' in eager"):
            trained(way, kind, read)
        return
    assert_same(trained(way, kind, read), trained("aot_eager" if kind in AS_TORCH else "eager", kind, read))


@pytest.mark.parametrize("read", ALL_READS)
def test_a_step_follows_what_its_loss_reads(read: str) -> None:
    def act(value: float, model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) * value

    with hook_cases.fresh_values():
        loss_fn, put = ALL_READS[read](act)
        changes_between_steps(lambda model, x: loss_fn(model, x), lambda: put(3.0))


# -- how often a step is captured -------------------------------------------------------------------------------


def steps_like_eager(
    prepare: Callable[[Any], Callable[[float], object]], values: Sequence[float] = VALUES
) -> roamc.TrainStep:
    """Train two models that ``prepare`` has changed; it returns what sets a value before each step."""
    torch.manual_seed(0)
    model = Net()
    twin = Net()
    twin.load_state_dict(model.state_dict())
    puts = [prepare(model), prepare(twin)]
    step, reference = roamc.train_step(model, square, sgd(model), strict=True, max_plans=9), sgd(twin)
    for number, value in enumerate(values):
        for put in puts:
            put(value)
        assert_same(step(X), eager_step(twin, square, reference, X), f"loss of step {number}")
        assert_same(tensors_of(model), tensors_of(twin), f"after step {number}")
    return step


def with_state(model: Any) -> Callable[[float], object]:
    """A hook that reads one entry of a dict and keeps results in others, and in a list."""
    state: dict[str, Any] = {"scale": 1.0, "kept": []}

    def hook(_: nn.Module, __: object, result: Tensor) -> Tensor:
        state["kept"].append(result.detach())
        state["last"] = result
        return result * state["scale"]

    model.second.register_forward_hook(hook)
    return lambda value: state.update(scale=value)


def test_values_that_come_back_are_served_by_their_programs_and_what_hooks_keep_is_no_change() -> None:
    step = steps_like_eager(with_state, (1.0, 1.0, 0.5, 0.5, 1.0, 0.5, 3.0))
    assert len(step.plans) == 3


def with_trainer(model: Any) -> Callable[[float], object]:
    """A hook that is a method of an object with another number, which no function of the step names."""

    class Trainer:
        def __init__(self) -> None:
            self.scale, self.epoch = 1.0, 0.0

        def hook(self, _: nn.Module, __: object, result: Tensor) -> Tensor:
            return result * self.scale

    trainer = Trainer()
    model.second.register_forward_hook(trainer.hook)
    return lambda value: setattr(trainer, "epoch", value)


def test_what_a_hook_does_not_read_of_its_object_makes_no_capture() -> None:
    assert len(steps_like_eager(with_trainer).plans) == 1


class Counting:
    """A hook that counts its calls, in one of several ways."""

    def __init__(self) -> None:
        self.calls, self.listed, self.named = 0, [0], {}

    def by_number(self, _: nn.Module, __: object, result: Tensor) -> Tensor:
        self.calls += 1
        return result * self.calls

    def by_list(self, _: nn.Module, __: object, result: Tensor) -> Tensor:
        self.listed[0] += 1
        return result * self.listed[0]

    def by_dict(self, _: nn.Module, __: object, result: Tensor) -> Tensor:
        self.named["calls"] = self.named.get("calls", 0) + 1
        return result * self.named["calls"]


@pytest.mark.parametrize("name", ["by_number", "by_list", "by_dict"])
def test_a_hook_that_counts_its_calls_counts_every_step(name: str) -> None:
    def prepare(model: Any) -> Callable[[float], object]:
        model.second.register_forward_hook(getattr(Counting(), name))
        return lambda _: None

    steps_like_eager(prepare)


@pytest.mark.parametrize("kind", [kind for kind in HOOKS if kind not in REFUSED])
def test_a_hook_that_begins_to_raise_raises(kind: str) -> None:
    act, install = HOOKS[kind]
    model = Net()
    optimizer = sgd(model)
    state = {"bad": False}

    def hook(*args: Any) -> Any:
        if state["bad"]:
            raise ZeroDivisionError("mine")
        return act(1.0, *args)

    with hook_cases.fresh_values():
        install(model, optimizer, hook)
        step = roamc.train_step(model, square, optimizer, strict=True)
        step(X)
        before = tensors_of(model)
        state["bad"] = True
        with pytest.raises(ZeroDivisionError, match="mine"):
            step(X)
        if kind != "after an update":
            assert_same(tensors_of(model), before, "nothing is changed")
        state["bad"] = False
        step(X)


def test_a_hook_that_takes_from_an_iterator_is_refused_by_name() -> None:
    model, scales = Net(), iter((1.0, 2.0))
    model.second.register_forward_hook(lambda _, __, result: result * next(scales))
    with pytest.raises(roamc.CaptureError, match=r"hook .*<lambda> names a tuple_iterator.*call next\(\) outside"):
        roamc.train_step(model, square, sgd(model))(X)


# -- other functions of the user that run in a step -------------------------------------------------------------

SCALE = 1.0


class Scaled(torch.autograd.Function):
    """Reads a number that its caller does not name, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * SCALE

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * SCALE * SCALE


class ScaledWeight(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * SCALE


class Doubling(TorchFunctionMode):
    """While inside, tanh is so many times tanh."""

    scale = 1.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.scale if func is torch.tanh else result


CRITERION = nn.Identity()
STATE = {"scale": 1.0}


def by_function(model: nn.Module, x: Tensor) -> Tensor:
    return Scaled.apply(model(x)).square().mean()  # type: ignore[no-any-return, no-untyped-call]


def by_criterion(model: nn.Module, x: Tensor) -> Tensor:
    return CRITERION(model(x)).square().mean()  # type: ignore[no-any-return]


def by_tanh(model: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(model(x)).square().mean()


def test_a_global_that_a_custom_function_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    changes_between_steps(by_function, lambda: monkeypatch.setitem(globals(), "SCALE", 3.0))


def test_a_global_that_a_parametrization_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(model: nn.Module) -> Callable[[float], object]:
        parametrize.register_parametrization(model.first, "weight", ScaledWeight())  # type: ignore[arg-type]
        return lambda value: monkeypatch.setitem(globals(), "SCALE", value)

    steps_like_eager(prepare)


def test_hooks_of_a_module_that_is_no_part_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = CRITERION.register_forward_hook(lambda _, __, result: result * STATE["scale"])
    changes_between_steps(by_criterion, lambda: monkeypatch.setitem(STATE, "scale", 3.0))
    changes_between_steps(by_criterion, handle.remove)


def test_a_number_that_a_function_mode_reads() -> None:
    mode = Doubling()
    with mode:
        changes_between_steps(by_tanh, lambda: setattr(mode, "scale", 3.0))

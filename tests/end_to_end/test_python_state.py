"""What Python code reads while a step is traced may change between two steps: the next step has eager's bits."""

from __future__ import annotations

import builtins
import copy
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import roamc
from tests.end_to_end.helpers import assert_same, eager_step, noise, sgd, square, tensors_of

X = noise(4, 8)
SCALE = 1.0


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def forward(self, y: Tensor) -> Tensor:
        return (y * self.weight).square().mean()


CRITERION = Criterion()


def helper(x: Tensor) -> Tensor:
    return x * SCALE * divmod(1, 1)[0]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return CRITERION(helper(model(x)))


class Reader(nn.Module):
    """Reads attributes of every kind."""

    shift = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh()
        self.function: Callable[[Tensor], Tensor] = torch.tanh
        self.numbers, self.named, self.chosen = [1.0, [2.0]], {"k": 1.0}, {1, 2}
        self._private, self.constant = 0.5, torch.ones(8)
        self.config = SimpleNamespace(scale=1.0, sizes=(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.second(self.first(x))) + self.shift
        x = self.function(x) * self.numbers[1][0] * self.named["k"] * self._private * self.constant  # type: ignore[index]
        return x * self.config.scale * len(self.chosen) + torch.ones(8, dtype=torch.float32)

    def backwards(self, x: Tensor) -> Tensor:
        return self.first(self.second(x))


def exchange(model: Any) -> None:
    model.first, model.second = model.second, model.first


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a module of another class": lambda m: setattr(m, "act", nn.Sigmoid()),
    "two modules exchanged": exchange,
    "a function": lambda m: setattr(m, "function", torch.sigmoid),
    "a list in a list": lambda m: m.numbers[1].__setitem__(0, 3.0),
    "a dict": lambda m: m.named.update(k=3.0),
    "a set": lambda m: m.chosen.add(3),
    "a private number": lambda m: setattr(m, "_private", 0.9),
    "a tensor": lambda m: setattr(m, "constant", torch.full((8,), 2.0)),
    "a tensor written": lambda m: m.constant.mul_(3.0),
    "an object": lambda m: setattr(m.config, "scale", 3.0),
    "forward of the object": lambda m: setattr(m, "forward", m.backwards),
    "forward of a part": lambda m: setattr(m.act, "forward", torch.relu),
}
EVERYWHERE: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "forward of the class": lambda patch: patch.setattr(Reader, "forward", Reader.backwards),
    "a number of the class": lambda patch: patch.setattr(Reader, "shift", 0.7),
    "a global number": lambda patch: patch.setitem(globals(), "SCALE", 3.0),
    "a built-in function": lambda patch: patch.setattr(builtins, "divmod", lambda *_: (SCALE * 3.0, 0)),
    "a global function": lambda patch: patch.setitem(globals(), "helper", torch.tanh),
    "a number of a criterion": lambda patch: patch.setattr(CRITERION, "weight", 3.0),
    "another criterion": lambda patch: patch.setitem(globals(), "CRITERION", nn.Sequential(nn.Tanh(), Criterion())),
}


def check(change: Callable[[nn.Module], Any], loss_fn: Callable[..., Tensor] = loss) -> None:
    """Two steps, ``change``, two steps: parameters and losses are eager's, and nothing is captured in between."""
    torch.manual_seed(0)
    model = Reader()
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, loss_fn, sgd(model), strict=True), sgd(twin)
    for number in range(4):
        if number == 2:
            change(model)
            change(twin)
        assert_same(step(X), eager_step(twin, loss_fn, reference, X), f"loss of step {number}")
        assert_same(tensors_of(model), tensors_of(twin), f"after step {number}")
    assert len(step._steps) <= 2


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_model(change: Callable[[Any], Any]) -> None:
    check(change)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_change_around_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(lambda _: EVERYWHERE[name](monkeypatch))


def test_a_number_in_the_closure_of_the_loss_function() -> None:
    weight = 1.0

    def weighted(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) * weight

    def change(_: nn.Module) -> None:
        nonlocal weight
        weight = 3.0

    check(change, weighted)


def test_a_module_in_the_place_of_one_with_the_same_geometry_is_trained_by_nobody() -> None:
    model = Reader()
    step = roamc.train_step(model, loss, sgd(model))
    step(X)
    model.first = nn.Linear(8, 8)
    with pytest.raises(roamc.CaptureError, match="the optimizer holds a parameter that the model does not"):
        step(X)


def test_another_loss_function_and_another_clipping_of_a_step() -> None:
    model = nn.Linear(8, 8)
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, square, sgd(model), strict=True), sgd(twin)
    step(X), eager_step(twin, square, reference, X)
    step.loss_fn, step.clip_grad_norm = loss, 0.1
    assert_same(step(X), eager_step(twin, loss, reference, X, clip=0.1))
    assert_same(tensors_of(model), tensors_of(twin))


class Doubled(TorchFunctionMode):
    """While inside, tanh is twice tanh."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def attention() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


def doubled() -> Iterator[None]:
    with Doubled():
        yield


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x).view(1, 2, 2, 8)
        return torch.tanh(F.scaled_dot_product_attention(q, q, q)) + torch.arange(8.0) + torch.full((8,), 0.1)


@pytest.mark.parametrize("around", [default_dtype, attention, doubled])
def test_what_is_set_around_some_steps(around: Callable[[], Iterator[None]]) -> None:
    model = Attention()
    twin = copy.deepcopy(model)
    loss_fn = lambda m, x: m(x).square().mean()  # noqa: E731
    step, reference = roamc.train_step(model, loss_fn, sgd(model), strict=True), sgd(twin)
    for number in range(6):
        inside = around() if number in (1, 2, 5) else iter(())
        next(inside, None)
        value, wanted = step(X), eager_step(twin, loss_fn, reference, X)
        next(inside, None)
        assert_same(value, wanted, f"loss of step {number}")
        assert_same(tensors_of(model), tensors_of(twin), f"after step {number}")
    assert len(step._steps) <= 4


def test_what_forward_leaves_in_its_module_is_no_change() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.kept, self.list = nn.Linear(8, 8), None, []

        def forward(self, x: Tensor) -> Tensor:
            x = nn.Softmax(-1)(self.linear(x))
            self.kept, seen = x, len(self.list)
            self.list.append(x.detach())
            return x * self.kept if seen < 100 else x

    model = Keeps()
    step = roamc.train_step(model, square, sgd(model), strict=True)
    for _ in range(5):
        step(X)
        gc.collect()
    assert len(step._steps) == 1
    assert (model.kept, model.list) == (None, []), "a trace leaves nothing behind"


def test_inference_mode_is_refused() -> None:
    step = roamc.train_step(model := nn.Linear(8, 8), square, sgd(model))
    with torch.inference_mode(), pytest.raises(roamc.CaptureError, match="inference_mode"):
        step(X)


def test_a_step_inside_of_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    step = roamc.train_step(model := nn.Linear(8, 8), square, sgd(model))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(roamc.CaptureError, match="while a CUDA graph is captured"):
        step(X)


def test_a_step_inside_of_the_loss_function_is_refused() -> None:
    def nested(model: nn.Module, x: Tensor) -> Tensor:
        step(x)
        return square(model, x)

    step = roamc.train_step(model := nn.Linear(8, 8), nested, sgd(model))
    with pytest.raises(roamc.CaptureError, match="inside loss_fn"):
        step(X)


def test_a_step_in_a_hook_behind_the_update() -> None:
    model = nn.Linear(8, 8)
    twin = copy.deepcopy(model)
    optimizer, reference = sgd(model), sgd(twin)
    step = roamc.train_step(model, square, optimizer, strict=True)
    handle = optimizer.register_step_post_hook(lambda *_: (handle.remove(), step(X)))
    step(X)
    eager_step(twin, square, reference, X)
    eager_step(twin, square, reference, X)
    assert_same(tensors_of(model), tensors_of(twin))


def test_two_steps_of_one_model_in_two_threads() -> None:
    """While one is captured, the model holds tensors of the trace."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    wanted = square(model, X).detach()
    steps = [roamc.train_step(model, square, torch.optim.SGD(model.parameters(), lr=0.0)) for _ in range(4)]
    start, losses = threading.Barrier(4), []

    def run(step: roamc.TrainStep) -> None:
        start.wait()
        losses.extend(step(X) for _ in range(3))

    threads = [threading.Thread(target=run, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(losses, [wanted] * 12)


SETTINGS: dict[str, Any] = {"scale": 2.0, "parts": [1.0]}
DEFAULTS = [2.0]
LOSSES: list[Any] = []


class Scaled:
    """A loss that is a method, of an object that holds a number."""

    def __init__(self) -> None:
        self.scale = 2.0

    def loss_of(self, model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) * self.scale


def by_settings(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) * SETTINGS["scale"] * SETTINGS["parts"][0]


def by_default(model: nn.Module, x: Tensor, *, scale: list[float] = DEFAULTS) -> Tensor:
    return square(model, x) * scale[0]


def noting(model: nn.Module, x: Tensor) -> Tensor:
    loss = square(model, x)
    LOSSES.append(loss.detach())
    return loss


def changes_between_steps(loss_of: Any, change: Callable[[], object]) -> roamc.TrainStep:
    """Two steps, a change, two steps more: losses and weights are eager's."""
    model = nn.Linear(8, 8)
    twin = copy.deepcopy(model)
    ours, theirs = sgd(model), sgd(twin)
    step = roamc.train_step(model, loss_of, ours, strict=True)
    for number in range(4):
        x = torch.randn(4, 8)
        if number == 2:
            change()
        assert torch.equal(step(x), eager_step(twin, loss_of, theirs, x))
    assert_same(tensors_of(model), tensors_of(twin), "weights")
    return step


def test_lists_and_dicts_that_the_loss_names_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "scale", 2.0)
    changes_between_steps(by_settings, lambda: SETTINGS.update(scale=3.0))
    changes_between_steps(by_default, lambda: DEFAULTS.__setitem__(0, 5.0))
    scaled = Scaled()
    changes_between_steps(scaled.loss_of, lambda: setattr(scaled, "scale", 7.0))
    held = {"scale": torch.tensor(2.0)}
    changes_between_steps(
        lambda model, x: square(model, x) * held["scale"], lambda: held.update(scale=torch.tensor(3.0))
    )


def test_a_list_that_the_loss_appends_to_makes_no_plan_for_every_step() -> None:
    LOSSES.clear()
    step = changes_between_steps(noting, lambda: None)
    assert len(step.plans) == 1
    LOSSES.clear()


# -- what is called as the loss, and signs of zero --------------------------------------------------------


def by_scale(model: nn.Module, x: Tensor, **_: object) -> Tensor:
    return square(model, x) * SCALE


class Weighted:
    def weight(self) -> float:
        return SHARES["base"]


SHARES = {"base": 1.0}


class Weighing(Weighted):
    """A loss that is an object: numbers of its own, of its class and of the module that it is written in."""

    share = 1.0
    shares = (1.0,)

    def __init__(self) -> None:
        self.part, self.parts, self.inner = 1.0, {"weight": 1.0}, nn.Identity()

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return by_scale(model, self.inner(x)) * self.weight() * self.part

    def weight(self) -> float:
        return self.parts["weight"] * self.share * self.shares[0] * self.of_module() * self.doubled * super().weight()

    @staticmethod
    def of_module() -> float:
        return float(SETTINGS["scale"])

    @property
    def doubled(self) -> float:
        return 2.0 * sum(DEFAULTS)


WEIGHING = Weighing()


def scaled(model: nn.Module, x: Tensor, factor: float = 1.0, **_: object) -> Tensor:
    return square(model, x) * factor


HALVED = functools.partial(scaled, factor=0.5)


def by_a_partial(model: nn.Module, x: Tensor) -> Tensor:
    return HALVED(model, x)


CALLED: dict[str, Callable[..., Tensor]] = {
    "a partial": functools.partial(by_scale, unused=1),
    "a partial of a partial": functools.partial(functools.partial(by_scale, unused=1), other=2),
    "an object": WEIGHING,
    "a partial of an object": functools.partial(WEIGHING),
    "a method of an object": WEIGHING.__call__,
}


@pytest.mark.parametrize("name", CALLED)
def test_a_global_that_what_is_called_as_the_loss_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes_between_steps(CALLED[name], lambda: monkeypatch.setitem(globals(), "SCALE", 3.0))


OF_THE_OBJECT: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a number": lambda patch: patch.setattr(WEIGHING, "part", 3.0),
    "a dict": lambda patch: patch.setitem(WEIGHING.parts, "weight", 3.0),
    "a number of the class": lambda patch: patch.setattr(Weighing, "share", 3.0),
    "a tuple of the class": lambda patch: patch.setattr(Weighing, "shares", (3.0,)),
    "a method": lambda patch: patch.setattr(Weighing, "weight", lambda self: 5.0),
    "a global of a static method": lambda patch: patch.setitem(SETTINGS, "scale", 7.0),
    "a global of a method of super": lambda patch: patch.setitem(SHARES, "base", 7.0),
    "a global of a property": lambda patch: patch.setitem(globals(), "DEFAULTS", [7.0]),
}


@pytest.mark.parametrize("name", OF_THE_OBJECT)
@pytest.mark.parametrize("called", ["an object", "a method of an object", "a partial of an object"])
def test_a_part_of_an_object_that_the_loss_belongs_to(name: str, called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes_between_steps(CALLED[called], lambda: OF_THE_OBJECT[name](monkeypatch))


def test_arguments_that_a_partial_holds_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    held = functools.partial(scaled, factor=2.0)
    changes_between_steps(held, lambda: held.keywords.update(factor=3.0))
    changes_between_steps(by_a_partial, lambda: HALVED.keywords.update(factor=0.25))
    changes_between_steps(by_a_partial, lambda: monkeypatch.setitem(globals(), "HALVED", scaled))


def test_arguments_that_a_partial_in_a_module_holds_may_change() -> None:
    def change(model: Any) -> None:
        model.function.keywords["negative_slope"] = 0.7

    model = Reader()
    model.function = functools.partial(F.leaky_relu, negative_slope=0.1)
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, loss, sgd(model), strict=True), sgd(twin)
    for number in range(4):
        if number == 2:
            change(model), change(twin)
        assert_same(step(X), eager_step(twin, loss, reference, X), f"loss of step {number}")
    assert len(step._steps) == 2


def test_a_new_partial_of_the_same_needs_no_other_capture() -> None:
    model = Reader()
    step = roamc.train_step(model, loss, sgd(model), strict=True)
    for _ in range(3):
        model.function = functools.partial(F.leaky_relu, negative_slope=0.1)
        step(X)
    assert len(step._steps) == 1


def by_name(model: nn.Module, x: Tensor) -> Tensor:
    return BY_NAME["a loss"](model, x)


BY_NAME: dict[str, Callable[..., Tensor]] = {"a loss": square, "itself": by_name}


def test_a_loss_may_be_in_a_dict_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    changes_between_steps(by_name, lambda: monkeypatch.setitem(BY_NAME, "a loss", by_scale))


result: Any = None


def of_a_result(model: nn.Module, x: Tensor) -> Tensor:
    return SimpleNamespace(result=square(model, x)).result


def test_a_global_with_the_name_of_an_attribute_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8)
    step = roamc.train_step(model, of_a_result, sgd(model), strict=True)
    for _ in range(3):
        monkeypatch.setitem(globals(), "result", step(X))
    assert len(step._steps) == 1


NUMBERS: dict[str, tuple[Any, Any]] = {
    "zeros": (0.0, -0.0),
    "zeros below": (-0.0, 0.0),
    "of a complex number": (complex(1, 0.0), complex(1, -0.0)),
    "a flag and a number": (True, 1),
    "a number and a flag": (1.0, True),
}


def written(value: Any, x: Tensor) -> Tensor:
    """Tells each value of ``NUMBERS`` from the other one."""
    told = torch.copysign(torch.ones(8), value.imag if isinstance(value, complex) else value)
    return x * told * {bool: 2.0, int: 3.0, float: 5.0, complex: 7.0}[type(value)]


class Signed(nn.Linear):
    """Reads its value directly, from a list, and as a tensor."""

    def __init__(self, value: Any) -> None:
        super().__init__(8, 8)
        self.value, self.values = value, [value]

    def forward(self, x: Tensor) -> Tensor:
        return written(self.value, written(self.values[0], super().forward(x)))


def set_value(model: Any, value: Any) -> None:
    model.value = value


def set_values(model: Any, value: Any) -> None:
    model.values[0] = value


@pytest.mark.parametrize("put", [set_value, set_values])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_equal_and_not_the_same(name: str, put: Callable[[Any, Any], None]) -> None:
    before, after = NUMBERS[name]
    model = Signed(before)
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, square, sgd(model), strict=True), sgd(twin)
    for value in (before, after, before, after):
        put(model, value), put(twin, value)
        assert_same(step(X), eager_step(twin, square, reference, X))
    assert_same(tensors_of(model), tensors_of(twin))


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_the_batch_that_are_equal_and_not_the_same(name: str) -> None:
    def of_value(model: nn.Module, x: Tensor, value: Any) -> Tensor:
        return written(value, model(x)).relu().mean()

    model = nn.Linear(8, 8)
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, of_value, sgd(model), strict=True), sgd(twin)
    for value in NUMBERS[name] * 2:
        assert_same(step(X, value), eager_step(twin, of_value, reference, X, value))


def test_a_constant_of_the_other_zero_gets_a_program_of_its_own() -> None:
    zero = 0.0

    def signed(model: nn.Module, x: Tensor) -> Tensor:
        return torch.copysign(model(x), torch.tensor(zero)).mean()

    def change() -> None:
        nonlocal zero
        zero = -0.0

    changes_between_steps(signed, change)


def test_nan_is_no_change() -> None:
    model = Reader()
    step = roamc.train_step(model, lambda model, x, _: loss(model, x), sgd(model), strict=True)
    for _ in range(3):
        model._private, model.config.scale = float("nan"), float("nan")
        model.named["k"] = float("nan")
        step(X, float("nan"))
    assert len(step._steps) == 1


class Noting:
    """A loss that is an object and keeps what it has given."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.given.append(noting(model, x))
        return self.given[-1]


def test_a_list_that_an_object_appends_to_makes_no_capture_for_every_step() -> None:
    step = changes_between_steps(Noting(), LOSSES.clear)
    assert len(step._steps) == 1

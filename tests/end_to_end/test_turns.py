"""What a step turns and a later step turns back: each step reads what the one before it has left, as in eager."""

from __future__ import annotations

import copy
import functools
import importlib
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import assert_same, eager_step, noise, sgd, square, tensors_of


def one() -> float:
    return 1.0


def two() -> float:
    return 2.0


class Meter:
    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, value: float) -> float:
        self.values.append(value)
        return sum(self.values)


class Averages:
    """Keeps tensors, and counts them."""

    def __init__(self) -> None:
        self.total: Any = 0.0
        self.count, self.rows = 0, list[Tensor]()

    def update(self, value: Tensor) -> None:
        self.total = self.total + value
        self.count += 1
        self.rows.append(value)


class Turning(nn.Module):
    """Turns something, and then scales its result by what that is."""

    def __init__(self, turn: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)
        self.count, self.flag, self.names = 0, False, ["a", "bb", "ccc"]
        self.settings = {"factor": 1.0}
        self.scales: Any = [one, two]
        self.by_name, self.pair = {"first": one, "second": two}, SimpleNamespace(first=one, second=two)
        self.factors = [torch.tensor(1.0), torch.tensor(2.0)]
        self.turn, self.meter, self.averages = turn, Meter(), Averages()

    def forward(self, x: Tensor) -> Tensor:
        factor = self.turn(self)
        return self.dropout(self.layer(x)) * factor


def count(m: Any) -> float:
    m.count = (m.count + 1) % 3
    return 1.0 + m.count


def flag(m: Any) -> float:
    m.flag = not m.flag
    return 2.0 if m.flag else 1.0


def in_a_dict(m: Any) -> float:
    m.settings["factor"] = 3.0 - m.settings["factor"]
    return float(m.settings["factor"])


def another_dict(m: Any) -> float:
    m.settings = {"factor": 3.0 - m.settings["factor"]}
    return float(m.settings["factor"])


def in_a_list(m: Any) -> float:
    m.names.append(m.names.pop(0))
    return float(len(m.names[0]))


def training(m: Any) -> float:
    m.train(not m.training)
    return 1.0


def functions(m: Any) -> float:
    m.scales.reverse()
    return float(m.scales[0]())


def entries(m: Any) -> float:
    m.by_name["first"], m.by_name["second"] = m.by_name["second"], m.by_name["first"]
    return float(m.by_name["first"]())


def attributes(m: Any) -> float:
    m.pair.first, m.pair.second = m.pair.second, m.pair.first
    return float(m.pair.first())


def tensors(m: Any) -> Any:
    m.factors.reverse()
    return m.factors[0]


TURNS = (count, flag, in_a_dict, another_dict, in_a_list, training, functions, entries, attributes, tensors)


def assert_turns(
    model: nn.Module, loss: Callable[..., Tensor], twins_loss: Callable[..., Tensor], plans: int = 3
) -> None:
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, loss, sgd(model), strict=True), sgd(twin)
    states = [torch.manual_seed(1).get_state()] * 2
    for number in range(7):
        x, losses = noise(4, 8, seed=number), []
        for which, run in enumerate((step, lambda x: eager_step(twin, twins_loss, reference, x))):
            torch.set_rng_state(states[which])
            losses.append(run(x))
            states[which] = torch.get_rng_state()
        assert_same(*losses, f"loss of step {number}")
        assert_same(tensors_of(model), tensors_of(twin), f"after step {number}")
    assert len(step.plans) <= plans


@pytest.mark.parametrize("turn", TURNS)
def test_what_forward_turns_in_its_module(turn: Callable[[Any], float]) -> None:
    assert_turns(Turning(turn), square, square)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The steps that are traced from now on."""
    here, kept = importlib.import_module("roamc.frontends.train_step"), list[object]()
    capture = here._captured
    monkeypatch.setattr(here, "_captured", lambda request: kept.append(request) or capture(request))
    return kept


def log_of_numbers(m: Any) -> float:
    m.names.append("d")
    return float(len(m.names))


def log_in_a_dict(m: Any) -> float:
    m.by_name.setdefault("log", [])
    m.by_name["log"].append(1.0)
    return sum(m.by_name["log"])


def log_in_its_dict(m: Any) -> float:
    m.names.append("d")
    return float(len(m.__dict__["names"]))


def log_by_a_computed_name(m: Any) -> float:
    m.names.append("d")
    return float(len(getattr(m, "".join(("na", "mes")))))


def log_by_another_name(m: Any) -> float:
    names = m.names
    names.append("d")
    return float(len(names))


def log_with_two_names(m: Any) -> float:
    if not hasattr(m, "others"):
        m.others = m.names
    m.names.append("d")
    return float(len(m.others))


def log_by_a_method_of_its(m: Any) -> float:
    if not hasattr(m, "note"):
        m.note = m.names.append
    m.note("d")
    return float(len(m.names))


def log_that_is_cleared(m: Any) -> float:
    m.names.append("d")
    if len(m.names) >= 5:
        m.names.clear()
    return 1.0 + len(m.names)


def log_of_an_object(m: Any) -> float:
    return float(m.meter.add(1.0))


def log_that_may_be_missing(m: Any) -> float:
    missing = not hasattr(m, "calls")
    if missing:
        m.calls = []
    m.calls.append(1)
    return 2.0 if missing else 1.0


def log_with_elements_that_may_be_none(m: Any) -> float:
    last = m.names[-1]
    m.names.append("d" if last is None else None)
    return 2.0 if last is None else 1.0


READ_LOGS = [
    *(log_of_numbers, log_in_a_dict, log_in_its_dict, log_by_a_computed_name, log_by_another_name),
    *(log_with_two_names, log_by_a_method_of_its, log_that_is_cleared, log_of_an_object, log_that_may_be_missing),
    log_with_elements_that_may_be_none,
]


@pytest.mark.parametrize("turn", READ_LOGS)
def test_a_log_that_forward_reads_is_as_long_as_in_eager(turn: Callable[[Any], float]) -> None:
    assert_turns(Turning(turn), square, square, plans=7)


def kept_by_another_name(m: Any) -> float:
    names = m.names
    names.append("d")
    return 1.0


def kept_if_there(m: Any) -> float:
    if not hasattr(m, "calls"):
        m.calls = []
    if m.calls is not None:
        m.calls.append(1)
    return 1.0


def kept_beside_a_computed_name(m: Any) -> Any:
    m.names.append("d")
    return getattr(m, "".join(("fac", "tors")))[0]


def kept_tensors(m: Any) -> float:
    m.averages.update(m.layer.weight.detach().mean())
    return 1.0


@pytest.mark.parametrize("turn", [kept_tensors, kept_by_another_name, kept_if_there, kept_beside_a_computed_name])
def test_a_log_that_forward_keeps_needs_no_other_trace(turn: Callable[[Any], float], traces: list[object]) -> None:
    assert_turns(Turning(turn), square, square, plans=2)
    assert len(traces) <= 2  # in the first step, an attribute may not be there yet


class Logging:
    """A loss that keeps logs."""

    def __init__(self) -> None:
        self.log, self.by_name, self.rows = [0], {"loss": [0], "step": [0]}, [[0]]
        self.none: list[int] | None = None

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.log.append(1)
        torch.log(x.abs())
        for name in ("loss", "step"):
            self.by_name[name].append(2)
        log = self.rows[-1]
        log.append(3)
        if self.none is not None:
            self.none.append(4)
        return square(model, x)


class Reading(Logging):
    """One that reads them, too."""

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return super().__call__(model, x) * self.log[-1] * len(self.by_name["loss"])


class ReadingOne(Logging):
    """One that reads a log whose name it computes."""

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return super().__call__(model, x) * min(len(self.by_name[name]) for name in ("loss", "step"))


class ReadingAny(Logging):
    """One that computes the name of an attribute."""

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return super().__call__(model, x) * len(getattr(self, "".join(("l", "og"))))


def by_default() -> Callable[..., Tensor]:
    def loss(model: nn.Module, x: Tensor, log: list[int] = [0]) -> Tensor:  # noqa: B006
        log.append(1)
        return square(model, x) * len(log)

    loss.__defaults__ = ([0],)
    return loss


def by_a_named_default() -> Callable[..., Tensor]:
    def loss(model: nn.Module, x: Tensor, *, log: list[int]) -> Tensor:
        log.append(1)
        return square(model, x) * len(log)

    loss.__kwdefaults__ = {"log": [0]}
    return loss


def by_a_named_partial() -> Callable[..., Tensor]:
    def loss(model: nn.Module, x: Tensor, **kept: list[int]) -> Tensor:
        kept["log"].append(1)
        return square(model, x) * len(kept["log"])

    return functools.partial(loss, log=[0])


class Growing(list[int]):
    def append(self, value: int) -> int:  # type: ignore[override]
        super().append(value)
        return len(self)


def by_a_list_of_its_own_kind() -> Callable[..., Tensor]:
    log = Growing()
    return lambda model, x: square(model, x) * log.append(1)


def by_a_length() -> Callable[..., Tensor]:
    log = [0]
    length = log.__len__
    return lambda model, x: (log.append(1), square(model, x) * length())[1]


def by_a_dict_that_grows() -> Callable[..., Tensor]:
    rows: dict[int, list[int]] = {}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        rows[len(rows)] = []
        return square(model, x) * len(rows)

    return loss


class Lazy:
    """A loss that makes its log in its first call."""

    log: list[int] | None = None

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        factor = 2.0 if self.log is None else 1.0
        if self.log is None:
            self.log = []
        self.log.append(1)
        return square(model, x) * factor


def by_a_partial() -> Callable[..., Tensor]:
    def loss(log: list[int], model: nn.Module, x: Tensor) -> Tensor:
        log.append(1)
        return square(model, x) * len(log)

    return functools.partial(loss, [0])


READING = [
    *(Reading, ReadingOne, ReadingAny, Lazy, by_default, by_a_named_default, by_a_partial, by_a_named_partial),
    *(by_a_list_of_its_own_kind, by_a_length, by_a_dict_that_grows),
]


@pytest.mark.parametrize("loss", READING)
def test_logs_that_a_loss_reads_are_as_long_as_in_eager(loss: Callable[[], Callable[..., Tensor]]) -> None:
    assert_turns(nn.Linear(8, 8), loss(), loss(), plans=7)


def keeping_by_default() -> Callable[..., Tensor]:
    def loss(model: nn.Module, x: Tensor, log: list[int] | None = None) -> Tensor:
        if log is not None:
            log.append(1)
        return square(model, x)

    loss.__defaults__ = ([0],)
    return loss


def keeping_by_a_partial() -> Callable[..., Tensor]:
    def loss(log: list[int], model: nn.Module, x: Tensor) -> Tensor:
        log.append(1)
        return square(model, x)

    return functools.partial(loss, [0])


def keeping_by_a_method() -> Callable[..., Tensor]:
    note = [0].append
    return lambda model, x: (note(1), square(model, x))[1]


@pytest.mark.parametrize("loss", [Logging, keeping_by_default, keeping_by_a_partial, keeping_by_a_method])
def test_logs_that_a_loss_keeps_need_no_other_trace(
    loss: Callable[[], Callable[..., Tensor]], traces: list[object]
) -> None:
    assert_turns(nn.Linear(8, 8), loss(), loss(), plans=1)
    assert len(traces) == 1


def test_tensors_that_a_hook_keeps_need_no_other_trace(traces: list[object]) -> None:
    kept: dict[str, Any] = {}
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    for name, child in model.named_children():
        child.register_forward_hook(lambda *hooked, name=name: kept.__setitem__(name, hooked[-1].detach()))
        child.register_forward_hook(lambda *hooked, name=name: kept.setdefault(f"all {name}", []).append(hooked[-1]))
    step = roamc.train_step(model, square, sgd(model), strict=True)
    for _ in range(3):
        step(noise(4, 8))
    assert len(traces) == 1


class Rotating:
    """A loss that scales by the first number of a queue, behind which it puts it."""

    def __init__(self) -> None:
        self.queue = deque([1.0, 2.0])

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.queue.rotate(1)
        return square(model, x) * self.queue[0]


def test_what_a_loss_turns_in_itself() -> None:
    assert_turns(nn.Linear(8, 8), Rotating(), Rotating())

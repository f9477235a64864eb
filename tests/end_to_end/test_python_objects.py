"""What a step reads of Python objects, not only of modules, may change between two steps: the next has eager's bits."""

from __future__ import annotations

import array
import builtins
import copy
import ctypes
import functools
import logging
import multiprocessing
import operator
import sys
import threading
import types
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import assert_same, eager_step, noise, sgd, square, tensors_of
from tests.end_to_end.test_python_state import changes_between_steps

X = noise(4, 8)


class Slotted:
    """Has its values in slots, one of them private, one of them in the slots of a subclass."""

    __slots__ = ("__hidden", "scale", "values")

    def __init__(self) -> None:
        self.scale, self.values, self.__hidden = 1.0, [1.0], 1.0

    def hide(self, value: float) -> None:
        self.__hidden = value

    def factor(self) -> float:
        return self.scale * self.values[0] * self.__hidden


@dataclass(slots=True)
class Settings:
    scale: float = 1.0


class Mixed:
    """Holds values beside what has no content to compare: a module, a lock, a generator, an object around it."""

    def __init__(self) -> None:
        self.inner, self.lock, self.generator = nn.Tanh(), threading.Lock(), torch.Generator()
        self.itself, self.act = self, torch.sigmoid
        self.scale, self.cfg = 1.0, SimpleNamespace(scale=1.0, parent=self)
        self.nested = [[1.0], {"deep": [1.0]}]

    def factor(self) -> float:
        return self.scale * self.cfg.scale * self.nested[0][0] * self.nested[1]["deep"][0]  # type: ignore[index, call-overload, return-value]

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return square(model, self.inner(x)) * self.factor()


def deep_change(mixed: Any) -> None:
    mixed.nested[1]["deep"][0] = 3.0


OF_A_MIXED: dict[str, Callable[[Any], object]] = {
    "a number": lambda mixed: setattr(mixed, "scale", 3.0),
    "a number of an object": lambda mixed: setattr(mixed.cfg, "scale", 3.0),
    "another object": lambda mixed: setattr(mixed, "cfg", SimpleNamespace(scale=3.0)),
    "a list in a list": lambda mixed: mixed.nested[0].__setitem__(0, 3.0),
    "a list in a dict in a list": deep_change,
}

MIXED = Mixed()
SLOTTED: Any = Slotted()
NESTED: dict[str, Any] = {}
CONFIG: Any = SimpleNamespace()
MODULE = types.ModuleType("constants_of_a_test")
MODULE.SCALE = 1.0  # type: ignore[attr-defined]
sys.modules["constants_of_a_test"] = MODULE


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test values of its own."""
    nested = {"rows": [[1.0, 2.0], (1.0, [1.0])], "recent": deque([1.0])}
    train = SimpleNamespace(weights=[[1.0]])
    config = SimpleNamespace(scale=1.0, train=train, settings=Settings(), log=[], array=np.ones(2))
    for name, value in {"SLOTTED": Slotted(), "NESTED": nested, "CONFIG": config}.items():
        monkeypatch.setitem(globals(), name, value)


def by_mixed(model: nn.Module, x: Tensor) -> Tensor:
    return MIXED(model, x)


def by_slotted(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) * SLOTTED.factor()


def by_nested(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) * NESTED["rows"][0][0] * NESTED["rows"][1][1][0] * NESTED["recent"][0]


def handed(config: Any) -> float:
    return config.train.weights[0][0] * config.settings.scale * float(config.array[0])  # type: ignore[no-any-return]


def by_config(model: nn.Module, x: Tensor) -> Tensor:
    CONFIG.log.append(0)
    return square(model, x) * handed(CONFIG) * getattr(CONFIG, "scale") * MODULE.SCALE  # noqa: B009


HIDDEN: Any = SimpleNamespace(scale=1.0, scaled=lambda: HIDDEN.scale)
MEMORY = bytearray(1), array.array("d", [1.0]), ctypes.c_double(1.0), multiprocessing.Value("d", 1.0)
of_scale, by_scaled = operator.attrgetter("scale"), operator.methodcaller("scaled")


@functools.lru_cache(maxsize=1)
def cached(value: Tensor) -> Tensor:
    return value * HIDDEN.scale


def by_cached(model: nn.Module, x: Tensor) -> Tensor:
    return cached(square(model, x))


def by_a_getter(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) * of_scale(HIDDEN)


def by_a_caller(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) * by_scaled(HIDDEN)


def by_a_computed_name(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) * getattr(HIDDEN, "".join(("sc", "ale")))


read, of_hidden = getattr, functools.partial(getattr, HIDDEN)
BY_NAME: dict[str, Callable[[str], float]] = {
    "a variable": lambda name: getattr(HIDDEN, name),
    "a variable and a default": lambda name: getattr(HIDDEN, name, MODULE.SCALE),
    "another name of getattr": lambda name: read(HIDDEN, name),
    "getattr as an attribute": lambda name: builtins.getattr(HIDDEN, name),
    "getattr in a partial": lambda name: of_hidden(name),
    "getattr handed on": lambda name: next(map(functools.partial(getattr, HIDDEN), [name])),
    "an attrgetter made now": lambda name: operator.attrgetter(name)(HIDDEN),
    "what getattr calls": lambda name: HIDDEN.__getattribute__(name),
}


def by_name(way: str) -> Callable[..., Tensor]:
    value_of = BY_NAME[way]
    return lambda model, x: square(model, x) * value_of("".join(("sc", "ale")))


def by_an_import(model: nn.Module, x: Tensor) -> Tensor:
    import constants_of_a_test  # type: ignore[import-not-found]

    return square(model, x) * constants_of_a_test.SCALE


def by_an_import_of_a_name(model: nn.Module, x: Tensor) -> Tensor:
    from constants_of_a_test import SCALE

    return square(model, x) * SCALE


def by_memory(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) * (MEMORY[0][0] + 1) * MEMORY[1][0] * MEMORY[2].value * MEMORY[3].value


NAMED: dict[str, tuple[Callable[..., Tensor], Callable[[pytest.MonkeyPatch], object]]] = {
    "a slot": (by_slotted, lambda patch: patch.setattr(SLOTTED, "scale", 3.0)),
    "a list in a slot": (by_slotted, lambda patch: SLOTTED.values.__setitem__(0, 3.0)),
    "a private slot": (by_slotted, lambda patch: SLOTTED.hide(3.0)),
    "a list in a list": (by_nested, lambda patch: NESTED["rows"][0].__setitem__(0, 3.0)),
    "a list in a tuple in a list": (by_nested, lambda patch: NESTED["rows"][1][1].__setitem__(0, 3.0)),
    "a deque": (by_nested, lambda patch: NESTED["recent"].__setitem__(0, 3.0)),
    "a number by getattr": (by_config, lambda patch: patch.setattr(CONFIG, "scale", 3.0)),
    "a list of an object in an object": (by_config, lambda patch: CONFIG.train.weights[0].__setitem__(0, 3.0)),
    "a dataclass with slots": (by_config, lambda patch: patch.setattr(CONFIG.settings, "scale", 3.0)),
    "an array of numpy": (by_config, lambda patch: CONFIG.array.fill(3.0)),
    "a number of a Python module": (by_config, lambda patch: patch.setattr(MODULE, "SCALE", 3.0)),
    "what a cached function reads": (by_cached, lambda patch: patch.setattr(HIDDEN, "scale", 3.0)),
    "an attrgetter": (by_a_getter, lambda patch: patch.setattr(HIDDEN, "scale", 3.0)),
    "a methodcaller": (by_a_caller, lambda patch: patch.setattr(HIDDEN, "scale", 3.0)),
    "a computed name": (by_a_computed_name, lambda patch: patch.setattr(HIDDEN, "scale", 3.0)),
    "an import": (by_an_import, lambda patch: patch.setattr(MODULE, "SCALE", 3.0)),
    "an import of a name": (by_an_import_of_a_name, lambda patch: patch.setattr(MODULE, "SCALE", 3.0)),
    "bytes": (by_memory, lambda patch: MEMORY[0].__setitem__(0, 3)),
    "an array": (by_memory, lambda patch: MEMORY[1].__setitem__(0, 3.0)),
    "a number of C": (by_memory, lambda patch: patch.setattr(MEMORY[2], "value", 3.0)),
    "a number of several processes": (by_memory, lambda patch: patch.setattr(MEMORY[3], "value", 3.0)),
    "a method": (by_slotted, lambda patch: patch.setattr(Slotted, "factor", lambda self: 5.0)),
}


NAMED |= {way: (by_name(way), lambda patch: patch.setattr(HIDDEN, "scale", 3.0)) for way in BY_NAME}


class Reading(nn.Module):
    """Reads a slot, its attributes as a whole, and what a method reads that Python finds without a name."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.listed, self.looked_up, self.slot = nn.Linear(8, 8), [1.0], [1.0], 1.0

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = super().__call__(x) * HIDDEN.scale
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) * self.slot * vars(self)["listed"][0] * self.__dict__["looked_up"][0]
        return result


OF_A_MODULE: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "a slot": lambda model, patch: object.__setattr__(model, "slot", 3.0),
    "an attribute by vars": lambda model, patch: model.listed.__setitem__(0, 3.0),
    "an attribute by its dict": lambda model, patch: model.looked_up.__setitem__(0, 3.0),
    "what __call__ reads": lambda model, patch: patch.setattr(HIDDEN, "scale", 3.0),
}


@pytest.mark.parametrize("name", OF_A_MODULE)
def test_what_a_module_reads_past_its_attributes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, twin = Reading(), Reading()
    twin.load_state_dict(model.state_dict())
    step, reference = roamc.train_step(model, square, sgd(model), strict=True), sgd(twin)
    for number in range(4):
        if number == 2:
            OF_A_MODULE[name](model, monkeypatch)
            OF_A_MODULE[name](twin, monkeypatch)
        assert_same(step(X), eager_step(twin, square, reference, X))
        assert_same(tensors_of(model), tensors_of(twin))
    assert len(step._steps) == 2


@pytest.mark.parametrize("name", NAMED)
def test_a_part_of_an_object_that_the_loss_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss_fn, change = NAMED[name]
    step = changes_between_steps(loss_fn, lambda: change(monkeypatch))
    assert len(step._steps) == 2


@pytest.mark.parametrize("name", OF_A_MIXED)
@pytest.mark.parametrize("way", ["named", "called", "its method"])
def test_a_value_beside_a_module_in_a_loss_object(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = Mixed()
    monkeypatch.setitem(globals(), "MIXED", mixed)
    loss_fn = {"named": by_mixed, "called": mixed, "its method": mixed.__call__}[way]
    changes_between_steps(loss_fn, lambda: OF_A_MIXED[name](mixed))


class Reader(nn.Module):
    """Reads attributes of objects that it holds, and of a global one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mixed, self.slotted, self.settings = nn.Linear(8, 8), SimpleNamespace(), Slotted(), Settings()
        self.mixed.act, self.mixed.inner, self.mixed.scale = torch.tanh, nn.Tanh(), 1.0
        self.array = np.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.mixed.scale * self.slotted.factor() * self.settings.scale
        return self.mixed.act(x) * float(self.array[0]) * CONFIG.scale


OF_A_READER: dict[str, Callable[[Any], object]] = {
    "a value beside a module": lambda m: setattr(m.mixed, "scale", 3.0),
    "a slot": lambda m: setattr(m.slotted, "scale", 3.0),
    "a list in a slot": lambda m: m.slotted.values.__setitem__(0, 3.0),
    "a dataclass with slots": lambda m: setattr(m.settings, "scale", 3.0),
    "an array of numpy": lambda m: m.array.fill(3.0),
    "a number of a global object": lambda m: setattr(CONFIG, "scale", 3.0),
}


@pytest.mark.parametrize("name", OF_A_READER)
def test_a_part_of_an_object_that_forward_reads(name: str) -> None:
    model = Reader()
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, square, sgd(model), strict=True), sgd(twin)
    for number in range(4):
        if number == 2:
            OF_A_READER[name](model), OF_A_READER[name](twin)
        assert_same(step(X), eager_step(twin, square, reference, X), f"loss of step {number}")
    assert_same(tensors_of(model), tensors_of(twin))
    assert len(step._steps) == 2


class Helper:
    SCALE = 1.0

    def scale(self) -> float:
        return HIDDEN.scale  # type: ignore[no-any-return]

    __call__ = scale


class Ways(nn.Module):
    """Reads a number of its class, or of a global object, by one way."""

    SCALE = 1.0

    def __init__(self, way: Callable[[Ways], float]) -> None:
        super().__init__()
        self.linear, self.way, self.helper, self.helpers = nn.Linear(8, 8), way, Helper(), {"first": [Helper()]}
        self.kind = Helper

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.linear(x) * self.way(self)
        return scaled

    scaled = property(lambda self: HIDDEN.scale)
    added = functools.partialmethod(lambda self, more: HIDDEN.scale + more, 1.0)

    @staticmethod
    def static() -> float:
        return HIDDEN.scale  # type: ignore[no-any-return]

    @classmethod
    def of_class(cls) -> float:
        return cls.SCALE

    def of_its_type(self) -> float:
        return type(self).SCALE


WAYS: dict[str, Callable[[Ways], float]] = {
    "a property": lambda m: m.scaled,
    "a partial method": lambda m: m.added(),
    "a static method": lambda m: m.static(),
    "a class method": lambda m: m.of_class(),
    "its type": lambda m: m.of_its_type(),
    "an object's method": lambda m: m.helper.scale(),
    "an object that is called": lambda m: m.helper(),
    "an object's class": lambda m: m.helper.SCALE,
    "a class that it holds": lambda m: m.kind.SCALE,
    "the method of an object in lists": lambda m: m.helpers["first"][0].scale(),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_forward_reads_by_way_of_its_class_and_objects(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Ways(WAYS[way])
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, square, sgd(model), strict=True), sgd(twin)
    for number in range(4):
        if number == 2:
            monkeypatch.setattr(HIDDEN, "scale", 3.0)
            for kind in (Ways, Helper):
                monkeypatch.setattr(kind, "SCALE", 3.0)
        assert_same(step(X), eager_step(twin, square, reference, X), f"loss of step {number}")
    assert_same(tensors_of(model), tensors_of(twin))
    assert len(step._steps) == 2


def test_what_the_loss_does_not_read_of_an_object_makes_no_capture() -> None:
    model = nn.Linear(8, 8)
    step = roamc.train_step(model, by_config, sgd(model), strict=True)
    for epoch in range(3):
        CONFIG.epoch = epoch
        step(X)
    assert len(step._steps) == 1


def test_what_the_loss_writes_to_an_object_makes_no_capture_and_hides_nothing_else() -> None:
    meter = SimpleNamespace(last=None, scale=1.0)

    def noting(model: nn.Module, x: Tensor) -> Tensor:
        meter.last = square(model, x) * meter.scale * SLOTTED.factor() * NESTED["rows"][0][0]
        return meter.last  # type: ignore[return-value]

    step = changes_between_steps(noting, lambda: setattr(meter, "scale", 3.0))
    assert len(step._steps) == 2
    changes_between_steps(noting, lambda: NESTED["rows"][0].__setitem__(0, 7.0))


@pytest.mark.parametrize("name", ["logger", "bound method", "adapter"])
def test_a_logger_makes_no_capture_for_every_step(name: str) -> None:
    """A logger leads to all others, some of which are new after a trace; the loss reads each attribute it may."""
    logger, traced = logging.getLogger(f"{__name__}.{name}"), []
    warn = {"logger": logger, "bound method": logger.debug, "adapter": logging.LoggerAdapter(logger)}[name]
    kind = "tanh"

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        traced.append(kind)
        getattr(warn, "debug", warn)("traced")
        logging.getLogger(f"{__name__}.{name}.{uuid.uuid4()}").debug("as torch asks its own")
        return getattr(torch, kind)(model(x)).square().mean()

    model = nn.Linear(8, 8)
    step = roamc.train_step(model, loss, sgd(model), strict=True)
    for _ in range(3):
        step(X)
    assert traced == [kind]

"""Batches of any nest: keywords, dicts, dataclasses, named tuples, and what data libraries hand out."""

from __future__ import annotations

import copy
import functools
import math
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import roamc
from roamc.capture.batch import describe, put_together, take_apart
from roamc.capture.python_keys import Seen
from tests.end_to_end.helpers import assert_same, eager_step, noise, sgd, tensors_of

X, Y = noise(4, 8), noise(4, 8, seed=4)


@dataclass
class Pair:
    x: Any
    y: Tensor
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: Tensor
    counted: int = field(default=0, init=False)


class Named(NamedTuple):
    x: Tensor
    y: Tensor


class Encoding(UserDict[str, Any]):
    """As a tokenizer's BatchEncoding: attributes are items, and it has more of them than it shows."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.encodings = [object()]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Attributes(dict[str, Any]):
    """Items are attributes, by an idiom that many projects have."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Ordered(OrderedDict[str, Any]):
    pass


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def by_attribute(model: Any, batch: Any) -> Tensor:
    return loss_of(model, batch.x, batch.y)


def by_item(model: Any, batch: Any) -> Tensor:
    return loss_of(model, batch["x"], batch["y"])


def unpacked(model: Any, batch: Any) -> Tensor:
    return loss_of(model, **batch)


def packed(model: Any, batch: PackedSequence) -> Tensor:
    return model(batch.data).square().mean() * batch.batch_sizes.shape[0]


BATCHES: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]] = {
    "keyword": (loss_of, (X,), {"y": Y}),
    "keywords": (loss_of, (), {"y": Y, "x": X}),
    "names that the step has itself": (lambda m, self, batch: loss_of(m, self, batch), (), {"self": X, "batch": Y}),
    "dict": (by_item, ({"x": X, "y": Y},), {}),
    "dict, other order": (by_item, ({"y": Y, "x": X},), {}),
    "keyword that is a dict": (lambda m, *, data: by_item(m, data), (), {"data": {"x": X, "y": Y}}),
    "dataclass": (by_attribute, (Pair(X, Y),), {}),
    "frozen dataclass": (by_attribute, (Frozen(X, Y),), {}),
    "named tuple": (by_attribute, (Named(X, Y),), {}),
    "user dict": (unpacked, (Encoding({"x": X, "y": Y}),), {}),
    "user dict by attribute": (by_attribute, (Encoding({"x": X, "y": Y}),), {}),
    "dict with attributes": (by_attribute, (Attributes(x=X, y=Y),), {}),
    "heir of an ordered dict": (unpacked, (Ordered(x=X, y=Y),), {}),
    "nest": (lambda m, batch: by_attribute(m, batch["a"][0].x["b"]), ({"a": [Pair({"b": Named(X, Y)}, Y)]},), {}),
    "size": (lambda m, x, y, size: loss_of(m, x, y) * size.numel(), (X, Y, X.shape), {}),
    "packed sequence": (packed, (pack_sequence([X, X[:2]]),), {}),
}  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


@pytest.mark.parametrize("name", BATCHES)
def test_step_takes_any_nest(name: str) -> None:
    loss_fn, args, named = BATCHES[name]
    model = net()
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, loss_fn, sgd(model), strict=True), sgd(twin)
    for _ in range(2):
        assert_same(step(*args, **named), eager_step(twin, lambda m: loss_fn(m, *args, **named), reference))
    assert_same(tensors_of(model), tensors_of(twin))
    assert len(step.plans) == 1


def test_new_tensors_in_an_old_container_are_read() -> None:
    for batch in (Pair(X, Y), Attributes(x=X, y=Y), Encoding({"x": X, "y": Y})):
        model = net()
        twin = copy.deepcopy(model)
        step, reference = roamc.train_step(model, by_attribute, sgd(model), strict=True), sgd(twin)
        for x in (X, Y, -X):
            (batch.data if isinstance(batch, Encoding) else batch.__dict__)["x"] = x
            assert_same(step(batch), eager_step(twin, by_attribute, reference, batch))
        assert len(step.plans) == 1


def test_order_of_a_dict_does_not_matter() -> None:
    model, twin = net(), net()
    step, reference = roamc.train_step(model, by_item, sgd(model), strict=True), sgd(twin)
    for batch in ({"x": X, "y": Y}, {"y": Y, "x": X}, {"x": Y, "y": X}):
        assert_same(step(batch), eager_step(twin, by_item, reference, batch))


@pytest.mark.parametrize("name", BATCHES)
def test_taken_apart_and_put_together_is_the_same(name: str) -> None:
    _, args, named = BATCHES[name]
    leaves, nest = take_apart((args, named))
    again = put_together(leaves, nest)
    assert all(isinstance(leaf, Tensor | torch.Size | float | int | bool | None) for leaf in leaves)
    assert [type(value) for value in again[0]] == [type(value) for value in args]
    assert all(one is other for one, other in zip(take_apart(again)[0], leaves, strict=True))
    assert nest.key(Seen()) == take_apart(again)[1].key(Seen())


def test_other_containers_are_other_batches() -> None:
    kinds = [(Pair(X, Y),), (Frozen(X, Y),), (Named(X, Y),), ({"x": X, "y": Y},), (Encoding({"x": X, "y": Y}),)]
    assert len({take_apart(kind)[1].key(Seen()) for kind in kinds}) == len(kinds)


def test_object_with_tensors_that_nobody_can_open_is_refused() -> None:
    class Bag:
        def __init__(self) -> None:
            self.x = X

    with pytest.raises(roamc.CaptureError, match="lists, dicts or dataclasses of them, not Bag"):
        describe(Bag(), Seen())


@pytest.mark.parametrize("hooked", [False, True])
def test_batch_that_wants_its_gradient_sent_back_is_refused(hooked: bool) -> None:
    model = net()
    x = X.clone().requires_grad_()
    if hooked:
        x.register_hook(lambda grad: grad * 2)
    else:
        x = x * 2
    step = roamc.train_step(model, loss_of, sgd(model))
    with pytest.raises(roamc.CaptureError, match="gradient hook" if hooked else r"MulBackward0.*\.detach\(\)"):
        step(x, Y)
    step(x.detach(), Y)


class Forward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, other: Any = None, twice: bool = False) -> Tensor:
        y = self.linear(x) + (other.y if isinstance(other, Pair) else 0)
        return y * 2 if twice else y


def test_plan_takes_keywords_of_the_batch_beside_options() -> None:
    model = Forward()
    alone = roamc.plan(model, X)
    assert roamc.plan(model, x=X, alignment=128).fingerprint == alone.fingerprint
    assert roamc.plan(model, X, other=Pair(X, Y), twice=True, strict=True).fingerprint != alone.fingerprint
    step = roamc.plan(model, X, y=Y, loss_fn=loss_of, optimizer=sgd(model), order="program")
    assert step.fingerprint == roamc.train_step(model, loss_of, sgd(model)).plan(X, y=Y).fingerprint


def test_keyword_of_plan_that_is_neither_is_an_unknown_option() -> None:
    with pytest.raises(roamc.OptionError, match="unknown option 'memory_limt'; did you mean 'memory_budget'"):
        roamc.plan(Forward(), X, memory_limt=3)
    with pytest.raises(roamc.OptionError, match="unknown option 'twise'"):
        roamc.plan(Forward(), X, twise=True)


def test_tokenizers_and_models_containers() -> None:
    transformers = pytest.importorskip("transformers")
    outputs = pytest.importorskip("transformers.modeling_outputs")
    batch = transformers.BatchEncoding({"x": X, "y": Y})
    model = net()
    step = roamc.train_step(model, lambda m, batch, out: by_attribute(m, batch) + out.logits.mean(), sgd(model))
    step(batch, outputs.CausalLMOutput(logits=X))
    step(transformers.BatchEncoding({"x": Y, "y": X}), outputs.CausalLMOutput(logits=Y))
    assert len(step.plans) == 1


class Scaled:
    """A value of the user's: it says that it equals all others."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def scaled(self, value: Tensor) -> Tensor:
        return value * self.scale


class Level(float, Enum):
    LOW = 1.0
    HIGH = 2.0


class Shown(Scaled):
    def __repr__(self) -> str:
        return "Shown"


@functools.cache
def named_by_one_name(scale: float) -> type[Any]:
    class Named(NamedTuple):
        item: int

        def scaled(self, value: Tensor) -> Tensor:
            return value * scale

    return Named


@dataclass
class Scaling:
    """A container whose method reads what lies in no instance."""

    item: int = 1
    by = 1.0

    def scaled(self, value: Tensor) -> Tensor:
        return value * self.by * _numbers[0]


_kept, _numbers = Scaled(1.0), [1.0]

VALUES: dict[str, tuple[Callable[[float], Any], Callable[[Tensor, Any], Tensor], int]] = {
    "new objects": (Scaled, lambda loss, value: value.scaled(loss), 2),
    "one object": (lambda number: setattr(_kept, "scale", number) or _kept, lambda loss, value: value.scaled(loss), 2),
    "function": (
        lambda number: _numbers.__setitem__(0, number) or _by_number,
        lambda loss, value: value(loss),
        2,
    ),
    "numpy": (lambda number: np.float64(number - 2), lambda loss, value: loss * float(value), 2),
    "sign of zero": (lambda number: np.float64(0 * (number - 1.5)), lambda loss, v: loss * math.copysign(1, v), 2),
    "enum": (Level, lambda loss, value: loss * value, 2),
    "types in a set": (
        lambda number: frozenset({1.0 if number == 1 else 1}),
        lambda loss, value: loss * len(repr(value)),
        2,
    ),
    "range": (lambda number: range(int(number)), lambda loss, value: loss * len(value), 2),
    "keys of a dict": (lambda number: {Shown(number): 1}, lambda loss, value: next(iter(value)).scaled(loss), 2),
    "keys of a dict in a dict": (
        lambda number: {"k": UserDict({Shown(number): 1})},
        lambda loss, value: next(iter(value["k"])).scaled(loss),
        2,
    ),
    "types of keys": (
        lambda number: {1.0 if number == 1 else 1: 1},
        lambda loss, value: loss * len(repr(value)),
        2,
    ),
    "named tuples": (lambda number: named_by_one_name(number)(1), lambda loss, value: value.scaled(loss), 2),
    "a number of a dataclass": (
        lambda number: setattr(Scaling, "by", number) or Scaling(),
        lambda loss, value: value.scaled(loss),
        2,
    ),
    "what a dataclass reads": (
        lambda number: _numbers.__setitem__(0, number) or Scaling(),
        lambda loss, value: value.scaled(loss),
        2,
    ),
    "no more of it": (lambda number: Scaled(5.0), lambda loss, value: value.scaled(loss), 1),
}


def _by_number(value: Tensor) -> Tensor:
    return value * _numbers[0]


@pytest.mark.parametrize(("make", "use", "plans"), VALUES.values(), ids=list(VALUES))
def test_values_count_by_their_content(
    make: Callable[[float], Any], use: Callable[[Tensor, Any], Tensor], plans: int
) -> None:
    def loss_fn(model: nn.Module, x: Tensor, value: Any) -> Tensor:
        return use(model(x).square().mean(), value)

    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, loss_fn, sgd(model), strict=True), sgd(twin)
    for number in (1.0, 2.0, 1.0):
        assert_same(step(X, make(number)), eager_step(twin, loss_fn, reference, X, make(number)))
        assert_same(tensors_of(model), tensors_of(twin))
    assert len(step.plans) == plans

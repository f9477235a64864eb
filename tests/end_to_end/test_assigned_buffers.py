"""Buffers and parameters that forward assigns anew: the next step finds what eager finds, or the step is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import adamw, assert_same, eager_step, noise, square, tensors_of

Assign = Callable[["Remembers", Tensor], object]


class Remembers(nn.Module):
    """Reads three buffers, and then does with them what it is told."""

    def __init__(self, assign: Assign) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        for number, name in enumerate(("new", "old", "oldest")):
            self.register_buffer(name, torch.full((8,), 1.0 + number))
        self.register_buffer("missing", None)
        self.assign = assign

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x).relu())
        result = y * self.new + self.old * self.oldest
        self.assign(self, y.detach())
        return result


def pair(assign: Assign) -> tuple[roamc.TrainStep, nn.Module, torch.optim.Optimizer]:
    model = Remembers(assign)
    twin = copy.deepcopy(model)
    return roamc.train_step(model, square, adamw(model), strict=True), twin, adamw(twin)


def exchange(m: nn.Module, y: Tensor) -> None:
    m.new, m.old = m.old, m.new


def hand_on(m: nn.Module, y: Tensor) -> None:
    m.oldest, m.old, m.new = m.old, m.new, y.mean(0)


def one_by_one(m: nn.Module, y: Tensor) -> None:
    m.old = m.new
    m.new = 0.5 * m.new + y.mean(0)


def turn(m: nn.Module, y: Tensor) -> None:
    m.new, m.old, m.oldest = m.old, m.oldest, m.new


def make_what_is_the_same_in_every_step(m: nn.Module, y: Tensor) -> None:
    m.register_buffer("mask", torch.ones(8).cumsum(0))


KEPT = (exchange, hand_on, one_by_one, turn)


@pytest.mark.parametrize("assign", [*KEPT, make_what_is_the_same_in_every_step])
def test_the_next_step_finds_what_eager_finds(assign: Assign) -> None:
    step, twin, reference = pair(assign)
    for number in range(4):
        x = noise(4, 8, seed=number)
        assert_same(step(x), eager_step(twin, square, reference, x), f"loss of step {number}")
        after = tensors_of(twin)
        after.pop("mask", None)
        assert_same(tensors_of(step.model), after, f"after step {number}")


def modules_exchanged(m: nn.Module, y: Tensor) -> None:
    m.first, m.last = m.last, m.first


def tie(m: nn.Module, y: Tensor) -> None:
    m.last.weight = m.first.weight


def weights_exchanged(m: nn.Module, y: Tensor) -> None:
    m.first.weight, m.last.weight = m.last.weight, m.first.weight


def written_twice(m: nn.Module, y: Tensor) -> None:
    m.old = m.oldest
    m.oldest.mul_(0.5)


def written_by_a_view(m: nn.Module, y: Tensor) -> None:
    m.old = m.oldest.view(8)
    m.old.mul_(0.5)


REFUSED: dict[str, tuple[Assign, str]] = {
    "modules exchanged": (modules_exchanged, r"another parameter into first\.weight"),
    "weights tied": (tie, r"another parameter into last\.weight"),
    "weights exchanged": (weights_exchanged, r"another parameter into first\.weight"),
    "no bias": (lambda m, y: setattr(m.first, "bias", None), r"takes parameter first\.bias away"),
    "no buffer": (lambda m, y: setattr(m, "old", None), "takes buffer 'old' away"),
    "a first buffer": (lambda m, y: setattr(m, "missing", y.mean(0)), "makes buffer 'missing'"),
    "one more buffer": (lambda m, y: m.register_buffer("more", y.mean(0)), "makes buffer 'more'"),
    "one buffer twice": (written_twice, "'old' that shares memory with 'oldest'"),
    "a view of a buffer": (written_by_a_view, "'old' that shares memory with 'oldest'"),
    "a parameter": (lambda m, y: setattr(m, "old", m.first.bias.detach()), "'old' that shares .*'first.bias'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_next_step_would_not_find_is_refused(name: str) -> None:
    assign, says = REFUSED[name]
    step, *_ = pair(assign)
    with pytest.raises(roamc.CaptureError, match=says):
        step(noise(4, 8))


def test_a_buffer_may_become_another_one_that_nobody_writes() -> None:
    step, twin, reference = pair(lambda m, y: setattr(m, "old", m.oldest))
    for number in range(3):
        x = noise(4, 8, seed=number)
        assert_same(step(x), eager_step(twin, square, reference, x), f"loss of step {number}")
        assert_same(step.model.old, twin.old)


def test_a_buffer_with_two_names_is_assigned_under_both() -> None:
    def both(m: nn.Module, y: Tensor) -> None:
        m.new = m.old = y.mean(0)

    def one(m: nn.Module, y: Tensor) -> None:
        m.new = y.mean(0)

    for assign, refused in ((both, False), (one, True)):
        model = Remembers(assign)
        model.new = model.old
        twin = copy.deepcopy(model)
        step, reference = roamc.train_step(model, square, adamw(model), strict=True), adamw(twin)
        if refused:
            with pytest.raises(roamc.CaptureError, match="'new' that shares memory with 'old'"):
                step(noise(4, 8))
            continue
        for number in range(3):
            assert_same(step(noise(4, 8, seed=number)), eager_step(twin, square, reference, noise(4, 8, seed=number)))
        assert_same(tensors_of(model), tensors_of(twin))

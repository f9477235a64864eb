"""Attributes that forward sets: nothing of a trace stays in a module, and nothing is carried over wrongly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from roamc.errors import CaptureError
from tests.end_to_end.helpers import assert_steps_equal, seeded


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)


class Notes(Base):
    """Keeps what it computes, for whoever wants to look, and reads back what it has kept in this step."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.seen: list[Tensor] = [torch.ones(8)]
        self.by_name: dict[str, Any] = {"first": [torch.ones(8)]}

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.last, self.new = h.detach(), h
        self.seen.append(h.mean())
        self.by_name["h"] = {"h": h}
        self.by_name["first"].append(h)
        return h * self.new.sigmoid()


class Carries(Base):
    """The next step reads what this one leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.t = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y: Tensor = h * self.t
        self.t = self.t * 0.5 + h.detach().mean(0)
        return y


class Starts(Base):
    """The same, from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.t: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        y = h if self.t is None else h * self.t
        self.t = h.detach().mean(0)
        return y


class Caches(Base):
    """Makes a mask once."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or self.mask.size(0) != len(x):
            self.mask = torch.triu(torch.ones(len(x), 8)).masked_fill(torch.eye(len(x), 8) > 0, 2.0)
        return self.a(x) * self.mask


class Rebinds(Base):
    """The same with a buffer, which backward reads as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("t", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y: Tensor = h * self.t
        self.t = self.t * 0.5 + h.detach().mean(0)
        return y


class Seeds(Base):
    def __init__(self, seed: Callable[[], object] = lambda: torch.manual_seed(3)) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        self.seed()
        return F.dropout(self.a(x), 0.5)


OUTSIDE = 11

GENERATOR = torch.default_generator
"""By a name of ours, past those of torch that a trace watches."""

SEEDS: dict[str, Callable[[], object]] = {
    "manual_seed": lambda: torch.manual_seed(3),
    "its module's": lambda: torch.random.manual_seed(3),
    "seed": lambda: torch.random.seed(),
    "of a device": lambda: torch.cuda.manual_seed(3),
    "of all devices": lambda: torch.cuda.random.manual_seed_all(3),
    "by keyword": lambda: torch.manual_seed(seed=3),
    "the generator's": lambda: torch.default_generator.manual_seed(3),
    "the seed that it has": lambda: GENERATOR.manual_seed(GENERATOR.initial_seed()),
    "that of outside": lambda: torch.default_generator.manual_seed(OUTSIDE),
}


def total(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    return loss


def step_of(model: nn.Module) -> roamc.TrainStep:
    return roamc.train_step(model, total, torch.optim.SGD(model.parameters(), 0.1), strict=True)


@pytest.mark.parametrize("way", ["step", "plan of a step", "plan"])
def test_no_tensor_of_a_trace_stays_in_a_module(way: str) -> None:
    model, x = Notes(), torch.randn(4, 8)
    seen = model.seen[0]
    if way == "plan":
        roamc.plan(model, x)
    elif way == "step":
        step_of(model)(x)
    else:
        step_of(model).plan(x)
    assert model.last is None
    assert not hasattr(model, "new")
    assert model.seen == [seen]
    assert list(model.by_name) == ["first"]
    assert len(model.by_name["first"]) == 1
    assert copy.deepcopy(model)(x).shape == (4, 8)


@pytest.mark.parametrize("kind", [Notes, Caches])
def test_what_a_step_keeps_and_reads_back_is_its_own(kind: type[Base]) -> None:
    assert_steps_equal(
        kind(), total, lambda model: torch.optim.SGD(model.parameters(), 0.1), [(torch.randn(4, 8),)] * 3
    )


@pytest.mark.parametrize("kind", [Carries, Starts])
def test_a_tensor_for_the_next_step_is_refused_by_the_name_of_its_attribute(kind: type[Base]) -> None:
    model = nn.Sequential(kind())
    before = model[0].t
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"forward reads 't' of 0 and then sets it .*; make it a buffer"):
            step_of(model)(torch.randn(4, 8))
    assert model[0].t is before
    other = roamc.optimize(Carries(), strict=True)
    assert other(torch.randn(4, 8)).shape == (4, 8)


def test_backward_reads_a_buffer_as_it_was_before_forward_set_it() -> None:
    assert_steps_equal(
        Rebinds(), total, lambda model: torch.optim.SGD(model.parameters(), 0.1), [(torch.randn(4, 8),)] * 4
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_inside_of_the_step_is_refused(seed: str) -> None:
    before = torch.get_rng_state()
    torch.manual_seed(OUTSIDE)
    step = step_of(Seeds(SEEDS[seed]))
    x, state = torch.randn(4, 8), torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"seeds torch's generator \(torch.manual_seed\).*seed outside"):
        step(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.initial_seed() == OUTSIDE
    torch.set_rng_state(before)


def test_a_seed_inside_of_forward_is_kept_by_optimize() -> None:
    model = Seeds()
    wanted = seeded(lambda: [total(model, torch.ones(4, 8)) for _ in range(2)])
    compiled = roamc.optimize(model)
    assert seeded(lambda: [total(compiled, torch.ones(4, 8)) for _ in range(2)]) == wanted

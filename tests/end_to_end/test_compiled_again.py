"""An optimized module in another compilation, in wrappers, and its copies: no plan is lost in silence."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import roamc.frontends.backend
from tests.end_to_end.helpers import assert_same, gradients_of, noise, sgd, square, warnings_of_roamc


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


class Own(nn.Module):
    """A module of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Outer(nn.Module):
    """A model with another as its part."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)).sin()


def own() -> nn.Module:
    torch.manual_seed(2)
    return Own()


def torchs() -> nn.Module:
    """A module of one of torch's classes."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))


makes = pytest.mark.parametrize("make", [own, torchs])


def compiled(model: nn.Module) -> Callable[..., Tensor]:
    return torch.compile(model, backend="eager")  # type: ignore[no-any-return]


def compiled_outer(model: nn.Module) -> Callable[..., Tensor]:
    torch.manual_seed(4)
    return compiled(Outer(model))


def compiled_sequence(model: nn.Module) -> Callable[..., Tensor]:
    return compiled(nn.Sequential(model, nn.Tanh()))


def compiled_function(model: nn.Module) -> Callable[..., Tensor]:
    return torch.compile(lambda x: model(x) * 2, backend="eager")  # type: ignore[no-any-return]


def compiled_in_place(model: nn.Module) -> Callable[..., Tensor]:
    torch.manual_seed(4)
    outer = Outer(model)
    outer.compile(backend="eager")
    return outer


AGAIN = (compiled, compiled_outer, compiled_sequence, compiled_function, compiled_in_place)


@makes
@pytest.mark.parametrize("again", AGAIN)
def test_another_compilation_leaves_the_module_its_plan_and_says_so(
    make: Callable[[], nn.Module], again: Callable[[nn.Module], Callable[..., Tensor]]
) -> None:
    eager, model = make(), roamc.optimize(make(), memory_budget="1GiB")
    call = again(model)
    with warnings_of_roamc() as texts:
        for _ in range(2):
            square(call, noise(4, 8)).backward()  # type: ignore[arg-type]
    assert [plan.budget_bytes for plan in roamc.plans(model)] == [1 << 30]
    assert len(texts) == 1
    assert "it keeps roamc's plan, and the other graph breaks there" in texts[0]
    torch._dynamo.reset()
    plain = again(eager)
    for _ in range(2):
        square(plain, noise(4, 8)).backward()  # type: ignore[arg-type]
    assert_same(gradients_of(model), gradients_of(eager))
    torch._dynamo.reset()
    strict = again(roamc.optimize(make(), strict=True))
    with pytest.raises(roamc.CaptureError, match=r"was compiled by roamc\.optimize, and torch.compile compiles it"):
        strict(noise(4, 8))


@makes
@pytest.mark.parametrize("by", ["optimize", "backend"])
def test_roamc_around_an_optimized_module_plans_both_as_one(make: Callable[[], nn.Module], by: str) -> None:
    def around(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
        outer = Outer(model)
        if by == "optimize":
            return roamc.optimize(outer, **options)
        return torch.compile(outer, backend="roamc", options=options, dynamic=False)  # type: ignore[no-any-return]

    roamc.frontends.backend.LATEST.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({}, {"memory_budget": "1GiB"}):
            part = roamc.optimize(make(), strict=True, **options)
            square(around(part, strict=True, **options), noise(4, 8)).backward()  # type: ignore[arg-type]
    assert len(roamc.plans()) == 2
    assert roamc.plans(part) == []
    model = roamc.optimize(make(), memory_budget="2GiB")
    with warnings_of_roamc() as texts:
        square(around(model, memory_budget="1GiB"), noise(4, 8)).backward()  # type: ignore[arg-type]
    assert ["one plan covers both" in text for text in texts] == [True]
    strict = around(roamc.optimize(make(), memory_budget="2GiB", strict=True))
    with pytest.raises(Exception, match=rf"memory_budget=.\+1%. in the place of memory_budget={2 << 30}"):
        strict(noise(4, 8))


@makes
def test_wrappers_that_call_the_module_run_its_plan(make: Callable[[], nn.Module]) -> None:
    for wrap in (nn.DataParallel, Outer, lambda model: nn.Sequential(model, nn.Tanh())):
        model = roamc.optimize(make(), strict=True)
        square(wrap(model), noise(4, 8)).backward()
        assert len(roamc.plans(model)) == 1


@makes
def test_an_average_is_optimized_like_its_model(make: Callable[[], nn.Module]) -> None:
    model = roamc.optimize(make(), strict=True, memory_budget="1GiB")
    average = AveragedModel(model)
    x = noise(4, 8)
    for _ in range(2):
        square(model, x).backward()
        sgd(model).step()
        average.update_parameters(model)
    with torch.no_grad():
        wanted = copy.deepcopy(average)(x)
        assert torch.equal(average(x), wanted)
    assert [plan.budget_bytes for plan in roamc.plans(average.module)] == [1 << 30]


def test_a_step_over_an_optimized_module_and_its_copy() -> None:
    results = []
    for make in (lambda: roamc.optimize(own()), lambda: copy.deepcopy(roamc.optimize(own())), own):
        model = make()
        step = roamc.train_step(model, square, sgd(model), strict=True)
        results.append([step(noise(4, 8, seed=seed)) for seed in range(2)])
        assert len(step.plans) == 1
    assert_same(results[0], results[2])
    assert_same(results[1], results[2])


def test_a_copy_inside_a_model_and_a_model_of_copies() -> None:
    inner = roamc.optimize(own(), strict=True)
    outer = copy.deepcopy(Outer(inner))
    copies = nn.ModuleList([inner, copy.deepcopy(inner)])
    twins = copy.deepcopy(copies)
    square(outer, noise(4, 8)).backward()
    for part in twins:
        square(part, noise(4, 8)).backward()
    assert [len(roamc.plans(part)) for part in (inner, outer.inner, *twins)] == [0, 1, 1, 1]


def test_a_copy_of_a_recurrent_model_is_planned() -> None:
    original = roamc.optimize(nn.LSTM(8, 8), strict=True)
    model = copy.deepcopy(original)
    nn.init.zeros_(model.weight_hh_l0)
    model(noise(3, 2, 8))[0].sum().backward()
    assert len(roamc.plans(model)) == 1
    assert original.weight_hh_l0.grad is None
    assert model.weight_hh_l0.grad is not None


def test_a_shallow_copy_is_a_plain_module() -> None:
    model = roamc.optimize(own(), strict=True)
    shallow = copy.copy(model)
    assert torch.equal(shallow(noise(4, 8)), own()(noise(4, 8)))
    with pytest.raises(roamc.RoamcError, match=r"was not made by roamc\.optimize"):
        roamc.plans(shallow)


def test_compile_afterwards_takes_the_place_of_optimize_and_plans_say_so() -> None:
    model = roamc.optimize(own(), strict=True)
    model.compile(backend="eager")
    square(model, noise(4, 8)).backward()
    with pytest.raises(roamc.RoamcError, match="compiled again by its method compile"):
        roamc.plans(model)
    roamc.optimize(model)
    square(model, noise(4, 8)).backward()
    assert len(roamc.plans(model)) == 1


def test_weights_move_and_load_as_before() -> None:
    model = roamc.optimize(own(), strict=True)
    assert list(model.state_dict()) == list(own().state_dict())
    model.double()
    square(model, noise(4, 8).double()).backward()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = own().double()
    other.load_state_dict(torch.load(file))
    assert_same(other.state_dict(), model.state_dict())


def test_nothing_keeps_a_copy_alive() -> None:
    model = copy.deepcopy(roamc.optimize(own()))
    square(model, noise(4, 8)).backward()
    gone = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None

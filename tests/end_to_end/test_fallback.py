"""When roamc itself fails, training goes on; when the budget cannot be met, it does not begin."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roamc
from roamc.planning import pipeline
from tests.end_to_end.cases import SMALL, Layers
from tests.end_to_end.helpers import (
    aot_eager,
    assert_same,
    noise,
    optimized,
    run_backward,
    sgd,
    square,
    state_of,
    tensors_of,
)

BATCHES = [(noise(4, 8, seed=seed),) for seed in range(2)]


class Bug(Exception):
    """What a mistake in a pass could raise."""


def fail(*args: Any, **kwargs: Any) -> Any:
    raise Bug("a mistake\nin two lines")


def break_pass(name: str, part: str) -> Callable[[pytest.MonkeyPatch], None]:
    def use(patch: pytest.MonkeyPatch) -> None:
        broken = [dataclasses.replace(p, **{part: fail}) if p.name == name else p for p in pipeline.PIPELINE]
        patch.setattr(pipeline, "PIPELINE", tuple(broken))

    return use


def break_name(target: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(target, fail)


BREAKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "normalize decide": break_pass("normalize", "decide"),
    "checkpoint apply": break_pass("checkpoint", "apply"),
    "retain apply": break_pass("retain", "apply"),
    "reorder decide": break_pass("reorder", "decide"),
    "reorder apply": break_pass("reorder", "apply"),
    "reuse apply": break_pass("reuse", "apply"),
    "layout decide": break_pass("layout", "decide"),
    "layout apply": break_pass("layout", "apply"),
    "emit": break_name("roamc.runtime.program.emit"),
    "capture": break_name("roamc.capture.joint.stitch"),
    "judge": break_name("roamc.planning.layout_judge.check_layout"),
    "load": break_name("roamc.runtime.program.load"),
    "partition": break_name("roamc.frontends.backend.partitioned"),
}
each_break = pytest.mark.parametrize("use", BREAKS.values(), ids=BREAKS)


def model_of_two_plans() -> nn.Module:
    return Layers(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8))


@each_break
def test_one_warning_and_the_results_of_aot_eager(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[pytest.MonkeyPatch], None]
) -> None:
    use(monkeypatch)
    model = model_of_two_plans()
    twin = aot_eager(model)
    model = roamc.optimize(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [run_backward(model, square, batch) for batch in BATCHES]
    wanted = [run_backward(twin, square, batch) for batch in BATCHES]
    assert_same(results, wanted)
    assert roamc.plans(model) == []
    messages = [str(one.message) for one in caught if "roamc" in str(one.message)]
    assert len(messages) == 1
    assert "Layers" in messages[0]
    assert "Bug: a mistake" in messages[0]
    assert "strict" in messages[0]
    assert "\n" not in messages[0]


def test_two_models_of_one_class_are_warned_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    break_name("roamc.capture.joint.stitch")(monkeypatch)
    for _ in range(2):  # torch's own modules are called through a function of dynamo's
        compiled = torch.compile(nn.Sequential(nn.Linear(8, 8)), backend="roamc")
        with pytest.warns(UserWarning, match="falls back to torch's aot_eager"):
            compiled(*BATCHES[0])
        torch._dynamo.reset()


def test_inference_falls_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    break_name("roamc.capture.joint.inference")(monkeypatch)
    model = roamc.optimize(SMALL["batch norm"].build().eval())
    x = noise(2, 3, 8, 8)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="falls back to torch's aot_eager"):
            output = model(x)
        assert_same(output, aot_eager(model)(x))


def test_a_second_graph_is_planned_after_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = roamc.optimize(model_of_two_plans())
    with monkeypatch.context() as patch:
        BREAKS["emit"](patch)
        with pytest.warns(UserWarning, match="aot_eager"):
            run_backward(model, square, BATCHES[0])
    run_backward(model, square, (noise(2, 8),))
    assert len(roamc.plans(model)) == 1


@each_break
def test_strict_raises(monkeypatch: pytest.MonkeyPatch, use: Callable[[pytest.MonkeyPatch], None]) -> None:
    use(monkeypatch)
    with pytest.raises(Exception, match="a mistake"):
        run_backward(optimized(model_of_two_plans()), square, BATCHES[0])


BUDGET = r"needs [\d.]+ \w+ \(\d+ bytes\) at its peak, above memory_budget=100 B, .*Raise the budget, or use"


def test_budget_of_a_train_step_is_checked_before_anything_runs() -> None:
    model = model_of_two_plans()
    optimizer = sgd(model)
    before, random = tensors_of(model), torch.get_rng_state()
    step = roamc.train_step(model, square, optimizer, memory_budget="100 B")
    for _ in range(2):
        with pytest.raises(roamc.BudgetError, match=BUDGET):
            step(*BATCHES[0])
    assert_same(tensors_of(model), before)
    assert_same(torch.get_rng_state(), random)
    assert state_of(optimizer) == {}
    assert step.plans == []


@pytest.mark.parametrize("strict", [True, False])
def test_budget_of_a_compiled_module_is_checked_before_anything_runs(strict: bool) -> None:
    model = SMALL["buffers"].build()
    before = tensors_of(model)
    model = roamc.optimize(model, memory_budget="100 B", strict=strict)
    with pytest.raises(Exception, match=BUDGET) as caught:
        model(*BATCHES[0])
    error = caught.value
    assert isinstance(getattr(error, "inner_exception", error), roamc.BudgetError)
    assert_same(tensors_of(model), before)


def test_budget_that_is_met_changes_nothing() -> None:
    model = model_of_two_plans()
    peak = roamc.plan(model, *BATCHES[0], loss_fn=square, optimizer=sgd(model)).needed_bytes
    assert roamc.plan(model, *BATCHES[0], loss_fn=square, optimizer=sgd(model), memory_budget=peak).needed_bytes == peak
    with pytest.raises(roamc.BudgetError):
        roamc.plan(model, *BATCHES[0], loss_fn=square, optimizer=sgd(model), memory_budget=peak - 1)
    roamc.train_step(model, square, sgd(model), memory_budget=peak)(*BATCHES[0])


def test_budget_error_names_a_bound_that_is_below_the_peak() -> None:
    model = model_of_two_plans()
    plan = roamc.plan(model, *BATCHES[0])
    with pytest.raises(roamc.BudgetError) as caught:
        roamc.plan(model, *BATCHES[0], memory_budget="1 B")
    needed = int(re.search(r"\((\d+) bytes\)", str(caught.value))[1])  # type: ignore[index]
    assert plan.bound_bytes <= needed <= plan.needed_bytes
    assert roamc.plan(model, *BATCHES[0], memory_budget=needed).needed_bytes == needed


class MarginLoss(nn.Module):
    """The kernel gives the dtype of its first argument; torch traces the wider of the two, for backward, too."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8).bfloat16()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.soft_margin_loss(self.line(x), target)


def test_output_of_another_dtype_than_torch_traced_falls_back() -> None:
    torch.manual_seed(0)
    model = MarginLoss()
    twin = copy.deepcopy(model)
    batch = noise(6, 8).bfloat16(), noise(6, 8).sign()
    with pytest.warns(UserWarning, match="where torch traced torch.float32"):
        roamc.optimize(model)(*batch).backward()
    twin(*batch).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()], "gradients")

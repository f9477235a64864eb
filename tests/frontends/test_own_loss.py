"""A model whose output has a loss is planned with it and an optimizer; without one, nothing asked for is lost."""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from roamc.errors import BudgetError, CaptureError, OptionError
from roamc.frontends.workload import capture, made
from roamc.graph import Role, TrainGraph
from roamc.graph.fingerprint import fingerprint
from tests.cli.test_cli import run

ROWS, WIDTH, CLASSES = 16, 32, 512


@dataclass
class Output:
    """As some libraries return it: an object."""

    logits: Tensor
    loss: Tensor | None = None


class Named(UserDict[str, Any]):
    """As a tokenizer's BatchEncoding: a mapping that torch does not open."""


class Classifier(nn.Module):
    """Returns logits, and a loss where it gets labels, as models of transformers do.

    Args:
        kind: container of its output.
    """

    def __init__(self, kind: Callable[..., Any] = dict) -> None:
        super().__init__()
        self.kind, self.inner, self.head = kind, nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.inner(features).relu())
        return (
            self.kind(logits=logits)
            if labels is None
            else self.kind(logits=logits, loss=F.cross_entropy(logits, labels))
        )


class Measured(Classifier):
    """Its ``loss`` is one for each row, or tells nothing of parameters."""

    def __init__(self, reduced: bool) -> None:
        super().__init__()
        self.reduced = reduced

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(features)["logits"]
        return {"logits": logits, "loss": logits.detach().mean() if self.reduced else logits.mean(1)}


def batch(rows: int = ROWS, labels: bool = True) -> dict[str, Tensor]:
    named = {"features": torch.zeros(rows, WIDTH)}
    return {**named, "labels": torch.zeros(rows, dtype=torch.long)} if labels else named


def loss_of(model: nn.Module, **named: Tensor) -> Tensor:
    output = model(**named)
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output.loss
    return loss


def tangents(graph: TrainGraph) -> list[str]:
    return [port.name for port in graph.inputs if port.role is Role.TANGENT]


@pytest.mark.parametrize("kind", [dict, Output, Named])
def test_plan_is_that_of_the_same_loss_and_optimizer_by_hand(kind: Callable[..., Any]) -> None:
    model = Classifier(kind)
    by_hand = roamc.plan(model, **batch(), loss_fn=loss_of, optimizer=torch.optim.AdamW(model.parameters()))
    plans = [roamc.plan(model, **batch()), roamc.plan(model, *batch().values())]
    plans.append(roamc.plan(model, **batch(), optimizer=torch.optim.AdamW(model.parameters(), lr=0.1)))
    plans.append(roamc.max_batch(lambda size: (Classifier(kind), batch(size)), "1GB", smallest=ROWS, largest=ROWS).plan)
    wanted = (by_hand.peak_bytes, by_hand.needed_bytes, by_hand.fixed_bytes)
    assert [(plan.peak_bytes, plan.needed_bytes, plan.fixed_bytes) for plan in plans] == [wanted] * len(plans)
    assert by_hand.fixed_bytes["optimizer state"] > 0
    default = "the loss is that of the model's output, and AdamW the optimizer by default"
    assert [default in plan.notes for plan in plans] == [True, True, False, True]


def test_optimizer_of_the_user_is_that_of_the_plan() -> None:
    model = Classifier()
    sgd = roamc.plan(model, **batch(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert "optimizer state" not in sgd.fixed_bytes
    assert "the loss is that of the model's output" in sgd.notes
    returned = made("it", (Classifier(), batch(), None, lambda parameters: torch.optim.SGD(parameters, lr=0.1)))
    assert Role.OPTIMIZER_STATE not in {port.role for port in capture(returned).inputs}


def test_without_the_update_the_gradient_of_the_loss_alone_is_handed_in() -> None:
    graph = capture(made("it", (Classifier(), batch())), update=False)
    assert tangents(graph) == ["gradient of output"]
    assert Role.OPTIMIZER_STATE not in {port.role for port in graph.inputs}
    by_hand = capture(made("it", (Classifier(), batch(), loss_of)), forward_backward=True)
    assert fingerprint(graph) == fingerprint(by_hand)
    plan = roamc.plan(Classifier(), **batch(), loss_fn=loss_of, forward_backward=True)
    assert plan.fingerprint == fingerprint(by_hand.replace(name="Classifier"))


def test_forward_backward_has_the_gradients_of_all_outputs_as_torch_compile() -> None:
    graph = capture(made("it", (Classifier(), batch())), forward_backward=True)
    assert tangents(graph) == ["gradient of output['logits']", "gradient of output['loss']"]
    model = Classifier()
    plan = roamc.plan(model, **batch(), forward_backward=True)
    assert (
        "forward and backward of output['logits'], with its gradient of 32.77 kB handed in, as torch.compile has it; "
        "for the loss alone give a loss_fn, such as lambda m, **b: m(**b).loss"
    ) in plan.notes


@pytest.mark.parametrize(
    ("kind", "inputs", "path", "example"),
    [
        (dict, batch(labels=False), "['logits']", "lambda m, **b: criterion(m(**b)['logits'])"),
        (dict, tuple(batch(labels=False).values()), "['logits']", "lambda m, *b: criterion(m(*b)['logits'])"),
        (Output, batch(labels=False), ".logits", "lambda m, **b: criterion(m(**b).logits)"),
        (Named, batch(labels=False), "['logits']", "lambda m, **b: criterion(m(**b)['logits'])"),
    ],
)
def test_without_a_loss_the_note_has_a_loss_function_of_the_inputs(
    kind: Callable[..., Any], inputs: Any, path: str, example: str
) -> None:
    named = inputs if isinstance(inputs, dict) else {}
    plan = roamc.plan(Classifier(kind), *(() if named else inputs), **named)
    advice = f"for a training step give one, such as {example}"
    said = (
        f"forward and backward of output{path}, with its gradient of 32.77 kB handed in, as there is no loss_fn; "
        f"{advice}"
    )
    assert said in plan.notes
    with pytest.raises(BudgetError) as raised:
        roamc.plan(Classifier(kind), *(() if named else inputs), **named, memory_budget="1 kB")
    assert f"(the gradient of output{path}) 32.77 kB" in str(raised.value)
    assert f"; {said}. Raise the budget" in str(raised.value)
    with pytest.raises(CaptureError) as refused:
        capture(made("it", (Classifier(kind), inputs, None, torch.optim.AdamW)))
    assert str(refused.value) == (
        f"the optimizer has nothing to do: it has no loss_fn, and its output no .loss; {advice}"
    )
    with pytest.raises(CaptureError, match="clip_grad_norm has nothing to do: Classifier has no loss_fn"):
        roamc.plan(Classifier(), *(() if named else inputs), **named, clip_grad_norm=1.0)


@pytest.mark.parametrize("reduced", [True, False])
def test_loss_that_trains_nothing_or_has_several_numbers_is_none(reduced: bool) -> None:
    graph = capture(made("it", (Measured(reduced), batch())))
    assert Role.LOSS not in {port.role for port in graph.outputs}


@pytest.mark.parametrize("argument", ["optimizer", "clip_grad_norm"])
def test_what_forward_backward_leaves_out_is_refused(argument: str) -> None:
    model = Classifier()
    value = torch.optim.AdamW(model.parameters()) if argument == "optimizer" else 1.0
    with pytest.raises(OptionError, match=f"{argument} is part of the update, which forward_backward=True leaves out"):
        roamc.plan(model, **batch(), forward_backward=True, **{argument: value})


def test_a_loss_without_an_optimizer_is_refused_with_what_to_pass() -> None:
    with pytest.raises(OptionError, match=r"optimizer=torch.optim.AdamW\(model.parameters\(\)\); forward_backward"):
        roamc.plan(Classifier(), **batch(), loss_fn=lambda model, **batch: model(**batch).loss)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none", "--optimizer", "compact"], "error: --optimizer compact has nothing to do: none has no loss_fn, and "),
        (["none", "--clip-grad-norm", "1"], "error: clip_grad_norm has nothing to do: none has no loss_fn, and its "),
        (["own", "--optimizer", "none", "--clip-grad-norm", "1"], "which --optimizer none leaves out"),
        (["own", "--optimizer", "adma"], "unknown optimizer 'adma'; did you mean 'adam'?"),
    ],
)
def test_optimizer_that_cannot_be_planned_is_refused_by_name(arguments: list[str], said: str, tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from tests.frontends.test_own_loss import Classifier, batch\n"
        "def own(): return Classifier(), batch()\n"
        "def none(): return Classifier(), batch(labels=False)\n"
    )
    assert said in run("plan", f"{tmp_path / 'mine.py'}:{arguments[0]}", *arguments[1:], code=1).stderr


def test_threads_that_plan_at_once_leave_torch_as_it_was() -> None:
    called = nn.Module.__call__
    errors: list[BaseException] = []

    def plan() -> None:
        try:
            for _ in range(3):
                assert roamc.plan(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.zeros(4, 8)).peak_bytes > 0
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=plan) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert nn.Module.__call__ is called
    assert not torch.is_anomaly_enabled()

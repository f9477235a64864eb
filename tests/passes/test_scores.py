"""Pass scores: which losses read the scores of their labels alone, what is refused, and that values stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from roamc.cli import zoo
from roamc.errors import PlanError, VerifyError
from roamc.frontends.workload import capture
from roamc.graph import TrainGraph, copied, operators, value_flow
from roamc.graph.value_numbers import Numbers
from roamc.operators.scores import label_scores, nll_of_scores
from roamc.options import Options
from roamc.passes import scores
from roamc.passes.scores import Decision
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.codegen.test_kernel_judge import on_gpu
from tests.graphs import clones, graph_and_inputs, traced
from tests.kernel_groups import use_pass
from tests.planning.test_pipeline import run_program

aten = torch.ops.aten
FAST = Options(numerics="fast", disable=("products",))
CLASSES = 24
INT = torch.int64


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass, and the groups of a GPU, in programs for a CPU."""
    use_pass(monkeypatch, scores)


class Classes(nn.Module):
    """A model of words, labels from the user."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedded, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        scored: Tensor = self.head(self.embedded(words))
        return scored


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda scored, labels: F.cross_entropy(scored, labels),
    "sum": lambda scored, labels: F.cross_entropy(scored, labels, reduction="sum") / 64,
    "of tokens": lambda scored, labels: F.cross_entropy(scored, labels, reduction="none").mean(),
    "ignored": lambda scored, labels: F.cross_entropy(scored, labels, ignore_index=3),
    "none counts": lambda scored, labels: F.cross_entropy(scored, labels * 0 - 100),
    "smoothed": lambda scored, labels: F.cross_entropy(scored, labels, label_smoothing=0.1),
    "of log-probabilities": lambda scored, labels: F.nll_loss(scored, labels),
}


def of_loss(name: str, route: str) -> tuple[TrainGraph, list[Any]]:
    torch.manual_seed(1)
    words, labels = torch.randint(0, CLASSES, (4, 16)), torch.randint(0, CLASSES, (4, 16))
    labels[0, :5] = 3 if name == "ignored" else -100

    def loss(model: nn.Module, words: Tensor, labels: Tensor) -> Tensor:
        return LOSSES[name](model(words).flatten(0, 1), labels.flatten())

    return graph_and_inputs(Classes(), (words, labels), loss, route, torch.optim.SGD)


def targets_of(graph: TrainGraph) -> list[object]:
    return [node.target for node in operators(graph.graph)]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.usefixtures("on_a_cpu")
def test_a_program_has_the_bits_of_that_with_all_log_probabilities(name: str) -> None:
    graph, inputs = of_loss(name, "step")
    results = []
    for disable in ((), ("scores",)):
        used = clones(inputs)
        options = Options(numerics="fast", disable=("products", *disable))
        planned = search.run(copied(graph), options, deep=True)
        assert (nll_of_scores in targets_of(planned.graph)) is (not disable)
        results.append([*run_program(planned, used), *used])
    for one, other in zip(*results, strict=True):
        assert not isinstance(one, Tensor) or torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.usefixtures("on_a_cpu")
def test_a_label_that_is_no_class_raises() -> None:
    graph, inputs = of_loss("mean", "step")
    labels = next(value for value in inputs if value.dtype is INT and (value == -100).any())
    labels[2, 2] = CLASSES
    planned = search.run(graph, FAST)
    with pytest.raises(IndexError, match="out of bounds"):
        run_program(planned, inputs)


def test_log_probabilities_have_no_memory_on_a_gpu() -> None:
    sizes = {"layers": 1, "width": 64, "heads": 2, "vocab": 2048, "seq": 128, "batch": 32, "dtype": "bfloat16"}
    graph = capture(zoo.make("gpt", sizes), device=torch.device("cuda"))
    logits: int = 32 * 128 * 2048 * 2
    peaks = [
        search.run(copied(graph), Options(numerics="fast", disable=off)).plan.peak_bytes for off in ((), ("scores",))
    ]
    assert logits < peaks[0] < 2 * logits
    assert peaks[1] > 3 * logits


@pytest.mark.parametrize(
    ("tensors", "weighted", "options", "wanted"),
    [
        ((on_gpu((8, 50)), on_gpu((8,), INT)), False, FAST, True),
        ((on_gpu((8, 50)), on_gpu((8,), INT)), True, FAST, False),
        ((on_gpu((50,)), on_gpu((), INT)), False, FAST, False),
        ((on_gpu((0, 50)), on_gpu((0,), INT)), False, FAST, False),
        ((torch.empty(8, 50), torch.zeros(8, dtype=INT)), False, FAST, False),
        ((on_gpu((8, 50)), on_gpu((8,), INT)), False, Options(), False),
        ((on_gpu((8, 50)), on_gpu((8,), INT)), False, Options(numerics="fast", disable=("fuse",)), False),
    ],
    ids=["rows", "weights of classes", "one row", "no row", "a CPU", "exact", "unfused"],
)
def test_which_losses(tensors: tuple[Tensor, ...], weighted: bool, options: Options, wanted: bool) -> None:
    graph = traced(
        lambda rows, labels: aten.nll_loss_forward(rows, labels, rows.sum(0) if weighted else None, 1, -100)[0],
        *tensors,
    )
    assert bool(scores.decide(graph, options).losses) is wanted


def of_rows() -> TrainGraph:
    loss = aten.nll_loss_forward
    return traced(lambda x, y: loss(x.log_softmax(-1), y, None, 1, -100)[0], on_gpu((8, 50)), on_gpu((8,), INT))


@pytest.mark.parametrize("name", ["_log_softmax", "missing"])
def test_a_decision_that_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=f"'{name}' is no loss of rows of classes"):
        scores.apply(of_rows(), Decision((name,)))


def test_a_plan_applies_again() -> None:
    planned = search.run(of_rows(), FAST)
    again = search.run(of_rows(), FAST, Plan.from_json(planned.plan.to_json()))
    assert planned.plan.decisions["scores"]["losses"] == ("nll_loss_forward",)
    assert again.plan.decisions == planned.plan.decisions


FAULTS: dict[str, Callable[[fx.Node, fx.Node], object]] = {
    "another label is left out": lambda picked, loss: picked.update_arg(4, 0),
    "and counted": lambda picked, loss: loss.update_arg(4, 0),
    "a sum for a mean": lambda picked, loss: loss.update_arg(3, 2),
    "fewer classes": lambda picked, loss: loss.update_arg(2, 49),
    "other scores": lambda picked, loss: picked.update_arg(0, picked.args[0].args[0]),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_flow_of_values_names_a_planted_fault(name: str) -> None:
    graph = of_rows()
    after = scores.apply(graph, Decision(("nll_loss_forward",)))
    nodes = {node.target: node for node in operators(after.graph)}
    before = value_flow.read(graph, Numbers())
    value_flow.check(after, before, "scores")
    FAULTS[name](nodes[label_scores], nodes[nll_of_scores])
    with pytest.raises(VerifyError, match=r"nll_loss_forward|label_scores|output"):
        value_flow.check(after, before, "scores")

"""Pass padding: which tensors get padded rows, what is refused, and that values stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from roamc.cli import zoo
from roamc.cost import slow_products
from roamc.errors import PlanError, VerifyError
from roamc.frontends.workload import capture
from roamc.graph import TrainGraph, copied, operators, tensors_of, value_flow
from roamc.graph.value_numbers import Numbers
from roamc.operators.aligned import BY_COPIES
from roamc.operators.padded import WITH_PADDED_ROWS, pitch_of, rows_padded
from roamc.options import Options
from roamc.passes import padding
from roamc.passes.padding import Decision
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.codegen.test_kernel_judge import on_gpu
from tests.graphs import clones, graph_and_inputs, traced
from tests.kernel_groups import use_kernels
from tests.planning.test_pipeline import run_program

aten = torch.ops.aten
FAST = Options(numerics="fast")
HALF = torch.bfloat16
CLASSES = 27


def padded_in(graph: TrainGraph) -> list[str]:
    """Names of the operators, outside of groups, that give a tensor with rows further apart than their columns."""
    named = ((node.name, tensor) for node in operators(graph.graph) for _, tensor in tensors_of(node))
    return [name for name, tensor in named if tensor.dim() == 2 and tensor.stride(0) == pitch_of(CLASSES, 2)]


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes for a GPU, its groups, and products of any size, in programs for a CPU."""
    use_kernels(monkeypatch)
    monkeypatch.setattr(padding, "MOST", 3.0)
    monkeypatch.setattr(slow_products, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(slow_products, "LEAST", 1)


class Words(nn.Module):
    """A model of words with and without a bias on its logits."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedded, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES, bias=bias)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedded(words))
        return logits


def loss(model: nn.Module, words: Tensor) -> Tensor:
    logits = model(words)[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def plain_loss(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten())


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("bias", [False, True], ids=["mm", "addmm"])
@pytest.mark.parametrize("function", [loss, plain_loss])
@pytest.mark.usefixtures("on_a_cpu")
def test_a_program_has_the_values_of_that_without_padding(function: Any, bias: bool, route: str) -> None:
    torch.manual_seed(1)
    words = torch.randint(0, CLASSES, (4, 16))
    graph, inputs = graph_and_inputs(Words(bias).to(HALF), (words,), function, route, torch.optim.SGD)
    results, padded = [], []
    for disable in ((), ("padding",)):
        used = clones(inputs)
        planned = search.run(copied(graph), Options(numerics="fast", disable=disable), deep=True)
        padded.append(padded_in(planned.graph))
        results.append([*run_program(planned, used), *used])
    if route == "step":
        assert padded[0]
        assert not padded[1]
    for one, other in zip(*results, strict=True):
        assert not isinstance(one, Tensor) or torch.allclose(one.float(), other.float(), atol=1e-2, rtol=1e-2)


@pytest.fixture(scope="module")
def language_model() -> TrainGraph:
    sizes = {"layers": 1, "width": 64, "heads": 2, "vocab": 2057, "seq": 128, "batch": 256, "dtype": "bfloat16"}
    return capture(zoo.make("gpt", sizes), device=torch.device("cuda"))


def test_logits_and_their_gradient_are_padded_and_nothing_is_copied(language_model: TrainGraph) -> None:
    planned = search.run(copied(language_model), FAST, deep=True)
    targets = [node.target for node in operators(planned.graph.graph)]
    assert len(planned.plan.decisions["padding"]["tensors"]) == 2
    assert not any(target in BY_COPIES.values() or target is rows_padded for target in targets)
    assert sum(target in WITH_PADDED_ROWS.values() for target in targets) == 1
    without = search.run(copied(language_model), Options(numerics="fast", disable=("padding",)))
    logits = 256 * 128 * 2057 * 2
    assert planned.plan.needed_bytes < without.plan.needed_bytes
    assert abs(planned.plan.peak_bytes - without.plan.peak_bytes) < 0.05 * logits


def test_a_plan_applies_again(language_model: TrainGraph) -> None:
    planned = search.run(copied(language_model), FAST)
    again = search.run(copied(language_model), FAST, Plan.from_json(planned.plan.to_json()))
    assert again.plan.decisions == planned.plan.decisions


def test_a_plan_with_padded_products_is_refused_under_exact(language_model: TrainGraph) -> None:
    planned = search.run(copied(language_model), Options(numerics="fast", disable=("masks",)))
    with pytest.raises(VerifyError, match=r"padded_mm.default, which sums in another order .*'numerics': 'fast'"):
        search.run(copied(language_model), Options(), planned.plan)


def test_a_copy_with_padded_rows_is_refused_under_exact() -> None:
    function, tensors, wanted = CASES["made by a kernel"]
    graph = traced(function, *tensors)
    before = value_flow.read(graph, Numbers())
    with pytest.raises(VerifyError, match=r"padded_rows_default moves rows apart.*'numerics': 'fast'"):
        value_flow.check(padding.apply(graph, Decision(wanted)), before, "padding")


def test_exact_programs_have_no_padded_rows(language_model: TrainGraph) -> None:
    assert padding.decide(language_model, Options()) == Decision()


ROWS = on_gpu((8192, 768), HALF)
TABLE = on_gpu((50257, 768), HALF)
WIDE = on_gpu((8192, 50257), HALF)
ODD = on_gpu((8192, 767), HALF), on_gpu((767, 50257), HALF)


def written_twice(doubled: Tensor, table: Tensor) -> Tensor:
    """A product of what the operator before the last has written over its argument."""
    row = aten.select.int(doubled, 0, 0)
    added = aten.add_.Tensor(doubled, 1)
    aten.mul_.Tensor(row, 0)
    return added @ table


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], tuple[str, ...]]] = {
    "logits": (lambda x, w: (x @ w.t()).relu().sum(), (ROWS, TABLE), ("mm",)),
    "logits that the user gets": (lambda x, w: x @ w.t(), (ROWS, TABLE), ()),
    "a view of them that the user gets": (lambda x, w: aten.slice.Tensor(x @ w.t(), 0, 0, 8), (ROWS, TABLE), ()),
    "logits with aligned rows": (lambda x, w: (x @ w.t()).sum(), (ROWS, on_gpu((50256, 768), HALF)), ()),
    "read one behind the other": (
        lambda x, w: aten.native_group_norm(x @ w.t(), None, None, 8192, 50257, 1, 29, 1e-5)[0],
        (ROWS, TABLE),
        (),
    ),
    "of few columns": (lambda x, w: (x @ w.t()).sum(), (on_gpu((1 << 20, 4096), HALF), on_gpu((3, 4096), HALF)), ()),
    "few": (lambda x, w: (x @ w.t()).sum(), (on_gpu((8, 768), HALF), TABLE), ()),
    "float32": (lambda x, w: (x.float() @ w.float().t()).sum(), (ROWS, TABLE), ()),
    "flattened": (lambda x, w: aten.view(x @ w.t(), [-1]).sum(), (ROWS, TABLE), ()),
    "written": (lambda x, w: aten.relu_(x @ w.t()).sum(), (ROWS, TABLE), ()),
    "by a factor whose rows are not aligned": (
        lambda x, w: (x @ w).relu().sum(),
        (on_gpu((8192, 767), HALF), on_gpu((767, 50257), HALF)),
        (),
    ),
    "written over what is written again": (lambda x, w: written_twice(x * 2, w), (WIDE, TABLE), ()),
    "made by a kernel": (lambda x, w: (x * 2) @ w, (WIDE, TABLE), ("mul",)),
    "not made by a kernel": (lambda x, w: x.cumsum(0) @ w, (WIDE, TABLE), ()),
    "given": (lambda x, w: x @ w, (WIDE, TABLE), ()),
    "both": (lambda x, w: ((x @ w.t()).relu() @ w).sum(), (ROWS, TABLE), ("mm", "relu")),
    "copied": (lambda x, w: aten.clone(x @ w.t()), (ROWS, TABLE), ("mm",)),
    "copied and turned": (lambda x, w: aten.clone((x @ w.t()).t()), (ROWS, TABLE), ("mm",)),
    "rows of it copied": (lambda x, w: aten.clone((x @ w.t()).narrow(0, 0, 8)), (ROWS, TABLE), ("mm",)),
    "copied as something else lies": (
        lambda x, w: aten.copy(w.new_empty(50257, 8192).t(), x @ w.t()),
        (ROWS, TABLE),
        ("mm",),
    ),
    "read without its strides": (
        lambda x, w: aten.native_group_norm(x @ w.t(), None, None, 8192, 50257, 1, 29, 1e-5)[0],
        (ROWS, TABLE),
        (),
    ),
    "copied by strides that it does not have": (
        lambda x, w: aten.as_strided_copy(x @ w.t(), [8192, 50257], [50257, 1], 0),
        (ROWS, TABLE),
        (),
    ),
    "with factors": (lambda x, w: torch.addmm(x.narrow(1, 0, 1), x, w.t(), beta=0.5) @ w, (ROWS, TABLE), ()),
}

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "of strides that it says itself": lambda y: aten.as_strided(y, [8192, 50250], [50257, 1], 0),
    "from one row into the next": lambda y: aten.as_strided(y, [4, 60000], [100000, 1], 0),
    "of a diagonal": lambda y: y.diagonal(),
    "of bytes": lambda y: y.view(torch.int8).narrow(1, 60000, 10000),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_viewed_other_than_by_rows_has_no_padded_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = traced(lambda x, w: VIEWS[name](x @ w.t()).relu(), ROWS, TABLE)
    assert padding.decide(graph, FAST) == Decision()
    monkeypatch.setattr(padding, "_has_same_elements", lambda *_: True)
    before = value_flow.read(graph, Numbers())
    with pytest.raises(VerifyError, match="the result of mm with rows further apart"):
        value_flow.check(padding.apply(graph, Decision(("mm",))), before, "padding", fast=True)


def test_what_lies_between_rows_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = traced(CASES["copied by strides that it does not have"][0], ROWS, TABLE)
    monkeypatch.setattr(padding, "_stays", lambda *_: True)
    before = value_flow.read(graph, Numbers())
    with pytest.raises(VerifyError, match="the result of mm with rows further apart"):
        value_flow.check(padding.apply(graph, Decision(("mm",))), before, "padding", fast=True)


@pytest.mark.parametrize("name", CASES)
def test_which_tensors(name: str) -> None:
    function, tensors, wanted = CASES[name]
    graph = traced(function, *tensors)
    decision = padding.decide(graph, FAST)
    assert decision.tensors == wanted
    before = value_flow.read(graph, Numbers())
    value_flow.check(padding.apply(copied(graph), decision), before, "padding", fast=True)


@pytest.mark.parametrize("name", ["t", "sum_1", "missing"])
def test_a_decision_that_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=f"'{name}' is no tensor in 16 bits on a GPU whose rows can be padded"):
        padding.apply(traced(CASES["logits"][0], ROWS, TABLE), Decision((name,)))


FAULTS: dict[str, Callable[[dict[str, fx.Node]], object]] = {
    "the factor is another": lambda nodes: nodes["mm"].update_arg(0, nodes["w_1"]),
    "what is copied is another": lambda nodes: nodes["padded_rows_default"].update_arg(0, nodes["mm"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_flow_of_values_names_a_planted_fault(name: str) -> None:
    graph = traced(CASES["both"][0], ROWS, TABLE)
    before = value_flow.read(graph, Numbers())
    after = padding.apply(graph, Decision(CASES["both"][2]))
    FAULTS[name]({node.name: node for node in after.graph.nodes})
    with pytest.raises(VerifyError, match=r"sum_1|mm|output"):
        value_flow.check(after, before, "padding", fast=True)

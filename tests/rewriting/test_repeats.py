"""Operators that repeat another one go, if that is still read; no bit and no peak changes but down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from roamc.errors import PlanError, VerifyError
from roamc.graph import TrainGraph, copied, value_flow
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from roamc.graph.value_numbers import Numbers
from roamc.graph.verify import check_graph, constraints
from roamc.options import Options
from roamc.passes import normalize
from tests.graphs import assert_same, captured_step, clones, graph_and_inputs, run_real, traced
from tests.random_graphs import random_model

X = torch.randn(64, 64)


def pairs(graph: TrainGraph) -> tuple[tuple[str, str], ...]:
    return normalize.decide(graph, Options()).repeats


def test_what_it_is_made_of_goes_as_well() -> None:
    def step(x: Tensor) -> Tensor:
        masks = [torch.where(x > 0, torch.scalar_tensor(0.0), torch.scalar_tensor(-1.0)) for _ in range(2)]
        return masks[0] * masks[1].sin()

    graph = traced(step, X)
    kept, flow = constraints(graph), value_flow.read(graph, Numbers(), "capture")
    decision = normalize.decide(graph, Options())
    assert dict(decision.repeats)["where_1"] == "where"
    assert {"where_1", "gt_1", "scalar_tensor_2", "scalar_tensor_3"} <= set(decision.dead)
    after = normalize.apply(graph, decision)
    check_graph(after, "normalize", kept, deep=True)
    value_flow.check(after, flow, "normalize")


def test_a_result_that_has_died_is_made_again() -> None:
    assert not pairs(traced(lambda x: (x.sin() * 2).sum() * x.sin().cos().sum(), X))


def test_views_of_it_become_views_of_the_first() -> None:
    graph = traced(lambda x: ((y := x.sin()), x.sin().t().cos() * y)[1], X)
    kept = constraints(graph)
    assert pairs(graph) == (("sin_1", "sin"),)
    after = normalize.apply(graph, normalize.decide(graph, Options()))
    check_graph(after, "normalize", kept, deep=True)
    assert torch.equal(run_real(after, [X])[0][0], X.sin().t().cos() * X.sin())


@pytest.mark.parametrize(
    "step",
    [
        lambda x: torch.rand_like(x) * torch.rand_like(x),
        lambda x: ((y := x.sin()), (z := x.sin()), y.add_(1), y * z)[3],
        lambda x: ((y := x.clone()), (z := y.sin()), y.add_(1), z * y.sin())[3],
        lambda x: (x.sin(), x.sin()),
        lambda x: x.mul(2) * x.mul(2.0),
        lambda x: x.sum(0) * x.sum(1),
    ],
    ids=["drawn", "written", "reads what is written", "handed out", "another type", "another dimension"],
)
def test_others_stay(step: object) -> None:
    assert not pairs(traced(step, X))  # type: ignore[arg-type]


def test_what_only_a_repeated_operator_of_backward_reads_is_not_saved() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x).relu() * self.up(x).relu()

    graph, _ = graph_and_inputs(Twice(), (X,), lambda model, x: model(x).square().mean(), "joint")
    kept = constraints(graph)
    after = normalize.apply(graph, normalize.decide(graph, Options()))
    check_graph(after, "normalize", kept, deep=True)
    assert len(after.saved) < len(graph.saved)


def test_phases_stay_apart() -> None:
    assert not pairs(traced(lambda x: ((y := x.sin()), x.sin() * y)[1], X, phases="FBB"))


def planted(graph: TrainGraph, *repeats: tuple[str, str]) -> None:
    """Apply a decision that was not decided, and judge it."""
    flow = value_flow.read(graph, Numbers(), "capture")
    kept = constraints(graph)
    after = normalize.apply(copied(graph), normalize.Decision((), tuple(name for name, _ in repeats), (), repeats))
    check_graph(after, "normalize", kept)
    value_flow.check(after, flow, "normalize")


def test_the_judge_names_another_value() -> None:
    graph = traced(lambda x: x.sin() * x.cos() * x.sin(), X)
    planted(graph, ("sin_1", "sin"))
    with pytest.raises(VerifyError, match="normalize"):
        planted(graph, ("cos", "sin"))


@pytest.mark.parametrize(
    ("step", "pair"),
    [
        (lambda x: x.sin() * x.sin(), ("sin", "sin_1")),
        (lambda x: x.sin() * x.sum(0).sin(), ("sin_1", "sin")),
        (lambda x: torch.rand_like(x) * torch.rand_like(x), ("rand_like_1", "rand_like")),
        (lambda x: x.sin() * x.sin(), ("sin_2", "sin")),
        (lambda x: (x.sin(), x.sin()), ("sin_1", "sin")),
    ],
    ids=["later", "shape", "drawn", "missing", "handed out"],
)
def test_a_decision_that_does_not_fit_is_refused(step: object, pair: tuple[str, str]) -> None:
    with pytest.raises(PlanError, match=r"does not (repeat|have)"):
        planted(traced(step, X), pair)  # type: ignore[arg-type]


def test_updates_wait_for_the_first_where_a_gradient_repeats_it() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.a + x * self.b

    graph = captured_step(Pair(), (X,), lambda model, x: model(x).square().sum(), torch.optim.AdamW).graph
    ((second, first),) = pairs(graph)
    assert second in graph.gradients
    after = normalize.apply(graph, normalize.decide(graph, Options()))
    assert after.gradients == (first,)
    memory = build_memory(after)
    at = {op.node.name: number for number, op in enumerate(memory.operators)}
    assert {(at[first], at[update]) for update in graph.waits} <= set(memory.edges)


@pytest.mark.parametrize("seed", range(4))
def test_random_graphs_give_the_same_bits_at_no_higher_peak(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, inputs = graph_and_inputs(*random_model(seed), "step")
    decision = normalize.decide(graph, Options())
    monkeypatch.setattr(normalize, "repeats", lambda graph, live: {})
    alone = normalize.decide(graph, Options())
    peaks = []
    for each in (alone, decision):
        after = normalize.apply(copied(graph), each)
        peaks.append(int(live_bytes(build_memory(after)).max()))
    assert peaks[1] <= peaks[0], f"seed {seed}"
    torch.manual_seed(seed)
    expected, _ = run_real(graph, clones(inputs))
    torch.manual_seed(seed)
    got, _ = run_real(normalize.apply(copied(graph), decision), clones(inputs))
    assert_same(got, expected, f"seed {seed}")

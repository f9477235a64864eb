"""The graph of a whole training step: its inputs, phases and sources, and that capturing touches nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roamc.capture.step import CapturedStep, capture_step
from roamc.capture.step_trace import StepRequest
from roamc.graph import Phase, Role, operators, placeholders, source_line, verify
from tests.end_to_end.cases import BatchNorm, Layers, Tied
from tests.end_to_end.helpers import assert_same, noise, square, tensors_of
from tests.graphs import captured_step

X = noise(4, 8)


def mlp() -> nn.Module:
    return Layers(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def request(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Any, **more: Any) -> StepRequest:
    loss_fn = more.pop("loss_fn", square)
    return StepRequest(model, loss_fn, optimizer, batch, lambda leaves: tuple(leaves), **more)


def captured(model: nn.Module | None = None, clip: float | None = None, **settings: Any) -> CapturedStep:
    model = model or mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **settings)
    return capture_step(request(model, optimizer, X, clip_grad_norm=clip))


def test_every_input_has_a_port_and_a_source() -> None:
    step = captured()
    kinds = [source.kind for source in step.sources]
    assert len(placeholders(step.graph.graph)) == len(step.sources) == len(step.graph.inputs)
    assert kinds == sorted(kinds, key=["parameter", "buffer", "batch", "scalar", "state"].index)
    roles = {"parameter": Role.PARAMETER, "batch": Role.INPUT, "scalar": Role.SCALAR, "state": Role.OPTIMIZER_STATE}
    assert [port.role for port in step.graph.inputs] == [roles[kind] for kind in kinds]
    states = [(source.name, source.key) for source in step.sources if source.kind == "state"]
    assert states[:2] == [("0.weight", "exp_avg"), ("0.weight", "exp_avg_sq")]


def test_output_is_the_loss_alone() -> None:
    step = captured()
    assert [port.role for port in step.graph.outputs] == [Role.LOSS]
    assert not step.graph.boundary


@pytest.mark.parametrize("model", [mlp, lambda: BatchNorm()], ids=["mlp", "batch norm"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_phases_come_one_after_the_other(model: Callable[[], nn.Module], clip: float | None) -> None:
    built = model()
    optimizer = torch.optim.AdamW(built.parameters())
    batch = X if isinstance(built[0] if isinstance(built, nn.Sequential) else None, nn.Linear) else noise(2, 3, 8, 8)
    graph = capture_step(request(built, optimizer, batch, clip_grad_norm=clip)).graph
    phases = [graph.phase[node.name] for node in operators(graph.graph)]
    assert phases == sorted(phases)
    assert set(phases) == set(Phase)
    verify.check_graph(graph, "capture", deep=True)


def test_every_trained_parameter_has_a_gradient_that_its_update_waits_for() -> None:
    step = captured()
    assert len(step.graph.gradients) == 4
    assert set(step.graph.waits.values()) <= set(step.graph.gradients)
    updates = {node.name for node in operators(step.graph.graph) if step.graph.phase[node.name] is Phase.UPDATE}
    assert set(step.graph.waits) <= updates


def test_parameters_of_one_group_and_count_share_their_scalars() -> None:
    model = mlp()
    groups = [{"params": [model[0].weight, model[2].weight]}, {"params": [model[0].bias, model[2].bias], "lr": 0.5}]
    step = capture_step(request(model, torch.optim.AdamW(groups, lr=0.1), X))
    assert len(set(step.cohorts.values())) == 2
    assert {source.index for source in step.sources if source.kind == "scalar"} == {0, 1}


def test_parameters_of_other_counts_have_scalars_of_their_own() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model[0].weight] = {"step": torch.tensor(3.0)}
    step = capture_step(request(model, optimizer, X))
    assert {cohort.step for cohort in step.cohorts.values()} == {0.0, 3.0}


def test_clipping_is_noted() -> None:
    assert captured().graph.notes == ()
    (note,) = captured(clip=1.0).graph.notes
    assert "clip_grad_norm holds all gradients" in note


def test_weight_decay_of_zero_is_not_in_the_graph() -> None:
    assert len(operators(captured(weight_decay=0.0).graph.graph)) == len(operators(captured().graph.graph)) - 4


def test_tied_weights_are_one_input() -> None:
    model = Tied()
    step = capture_step(request(model, torch.optim.SGD(model.parameters(), lr=1), torch.tensor([[1, 2]])))
    names = [port.name for port in step.graph.inputs if port.role is Role.PARAMETER]
    assert names == ["embed.weight", "mix.weight", "mix.bias"]


def squared(y: Tensor) -> Tensor:
    return (y * y).sum()  # line of squared


def with_helper(model: nn.Module, x: Tensor) -> Tensor:
    return squared(model(x)).log()  # line of with_helper


def test_operators_of_the_loss_function_have_their_lines_in_forward_and_backward() -> None:
    model = mlp()
    graph = capture_step(request(model, torch.optim.SGD(model.parameters()), X, loss_fn=with_helper)).graph
    calls: dict[str, set[str]] = {}
    for node in operators(graph.graph):
        name = str(node.target).split(".")[1]
        calls.setdefault(source_line(node), set()).add(f"{name} {graph.phase[node.name].name}")
    text = Path(__file__).read_text().splitlines()
    ends = [f"# line of {function.__name__}" for function in (squared, with_helper)]
    helper, caller = (f"test_step.py:{at}" for end in ends for at, line in enumerate(text, 1) if line.endswith(end))
    assert calls[helper] >= {"mul FORWARD", "sum FORWARD", "mul BACKWARD"}
    assert calls[caller] >= {"log FORWARD", "div BACKWARD"}


def broken(model: nn.Module, x: Tensor) -> Tensor:
    model(x)
    raise KeyError("mine")


@pytest.mark.parametrize("loss_fn", [square, broken], ids=lambda f: f.__name__)
@pytest.mark.parametrize("build", [BatchNorm, Tied], ids=lambda f: f.__name__)
def test_capture_leaves_the_model_as_it_was(build: Callable[[], nn.Module], loss_fn: Callable[..., Tensor]) -> None:
    model = build().train()
    batch = noise(2, 3, 8, 8) if build is BatchNorm else torch.tensor([[1, 2]])
    before, tensors = tensors_of(model), [*model.parameters(), *model.buffers()]
    random = torch.get_rng_state()
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        capture_step(request(model, optimizer, batch, loss_fn=loss_fn))
    except KeyError:
        assert loss_fn is broken
    after = [*model.parameters(), *model.buffers()]
    assert all(one is other for one, other in zip(after, tensors, strict=True))
    assert_same(tensors_of(model), before)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert_same(torch.get_rng_state(), random)
    assert len(optimizer.state) == 0


def test_the_thread_that_traces_forward_traces_backward() -> None:
    """On a GPU autograd has a thread of its own, to which patches of this thread, such as decompositions, do not go."""
    seen: list[bool] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(torch._C._is_multithreading_enabled())
        return model(x).sum()

    captured_step(nn.Linear(4, 4), (torch.ones(2, 4),), loss)
    assert seen == [False]
    assert torch._C._is_multithreading_enabled()

"""AOTAutograd's two halves put together: roles, the boundary, and the numbers of the halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import roamc
from roamc import compat, ops, verify
from roamc.capture import joint
from roamc.graph import Phase, Role, TrainGraph, operators, output_values, placeholders
from roamc.memory import identity
from tests.end_to_end.cases import SMALL
from tests.end_to_end.helpers import assert_same, noise, optimized

NAMES = ["several outputs", "batch norm", "tied weights", "slice assignment", "view of an input", "frozen parameters"]


def halves_of(name: str) -> tuple[nn.Module, Any, tuple[fx.GraphModule, ...], int, tuple[int, ...]]:
    model, batch = SMALL[name].build(), SMALL[name].batch()
    return model, batch, *compat.forward_backward(model, (batch,))


@pytest.mark.parametrize("name", NAMES)
def test_stitched_graph_gives_the_numbers_of_its_halves(name: str) -> None:
    model, batch, (forward, backward), outputs, static = halves_of(name)
    graph = joint.stitch(forward, backward, outputs, static, name)
    tensors = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    inputs = [*tensors, batch]
    first = fx.Interpreter(forward).run(*inputs)
    late = [node.meta["val"] for node in placeholders(backward.graph)][len(first) - outputs :]
    tangents = [noise(*fake.shape) for fake in late]
    second = fx.Interpreter(backward).run(*first[outputs:], *tangents)
    assert_same(list(fx.Interpreter(graph.module).run(*inputs, *tangents)), [*first[:outputs], *second])


@pytest.mark.parametrize("name", NAMES)
def test_stitched_graph_is_valid(name: str) -> None:
    _, _, (forward, backward), outputs, static = halves_of(name)
    graph = joint.stitch(forward, backward, outputs, static, name)
    verify.check_graph(graph, "capture", deep=True)
    assert graph.boundary
    phases = [graph.phase[node.name] for node in operators(graph.graph)]
    assert phases == sorted(phases)
    assert len(graph.inputs) == len(placeholders(graph.graph))
    assert len(graph.outputs) == len(output_values(graph.graph))


def test_roles() -> None:
    _, _, (forward, backward), outputs, static = halves_of("batch norm")
    graph = joint.stitch(forward, backward, outputs, static, "n")
    roles = [port.role for port in graph.inputs]
    assert roles == [Role.PARAMETER] * 7 + [Role.INPUT, Role.TANGENT]
    assert [port.phase for port in graph.inputs if port.role is Role.TANGENT] == [Phase.BACKWARD]
    kinds = [port.role for port in graph.outputs]
    assert kinds == sorted(kinds, key=[Role.OUTPUT, Role.GRADIENT].index)


def test_saved_tensors_are_named_in_the_order_of_the_backward() -> None:
    _, _, (forward, backward), outputs, static = halves_of("several outputs")
    graph = joint.stitch(forward, backward, outputs, static, "n")
    assert list(graph.saved) == [node.name for node in placeholders(backward.graph)][: len(graph.saved)]


def test_inference_graph_has_one_phase_and_no_boundary() -> None:
    model = SMALL["batch norm"].build().eval().requires_grad_(False)
    batch = noise(2, 3, 8, 8)
    (gm,), _, static = compat.forward_backward(model, (batch,))
    graph = joint.inference(gm, static, "n")
    verify.check_graph(graph, "capture", deep=True)
    assert not graph.boundary
    assert set(graph.phase.values()) == {Phase.FORWARD}
    with torch.no_grad():
        found = fx.Interpreter(graph.module).run(*model.parameters(), *model.buffers(), batch)
        assert_same(found[0], model(batch))


class Product(nn.Module):
    """Backward reads a view of what the region makes again."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(noise(16, 64)), nn.Parameter(noise(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(x @ self.left) @ self.right


class Regions(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Product() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return x.mean()


def test_views_of_what_runs_again_lie_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[TrainGraph] = []
    stitch = joint.stitch
    monkeypatch.setattr(joint, "stitch", lambda *args: found.append(stitch(*args)) or found[-1])
    model, x = Regions(4), noise(128, 16)
    optimized(model)(x).backward()
    for node in operators(found[0].graph):
        if ops.is_view(node.target) and isinstance(node.meta["val"], Tensor):
            assert identity(node.meta["val"]) == identity(node.args[0].meta["val"]), node
    step = roamc.plan(model, x, loss_fn=lambda m, x: m(x), optimizer=torch.optim.SGD(model.parameters()))
    assert roamc.plans(model)[0].needed_bytes < step.needed_bytes + 1.1 * step.fixed_bytes["parameter"], "and gradients"

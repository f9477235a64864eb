"""AOTAutograd's two halves put together: roles, the boundary, and the numbers of the halves."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import roamc
from roamc import compat_aot
from roamc.capture import joint
from roamc.compat import identity
from roamc.errors import CaptureError
from roamc.graph import Phase, Role, TrainGraph, operators, output_values, placeholders, verify
from roamc.operators import ops
from roamc.operators.random import replay, save_rng_state
from roamc.operators.schemas import name_of
from tests.end_to_end.cases import SMALL
from tests.end_to_end.helpers import assert_same, noise, optimized
from tests.graphs import joint_graph

aten = torch.ops.aten

NAMES = ["several outputs", "batch norm", "tied weights", "slice assignment", "view of an input", "frozen parameters"]


def halves_of(name: str) -> tuple[nn.Module, Any, tuple[fx.GraphModule, ...], int, tuple[int, ...]]:
    model, batch = SMALL[name].build(), SMALL[name].batch()
    return model, batch, *compat_aot.forward_backward(model, (batch,))


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


def test_a_gradient_of_a_part_takes_what_is_handed_in() -> None:
    """torch traces it as a part of a tensor that is as large as what the output is a part of."""

    class Part(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[1:-1]

    graph = joint.capture(Part(8, 16), (torch.randn(6, 8),), {}, "part")
    pairs = zip(placeholders(graph.graph), graph.inputs, strict=True)
    tangents = [node.meta["val"] for node, port in pairs if port.role is Role.TANGENT]
    assert [(tuple(tangent.shape), tangent.untyped_storage().nbytes()) for tangent in tangents] == [((4, 16), 256)]


def test_saved_tensors_are_named_in_the_order_of_the_backward() -> None:
    _, _, (forward, backward), outputs, static = halves_of("several outputs")
    graph = joint.stitch(forward, backward, outputs, static, "n")
    assert list(graph.saved) == [node.name for node in placeholders(backward.graph)][: len(graph.saved)]


def test_inference_graph_has_one_phase_and_no_boundary() -> None:
    model = SMALL["batch norm"].build().eval().requires_grad_(False)
    batch = noise(2, 3, 8, 8)
    (gm,), _, static = compat_aot.forward_backward(model, (batch,))
    graph = joint.inference(gm, static, "n")
    verify.check_graph(graph, "capture", deep=True)
    assert not graph.boundary
    assert set(graph.phase.values()) == {Phase.FORWARD}
    with torch.no_grad():
        outputs = fx.Interpreter(graph.module).run(*model.parameters(), *model.buffers(), batch)
        assert_same(outputs[0], model(batch))


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
    graphs: list[TrainGraph] = []
    stitch = joint.stitch
    monkeypatch.setattr(joint, "stitch", lambda *args: graphs.append(stitch(*args)) or graphs[-1])
    model, x = Regions(4), noise(128, 16)
    optimized(model)(x).backward()
    for node in operators(graphs[0].graph):
        if ops.is_view(node.target) and isinstance(node.meta["val"], Tensor):
            assert identity(node.meta["val"]) == identity(node.args[0].meta["val"]), node
    step = roamc.plan(model, x, loss_fn=lambda m, x: m(x), optimizer=torch.optim.SGD(model.parameters()))
    assert roamc.plans(model)[0].needed_bytes < step.needed_bytes + 1.1 * step.fixed_bytes["parameter"], "and gradients"


def test_a_region_runs_again_where_no_dynamo_traces() -> None:
    graph = joint_graph(Regions(3), (noise(8, 16),))
    again = [node for node in operators(graph.graph) if node.target is aten.sin.default]
    assert [graph.phase[node.name] for node in again] == 3 * [Phase.FORWARD] + 3 * [Phase.BACKWARD]


class Attending(nn.Module):
    """Attention in a region that is made again in backward."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(16, 48), dropout

    def inner(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False).square().mean()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_runs_again_in_backward(dropout: float) -> None:
    model, x = Attending(dropout), noise(4, 12, 16)
    twin = copy.deepcopy(model)
    results = []
    for each in (optimized(model), twin):
        torch.manual_seed(3)
        loss = each(x)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in each.parameters()), torch.get_rng_state()])
    assert_same(*results)


def test_what_draws_again_needs_no_generator_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch has it on a GPU, where the state of a generator would be one more argument of both halves."""
    from torch._functorch import partitioners

    if not hasattr(partitioners, "supports_graphsafe_rng"):
        pytest.skip("this torch asks for the type of the device itself")
    monkeypatch.setattr(partitioners, "supports_graphsafe_rng", lambda device: True)
    monkeypatch.setattr(partitioners, "get_device_rng_state", lambda device: torch.get_rng_state())
    graph = joint_graph(Attending(0.3), (noise(4, 12, 16),))
    called = [node.target for node in operators(graph.graph)]
    assert called.count(save_rng_state) == called.count(replay) == 1
    assert len(graph.inputs) == 4, "weight, bias, input and the gradient of the result"


def test_numbers_of_a_gpu_are_drawn_again_from_its_generator() -> None:
    stitcher = joint._Stitcher(FakeTensorMode())
    source = fx.Graph().call_function(torch.ops.aten.rand.default, ([8],), {"device": "cuda"})
    drawn = stitcher._random_pair(source, (aten.rand.default, [8]), {"device": "cuda"}, Phase.FORWARD)
    assert drawn.prev.args == (torch.device("cuda"),)


def halves_with(dropout: float) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Attention in forward, and again in backward under the same name, as AOTAutograd's partition writes it."""
    with FakeTensorMode():
        halves = []
        for _ in range(2):
            graph = fx.Graph()
            q = graph.placeholder("q")
            q.meta["val"] = torch.empty(1, 2, 8, 4)
            again = graph.call_function(aten._scaled_dot_product_flash_attention.default, (q, q, q, dropout))
            again.meta["val"] = again.target(*[q.meta["val"]] * 3, dropout)
            first = graph.call_function(operator.getitem, (again, 0))
            first.meta["val"] = again.meta["val"][0]
            graph.output((first, q) if not halves else (first,))
            halves.append(fx.GraphModule({}, graph))
    return halves[0], halves[1]


def test_attention_of_a_gpu_runs_again_in_backward_only_without_dropout() -> None:
    graph = joint.stitch(*halves_with(0.0), 1, (), "n")
    assert len([node for node in operators(graph.graph) if name_of(node.target).startswith("aten._scaled")]) == 2
    with pytest.raises(CaptureError, match="would draw random numbers again in backward"):
        joint.stitch(*halves_with(0.1), 1, (), "n")

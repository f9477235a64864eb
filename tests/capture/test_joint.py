"""AOTAutograd's two halves put together: roles, the boundary, and the numbers of the halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from roamc import compat, verify
from roamc.capture import joint
from roamc.graph import Phase, Role, operators, output_values, placeholders
from tests.end_to_end.cases import SMALL
from tests.end_to_end.helpers import assert_same, noise

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

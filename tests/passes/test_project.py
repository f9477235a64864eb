"""Pass project: which gradients are made of projected inputs, what its judge refuses, and where products wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from roamc.errors import PlanError, VerifyError
from roamc.graph import Phase, TrainGraph, copied, operators, projection_judge
from roamc.operators.projection import projection
from roamc.options import Options
from roamc.passes import project
from roamc.passes.project import Decision
from tests.graphs import traced

aten = torch.ops.aten
X, FIRST, SECOND = (torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...] | Tensor]


def p_of(x: Tensor, stream: int = 0) -> Tensor:
    result: Tensor = projection(0.0, 0, stream, x.shape[1], 2, "gaussian", dtype=x.dtype, device=x.device)
    return result


def graph_of(step: Step) -> TrainGraph:
    graph = traced(step, X, FIRST, SECOND)
    return graph.replace(
        phase=dict.fromkeys(graph.phase, Phase.BACKWARD),
        outputs=tuple(type(port)(port.name, port.role, Phase.BACKWARD) for port in graph.outputs),
    )


def rewritten(graph: TrainGraph) -> tuple[TrainGraph, Decision]:
    decision = project.decide(graph, Options())
    after = project.apply(graph, decision)
    projection_judge.check(graph, after, "project")
    return after, decision


def outputs_of(graph: TrainGraph) -> list[Tensor]:
    outputs: list[Tensor] = [*graph.module(X.clone(), FIRST.clone(), SECOND.clone())]
    return outputs


def called(graph: TrainGraph, target: object) -> list[fx.Node]:
    return [node for node in operators(graph.graph) if node.target is target]


def shared(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    p = p_of(x)
    return (first.t() @ x) @ p, (second.t() @ x).t().t() @ p


def test_products_of_one_input_share_its_projection() -> None:
    graph = graph_of(shared)
    after, decision = rewritten(graph)
    assert len(decision.gradients) == 2
    shapes = [tuple(node.meta["val"].shape) for node in called(after, aten.mm.default)]
    assert shapes == [(6, 2), (8, 2), (8, 2)], "one projected input, no whole gradient"
    for a, b in zip(outputs_of(after), outputs_of(graph), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_views_that_are_alike_share_and_others_do_not() -> None:
    def step(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        p, other = p_of(x), p_of(x, 1)
        parts = [(dy.t() @ x.view(6, 8)) @ p for dy in (first, second)]
        return *parts, (first.t() @ x) @ other, (first[:3].t() @ x[:3]) @ p

    after, decision = rewritten(graph_of(step))
    assert len(decision.gradients) == 4
    projected = [node for node in called(after, aten.mm.default) if node.meta["val"].shape[0] < 8]
    assert [tuple(node.meta["val"].shape) for node in projected] == [(6, 2), (6, 2), (3, 2)]


def written_between(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    x, p = x.clone(), p_of(x)
    before = (first.t() @ x) @ p
    x.mul_(2)
    return before, (second.t() @ x) @ p


def test_an_input_that_is_written_is_projected_for_each_product() -> None:
    graph = graph_of(written_between)
    after, _ = rewritten(graph)
    assert len(called(after, aten.mm.default)) == 4
    for a, b in zip(outputs_of(after), outputs_of(graph), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_an_input_that_is_a_product_is_projected() -> None:
    after, decision = rewritten(graph_of(lambda x, first, second: (first.t() @ (x @ second.t() @ x)) @ p_of(x)))
    assert len(decision.gradients) == 1
    assert len(called(after, projection)) == 1


@pytest.mark.parametrize(
    "turned", [lambda w: w.mT, lambda w: w.T, lambda w: w.transpose(0, 1), lambda w: w.permute(-1, 0)]
)
def test_every_way_to_turn_a_matrix_is_one(turned: Callable[[Tensor], Tensor]) -> None:
    after, decision = rewritten(graph_of(lambda x, first, second: turned((first.t() @ x).t()) @ p_of(x)))
    assert len(decision.gradients) == 1
    assert [tuple(node.meta["val"].shape) for node in called(after, aten.mm.default)] == [(6, 2), (8, 2)]
    assert rewritten(graph_of(lambda x, first, second: turned(x.t() @ first) @ p_of(first)))[1] == Decision()


STAYS: dict[str, Step] = {
    "the whole gradient is read": lambda x, first, second: ((w := first.t() @ x), w @ p_of(x)),
    "it is a sum of two": lambda x, first, second: (first.t() @ x + second.t() @ x) @ p_of(x),
    "it is scaled": lambda x, first, second: (first.t() @ x * 2) @ p_of(x),
    "it is transposed": lambda x, first, second: (x.t() @ first).t() @ p_of(x),
    "there is no product": lambda x, first, second: x @ p_of(x),
    "the projection is on the left": lambda x, first, second: p_of(x).t() @ (x.t() @ first),
    "there is no projection": lambda x, first, second: (first.t() @ x) @ torch.ones_like(x).t(),
}


@pytest.mark.parametrize("name", STAYS)
def test_other_products_stay(name: str) -> None:
    graph = graph_of(STAYS[name])
    assert rewritten(graph) == (graph, Decision())
    names = tuple(node.name for node in called(graph, aten.mm.default))
    with pytest.raises(PlanError, match="no projection of a product that nothing else reads"):
        project.apply(graph, Decision(names[-1:]))
    with pytest.raises(PlanError, match="'absent'"):
        project.apply(graph, Decision(("absent",)))


def faulty(change: Callable[[dict[str, fx.Node]], None]) -> str:
    """The verdict on :func:`shared`, rewritten and then changed."""
    graph = graph_of(shared)
    after = copied(rewritten(graph)[0])
    change({node.name: node for node in after.graph.nodes})
    with pytest.raises(VerifyError) as error:
        projection_judge.check(graph, after, "project")
    return str(error.value)


def small(nodes: dict[str, fx.Node]) -> list[fx.Node]:
    """The projected input and both gradients."""
    return [node for node in nodes.values() if node.target is aten.mm.default]


def test_a_gradient_of_another_factor_is_refused() -> None:
    def other_left(nodes: dict[str, fx.Node]) -> None:
        _, first, second = small(nodes)
        first.update_arg(0, second.args[0])

    def other_input(nodes: dict[str, fx.Node]) -> None:
        inputs = [node for node in nodes.values() if node.op == "placeholder"]
        small(nodes)[0].update_arg(0, inputs[1])

    def other_stream(nodes: dict[str, fx.Node]) -> None:
        next(node for node in nodes.values() if node.target is projection).update_arg(2, 1)

    def other_counter(nodes: dict[str, fx.Node]) -> None:
        next(node for node in nodes.values() if node.target is projection).update_arg(0, 1.0)

    for change in (other_left, other_input, other_stream, other_counter):
        assert "would" in faulty(change), change.__name__


def test_a_product_of_a_turned_matrix_is_refused() -> None:
    square = torch.randn(8, 8)

    def step(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return (first.t() @ x) @ p_of(x)

    graph = traced(step, square, square, square)
    graph = graph.replace(phase=dict.fromkeys(graph.phase, Phase.BACKWARD))
    after = copied(project.apply(graph, project.decide(graph, Options())))
    gradient = called(after, aten.mm.default)[-1]
    gradient.update_arg(0, gradient.args[0].args[0])
    with pytest.raises(VerifyError, match="would"):
        projection_judge.check(graph, after, "project")

"""Arranging: operators run as listed, views stay behind what they look into, and an order that cannot be is refused."""

import pytest
import torch
from torch import Tensor

from roamc.errors import PlanError
from roamc.graph import Phase
from roamc.graph.memory import build_memory
from roamc.rewriting.arrange import arrange
from tests.graphs import assert_same, run_real, traced
from tests.rewriting.cases import chain


def two_chains(x: Tensor) -> Tensor:
    return (x.sin().t().cos() + x.exp()).sum()


def test_operators_run_as_listed_and_views_come_with_their_readers() -> None:
    graph, inputs = chain(two_chains, "")
    expected, _ = run_real(graph, inputs)
    order = ["exp", "sin", "cos", "add", "sum_1"]
    after = arrange(graph, order)
    assert [op.node.name for op in build_memory(after).operators] == order
    assert_same(expected, run_real(after, inputs)[0], "another order")


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (["exp", "sin", "cos", "add"], "^the plan's order is not a permutation"),
        (["exp", "sin", "cos", "add", "add"], "^the plan's order is not a permutation"),
        (["exp", "cos", "sin", "add", "sum_1"], "would run before sin, which it reads$"),
    ],
)
def test_order_that_cannot_be_is_refused(order: list[str], said: str) -> None:
    graph, _ = chain(two_chains, "")
    with pytest.raises(PlanError, match=said):
        arrange(graph, order)


def test_an_update_waits_for_the_maker_of_a_view_that_is_erased() -> None:
    """It would wait for nothing, and a step that fails before the gradient is there would have changed the state."""

    def function(x: Tensor, state: Tensor) -> Tensor:
        gradient = x @ x
        gradient.t()
        state.mul_(0.5)
        return gradient

    graph = traced(function, torch.zeros(4, 4), torch.zeros(4, 4))
    phase = {"mm": Phase.BACKWARD, "t": Phase.BACKWARD, "mul_": Phase.UPDATE}
    graph = graph.replace(phase={**graph.phase, **phase}, waits={"mul_": "t"})
    after = arrange(graph, [op.node.name for op in build_memory(graph).operators])
    assert after.waits == {"mul_": "mm"}
    names = [op.node.name for op in build_memory(after).operators]
    assert (names.index("mm"), names.index("mul_")) in build_memory(after).edges

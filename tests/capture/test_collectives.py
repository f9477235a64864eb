"""Start and wait of a collective become one operator; what is not known to be finished is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from roamc.capture import joint
from roamc.compat import identity
from roamc.errors import CaptureError, VerifyError
from roamc.graph import TrainGraph, operators, verify
from tests.graphs import traced
from tests.kernel_cases import alone

functional: Any = torch.ops._c10d_functional
ours: Any = torch.ops.roamc_collective
X = torch.randn(4, 6)


def started(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The graph as torch traces it."""
    import torch.distributed._functional_collectives  # noqa: F401  the fake kernels of torch's collectives

    return traced(function, *inputs).module


def captured(function: Callable[..., Any], *inputs: Tensor) -> TrainGraph:
    """The graph as roamc plans it."""
    graph = joint.inference(started(function, *inputs), (), "test")
    verify.check_graph(graph, "capture", deep=True)
    return graph


def names(graph: TrainGraph) -> list[str]:
    return [node.name for node in operators(graph.graph)]


def test_start_and_wait_are_one_operator_at_the_place_of_the_start() -> None:
    def function(x: Tensor) -> Tensor:
        sent = functional.all_reduce(x * 2, "sum", "0")
        other = x + 1
        return functional.wait_tensor(sent) * other

    graph = captured(function, X)
    assert names(graph) == ["mul", "all_reduce", "add", "mul_1"]
    assert operators(graph.graph)[1].target is ours.all_reduce.default
    assert set(graph.phase) == set(names(graph))


def test_several_starts_before_their_waits_and_several_waits_of_one() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        first = functional.all_reduce(x, "sum", "0")
        second = functional.reduce_scatter_tensor(x, "sum", 2, "0")
        a = functional.wait_tensor(second).t()
        b = functional.wait_tensor(first)[1:]
        c = functional.wait_tensor(first).t()
        return a + 1, b + 1, c + 1

    graph = captured(function, X)
    assert names(graph)[:2] == ["all_reduce", "reduce_scatter_tensor"]
    values = {node.name: node.meta["val"] for node in operators(graph.graph)}
    views = [node for node in operators(graph.graph) if node.args[0] is operators(graph.graph)[0]]
    assert len(views) == 2, "the views of both waits look at the one result"
    assert {identity(node.meta["val"]) for node in views} == {identity(values["all_reduce"])}


@pytest.mark.parametrize(
    ("start", "target"),
    [
        (lambda x: functional.all_reduce_coalesced([x, x + 1], "sum", "0"), ours.all_reduce_coalesced.default),
        (
            lambda x: functional.all_gather_into_tensor_coalesced([x, x + 1], 2, "0"),
            ours.all_gather_into_tensor_coalesced.default,
        ),
    ],
    ids=["all_reduce_coalesced", "all_gather_into_tensor_coalesced"],
)
def test_every_result_of_a_coalesced_start_is_waited_for(start: Any, target: Any) -> None:
    graph = captured(lambda x: [functional.wait_tensor(result) for result in start(x)], X)
    assert [node.target for node in operators(graph.graph)][1] is target
    assert not [name for name in names(graph) if "wait" in name]


def test_wait_in_backward_of_a_start_in_forward() -> None:
    forward, backward = fx.Graph(), fx.Graph()
    fake = next(iter(traced(lambda x: x, X).graph.nodes)).meta["val"]
    x = forward.create_node("placeholder", "x")
    sent = forward.create_node("call_function", functional.all_reduce.default, (x, "sum", "0"), name="all_reduce")
    forward.output((x, sent))
    saved = backward.create_node("placeholder", sent.name)
    tangent = backward.create_node("placeholder", "tangent")
    waited = backward.call_function(functional.wait_tensor.default, (saved,))
    product = backward.create_node("call_function", torch.ops.aten.mul.Tensor, (waited, tangent), name="mul")
    backward.output((product,))
    for node in (x, sent, saved, tangent, waited, product):
        node.meta["val"] = fake.new_empty(fake.shape)
    graph = joint.stitch(fx.GraphModule({}, forward), fx.GraphModule({}, backward), 1, (), "test")
    verify.check_graph(graph, "capture", deep=True)
    assert names(graph) == ["all_reduce", "mul"]
    assert graph.saved == ("all_reduce",)


def test_result_is_noted_as_its_kernel_makes_it() -> None:
    """torch notes a broadcast of a transposed tensor as transposed; the kernel gives a dense one."""
    graph = captured(lambda x: functional.wait_tensor(functional.broadcast(x, 0, "0")).t().cos(), X.t())
    strides = {node.name: node.meta["val"].stride() for node in operators(graph.graph)}
    assert strides == {"broadcast": (4, 1), "t": (1, 4), "cos": (1, 4)}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: functional.all_reduce(x, "sum", "0"), "all_reduce.default is never waited for"),
        (lambda x: functional.all_reduce_coalesced([x], "sum", "0")[0] + 1, "is never waited for in the graph"),
        (lambda x: functional.wait_tensor(x), "waits for a collective that was started outside of it"),
        pytest.param(
            lambda x: functional.isend(x, 1, 0, "0"),
            r"roamc does not know when _c10d_functional\.isend\.default is finished",
            marks=pytest.mark.skipif(not hasattr(functional, "isend"), reason="new behind torch 2.11"),
        ),
        (
            lambda x: functional.all_reduce_(x, "sum", "0"),
            r"roamc does not know when _c10d_functional\.all_reduce_\.default is finished",
        ),
    ],
)
def test_what_is_not_known_to_be_finished_is_refused(function: Any, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        captured(function, X)


def test_collective_in_a_branch_is_refused() -> None:
    inner = started(lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", "0")), X)
    graph = fx.Graph()
    x, flag = graph.placeholder("x"), graph.placeholder("flag")
    branch = graph.get_attr("branch")
    branched = graph.call_function(torch.ops.higher_order.cond, (flag, branch, branch, (x,)))
    x.meta["val"] = branched.meta["val"] = next(iter(inner.graph.nodes)).meta["val"]
    graph.output((branched,))
    with pytest.raises(CaptureError, match=r"all_reduce.default stands in a branch or a loop \(branch\)"):
        joint.inference(fx.GraphModule({"branch": inner}, graph), (), "test")


def test_judge_refuses_a_start_that_is_not_finished() -> None:
    graph = traced(lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", "0")) * 2, X)
    with pytest.raises(VerifyError, match="all_reduce may not be finished when it returns"):
        verify.check_graph(graph, "capture")


def test_fallback_for_what_is_refused_is_one_warning_and_right() -> None:
    group = alone()
    compiled = torch.compile(lambda x: functional.all_reduce(x * 2, "sum", group), backend="roamc", dynamic=False)
    with pytest.warns(UserWarning, match=r"all_reduce\.default is never waited for") as said:
        result = functional.wait_tensor(compiled(X))
    assert torch.equal(result, X * 2)
    assert len(said) == 1


def test_planned_collective_gives_the_numbers_of_start_and_wait() -> None:
    """One rank, where the numbers are known; tests/end_to_end/test_collectives.py has several."""
    graph = captured(lambda x: functional.wait_tensor(functional.all_reduce(x.t(), "sum", alone())) * 2, X)
    (result,) = graph.module(X)
    assert torch.equal(result, X.t() * 2)

"""reuse: what may be written over what, that the values stay, and that the judge sees every wrong reuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.errors import PlanError, VerifyError
from roamc.graph import Phase, TrainGraph, operators
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import Place, build_memory
from roamc.graph.storage_ids import ids_of
from roamc.graph.verify import check_graph
from roamc.operators import ops
from roamc.options import Options
from roamc.passes import reuse
from tests.graphs import assert_same, clones, graph_and_inputs, peak, run_real, traced
from tests.random_graphs import random_model

aten = torch.ops.aten
X = torch.randn(4, 4)
FLAGS = [(seed, route) for seed in range(20) for route in ("step", "joint")]


def decided(function: Callable[..., Any], *inputs: Tensor, **fields: Any) -> tuple[tuple[str, int], ...]:
    return reuse.decide(traced(function, *(inputs or (X,)), **fields), Options()).overwrites


def written_over(graph: TrainGraph) -> set[str]:
    """Names of the storages that results are written over."""
    memory, by_name = build_memory(graph), {node.name: node for node in graph.graph.nodes}
    pairs = reuse.decide(graph, Options()).overwrites
    return {memory.storage_of(by_name[name].args[position]).name for name, position in pairs}  # type: ignore[arg-type]


def with_reuse(graph: TrainGraph) -> TrainGraph:
    return reuse.apply(graph, reuse.decide(graph, Options()))


def test_chain_of_pointwise_operators_lies_in_one_place() -> None:
    graph = traced(lambda x: x.sin().cos().exp().sum(), X)
    assert reuse.decide(graph, Options()).overwrites == (("cos", 0), ("exp", 0))
    assert reuse.decide(graph, Options()).nbytes == 2 * X.nbytes
    after = with_reuse(graph)
    assert [s.name for s in build_memory(after).counted] == ["sin", "sum_1"]
    assert peak(after) == X.nbytes + 4


def test_second_argument_is_taken_where_the_first_is_still_needed() -> None:
    assert decided(lambda x: ((y := x.sin()), (z := x.cos()), (y * z).sum(), y.sum())[2:]) == (("mul", 1),)


def test_result_that_is_handed_out_takes_the_place_of_a_temporary() -> None:
    assert decided(lambda x: x.sin().cos()) == (("cos", 0),)


def test_view_of_the_whole_is_written_over_but_not_handed_out() -> None:
    assert decided(lambda x: x.sin().view(16).cos().sum()) == (("cos", 0),)
    assert decided(lambda x: x.sin().view(16).cos()) == ()


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: x.cos().sum(), id="inputs"),
        pytest.param(lambda x: ((y := x.sin()), y.cos().sum())[0::1], id="outputs"),
        pytest.param(lambda x: ((y := x.sin()), (y - y.t()).sum())[1], id="read in another geometry"),
        pytest.param(lambda x: (x.sin()[:1] + x).sum(), id="broadcast"),
        pytest.param(lambda x: (x.sin() > 0).sum(), id="another dtype"),
        pytest.param(lambda x: x.sin().to(torch.bfloat16).sum(), id="a smaller dtype"),
        pytest.param(lambda x: (x.sin() @ x).sum(), id="matrix products"),
        pytest.param(lambda x: ((y := x.sin()), (y.cos() + y.sum()).sum())[1], id="needed again"),
        pytest.param(lambda x: x.sin().t().clone(memory_format=torch.contiguous_format).sum(), id="other strides"),
        pytest.param(lambda x: x.sin().view(2, 8)[:, 4:].cos().sum(), id="a part"),
    ],
)
def test_not_written_over(function: Callable[..., Any]) -> None:
    assert written_over(traced(function, X)).isdisjoint({"sin", "x_1", "arg0_1"})


@pytest.mark.parametrize("seed", range(8))
def test_only_the_steps_own_tensors_are_written_over(seed: int) -> None:
    graph, _ = graph_and_inputs(*random_model(seed), "joint")
    own = {s.name for s in build_memory(graph).counted if s.place is Place.TEMPORARY}
    assert written_over(graph) <= own


@pytest.mark.parametrize(("seed", "route"), FLAGS)
def test_random_graphs_keep_their_values_and_the_model_counts_right(seed: int, route: str) -> None:
    graph, inputs = graph_and_inputs(*random_model(seed), route)
    torch.manual_seed(seed)
    expected, _ = run_real(graph, first := clones(inputs))
    before = live_bytes(build_memory(graph))
    after = with_reuse(graph)
    check_graph(after, "reuse", deep=True)
    torch.manual_seed(seed)
    outputs, measured = run_real(after, second := clones(inputs))
    assert_same(outputs, expected, "outputs")
    assert_same(second, first, "inputs written")
    assert measured == live_bytes(build_memory(after)).tolist()
    assert (live_bytes(build_memory(after)) <= before).all()


def test_something_is_written_over_in_most_random_graphs() -> None:
    some = [
        bool(reuse.decide(graph_and_inputs(*random_model(seed), "step")[0], Options()).overwrites) for seed in range(8)
    ]
    assert sum(some) >= 6


def tampered(position: int = 0, node: str = "cos") -> TrainGraph:
    """sin, cos, exp in a row; ``node`` is said to be written over its argument."""
    graph = traced(lambda x: ((y := x.sin()), y.cos().sum() + y.exp().sum())[1], X)
    return graph.replace(reuse={node: position})


def test_judge_sees_who_reads_what_was_written_over() -> None:
    with pytest.raises(VerifyError, match="exp reads sin, which was written over"):
        check_graph(tampered(), "reuse")


@pytest.mark.parametrize(
    "function",
    [lambda x: x[0].sin() + x, lambda x: x.sin()[1:].cos(), lambda x: x.sin().view(16)[:4].cos()],
    ids=["broadcast", "behind the start of its storage", "part of its storage"],
)
def test_judge_sees_a_result_that_lies_elsewhere(function: Callable[[Tensor], Tensor]) -> None:
    graph = traced(function, X)
    with pytest.raises(VerifyError, match="which lies elsewhere"):
        check_graph(graph.replace(reuse={operators(graph.graph)[-1].name: 0}), "reuse")


def test_judge_sees_an_operator_that_reads_another_part_of_what_it_writes() -> None:
    def moved(x: Tensor) -> Tensor:
        y = x.sin()
        return (y * y.t()).sum()

    with pytest.raises(VerifyError, match="mul is to be written over sin, and reads it as t as well"):
        check_graph(traced(moved, X).replace(reuse={"mul": 0}), "reuse")


def test_judge_sees_an_operator_that_must_not() -> None:
    graph = traced(lambda x: x.sin().cumsum(0).sum(), X)
    with pytest.raises(VerifyError, match="may not write over sin"):
        check_graph(graph.replace(reuse={"cumsum": 0}), "reuse")


def test_judge_sees_an_operator_that_writes_in_place() -> None:
    def function(x: Tensor) -> Tensor:
        a, b = x.sin(), x.cos()
        product = a * b
        a.add_(b)
        return product.exp() + a

    graph = traced(function, X)
    assert ops.may_overwrite(next(n for n in operators(graph.graph) if n.name == "add_"), ids_of) == ()
    with pytest.raises(VerifyError, match="add_ is to be written over cos, and makes no memory of its own"):
        check_graph(graph.replace(reuse={"add_": 1}), "reuse")


def test_judge_sees_an_argument_that_is_negated_when_it_is_read() -> None:
    graph = traced(lambda x: x.sin() * x, X)
    sine = next(n for n in operators(graph.graph) if n.name == "sin")
    with sine.meta["val"].fake_mode:
        sine.meta["val"] = aten._neg_view.default(sine.meta["val"])
    with pytest.raises(VerifyError, match="which lies elsewhere"):
        check_graph(graph.replace(reuse={"mul": 0}), "reuse")


def test_plan_of_another_graph_is_refused() -> None:
    graph = traced(lambda x: x.sin().cos().sum(), X)
    for overwrites in ((("tan", 0),), (("cos", 1),), (("sum_1", 0),), (("sin", 0),)):
        with pytest.raises(PlanError, match="cannot write over its argument"):
            reuse.apply(graph, reuse.Decision(overwrites, 0))


def test_update_is_written_over_its_gradient_only_behind_all_who_read_it() -> None:
    graph, _ = graph_and_inputs(*random_model(3), "step")
    memory = build_memory(graph)
    for name, position in reuse.decide(graph, Options()).overwrites:
        index = next(i for i, op in enumerate(memory.operators) if op.node.name == name)
        argument = memory.operators[index].node.args[position]
        assert max(memory.uses[memory.storage_of(argument).index]) == index
    assert Phase.UPDATE in graph.phase.values()

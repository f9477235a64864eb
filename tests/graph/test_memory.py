"""The memory model: predicted live bytes are those of real storages, in any order; lifetimes and hazards by hand."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.graph import Phase, TrainGraph
from roamc.graph.eager_memory import eager_live_bytes
from roamc.graph.lifetimes import lifetimes, live_bytes
from roamc.graph.memory import _KEPT_AS, WROTE_OVER, MemoryModel, Place, _Builder, _state, build_memory, input_bytes
from roamc.graph.verify import constraints
from roamc.options import Options
from roamc.passes import reorder, reuse
from roamc.planning import search
from tests.graphs import assert_same, captured_step, clones, graph_and_inputs, model_graph, run_real, traced
from tests.models import MODELS
from tests.random_graphs import random_model

ROUTES = ("step", "joint")
KB, KB_2, KB_3 = (torch.zeros(256) for _ in range(3))  # 1024 bytes each


def assert_real_bytes_are_predicted(graph: TrainGraph, inputs: Sequence[Any], said: str) -> None:
    memory = build_memory(graph)
    _, measured = run_real(graph, inputs)
    predicted = live_bytes(memory).tolist()
    assert len(measured) == len(predicted), said
    wrong = [i for i, (a, b) in enumerate(zip(measured, predicted, strict=True)) if a != b]
    assert not wrong, (
        f"{said}: {len(wrong)} steps differ; first at {memory.operators[wrong[0]].node.format_node()}: "
        f"really {measured[wrong[0]]}, predicted {predicted[wrong[0]]}"
    )


def shuffled(memory: MemoryModel, boundary: bool, draw: random.Random) -> tuple[str, ...]:
    """Names of the operators in a random order that keeps every edge and the boundary."""
    waiting = [0] * len(memory.operators)
    after: list[list[int]] = [[] for _ in memory.operators]
    for before, behind in memory.edges:
        waiting[behind] += 1
        after[before].append(behind)
    ready, order = [i for i, count in enumerate(waiting) if not count], []
    while ready:
        first = min(memory.operators[i].phase for i in ready) if boundary else None
        chosen = draw.choice([i for i in ready if first is None or memory.operators[i].phase is first])
        ready.remove(chosen)
        order.append(memory.operators[chosen].node.name)
        for behind in after[chosen]:
            waiting[behind] -= 1
            if not waiting[behind]:
                ready.append(behind)
    return tuple(order)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("seed", range(60))
def test_random_graph_live_bytes_are_real_in_program_order_and_any_other(seed: int, route: str) -> None:
    model, batch, loss = random_model(seed)
    optimizer = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)[seed % 3]
    graph, inputs = graph_and_inputs(model, batch, loss, route, optimizer)
    assert_real_bytes_are_predicted(graph, clones(inputs), f"seed {seed}, {route}, program order")
    torch.manual_seed(seed)
    used = clones(inputs)
    expected, _ = run_real(graph, used)
    order = shuffled(build_memory(graph), graph.boundary, random.Random(seed))
    moved = reorder.apply(graph, reorder.Decision(order, 0, 0, "gap", "random", ()))
    assert_real_bytes_are_predicted(moved, clones(inputs), f"seed {seed}, {route}, random order")
    torch.manual_seed(seed)
    got, _ = run_real(moved, inputs)
    assert_same((*expected, *used), (*got, *inputs), f"seed {seed}, {route}: another order gives other results")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", MODELS)
def test_model_live_bytes_are_real_in_program_order_reordered_and_with_in_place_reuse(name: str, route: str) -> None:
    graph, inputs = model_graph(name, route)
    assert_real_bytes_are_predicted(graph, clones(inputs), f"{name}, {route}, program order")
    before = int(live_bytes(build_memory(graph)).max())
    decision = reorder.decide(graph, Options())
    moved = reorder.apply(graph, decision)
    assert_real_bytes_are_predicted(moved, clones(inputs), f"{name}, {route}, reordered by {decision.algorithm}")
    with_reuse = reuse.apply(moved, reuse.decide(moved, Options()))
    assert_real_bytes_are_predicted(with_reuse, inputs, f"{name}, {route}, in-place reuse")
    assert int(live_bytes(build_memory(with_reuse)).max()) == decision.peak_bytes <= before


def names_and_lives(graph: TrainGraph) -> dict[str, tuple[int, int]]:
    memory = build_memory(graph)
    born, dead = lifetimes(memory)
    return {s.name: (int(b), int(d)) for s, b, d in zip(memory.counted, born, dead, strict=True)}


def test_chain_lives_are_half_open_and_the_output_lives_to_the_end() -> None:
    #            step:    0: add   1: mul   2: sum
    # add    1024 bytes   x        x                  [0, 2) dead after its last reader
    # mul    1024 bytes            x        x         [1, 3)
    # sum       4 bytes                     x         [2, 3) output
    graph = traced(lambda x: ((x + 1) * 2).sum(), KB)
    assert names_and_lives(graph) == {"add": (0, 2), "mul": (1, 3), "sum_1": (2, 3)}
    assert live_bytes(build_memory(graph)).tolist() == [1024, 2048, 1028]


def test_early_output_lives_to_the_end() -> None:
    # add is handed out and read by mul only; it stays through sin and cos.
    graph = traced(lambda x: ((y := x + 1), (y * 2).sum().sin().cos()), KB)
    assert names_and_lives(graph)["add"] == (0, 5)
    # add, mul 1024 each; sum 4 over mul; then add with two numbers
    assert live_bytes(build_memory(graph)).tolist() == [1024, 2048, 2052, 1024 + 8, 1024 + 8]


def test_storage_lives_while_any_view_of_it_is_read() -> None:
    #        0: mul  1: sin  2: sum   views t and select have no step and no bytes
    # mul    x       x       x        read at 2 through two views
    # sin            x       x        output
    # sum                    x        output
    graph = traced(lambda x: ((y := x * 2), y.sin(), y.view(16, 16).t().select(0, 3).sum())[1:], KB)
    memory = build_memory(graph)
    assert [op.node.name for op in memory.operators] == ["mul", "sin", "sum_1"]
    assert names_and_lives(graph)["mul"] == (0, 3)
    assert live_bytes(memory).tolist() == [1024, 2048, 2052]


def test_unread_result_of_several_lives_one_step() -> None:
    # max over rows of 16x16: 16 values of 4 bytes, 16 indices of 8 bytes that nobody picks
    graph = traced(lambda x: x.view(16, 16).max(dim=1).values.sum(), KB)
    lives = names_and_lives(graph)
    assert lives["max_1#0"] == (0, 2)
    assert lives["max_1#1"] == (0, 1)
    assert live_bytes(build_memory(graph)).tolist() == [64 + 128, 64 + 4]


def test_write_in_place_makes_no_storage_and_keeps_the_old_one_alive() -> None:
    # zeros [0, 3): made, written at 1, read at 2
    graph = traced(lambda x: torch.zeros_like(x).add_(x).sum(), KB)
    assert live_bytes(build_memory(graph)).tolist() == [1024, 1024, 1028]
    assert [op.births for op in build_memory(graph).operators][1] == ()


def test_inputs_are_never_counted() -> None:
    graph = traced(lambda x, y: x.add_(y), KB, KB_2)
    memory = build_memory(graph)
    assert [s.place for s in memory.storages] == [Place.INPUT, Place.INPUT]
    assert live_bytes(memory).tolist() == [0]
    assert input_bytes(graph) == {"input": 2048}


def test_saved_is_born_in_forward_and_read_later() -> None:
    # F: sin, cos, mul   B: mul again of sin; cos is read by F only, sin by both
    graph = traced(lambda x: ((s := x.sin()), (s * x.cos()).sum(), s * 3)[1:], KB, phases="FFFFB")
    memory = build_memory(graph)
    assert [s.name for s in memory.saved] == ["sin"]


def test_eager_keeps_gradients_to_the_end() -> None:
    # two "gradients" a and b, each read once by an "update"
    def step(x: Tensor, p: Tensor, q: Tensor) -> Tensor:
        p.add_(x * 2)
        q.add_(x * 3)
        return x.sum()

    graph = traced(step, KB, KB_2, KB_3, phases="BUBUF", gradients=("mul", "mul_1"))
    memory = build_memory(graph)
    #             0: mul  1: add_  2: mul_1  3: add_  4: sum
    assert live_bytes(memory).tolist() == [1024, 1024, 1024, 1024, 4]
    assert eager_live_bytes(memory).tolist() == [1024, 1024, 2048, 2048, 2052]


def test_what_the_update_divides_in_place_takes_nothing_in_eager() -> None:
    def step(x: Tensor, p: Tensor) -> Tensor:
        gradient = x * 2
        p.add_(gradient.div_(3).div_(x))
        return x.sum()

    memory = build_memory(traced(step, KB, KB_2, phases="BUUUF", gradients=("mul",)))
    #                                            0: mul  1: div_  2: div_  3: add_  4: sum
    assert eager_live_bytes(memory).tolist() == [1024, 1024, 1024, 1024, 1028]


def test_what_is_written_over_a_gradient_lies_there_to_the_end_in_eager() -> None:
    def step(x: Tensor, p: Tensor) -> Tensor:
        p.add_((x * 2) * 3)
        return x.sum()

    graph = traced(step, KB, KB_2, phases="BUUF", gradients=("mul",))
    next(node for node in graph.graph.nodes if node.name == "mul_1").meta[WROTE_OVER] = True
    memory = build_memory(graph)
    #                                      0: mul  1: mul_1  2: add_  3: sum
    assert live_bytes(memory).tolist() == [1024, 2048, 1024, 4]
    assert eager_live_bytes(memory).tolist() == [1024, 1024, 1024, 1028]


def test_what_eager_writes_to_a_part_keeps_the_whole_alive() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        part = (x * 2)[:128].sigmoid().tan()
        return x.sum(), part.cos()

    graph = traced(function, KB)
    for node in graph.graph.nodes:
        if node.target in (torch.ops.aten.sigmoid.default, torch.ops.aten.tan.default):
            node.meta[WROTE_OVER] = True
    memory = build_memory(graph)
    #                                           0: mul  1: sigmoid  2: tan  3: sum  4: cos
    assert live_bytes(memory).tolist() == [1024, 1536, 1024, 516, 1028]
    assert eager_live_bytes(memory).tolist() == [1024, 1024, 1024, 1028, 1540]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("seed", range(5))
def test_eager_never_holds_less(seed: int, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where it writes over a value."""
    graph, _ = graph_and_inputs(*random_model(seed), route)
    memory = build_memory(graph)
    monkeypatch.setattr("roamc.graph.eager_memory._written_over", lambda *_: ())
    assert (eager_live_bytes(memory) >= live_bytes(memory)).all()


def test_edges_keep_read_write_read_of_one_storage() -> None:
    graph = traced(lambda x, y: ((a := x * 2), a.sum(), a.add_(y), a.cos())[1::2], KB, KB_2)
    kept = constraints(graph).order
    assert ("sum_1", "add_") in kept  # the read before stays before
    assert ("add_", "cos") in kept  # the read behind stays behind
    assert ("sum_1", "cos") not in kept  # reads among themselves are free


def test_edges_see_reads_and_writes_through_different_views() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        a = x.view(16, 16) * 2
        before = a.t().sum(0)
        a[0].zero_()
        return before, a.t().select(1, 3).cos()

    kept = constraints(traced(function, KB)).order
    assert ("sum_1", "zero_") in kept
    assert ("zero_", "cos") in kept


def test_edges_keep_two_writes_of_an_input_and_its_reads() -> None:
    graph = traced(lambda p: ((r := p.sin()), p.mul_(2), p.add_(1), p.cos(), r)[3:], KB)
    assert {("sin", "mul_"), ("mul_", "add_"), ("add_", "cos")} <= set(constraints(graph).order)


def test_edges_chain_random_operators_in_order() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        mask, _ = torch.ops.aten.native_dropout.default(x, 0.5, True)
        return torch.randn_like(x), mask.sin(), torch.bernoulli(x), x.cos()

    kept = constraints(traced(function, KB)).order
    assert {("native_dropout", "randn_like"), ("randn_like", "bernoulli")} <= set(kept)
    assert not any("cos" in pair for pair in kept)


def test_update_waits_for_the_gradient_it_does_not_read() -> None:
    linear = torch.nn.Linear(3, 3)
    graph = captured_step(linear, (torch.randn(2, 3),), lambda m, x: m(x).square().mean()).graph
    memory = build_memory(graph)
    kept = set(constraints(graph).order)
    decays = [op.node.name for op in memory.operators if op.node.target is torch.ops.aten.mul_.Tensor]
    weights = [name for name in decays if name in graph.waits]
    assert weights  # AdamW shrinks the weight and its moments before it looks at the gradient
    makers = {memory.storage_of(node).producer for node in graph.graph.nodes if node.name in graph.gradients}
    for name in weights:
        before = {a for a, b in kept if b == name}
        assert before & {memory.operators[maker].node.name for maker in makers}, name


def test_gradients_and_phases_of_a_captured_step() -> None:
    linear = torch.nn.Linear(3, 3)
    graph = captured_step(linear, (torch.randn(2, 3),), lambda m, x: m(x).square().mean(), torch.optim.SGD).graph
    memory = build_memory(graph)
    assert len(graph.gradients) == 2
    assert {op.phase for op in memory.operators} == set(Phase)
    assert sum(s.gradient for s in memory.counted) == 2


@pytest.mark.parametrize(("name", "route"), [("nanogpt", "step"), ("lstm", "step"), ("t5", "step"), ("t5", "joint")])
def test_kept_models_are_those_of_the_graph_as_it_is(name: str, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the road asks, passes under a budget included, against a model that is read off anew each time."""
    again = 0

    def state(graph: TrainGraph) -> list[object]:
        nonlocal again
        cached, state_of_graph = getattr(graph.graph, _KEPT_AS, None), _state(graph)
        if (
            cached is not None
            and len(cached.state) == len(state_of_graph)
            and all(map(operator.is_, cached.state, state_of_graph))
        ):
            assert cached.memory == _Builder(graph).build()
            again += 1
        return state_of_graph

    monkeypatch.setattr("roamc.graph.memory._state", state)
    graph, _ = model_graph(name, route)
    search.run(graph, Options(memory_budget="85%"))
    assert again

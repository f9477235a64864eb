"""Reruns: any legal choice of them leaves every bit as it is, and the bytes are free in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.cost import workspaces
from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph, verify
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from roamc.operators.random import save_rng_state
from roamc.options import Options
from roamc.passes import retain
from roamc.passes.retain.problem import question
from roamc.rewriting.arrange import arrange
from roamc.rewriting.rerun import rerun
from roamc.rewriting.rerun_readers import Run, with_readers
from roamc.rewriting.reruns import Rerun
from roamc.solvers import retain as solver
from roamc.solvers.retain import RetainSolution, schedule
from roamc.solvers.status import Status
from tests.graphs import graph_and_inputs, model_graph
from tests.random_graphs import random_model
from tests.rewriting.cases import At, X, chain, check, cleaned, named, some_reruns


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(15))
def test_random_reruns_of_random_graphs_leave_every_bit(seed: int, route: str) -> None:
    graph, inputs = graph_and_inputs(*random_model(seed), route)
    graph = cleaned(graph)
    reruns = some_reruns(graph, seed, (0.1, 0.5, 1.0)[seed % 3])
    check(graph, inputs, reruns, f"seed {seed}, {route}")


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(6))
def test_reruns_ahead_of_their_readers_leave_every_bit(seed: int, route: str) -> None:
    graph, inputs = graph_and_inputs(*random_model(seed), route)
    graph = cleaned(graph)
    check(graph, inputs, some_reruns(graph, seed, 0.3, ahead=True), f"seed {seed}, {route}")


def arranged_as(graph: TrainGraph, spots: Sequence[At]) -> TrainGraph:
    """The graph with reruns just where they were decided, as pass retain leaves it."""
    names = [op.node.name for op in build_memory(graph).operators]
    number = {storage.name: storage.index for storage in build_memory(graph).storages}
    runs = [Run(names.index(spot.before), spot.operator, tuple(number[name] for name in spot.renews)) for spot in spots]
    reruns, order = with_readers(graph, names, runs)
    rows = tuple((*one, 0.0) for one in reruns)
    return retain.apply(graph, dataclasses.replace(retain.NOTHING, reruns=rows, sequence=tuple(order)))


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(12))
def test_the_graph_has_no_more_live_bytes_than_the_solver_counted(seed: int, route: str) -> None:
    graph, _ = graph_and_inputs(*random_model(seed), route)
    graph = cleaned(graph)
    program_order = [op.node.name for op in build_memory(graph).operators]
    asked = question(graph, Options(disable=("reuse",)), program_order, dict.fromkeys(program_order, 0.0))
    names = [asked.operators[op] for op in asked.problem.sequence.tolist()]
    graph = arrange(graph, [name for name in names if name])
    reruns = some_reruns(graph, seed, 0.3, ahead=True)
    number = {storage.name: k for k, storage in enumerate(asked.storages)}
    rows = [(names.index(b), asked.operators.index(op), (number[renewed],)) for b, op, (renewed,) in reruns]
    chosen = RetainSolution(tuple(solver.Rerun(*row) for row in rows), 0, 0.0, 0.0, 0, Status.GAP, 0)
    counted = max(nbytes for _, nbytes in schedule(asked.problem, chosen))
    after = build_memory(arranged_as(graph, reruns))
    states = sum(s.nbytes for s in after.counted if after.operators[s.producer].node.target is save_rng_state)
    assert (live_bytes(after) + workspaces(after.operators, 1)).max() <= counted + states


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("name", ["nanogpt-dropout", "t5", "vit"])
def test_random_reruns_of_models_leave_every_bit(name: str, route: str) -> None:
    graph, inputs = model_graph(name, route)
    graph = cleaned(graph)
    reruns = some_reruns(graph, 7, 0.3)
    assert reruns
    check(graph, inputs, reruns, f"{name}, {route}", deep=False)


def test_bytes_are_free_between_the_two_runs() -> None:
    graph, inputs = chain(lambda x: ((y := x.sin()), (y + (y.sum() * 2)).sum())[1], "FFFBB")
    before = live_bytes(build_memory(graph)).tolist()
    after = check(graph, inputs, [At("add", "sin", ("sin",))], "sin again")
    assert [op.node.name for op in build_memory(after).operators] == ["sin", "sum_1", "mul", "sin_1", "add", "sum_2"]
    assert before[2] == X.nbytes + 8
    assert live_bytes(build_memory(after)).tolist()[2] == 8
    assert after.phase["sin_1"] is Phase.BACKWARD


def test_a_rerun_stands_in_front_of_its_reader_wherever_it_was_decided() -> None:
    graph, inputs = chain(lambda x: ((y := x.sin()), (y + (y.sum() * 2 * x.sum())).sum())[1], "FFFFFBB")
    before = [op.node.name for op in build_memory(graph).operators]
    early = before[before.index("add") - 1]
    after = check(graph, inputs, [At(early, "sin", ("sin",))], "sin ahead")
    names = [op.node.name for op in build_memory(after).operators]
    assert names.index(early) + 1 == names.index("sin_1") == names.index("add") - 1
    assert after.phase["sin_1"] is Phase.FORWARD


@pytest.mark.parametrize("times", [1, 3])
def test_random_operators_draw_the_same_again(times: int) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        y, mask = torch.ops.aten.native_dropout(x, 0.5, True)
        z = torch.rand_like(x) + torch.bernoulli(x.abs().clamp(max=1))
        return tuple((y * (i + 1) + mask).sum() + z.sum() for i in range(times))

    graph, inputs = chain(model, "")
    memory = build_memory(graph)
    readers = [op.node.name for op in memory.operators if op.node.target is torch.ops.aten.mul.Tensor]
    parts = ("native_dropout", "native_dropout_by_mask")
    again = [At(name, part, (part,)) for name in readers for part in parts]
    after = check(graph, inputs, again, "dropout")
    states = [node for node in after.graph.nodes if "save_rng_state" in str(node.target)]
    assert len(states) == 1, "one state serves all reruns"


def reads_twice(x: Tensor, scale: Tensor) -> Tensor:
    y = (x * scale).sin()
    z = y.cos()
    scale.add_(1)
    return (y + z).exp()


SINE = ("sin", ("add",))
"""What one run renews, and for whom."""


@pytest.mark.parametrize(
    ("again", "said"),
    [
        ([("sin_1", "nobody", "backward", (SINE,))], "no operator 'nobody' that could run again"),
        ([("x_2", "x_1", "backward", (SINE,))], "no operator 'x_1' that could run again"),
        ([("t_1", "t", "backward", (SINE,))], "no operator 't' that could run again"),
        ([("add__1", "add_", "backward", (("mul", ("cos",)),))], "no operator 'add_' that could run again"),
        ([("sin_1", "sin", "backward", (("exp", ("add",)),))], "sin does not make the storage 'exp'"),
        ([("sin_1", "sin", "backward", (("sin", ("nobody",)),))], "no operator 'nobody', which is to read sin_1"),
        ([("sin_1", "sin", "backward", (("sin", ("exp",)),))], "exp does not read sin, which sin_1 makes again"),
        ([("sin_1", "sin", "backward", (("sin", ("add", "add")),))], "add would read two versions of sin"),
        (
            [("sin_1", "sin", "backward", (SINE,)), ("sin_2", "sin", "backward", (SINE,))],
            "add would read two versions of sin, one of them that of sin_2",
        ),
        ([("sin_1", "sin", "backward", (SINE, ("sin", ("cos",))))], "sin_1 names a storage twice"),
        ([("sin_1", "sin", "backward", ())], "nothing reads what sin_1 makes"),
        ([("sin_1", "sin", "backward", (("sin", ()),))], "nothing reads what sin_1 makes"),
        ([("cos_1", "sin", "backward", (SINE,))], "another run of sin cannot have the name 'cos_1'"),
        ([("sin_1; import os", "sin", "backward", (SINE,))], "another run of sin cannot have the name 'sin_1; import"),
        ([("sin", "sin", "backward", (SINE,))], "another run of sin cannot have the name 'sin'"),
        ([("add_1", "add", "backward", (("add", ("exp",)),))] * 2, "two operators would have the name 'add_1'"),
        ([("mul_1", "mul", "late", (("mul", ("sin",)),))], "mul_1: the phase must be one of forward, backward, update"),
    ],
)  # fmt: skip
def test_rerun_that_does_not_belong_to_the_graph_is_named(again: list[tuple[Any, ...]], said: str) -> None:
    graph, _ = chain(reads_twice, "FFFFBB", X, X.clone())
    assert {op.node.name for op in build_memory(graph).operators} == {"mul", "sin", "cos", "add_", "add", "exp"}
    with pytest.raises(PlanError, match=said):
        rerun(graph, [Rerun(*one) for one in again])


def test_a_name_that_a_node_has_is_refused() -> None:
    graph, _ = chain(lambda x: x.sin() + x.cos().sin(), "")
    with pytest.raises(PlanError, match="two operators would have the name 'sin_1'"):
        rerun(graph, [Rerun("sin_1", "sin", "forward", (("sin", ("add",)),))])


def halves(function: Callable[..., Any], phases: str) -> TrainGraph:
    """A graph with a boundary between forward and backward."""
    return chain(function, phases, X, X.clone())[0].replace(boundary=True)


def test_a_rerun_behind_the_boundary_cannot_be_read_in_front_of_it() -> None:
    said = "sin_1 would run in backward, behind cos, which reads it"
    with pytest.raises(PlanError, match=said):
        rerun(halves(reads_twice, "FFFFBB"), [Rerun("sin_1", "sin", "backward", (("sin", ("cos", "add")),))])
    chained = [
        Rerun("mul_1", "mul", "backward", (("mul", ("sin_1",)),)),
        Rerun("sin_1", "sin", "forward", (("sin", ("add",)),)),
    ]
    with pytest.raises(PlanError, match="mul_1 would run in backward, behind sin_1, which reads it"):
        rerun(halves(reads_twice, "FFFFBB"), chained)


def test_a_rerun_in_front_of_the_boundary_cannot_be_of_an_operator_behind_it() -> None:
    with pytest.raises(PlanError, match="add_1 would run in forward, in front of add:"):
        rerun(halves(reads_twice, "FFFFBB"), [Rerun("add_1", "add", "forward", (("add", ("exp",)),))])


def test_a_rerun_cannot_be_in_a_part_that_a_graph_with_a_boundary_does_not_have() -> None:
    with pytest.raises(PlanError, match="sin_1 would run in update, which this graph does not have"):
        rerun(halves(reads_twice, "FFFFBB"), [Rerun("sin_1", "sin", "update", (("sin", ("add",)),))])


def test_a_rerun_behind_the_boundary_cannot_read_what_is_written_in_front_of_it() -> None:
    said = "mul_1 would run in backward, behind add_, which writes what it reads"
    chained = [
        Rerun("mul_1", "mul", "backward", (("mul", ("sin_1",)),)),
        Rerun("sin_1", "sin", "backward", (("sin", ("add",)),)),
    ]
    with pytest.raises(PlanError, match=said):
        rerun(halves(reads_twice, "FFFFBB"), chained)


def test_a_rerun_stands_in_front_of_the_write_to_what_it_reads() -> None:
    graph, inputs = chain(reads_twice, "FFFFBB", X, X.clone())
    after = check(graph, inputs, [At("add_", "mul", ("mul",)), At("add", "sin", ("sin",))], "in front of a write")
    names = [op.node.name for op in build_memory(after).operators]
    assert names == ["mul", "sin", "cos", "mul_1", "add_", "sin_1", "add", "exp"]


@pytest.mark.parametrize("boundary", [False, True])
def test_a_rerun_of_forward_stands_in_front_of_the_boundary(boundary: bool) -> None:
    graph, _ = chain(lambda x, y: (x.sin().cos() * 2 + x.sin().exp()).sum(), "FFFFFBB", X, X.clone())
    one = Rerun("sin_2", "sin", "forward", (("sin", ("cos",)),))
    late = Rerun("exp_1", "exp", "forward", (("exp", ("add",)),))
    after = rerun(graph.replace(boundary=boundary), [late, one])
    names = [op.node.name for op in build_memory(after).operators if op.phase is Phase.FORWARD]
    assert names[-1] == "exp_1"
    verify.check_graph(after, "retain")


def test_a_rerun_cannot_read_its_own_result_nor_what_is_made_of_it() -> None:
    graph, _ = chain(lambda x: x.sin().cos().exp(), "")
    with pytest.raises(PlanError, match="cos_1 does not read cos, which cos_1 makes again"):
        rerun(graph, [Rerun("cos_1", "cos", "forward", (("cos", ("cos_1",)),))])
    circle = [
        Rerun("sin_1", "sin", "forward", (("sin", ("cos_1",)),)),
        Rerun("cos_1", "cos", "forward", (("cos", ("sin_1", "exp")),)),
    ]
    with pytest.raises(PlanError, match="sin_1 does not read cos, which cos_1 makes again"):
        rerun(graph, circle)


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(8))
def test_readers_of_runs_in_an_order_are_those_of_a_walk(seed: int, route: str) -> None:
    graph = cleaned(graph_and_inputs(*random_model(seed), route)[0])
    memory = build_memory(graph)
    names = [op.node.name for op in memory.operators]
    spots = some_reruns(graph, seed, 0.4, ahead=seed % 2 == 1)
    number = {storage.name: storage.index for storage in memory.storages}
    runs = [Run(names.index(spot.before), spot.operator, tuple(number[name] for name in spot.renews)) for spot in spots]
    reruns, order = with_readers(graph, names, runs)
    wanted = named(graph, spots)
    assert [without_sequence(one) for one in reruns] == [without_sequence(one) for one in wanted]
    assert [name for name in order if name in set(names)] == names
    assert {*order} - {*names} == {one.name for one in reruns}


def without_sequence(one: Rerun) -> tuple[Any, ...]:
    return (*one[:3], sorted((storage, sorted(readers)) for storage, readers in one.renews))

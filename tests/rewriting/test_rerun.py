"""Reruns: any legal choice of them leaves every bit as it is, and the bytes are free in between."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from roamc.cost import workspaces
from roamc.errors import PlanError
from roamc.graph import Phase
from roamc.graph.memory import build_memory, live_bytes
from roamc.operators.random import save_rng_state
from roamc.options import Options
from roamc.passes.retain.problem import question
from roamc.rewriting.arrange import arrange
from roamc.rewriting.rerun import Rerun, rerun
from roamc.solvers import retain as solver
from roamc.solvers.retain import RetainSolution, schedule
from roamc.solvers.status import Status
from tests.graphs import graph_and_inputs, model_graph
from tests.random_graphs import random_model
from tests.rewriting.cases import X, chain, check, cleaned, some_reruns


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


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(12))
def test_the_graph_has_no_more_live_bytes_than_the_solver_counted(seed: int, route: str) -> None:
    graph, _ = graph_and_inputs(*random_model(seed), route)
    graph = cleaned(graph)
    given = [op.node.name for op in build_memory(graph).operators]
    asked = question(graph, Options(disable=("reuse",)), given, dict.fromkeys(given, 0.0))
    names = [asked.operators[op] for op in asked.problem.sequence.tolist()]
    graph = arrange(graph, [name for name in names if name])
    reruns = some_reruns(graph, seed, 0.3, ahead=True)
    number = {storage.name: k for k, storage in enumerate(asked.storages)}
    rows = [(names.index(b), asked.operators.index(op), (number[renewed],)) for b, op, (renewed,) in reruns]
    chosen = RetainSolution(tuple(solver.Rerun(*row) for row in rows), 0, 0.0, 0.0, 0, Status.GAP, 0)
    counted = max(nbytes for _, nbytes in schedule(asked.problem, chosen))
    after = build_memory(rerun(graph, reruns))
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
    after = check(graph, inputs, [Rerun("add", "sin", ("sin",))], "sin again")
    assert [op.node.name for op in build_memory(after).operators] == ["sin", "sum_1", "mul", "sin_1", "add", "sum_2"]
    assert before[2] == X.nbytes + 8
    assert live_bytes(build_memory(after)).tolist()[2] == 8
    assert after.phase["sin_1"] is Phase.BACKWARD


def test_a_rerun_ahead_of_its_reader_waits_for_it() -> None:
    graph, inputs = chain(lambda x: ((y := x.sin()), (y + (y.sum() * 2 * x.sum())).sum())[1], "FFFFFBB")
    before = [op.node.name for op in build_memory(graph).operators]
    early = before[before.index("add") - 1]
    after = check(graph, inputs, [Rerun(early, "sin", ("sin",))], "sin ahead")
    names = [op.node.name for op in build_memory(after).operators]
    assert names.index("sin_1") + 1 == names.index(early) == names.index("add") - 1
    assert after.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)


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
    again = [Rerun(name, part, (part,)) for name in readers for part in parts]
    after = check(graph, inputs, again, "dropout")
    states = [node for node in after.graph.nodes if "save_rng_state" in str(node.target)]
    assert len(states) == 1, "one state serves all reruns"


@pytest.mark.parametrize(
    ("again", "said"),
    [
        (Rerun("cos", "nobody", ("sin",)), "no operator 'nobody'"),
        (Rerun("nobody", "sin", ("sin",)), "no operator 'nobody'"),
        (Rerun("cos", "sin", ("exp",)), "sin does not make the storage 'exp'"),
        (Rerun("cos", "x_1", ("x_1",)), "no operator 'x_1' that could run again"),
    ],
)
def test_rerun_that_does_not_belong_to_the_graph_is_named(again: Rerun, said: str) -> None:
    graph, _ = chain(lambda x: x.sin().cos().exp(), "")
    with pytest.raises(PlanError, match=said):
        rerun(graph, [again])

"""Reruns: any legal choice of them leaves every bit as it is, and the bytes are free in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roamc.cost import workspaces
from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph, verify
from roamc.graph.memory import build_memory, live_bytes
from roamc.operators.random import save_rng_state
from roamc.options import Options
from roamc.passes import normalize
from roamc.passes.retain.problem import question
from roamc.rewriting.arrange import arrange
from roamc.rewriting.expiry import droppable, expiries
from roamc.rewriting.rerun import Rerun, rerun
from roamc.solvers import retain as solver
from roamc.solvers.retain import RetainSolution, schedule
from roamc.solvers.status import Status
from tests.graphs import assert_same, clones, graph_and_inputs, model_graph, run_real, traced
from tests.random_graphs import random_model

X = torch.randn(8, 8)


def cleaned(graph: TrainGraph) -> TrainGraph:
    return normalize.apply(graph, normalize.decide(graph, Options()))


def some_reruns(graph: TrainGraph, seed: int, share: float, ahead: bool = False) -> list[Rerun]:
    """Of all operators and their readers, a random share: the operator runs again in front of the reader, or ahead."""
    rng = random.Random(seed)
    memory = build_memory(graph)
    names = [op.node.name for op in memory.operators]
    nodes = {op.node.name: op.node for op in memory.operators}
    until = expiries(memory, nodes, names, range(len(names)), boundary=graph.boundary)
    chosen = []
    for storage, may_drop in zip(memory.counted, droppable(memory, memory.counted), strict=True):
        for user in memory.uses[storage.index] if may_drop else ():
            if user < until[storage.producer] and rng.random() < share:
                at = rng.randint(storage.producer + 1, user) if ahead else user
                chosen.append((at, storage.producer, storage.name))
    return [Rerun(names[at], names[maker], (storage,)) for at, maker, storage in sorted(chosen)]


def check(graph: TrainGraph, inputs: list[Any], reruns: Sequence[Rerun], said: str, *, deep: bool = True) -> TrainGraph:
    """Run before and after: results, written inputs and the generator are the same, and all bytes are foreseen."""
    used, again = clones(inputs), clones(inputs)
    torch.manual_seed(5)
    expected, _ = run_real(graph, used)
    state = torch.get_rng_state()
    kept = verify.constraints(graph)
    after = rerun(graph, reruns)
    verify.check_graph(after, "retain", kept, deep=deep)
    torch.manual_seed(5)
    got, measured = run_real(after, again)
    assert torch.equal(torch.get_rng_state(), state), said
    assert_same([*expected, *used], [*got, *again], said)
    assert measured == live_bytes(build_memory(after)).tolist(), said
    return after


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
    assert (live_bytes(after) + workspaces(after.operators)).max() <= counted + states


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("name", ["nanogpt-dropout", "t5", "vit"])
def test_random_reruns_of_models_leave_every_bit(name: str, route: str) -> None:
    graph, inputs = model_graph(name, route)
    graph = cleaned(graph)
    reruns = some_reruns(graph, 7, 0.3)
    assert reruns
    check(graph, inputs, reruns, f"{name}, {route}", deep=False)


def chain(function: Callable[..., Any], phases: str, *inputs: Tensor) -> tuple[TrainGraph, list[Any]]:
    given = list(inputs or (X,))
    return cleaned(traced(function, *given, phases=phases)), given


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


def test_what_read_a_version_reads_the_newest_when_it_runs_again() -> None:
    """A rerun in front of the first reader, too: else that version would live until the second rerun reads it."""

    def function(x: Tensor) -> Tensor:
        sine, total = x.sin(), x.sum()
        cosine = sine.t().cos()
        return (cosine * (cosine.sum() * total)).sum()

    graph, inputs = chain(function, "")
    names = [op.node.name for op in build_memory(graph).operators]
    assert names == ["sin", "sum_1", "cos", "sum_2", "mul", "mul_1", "sum_3"]
    again = [Rerun(before, name, (name,)) for before, name in (("cos", "sin"), ("mul_1", "sin"), ("mul_1", "cos"))]
    after = build_memory(check(graph, inputs, again, "a version read twice"))
    runs = [op.node.name for op in after.operators]
    assert runs == ["sum_1", "sin_1", "cos", "sum_2", "mul", "sin_2", "cos_1", "mul_1", "sum_3"]
    assert live_bytes(after).tolist()[runs.index("mul")] == 12


def test_first_run_that_nobody_reads_any_more_is_taken_out() -> None:
    graph, inputs = chain(lambda x: ((y := x.sin()), (x.sum() + y).sum())[1], "FFBB")
    after = check(graph, inputs, [Rerun("add", "sin", ("sin",))], "sin later")
    assert [op.node.name for op in build_memory(after).operators] == ["sum_1", "sin_1", "add", "sum_2"]


def test_views_are_made_again_of_the_new_version() -> None:
    graph, inputs = chain(lambda x: ((y := x.sin().t()), y.sum() + y[::3].exp().sum())[1], "")
    last = next(op.node.name for op in build_memory(graph).operators if op.node.name == "exp")
    check(graph, inputs, [Rerun(last, "sin", ("sin",))], "views")


def test_one_result_of_several_is_renewed_and_the_others_stay() -> None:
    def norm(x: Tensor) -> Tensor:
        y, mean, rstd = torch.ops.aten.native_layer_norm(x, [8], None, None, 1e-5)
        return (y * mean).sum() + (y + rstd).sum()

    graph, inputs = chain(norm, "")
    names = [op.node.name for op in build_memory(graph).operators]
    after = check(graph, inputs, [Rerun("add", "native_layer_norm", ("native_layer_norm#0",))], "layer norm")
    add = next(node for node in after.graph.nodes if node.name == "add")
    assert [str(argument.args[0]) for argument in add.args] == ["native_layer_norm_1", "native_layer_norm"]
    assert len(names) + 1 == len(build_memory(after).operators)


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


@pytest.mark.parametrize("route", ["step", "joint"])
def test_batch_norm_runs_again_without_the_old_statistics(route: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    graph, inputs = graph_and_inputs(model, (torch.randn(2, 3, 9, 9),), lambda m, x: m(x).square().mean(), route)
    graph = cleaned(graph)
    reruns = [again for again in some_reruns(graph, 3, 1.0) if "batch_norm_legit" in again.operator]
    assert reruns
    after = check(graph, inputs, reruns, "batch norm", deep=False)
    again = [node for node in after.graph.nodes if node.target is torch.ops.aten._native_batch_norm_legit.no_stats]
    assert len(again) == len(reruns)


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

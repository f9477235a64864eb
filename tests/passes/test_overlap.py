"""Split collectives, on a group of one rank: bits, bytes, faults in what is planned, and faults while it runs.

tests/end_to_end/test_overlap.py has two ranks, tests/solvers/order/test_overlap.py the search.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.cost import load_profile, prices, step_seconds
from roamc.cost.collectives import collectives, exposed_seconds
from roamc.errors import PlanError, UnfinishedError, VerifyError
from roamc.graph import TrainGraph, value_flow
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from roamc.graph.storage_ids import number_result
from roamc.graph.value_numbers import Numbers
from roamc.graph.verify import check_graph, constraints
from roamc.operators import split_collectives
from roamc.operators.split_collectives import STARTS, WAIT
from roamc.options import Options
from roamc.passes import overlap, reuse
from roamc.planning import search
from roamc.planning.plan import Plan
from roamc.planning.planned import Planned
from roamc.rewriting.split import split, splittable
from roamc.runtime import program
from roamc.runtime.program import Whole
from tests.graphs import assert_same, clones, node_calling, run_real, traced
from tests.kernel_cases import alone

COLLECTIVES: Any = torch.ops.roamc_collective
X, W = torch.randn(16, 16), torch.randn(16, 16)
CPU = Options(profile="cpu")
pytestmark = pytest.mark.usefixtures("arenas_of_any_size")


def summed(x: Tensor) -> Tensor:
    return COLLECTIVES.all_reduce(x, "sum", alone())  # type: ignore[no-any-return]


def layers(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Like backward under data parallelism: what each layer sends is needed at the end; a wide value makes the peak."""
    wide = torch.cat([x] * 12).exp().sum()
    grads = []
    for _ in range(3):
        x = (x @ w).tanh()
        grads.append(summed(x.t() @ w))
    whole = COLLECTIVES.all_gather_into_tensor(x.neg(), 1, alone())
    part = COLLECTIVES.reduce_scatter_tensor(x.exp(), "sum", 1, alone())
    return (x.sum() + wide, w - grads[0], w - grads[1] * 2, w - grads[2], whole * part)


def graph_of(function: Callable[..., Any] = layers) -> TrainGraph:
    return traced(function, X, W)


@pytest.fixture
def planned(arenas_of_any_size: None) -> Planned:
    """The plan of ``layers``, with its collectives split."""
    return search.run(graph_of(), CPU, deep=True)


def test_collectives_are_split_and_hidden(planned: Planned) -> None:
    decision, targets = planned.plan.decisions["overlap"], [node.target for node in planned.graph.graph.nodes]
    assert len(decision["collectives"]) == targets.count(WAIT) >= 4
    assert decision["exposed_seconds"] < decision["link_seconds"] / 2
    whole = search.run(graph_of(), dataclasses.replace(CPU, disable=("overlap",)))
    assert planned.plan.live_bytes <= whole.plan.live_bytes
    assert planned.plan.peak_bytes <= whole.plan.peak_bytes * 1.001
    profile = load_profile(profile="cpu")
    exposed, less = (exposed_seconds(one.graph, prices(one.graph, profile)) for one in (whole, planned))
    assert exposed == pytest.approx(decision["link_seconds"])
    assert less == pytest.approx(decision["exposed_seconds"])
    seconds = [step_seconds(one.graph, profile) for one in (whole, planned)]
    assert seconds[0] - seconds[1] == pytest.approx(exposed - less)


def test_the_program_gives_the_bits_of_eager(planned: Planned) -> None:
    assert_same(list(Whole(planned)(clones([X, W]))), list(layers(X, W)), "overlapped")
    assert not split_collectives._UNDER_WAY.works


def test_bytes_are_those_that_are_measured(planned: Planned) -> None:
    graph = planned.graph.replace(reuse={}, layout=None)
    _, measured = run_real(graph, clones([X, W]))
    assert measured == live_bytes(build_memory(graph)).tolist()


def test_a_plan_is_read_back_and_gives_the_same_graph(planned: Planned) -> None:
    again = search.run(graph_of(), CPU, Plan.from_json(planned.plan.to_json()))
    assert [(n.name, str(n.target)) for n in again.graph.graph.nodes] == [
        (n.name, str(n.target)) for n in planned.graph.graph.nodes
    ]


def test_a_sum_over_ranks_is_started_over_an_argument_that_nobody_else_reads() -> None:
    graph = split(graph_of(lambda x, w: (summed(x.sin()).cos(), w.exp().sum())), ["all_reduce"])
    decision = reuse.decide(graph, CPU)
    assert dict(decision.overwrites)["all_reduce"] == 0
    check_graph(reuse.apply(graph, decision), "reuse")
    read_later = split(graph_of(lambda x, w: (summed(a := x.sin()).cos() + a, w.exp().sum())), ["all_reduce"])
    assert "all_reduce" not in dict(reuse.decide(read_later, CPU).overwrites)


OPERATORS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a @ b,
    lambda a, b: a + b,
    lambda a, b: (a.t() * b).tanh(),
    lambda a, b: a.sin(),
    lambda a, b: summed(a),
    lambda a, b: summed(a.contiguous()).t(),
    lambda a, b: COLLECTIVES.all_gather_into_tensor(b, 1, alone()),
    lambda a, b: COLLECTIVES.reduce_scatter_tensor(a.contiguous(), "max", 1, alone()) - b,
    lambda a, b: torch.cat([a] * 6).exp()[:16],
)


def random_function(seed: int) -> Callable[[Tensor, Tensor], list[Tensor]]:
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        dice, values = random.Random(seed), [x, w]
        for _ in range(24):
            result = dice.choice(OPERATORS)(dice.choice(values[-6:]), dice.choice(values[-6:]))
            values.append(result / (1 + result.abs().amax()))
        return [value.sum() for value in values[-3:]] + values[-1:]

    return function


@pytest.mark.parametrize("seed", range(6))
def test_random_graphs_keep_their_bits_and_their_peak(seed: int) -> None:
    options = dataclasses.replace(CPU, order="program" if seed % 2 else "best")
    function = random_function(seed)
    overlapped = search.run(graph_of(function), options, deep=True)
    assert_same(list(Whole(overlapped)(clones([X, W]))), function(X, W), f"seed {seed}")
    whole = search.run(graph_of(function), dataclasses.replace(options, disable=("overlap",)))
    assert overlapped.plan.peak_bytes <= whole.plan.peak_bytes * 1.001
    graph = overlapped.graph.replace(reuse={}, layout=None)
    assert run_real(graph, clones([X, W]))[1] == live_bytes(build_memory(graph)).tolist()


# -- faults in what is planned ----------------------------------------------------------------


def wait_dropped(graph: TrainGraph) -> TrainGraph:
    wait = node_calling(graph, WAIT)
    wait.replace_all_uses_with(wait.args[0])
    graph.graph.erase_node(wait)
    return graph.replace(phase={name: phase for name, phase in graph.phase.items() if name != wait.name})


def read_before_its_wait(graph: TrainGraph) -> TrainGraph:
    return inserted_before_a_wait(graph, lambda start: start)


def inserted_before_a_wait(graph: TrainGraph, operand: Callable[[Any], Any]) -> TrainGraph:
    """Another operator in front of the first wait, named ``exp_9``, which reads ``operand`` of its start."""
    start: Any = node_calling(graph, WAIT).args[0]
    with graph.graph.inserting_before(node_calling(graph, WAIT)):
        node = graph.graph.create_node("call_function", torch.ops.aten.exp.default, (operand(start),), name="exp_9")
    node.meta["val"] = torch.empty_like(operand(start).meta["val"])
    number_result(node)
    return graph.replace(phase={**graph.phase, node.name: graph.phase[start.name]})


def argument_written_between(graph: TrainGraph) -> TrainGraph:
    wait = node_calling(graph, WAIT)
    with graph.graph.inserting_before(wait):
        node = graph.graph.call_function(torch.ops.aten.neg_.default, (wait.args[0].args[0],))  # type: ignore[union-attr]
    node.meta = dict(wait.args[0].args[0].meta)  # type: ignore[union-attr]
    return graph.replace(phase={**graph.phase, node.name: graph.phase[wait.name]})


def argument_reused_between(graph: TrainGraph) -> TrainGraph:
    return inserted_before_a_wait(graph, lambda start: start.args[0]).replace(reuse={"exp_9": 0})


def started_in_another_order(graph: TrainGraph) -> TrainGraph:
    first, second = (node_calling(graph, STARTS[COLLECTIVES.all_reduce.default], number) for number in (0, 1))
    mm = second.args[0]
    for node in (second, mm, *mm.all_input_nodes):  # type: ignore[union-attr]
        if node.op == "call_function":
            first.prepend(node)
            first = node
    return graph.replace()


def started_twice(graph: TrainGraph) -> TrainGraph:
    wait = node_calling(graph, WAIT)
    start: Any = wait.args[0]
    with graph.graph.inserting_after(start):
        again = graph.graph.node_copy(start)
    number_result(again)
    wait.args = (again,)
    return graph.replace(phase={**graph.phase, again.name: graph.phase[start.name]})


def waited_for_twice(graph: TrainGraph) -> TrainGraph:
    wait = node_calling(graph, WAIT)
    with graph.graph.inserting_after(wait):
        again = graph.graph.node_copy(wait)
    return graph.replace(phase={**graph.phase, again.name: graph.phase[wait.name]})


def another_group(graph: TrainGraph) -> TrainGraph:
    start = node_calling(graph, STARTS[COLLECTIVES.all_reduce.default])
    start.args = (*start.args[:2], "another group")
    return graph.replace()


def another_reduction(graph: TrainGraph) -> TrainGraph:
    start = node_calling(graph, STARTS[COLLECTIVES.all_reduce.default])
    start.args = (start.args[0], "max", start.args[2])
    return graph.replace()


FAULTS: dict[Callable[[TrainGraph], TrainGraph], str] = {
    wait_dropped: r"\w+ may not be finished when it returns",
    read_before_its_wait: r"needs the memory of \w+, which has not ended",
    argument_written_between: r"neg__default needs the memory of \w+, which has not ended",
    argument_reused_between: r"needs the memory of \w+, which has not ended",
    started_in_another_order: r"must stay behind|needs the memory|would run before|before it has been defined",
    started_twice: r"\w+ may not be finished when it returns",
    waited_for_twice: r"waits for \w+, which has ended",
    another_group: "all_reduce",
    another_reduction: "all_reduce",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_in_a_split_graph_is_named(fault: Callable[[TrainGraph], TrainGraph]) -> None:
    graph = graph_of()
    kept, flow = constraints(graph), value_flow.read(graph, Numbers())
    graph = overlap.apply(graph, overlap.decide(graph, CPU))
    check_graph(graph, "overlap", kept)
    value_flow.check(graph, flow, "overlap")
    graph = fault(graph)

    def judge() -> None:
        check_graph(graph, "overlap", kept)
        value_flow.check(graph, flow, "overlap")

    with pytest.raises(VerifyError, match=FAULTS[fault]):
        judge()


def test_a_wait_in_another_part_of_the_step_is_refused() -> None:
    graph = traced(lambda x: summed(x.sin()).exp() * x.cos(), X, phases="FFFBB", boundary=True)
    graph = split(graph, ["all_reduce"])
    assert graph.phase["all_reduce_wait"] is graph.phase["all_reduce"]
    check_graph(graph, "overlap")
    late = graph.replace(phase={**graph.phase, "all_reduce_wait": graph.phase["cos"], "exp": graph.phase["cos"]})
    node_calling(late, torch.ops.aten.cos.default).append(node_calling(late, WAIT))
    node_calling(late, WAIT).append(node_calling(late, torch.ops.aten.exp.default))
    with pytest.raises(
        VerifyError, match="all_reduce_wait waits in another part of the step than all_reduce begins in"
    ):
        check_graph(late, "overlap")


def test_a_decision_that_does_not_fit_is_refused() -> None:
    plan = search.run(graph_of(), CPU).plan
    decision = overlap.Decision(**plan.decisions["overlap"])
    for changes, said in (
        ({"collectives": (*decision.collectives, "mm")}, "mm is no collective of this graph that can be split"),
        ({"collectives": ()}, "splits no collective"),
        ({"order": decision.order[::-1]}, "would run before"),
        ({"order": decision.order[1:]}, "not a permutation"),
        ({"peak_bytes": 1}, "peak_bytes"),
    ):
        wrong = dataclasses.replace(decision, **changes)  # type: ignore[arg-type]
        data = {**plan.decisions, "overlap": dataclasses.asdict(wrong)}
        with pytest.raises((PlanError, VerifyError), match=said):
            search.run(graph_of(), CPU, dataclasses.replace(plan, decisions=data))


def test_only_what_can_be_started_apart_is_split() -> None:
    graph = graph_of(lambda x, w: (summed(x.t()), COLLECTIVES.broadcast(x, 0, alone()), summed(x)))
    assert splittable(graph) == ["broadcast", "all_reduce_1"]  # the first would be copied until its wait


# -- faults while it runs ---------------------------------------------------------------------


def test_nothing_stays_under_way_whatever_operator_fails(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, calls, at = list(layers(X, W)), itertools.count(), [-1]
    load = program.load

    def watch(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == at[0]:
                raise ValueError("a mistake")
            return function(*args, **kwargs)

        return call

    def watched(emitted: Any, code: Any) -> Any:
        constants = {n: watch(v) if callable(v) and n != "torch" else v for n, v in emitted.constants.items()}
        return load(dataclasses.replace(emitted, constants=constants), code)

    monkeypatch.setattr(program, "load", watched)
    whole, unfinished = Whole(planned, on_failure=lambda error: None), 0
    whole(clones([X, W]))
    total = next(calls)
    for number in range(total):
        whole.executable.broken, at[0], calls = False, number, itertools.count()
        try:
            assert_same(list(whole(clones([X, W]))), wanted, f"the fault is in operator {number}")
        except UnfinishedError:
            unfinished += 1
        assert not split_collectives._UNDER_WAY.works, number
    waits = sum(node.target is WAIT for node in planned.graph.graph.nodes)
    assert unfinished == len(list(collectives(planned.graph))) + waits


class Lost:
    """Work that fails, as where another rank is gone."""

    def wait(self) -> None:
        raise RuntimeError("connection closed by peer")


def test_a_collective_that_fails_ends_the_step(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_collectives.dist, "all_reduce", lambda *args, **kwargs: Lost())
    for on_failure in (None, lambda error: None):
        with pytest.raises((RuntimeError, UnfinishedError), match="connection closed by peer"):
            Whole(planned, on_failure=on_failure)(clones([X, W]))
        assert not split_collectives._UNDER_WAY.works

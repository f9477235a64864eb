"""Collectives that run again where all ranks run one plan: ranks in lockstep get the same bits under every budget."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roamc import cost, decode
from roamc.compat_groups import planned_for
from roamc.errors import PlanError, VerifyError
from roamc.graph import Agreement, SamePlan, TrainGraph, copied, operators, value_flow, verify
from roamc.graph.memory import build_memory
from roamc.graph.ranks import collectives_of
from roamc.graph.value_numbers import Numbers
from roamc.operators import ops
from roamc.options import Options
from roamc.passes import retain
from roamc.passes.retain.problem import able_in
from roamc.planning import search
from roamc.planning.plan import Plan
from roamc.planning.planned import Planned
from roamc.rewriting.gathers import gathered_once, gathered_twice
from roamc.rewriting.rerun import rerun
from roamc.rewriting.reruns import Rerun
from tests.graphs import traced
from tests.passes.test_shard import random_step
from tests.rewriting.cases import cleaned, named, some_reruns
from tests.shards import COLLECTIVES, GROUP, Rows, captured, counted, inputs_of, normal_form, run_ranks

SAME = (SamePlan(GROUP, sums=True),)


@pytest.fixture(autouse=True, scope="module")
def two_ranks() -> Iterator[None]:
    """One process plans for both ranks."""
    with planned_for({GROUP: range(2)}):
        yield


WIDTH = 16
X = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0))


def chain(rank: int) -> nn.Module:
    """Sums over the ranks, one behind the other; what is between two of them is made of the sum alone."""
    torch.manual_seed(0)
    layers = [Rows(nn.Linear(2 * WIDTH, WIDTH, bias=False), rank, 2) for _ in range(8)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


@functools.cache
def _captured() -> TrainGraph:
    return normal_form(chain(0), (X.clone().requires_grad_(),))


def graph_of(kind: str) -> TrainGraph:
    return copied(_captured()) if kind == "chain" else captured(kind, length=24)


@functools.cache
def planned(kind: str, shard: str, budget: Any = None) -> Planned:
    options = Options(shard=shard, memory_budget=budget, profile="a100", layout_nodes=1000)
    return search.run(graph_of(kind), options)


def again(planned_graph: Planned) -> list[str]:
    """The collectives that run again."""
    nodes = operators(planned_graph.graph.graph)
    return [node.name for node in nodes if "again" in node.meta and ops.rule(node.target).collective]


def outputs(planned_graph: Planned, kind: str) -> list[list[Any]]:
    """What each rank gets, with the same random numbers."""
    if kind == "chain":
        tangent = torch.ones_like(X)
        inputs = [[*(p.detach() for p in chain(rank).parameters()), X, tangent] for rank in range(2)]
    else:
        inputs = inputs_of(kind, 2, length=24)
    torch.manual_seed(0)
    return run_ranks(planned_graph.graph, inputs)


def test_bits_are_those_without_a_budget_where_sums_run_again() -> None:
    wanted = outputs(planned("chain", "whole"), "chain")
    for budget in ("70%", "min"):
        assert again(planned("chain", "whole", budget))
        assert_same_on_ranks(outputs(planned("chain", "whole", budget), "chain"), wanted)


def assert_same_on_ranks(results: list[list[Any]], wanted: list[list[Any]]) -> None:
    for mine, theirs in zip(results, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one is other or torch.equal(one, other)


def test_bits_are_those_without_a_budget_where_rows_are_gathered() -> None:
    free = planned("gpt", "sequence")
    wanted = outputs(free, "gpt")
    for budget in (2 * free.plan.needed_bytes, "min"):
        planned_graph = planned("gpt", "sequence", budget)
        assert planned_graph.plan.decisions["retain"]["once"]
        assert bool(again(planned_graph)) == (budget == "min")
        assert_same_on_ranks(outputs(planned_graph, "gpt"), wanted)


def test_ranks_compare_which_collectives_run_again() -> None:
    graph = planned("chain", "whole", "min").graph
    (agreement,) = graph.agreements
    names = [node.name for node in operators(graph.graph) if ops.rule(node.target).collective]
    assert [line.split()[1] for line in collectives_of(graph, agreement.group)] == names
    assert {*again(planned("chain", "whole", "min"))} <= {*names}


def test_lowest_peak_is_lower_than_where_ranks_plan_apart() -> None:
    apart, together = (planned("chain", shard, "min") for shard in ("off", "whole"))
    assert not again(apart)
    assert together.plan.needed_bytes < apart.plan.needed_bytes


def test_rows_are_gathered_again_without_a_budget_and_stay_whole_where_there_is_room() -> None:
    free = planned("gpt", "sequence")
    roomy = planned("gpt", "sequence", 2 * free.plan.needed_bytes)
    gathers = "all_gather_into_tensor"
    assert counted(free.graph)["BACKWARD", gathers] == counted(free.graph)["FORWARD", gathers] + 3
    assert counted(roomy.graph)["BACKWARD", gathers] == 3, "those of gradients"
    assert roomy.plan.decisions["retain"]["once"]
    assert free.plan.needed_bytes < roomy.plan.needed_bytes <= roomy.plan.budget_bytes
    assert free.plan.decisions["retain"] == decode.plain(retain.NOTHING)


def test_a_plan_without_collectives_that_run_again_is_the_same_where_ranks_plan_apart() -> None:
    apart, together = (planned("chain", shard, 1 << 30).plan for shard in ("off", "whole"))
    assert apart.to_dict() == together.to_dict()


def test_light_budget_runs_no_collective_again() -> None:
    graph = hand_made(gathers, "FFBBBBB")
    assert retain.once(graph, "all")
    assert not retain.once(graph, "light")
    (collective, *_) = operators(graph.graph)
    assert able_in(graph, "all")(collective)
    assert not able_in(graph, "light")(collective)


def test_plan_is_applied_where_all_ranks_run_it_and_refused_elsewhere() -> None:
    lowest = planned("chain", "whole", "min")
    read = Plan.from_json(lowest.plan.to_json())
    assert search.run(graph_of("chain"), Options(shard="whole"), read).plan.decisions == lowest.plan.decisions
    with pytest.raises(PlanError, match="retain: this graph has no operator 'all_reduce"):
        search.run(graph_of("chain"), Options(shard="off"), read)
    rows = planned("gpt", "sequence", 2 * planned("gpt", "sequence").plan.needed_bytes)
    read = Plan.from_json(rows.plan.to_json())
    assert search.run(graph_of("gpt"), Options(shard="sequence"), read).plan.decisions == rows.plan.decisions


def test_ranks_compare_which_collectives_run_again_before_the_first_step() -> None:
    less, more = (planned("chain", "whole", budget).graph for budget in (None, "min"))
    (agreed,) = more.agreements
    assert less.agreements == (agreed,), "a rank on which none runs again has to compare as well"
    assert agreed.group == GROUP
    assert len(list(collectives_of(less, agreed.group))) < len(list(collectives_of(more, agreed.group)))


def test_curve_counts_gathers_of_a_plan_without_a_budget_as_added_time() -> None:
    options = Options(shard="sequence", profile="a100", layout_nodes=1000)
    trials = search.PlanSearch(graph_of("gpt"), options, many=True)
    plan = trials.run().plan
    assert plan.added_seconds == 0
    prices = cost.prices(planned("gpt", "sequence").graph, cost.load_profile(profile="a100"))
    assert trials.counted(plan).added_seconds == pytest.approx(sum(prices.values()) - trials.alone)
    roomy = trials.attempt(2 * plan.needed_bytes).plan
    assert trials.counted(roomy) == roomy
    assert roomy.added_seconds == 0


@pytest.mark.parametrize("seed", range(12))
def test_random_reruns_of_random_graphs_leave_every_bit(seed: int) -> None:
    tensors = (torch.zeros(4, 6, 8), torch.zeros(8, 8), torch.zeros(8), torch.zeros(6, 8))
    graph = cleaned(traced(random_step(random.Random(seed)), *tensors, same_plan=SAME))
    kept, flow = verify.constraints(graph), value_flow.read(graph, Numbers())
    after = compared(rerun(copied(graph), named(graph, some_reruns(graph, seed, 0.5))))
    verify.check_graph(after, "retain", kept, deep=True)
    value_flow.check(after, flow, "retain")
    sums = [node for node in operators(after.graph) if node.target is COLLECTIVES.all_reduce.default]
    assert any("again" in node.meta for node in sums)
    torch.manual_seed(seed)
    shared = [torch.randn_like(tensor) for tensor in tensors]
    inputs = [[shared[0], torch.randn(8, 8) / 3, *shared[2:]] for _ in range(2)]
    assert_same_on_ranks(run_ranks(after, inputs), run_ranks(graph, inputs))


# -- faults that judges name ----------------------------------------------------------------------


def step(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    part = x @ w
    total = COLLECTIVES.all_reduce(part, "sum", GROUP)
    other = COLLECTIVES.all_reduce(total.tanh(), "sum", GROUP)
    grad = total * g
    return other, grad


def hand_made(function: Any = step, phases: str = "FFFFB", **fields: Any) -> TrainGraph:
    inputs = [torch.randn(8, 8) for _ in range(3)]
    return traced(function, *inputs, phases=phases, same_plan=SAME, **fields)


AGAIN = Rerun("all_reduce_2", "all_reduce", "backward", (("all_reduce", ("mul",)),))


def compared(graph: TrainGraph) -> TrainGraph:
    """The graph with ranks that compare which collectives they run, as pass retain leaves it."""
    return graph.replace(agreements=(Agreement(GROUP, (), (), (), ""),))


def judged(before: TrainGraph, change: Any) -> None:
    """Let the judges of every pass compare the graph with what ``change`` makes of it."""
    kept, flow = verify.constraints(before), value_flow.read(before, Numbers())
    after = change(before)
    verify.check_graph(after, "retain", kept, deep=True)
    value_flow.check(after, flow, "retain")


def moved(graph: TrainGraph, name: str, before: str) -> TrainGraph:
    nodes = {node.name: node for node in graph.graph.nodes}
    nodes[before].prepend(nodes[name])
    return graph


def test_a_sum_runs_again_with_its_argument_kept() -> None:
    judged(hand_made(), lambda graph: compared(rerun(graph, [AGAIN])))
    memory = build_memory(rerun(hand_made(), [AGAIN]))
    names = [op.node.name for op in memory.operators]
    pairs = {(names[before], names[behind]) for before, behind in memory.edges}
    assert ("all_reduce", "all_reduce_1") in pairs
    assert [pair[0] for pair in pairs if pair[1] == "all_reduce_2" and pair[0] != "mm"] == ["all_reduce"], (
        "not the last"
    )


def test_sums_of_a_backend_without_one_order_never_run_again() -> None:
    graph = hand_made().replace(same_plan=(SamePlan(GROUP, sums=False),))
    with pytest.raises(PlanError, match="no operator 'all_reduce' that could run again"):
        rerun(graph, [AGAIN])


def test_a_rerun_in_front_of_its_first_run_is_named() -> None:
    graph = rerun(hand_made(), [AGAIN])
    with pytest.raises(VerifyError, match="all_reduce_2 must stay behind all_reduce "):
        judged(graph, lambda graph: moved(graph, "all_reduce_2", "all_reduce"))


@pytest.mark.parametrize("same_plan", [(), (SamePlan("other ranks", sums=True),)])
def test_a_rerun_where_ranks_may_plan_apart_is_named(same_plan: tuple[SamePlan, ...]) -> None:
    with pytest.raises(VerifyError, match="all_reduce would run an operator again that may give other bits"):
        judged(hand_made().replace(same_plan=same_plan), lambda graph: rerun(graph.replace(same_plan=SAME), [AGAIN]))


def test_a_first_run_out_of_its_groups_order_is_named() -> None:
    def apart(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return COLLECTIVES.all_reduce(x, "sum", GROUP), COLLECTIVES.all_reduce(w, "sum", GROUP), g * 2

    with pytest.raises(VerifyError, match="all_reduce_1 must stay behind all_reduce"):
        judged(hand_made(apart, "FFB"), lambda graph: moved(graph, "all_reduce_1", "all_reduce"))


def test_a_rerun_behind_a_write_to_its_argument_is_named() -> None:
    def written(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        total = COLLECTIVES.all_reduce(x, "sum", GROUP)
        x.add_(1)
        return (total * g,)

    graph = hand_made(written, "FFB")
    (rewritten,) = [node.name for node in operators(graph.graph)][-1:]
    one = Rerun("all_reduce_1", "all_reduce", "backward", (("all_reduce", (rewritten,)),))
    with pytest.raises(VerifyError, match="would read what add_ has written and not x"):
        judged(graph, lambda graph: moved(rerun(graph, [one]), "all_reduce_1", rewritten))


def test_a_collective_that_is_gone_is_named() -> None:
    def drop(graph: TrainGraph) -> TrainGraph:
        nodes = {node.name: node for node in graph.graph.nodes}
        nodes["all_reduce_1"].replace_all_uses_with(nodes["tanh"])
        graph.graph.erase_node(nodes["all_reduce_1"])
        return graph.replace(phase={name: phase for name, phase in graph.phase.items() if name != "all_reduce_1"})

    with pytest.raises(VerifyError, match="1 operators with an effect, 2 before"):
        judged(hand_made(), drop)


def gathers(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    def gathered(part: Tensor) -> Tensor:
        return COLLECTIVES.all_gather_into_tensor(part, 2, GROUP)  # type: ignore[no-any-return]

    y = gathered(x) @ w
    return y, gathered(x).t() @ y, gathered(w) @ g


def test_one_gather_in_the_place_of_two() -> None:
    graph = hand_made(gathers, "FFBBBBB")
    assert gathered_twice(graph) == (("all_gather_into_tensor_1", "all_gather_into_tensor"),)
    judged(graph, lambda graph: gathered_once(graph, gathered_twice(graph)))
    assert gathered_twice(graph) == ()
    assert gathered_twice(hand_made(gathers, "FFBBBBB").replace(same_plan=())) == ()
    assert gathered_twice(hand_made(gathers, "FFFFFFF")) == (), "both in forward"


def test_another_gather_does_not_stand_for_one() -> None:
    with pytest.raises(PlanError, match="'all_gather_into_tensor_2' does not gather what 'all_gather_into_tensor' has"):
        gathered_once(hand_made(gathers, "FFBBBBB"), [("all_gather_into_tensor_2", "all_gather_into_tensor")])
    with pytest.raises(VerifyError, match="mm_2 through all_gather_into_tensor, which would read"):
        judged(hand_made(gathers, "FFBBBBB"), _read_another)


def _read_another(graph: TrainGraph) -> TrainGraph:
    nodes = {node.name: node for node in graph.graph.nodes}
    nodes["mm_2"].replace_input_with(nodes["all_gather_into_tensor_2"], nodes["all_gather_into_tensor"])
    return graph


def test_what_is_written_between_is_gathered_again() -> None:
    def written(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        first = COLLECTIVES.all_gather_into_tensor(x, 2, GROUP)
        x.add_(1)
        return first, COLLECTIVES.all_gather_into_tensor(x, 2, GROUP)

    assert gathered_twice(hand_made(written, "FFB")) == ()


def test_without_pass_retain_no_gather_is_left_out_of_the_order() -> None:
    options = Options(shard="sequence", profile="a100", memory_budget=1 << 30, layout_nodes=1000, disable=("retain",))
    trials = search.PlanSearch(graph_of("gpt"), options, many=True)
    assert trials.least_bytes(1 << 30) <= trials.run().plan.peak_bytes

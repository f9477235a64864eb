"""Pass masks: which dropouts get a seed, what is refused, and that backward drops what forward dropped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from roamc.errors import PlanError, VerifyError
from roamc.graph import Phase, Role, TrainGraph, copied, mask_judge, operators, tensors_of, value_flow
from roamc.graph.keep import KEEP, KEY
from roamc.graph.storage_ids import STORAGES, ids_of, renewed
from roamc.graph.value_numbers import Numbers
from roamc.operators import ops
from roamc.operators.counter import counter_mask, draw_seeds
from roamc.operators.random import replay, save_rng_state
from roamc.options import Options
from roamc.passes import masks
from roamc.passes.masks import Decision
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.graphs import clones, graph_and_inputs, traced
from tests.kernel_groups import use_pass
from tests.planning.test_pipeline import run_program

aten = torch.ops.aten
FAST = Options(numerics="fast", disable=("normalize", "products"))
X = torch.ones(8, 16)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass, the groups and the dropouts of a GPU, in programs for a CPU."""
    use_pass(monkeypatch, masks)
    monkeypatch.setattr("roamc.capture.dropouts.as_eager", contextlib.nullcontext)


class Layers(nn.Module):
    """Two layers that drop, the second in a region that ``again`` runs, such as a checkpoint."""

    def __init__(self, again: Callable[..., Any] | None = None, share: float = 0.25) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.again, self.share = again or (lambda run, x: run(x)), share

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.share, self.training)

    def inner(self, x: Tensor) -> Tensor:
        return self.drop(self.second(x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.first(x).relu())
        return x + torch.rand_like(x) * self.again(self.inner, x)


class Counted(Layers):
    """The same by masks of a counter, as the planned program makes them."""

    def forward(self, x: Tensor) -> Tensor:
        self.seeds = list(draw_seeds(2))
        return super().forward(x)

    def drop(self, x: Tensor) -> Tensor:
        keep = 1.0 - self.share
        return x * counter_mask(self.seeds.pop(0), x.shape, x.stride(), keep) * (1.0 / keep)


def plain(run: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(run, x, use_reentrant=False)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x).square().mean()
    return result


def captured(route: str, again: Callable[..., Any] | None = None) -> tuple[TrainGraph, list[Any]]:
    graph, inputs = _captured(route, again)
    return copied(graph), clones(inputs)


@functools.cache
def _captured(route: str, again: Callable[..., Any] | None) -> tuple[TrainGraph, list[Any]]:
    torch.manual_seed(1)
    return graph_and_inputs(Layers(again), (torch.randn(64, 16),), loss, route, torch.optim.SGD)


def decided(graph: TrainGraph, options: Options = FAST) -> tuple[tuple[str, ...], ...]:
    return masks.decide(graph, options).seeds


def dropping(share: float = 0.1, train: bool | None = True) -> Callable[[Tensor], Tensor]:
    return lambda x: aten.native_dropout(x, share, train)[0].sum()


# -- which dropouts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (dropping(0.0), X),
        (dropping(1.0), X),
        (dropping(train=False), X),
        (dropping(), X.double()),
        (dropping(), torch.ones(())),
        (dropping(), torch.ones(0, 4)),
        (lambda x: x * torch.bernoulli(x, 0.5), X),
        (lambda x: x * torch.rand_like(x), X),
        (lambda x: aten.native_dropout(x, 0.1, True)[1].view(-1), X),
    ],
    ids=[
        *("drops nothing", "drops all", "evaluates", "float64", "no dimension", "no elements", "bernoulli", "rand"),
        "a reader outside of groups",
    ],
)
def test_other_operators_keep_their_draws(function: Callable[..., Any], x: Tensor) -> None:
    assert decided(traced(function, x)) == ()


@pytest.mark.parametrize("options", [Options(), Options(numerics="fast", disable=("fuse",))], ids=["exact", "unfused"])
def test_masks_are_drawn_unless_fast_groups_take_them(options: Options) -> None:
    assert decided(traced(dropping(), X)) == (("native_dropout",),)
    assert decided(traced(dropping(), X), options) == ()


def test_what_is_kept_has_its_mask_drawn() -> None:
    graph = traced(dropping(), X)
    operators(graph.graph)[0].meta["custom"] = {KEY: KEEP}
    assert decided(graph) == ()


def test_a_cpu_keeps_its_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert decided(traced(dropping(), X)) == ()


def test_replays_share_the_seed_of_the_draw_that_they_repeat() -> None:
    graph, _ = captured("step", plain)
    (first,), (second, again) = decided(graph)
    nodes = {node.name: node for node in operators(graph.graph)}
    assert nodes[again].target is replay
    assert graph.phase[again] is Phase.BACKWARD
    after = masks.apply(graph, masks.decide(graph, FAST))
    mask_nodes = {node.name: node for node in operators(after.graph) if node.target is counter_mask}
    assert set(mask_nodes) == {first, second, again}
    assert mask_nodes[second].args == mask_nodes[again].args != mask_nodes[first].args
    assert not any(node.target in (aten.native_dropout.default, save_rng_state) for node in operators(after.graph))


@pytest.mark.parametrize(
    "seeds",
    [(("sum_1",),), (("missing",),), ((),), (("native_dropout",), ("native_dropout",))],
    ids=["a sum", "no such node", "nothing", "twice"],
)
def test_a_decision_that_does_not_fit_is_refused(seeds: tuple[tuple[str, ...], ...]) -> None:
    with pytest.raises(PlanError, match="dropout"):
        masks.apply(traced(dropping(), X), Decision(seeds))


def test_a_decision_without_a_replay_is_refused() -> None:
    graph, _ = captured("step", plain)
    with pytest.raises(PlanError, match="with one draw"):
        masks.apply(graph, Decision(tuple(names[:1] for names in decided(graph))))


# -- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "budget"), [("step", None), ("joint", None), pytest.param("step", "min", marks=pytest.mark.thorough)]
)
def test_backward_drops_what_forward_dropped(route: str, budget: Any) -> None:
    """Against eager with masks of the same seeds, bit for bit, twice in a row."""
    graph, inputs = captured(route)
    parameters = [at for at, port in enumerate(graph.inputs) if port.role is Role.PARAMETER]
    planned = search.run(graph, dataclasses.replace(FAST, memory_budget=budget), deep=True)
    assert stored_masks(planned.graph) == []
    gradients = [at for at, port in enumerate(planned.graph.outputs) if port.role is Role.GRADIENT]
    for number in range(2):
        used = clones(inputs)
        torch.manual_seed(number)
        results = run_program(planned, used)
        model = Counted()
        torch.manual_seed(number)
        wanted = loss(model, inputs[len(parameters)])
        wanted.backward()
        assert torch.equal(results[0], wanted.detach())
        grads = [parameter.grad for parameter in model.parameters()]
        from_plan = [results[at] for at in gradients if results[at] is not None]
        if route == "step":
            torch.optim.SGD(model.parameters(), lr=0.01).step()
            grads = [parameter.detach() for parameter in model.parameters()]
            from_plan = [used[at] for at in parameters]
        assert len(from_plan) == len(grads) == 4
        assert all(map(torch.equal, from_plan, grads))  # type: ignore[arg-type]


def stored_masks(graph: TrainGraph) -> list[str]:
    """Names of the nodes, outside of groups, that make a tensor of bool."""
    named_tensors = ((node.name, tensor) for node in operators(graph.graph) for _, tensor in tensors_of(node))
    return [name for name, tensor in named_tensors if tensor.dtype is torch.bool]


@pytest.mark.parametrize("route", ["step", "joint"])
def test_a_checkpoint_drops_again_what_it_dropped(route: str) -> None:
    results = []
    for again in (None, plain):
        graph, inputs = captured(route, again)
        planned = search.run(graph, FAST, deep=True)
        torch.manual_seed(3)
        results.append([*run_program(planned, inputs), *inputs])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_a_plan_applies_again() -> None:
    planned = search.run(captured("step")[0], FAST)
    again = search.run(captured("step")[0], FAST, Plan.from_json(planned.plan.to_json()))
    assert again.plan.decisions == planned.plan.decisions
    assert any("2 dropouts take their masks from a counter" in note for note in planned.plan.notes)


def test_a_plan_with_seeds_is_refused_unless_fast() -> None:
    graph = captured("step")[0]
    after = masks.apply(graph, masks.decide(graph, FAST))
    with pytest.raises(VerifyError, match="draw_seeds_default draws seeds of dropouts"):
        value_flow.check(after, value_flow.read(after, Numbers()), "fuse")


# -- the judges -------------------------------------------------------------------------------------------------------


def fault(change: Callable[[dict[str, fx.Node]], object], again: Callable[..., Any] | None = None) -> str:
    """What the judge of the pass says of the captured step with a change behind the pass."""
    graph, _ = captured("step", again)
    after = masks.apply(graph, masks.decide(graph, FAST))
    change({node.name: node for node in after.graph.nodes})
    try:
        mask_judge.check(graph, after, "masks")
    except VerifyError as error:
        return str(error)
    return ""


def test_what_the_pass_writes_is_accepted() -> None:
    assert fault(lambda nodes: None) == fault(lambda nodes: None, plain) == ""


FAULTS: dict[str, tuple[Callable[[dict[str, fx.Node]], object], str]] = {
    "one seed for two dropouts": (
        lambda nodes: nodes["native_dropout_1"].update_arg(0, nodes["native_dropout"].args[0]),
        "native_dropout_1",
    ),
    "mask of another layer in backward": (
        lambda nodes: nodes["native_dropout_backward"].update_arg(1, nodes["native_dropout"]),
        "native_dropout_backward",
    ),
    "another probability": (lambda nodes: nodes["native_dropout"].update_arg(3, 0.5), "native_dropout"),
    "a seed that nobody drew": (
        lambda nodes: nodes["native_dropout"].update_arg(0, next(iter(nodes.values()))),
        "native_dropout has a seed that is no row of what was drawn",
    ),
    "another scale": (lambda nodes: nodes["native_dropout_by_mask"].update_arg(2, 2.0), "would run with other arg"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_judge_of_the_pass_names_a_planted_fault(name: str) -> None:
    change, said = FAULTS[name]
    assert re.search(said, fault(change)), fault(change)


def test_a_replay_with_another_seed_is_refused() -> None:
    def change(nodes: dict[str, fx.Node]) -> None:
        again = [node for node in nodes.values() if node.target is counter_mask][-1]
        again.update_arg(0, nodes["native_dropout"].args[0])

    assert "would" in fault(change, plain)


def test_a_mask_may_be_made_again_and_the_seeds_not() -> None:
    def dropped(x: Tensor) -> tuple[Tensor, ...]:
        seeds = draw_seeds(1)
        mask = counter_mask(seeds[0], x.shape, x.stride(), 0.5)
        return x * mask, x + mask

    graph = traced(dropped, X)
    before = value_flow.read(graph, Numbers())
    for name, wrong in (("counter_mask", ""), ("draw_seeds", "mul|add")):
        other = copied(graph)
        nodes = {node.name: node for node in other.graph.nodes}
        again = repeat(other.graph, [nodes[each] for each in ("draw_seeds", "select", "counter_mask")], name)
        nodes["add"].replace_input_with(nodes["counter_mask"], again)
        other = other.replace(phase=dict.fromkeys((node.name for node in operators(other.graph)), Phase.FORWARD))
        if not wrong:
            value_flow.check(other, before, "retain", fast=True)
            continue
        with pytest.raises(VerifyError, match=wrong):
            value_flow.check(other, before, "retain", fast=True)


def repeat(graph: fx.Graph, chain: list[fx.Node], begin: str) -> fx.Node:
    """Copies of the nodes of ``chain`` from ``begin`` on, behind the last one; the last copy."""
    place, rerun = chain[-1], dict[fx.Node, fx.Node]()
    for node in chain[[each.name for each in chain].index(begin) :]:
        with graph.inserting_after(place):
            copy = graph.node_copy(node, lambda argument: rerun.get(argument, argument))
        bases = [rerun[argument] for argument in node.all_input_nodes if argument in rerun and ops.is_view(node.target)]
        copy.meta[STORAGES] = bases[0].meta[STORAGES] if bases else renewed(ids_of(node))
        rerun[node] = place = copy
    return place

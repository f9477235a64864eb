"""Judges of what a graph says beside its values: which gradients updates wait for, and what ranks compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roamc.compat_groups import planned_for
from roamc.errors import VerifyError
from roamc.graph import Agreement, Phase, Role, TrainGraph, copied, operators, placeholders, shard_judge, value_flow
from roamc.graph.ranks import with_same_plan
from roamc.graph.shard_states import literals
from roamc.graph.shard_terms import is_same
from roamc.graph.value_numbers import Numbers
from roamc.graph.verify import check_graph, constraints
from roamc.options import Options
from roamc.passes import normalize, retain, shard
from roamc.rewriting.split import split as split_collectives
from tests.graphs import captured_step, traced
from tests.parallel import WIDTH, batch, build
from tests.passes import test_shard_loss
from tests.passes.test_shard_loss import LOSSES, Model
from tests.shards import COLLECTIVES, GROUP, captured, normal_form, split

aten = torch.ops.aten
SEQUENCE = Options(shard="sequence")


@pytest.fixture(scope="module")
def step() -> TrainGraph:
    """A step of AdamW, whose weight decay does not read the gradient."""
    graph = captured_step(nn.Linear(3, 3), (torch.ones(2, 3),), lambda model, x: model(x).square().mean()).graph
    return normalize.apply(graph, normalize.decide(graph, Options()))


def decay_of(graph: TrainGraph) -> Any:
    """The first update that waits for a gradient that it does not read, and the gradient."""
    nodes = {node.name: node for node in graph.graph.nodes}
    return next((nodes[update], nodes[gradient]) for update, gradient in graph.waits.items() if "mul_" in update)


def first_in_update(graph: TrainGraph) -> Any:
    return next(node for node in operators(graph.graph) if graph.phase[node.name] is not Phase.FORWARD)


def test_an_update_in_front_of_its_gradient_is_named_whatever_the_graph_says(step: TrainGraph) -> None:
    graph = copied(step)
    before = value_flow.read(graph, Numbers())
    assert value_flow.check(graph, before, "reorder").updates.waits == before.updates.waits != {}
    decay, _ = decay_of(graph)
    first_in_update(graph).prepend(decay)
    for said in (graph, graph.replace(waits={})):
        with pytest.raises(VerifyError, match=r"after pass 'reorder': .* is updated before its gradient \w+ is there"):
            value_flow.check(said, before, "reorder")


def test_what_updates_wait_for_is_remembered_from_the_captured_graph(step: TrainGraph) -> None:
    graph = copied(step)
    before = value_flow.read(graph, Numbers())
    forgotten = value_flow.check(graph.replace(waits={}), before, "fuse")
    decay, _ = decay_of(graph)
    first_in_update(graph).prepend(decay)
    with pytest.raises(VerifyError, match="is updated before its gradient"):
        value_flow.check(graph.replace(waits={}), forgotten, "reorder")


class Flat(nn.Module):
    """Two weights, parts of one tensor: side by side, or one behind the other."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        whole = torch.ones((8, 4) if dim == 0 else (4, 8))
        self.first, self.second = map(nn.Parameter, whole.chunk(2, dim))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.second).tanh() @ self.first).sum()  # the gradient of the first is there first


@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_in_one_storage_wait_for_their_own_gradients(dim: int) -> None:
    graph = captured_step(Flat(dim), (torch.ones(4, 4),), lambda model, x: model(x)).graph
    before, nodes = value_flow.read(graph, Numbers()), {node.name: node for node in operators(graph.graph)}
    first, second = (gradient for name, (_, gradient) in before.updates.waits.items() if "state" not in name)
    updates = {of: [nodes[name] for name, gradient in graph.waits.items() if gradient == of] for of in (first, second)}
    for update in updates[first]:
        nodes[second].prepend(update)
    value_flow.check(graph, before, "reorder")
    nodes[second].prepend(next(update for update in updates[second] if "mul_" in update.name))  # it does not read it
    with pytest.raises(VerifyError, match=f"is updated before its gradient {second} is there"):
        value_flow.check(graph, before, "reorder")


def test_a_gradient_that_is_under_way_is_not_there() -> None:
    def function(x: Tensor, weight: Tensor, decayed: Tensor) -> Tensor:
        gradient = COLLECTIVES.all_reduce(x, "sum", GROUP)
        decayed.mul_(0.5)
        return gradient * weight

    graph = traced(function, *(torch.zeros(4) for _ in range(3)))
    names = [node.name for node in operators(graph.graph)]
    graph = graph.replace(
        phase={name: Phase.UPDATE if name == "mul_" else Phase.BACKWARD for name in names},
        waits={"mul_": "all_reduce"},
    )
    before = value_flow.read(graph, Numbers())
    after = split_collectives(graph, ["all_reduce"])
    value_flow.check(after, before, "overlap")
    nodes = {node.name: node for node in operators(after.graph)}
    nodes["all_reduce"].append(nodes["mul_"])
    with pytest.raises(VerifyError, match="decayed_1 is updated before its gradient all_reduce is there"):
        value_flow.check(after, before, "overlap")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[TrainGraph, TrainGraph]]:
    """A step with dropout and AdamW, and the same on shards of two ranks."""
    with planned_for({GROUP: range(2)}):
        model = split(build("bert", 1), 0, 2)
        graph = captured_step(model, (batch(),), lambda model, x: model(x)).graph
        graph = normalize.apply(graph, normalize.decide(graph, Options()))
        yield graph, shard.apply(graph, shard.decide(graph, SEQUENCE))


def without(graph: TrainGraph, **changes: Any) -> TrainGraph:
    (agreement,) = graph.agreements
    return graph.replace(agreements=(replace(agreement, **changes),))


def no_input(graph: TrainGraph, role: str) -> TrainGraph:
    ports = zip(placeholders(graph.graph), graph.inputs, strict=True)
    named = [node.name for node, port in ports if port.role.value == role]
    (agreement,) = graph.agreements
    (first, *_) = [name for name in agreement.inputs if name in named]
    return without(graph, inputs=tuple(name for name in agreement.inputs if name != first))


def another_gradient(graph: TrainGraph) -> TrainGraph:
    decay, _ = decay_of(graph)
    other = next(name for name in graph.gradients if name != graph.waits[decay.name])
    return graph.replace(waits={**graph.waits, decay.name: other})


def addend_awaited(graph: TrainGraph) -> TrainGraph:
    """An update waits for what a rank adds to its gradient."""
    nodes = {node.name: node for node in graph.graph.nodes}
    for update, gradient in graph.waits.items():
        source = nodes[gradient].all_input_nodes[0]
        if "all_reduce_bucket" in source.name:
            return graph.replace(waits={**graph.waits, update: source.args[0][nodes[gradient].args[1]].name})
    raise AssertionError


FAULTS: dict[str, tuple[str, Callable[[TrainGraph], TrainGraph]]] = {
    "no agreement": ("do not compare", lambda graph: graph.replace(agreements=())),
    "of another group": ("do not compare", lambda graph: without(graph, group="others")),
    "batch not compared": (r"do not compare \w+, which", lambda graph: no_input(graph, "input")),
    "norm's weight not compared": (r"do not compare \w+, which", lambda graph: no_input(graph, "parameter")),
    "seed not compared": ("do not compare random numbers of FORWARD on cpu", lambda graph: without(graph, draws=())),
    "update of another gradient": ("do not wait for the gradient", another_gradient),
    "update of an addend": ("do not wait for the gradient", addend_awaited),
    "updates that wait for nothing": ("do not wait for the gradient", lambda graph: graph.replace(waits={})),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_on_shards_is_named(pair: tuple[TrainGraph, TrainGraph], fault: str) -> None:
    before, after = pair
    message, plant = FAULTS[fault]
    with pytest.raises(VerifyError, match=f"after pass 'shard': .*{message}"):
        shard_judge.check(before, plant(after), "shard")


def test_what_the_pass_says_is_right(pair: tuple[TrainGraph, TrainGraph]) -> None:
    shard_judge.check(*pair, "shard")
    assert pair[1].waits.keys() == pair[0].waits.keys() != set()


def test_what_ranks_compare_is_kept(pair: tuple[TrainGraph, TrainGraph]) -> None:
    after = pair[1]
    for lost in (after.replace(agreements=()), without(after, inputs=())):
        with pytest.raises(VerifyError, match="no longer compare what they must"):
            check_graph(lost, "fuse", constraints(after))
    (agreement,) = after.agreements
    with pytest.raises(VerifyError, match="of one group compare more than once"):
        check_graph(after.replace(agreements=(agreement, replace(agreement, inputs=()))), "fuse")
    with pytest.raises(VerifyError, match="compare nothing, which is no input"):
        check_graph(after.replace(agreements=(replace(agreement, inputs=("nothing",)),)), "fuse")


def test_ranks_that_run_collectives_again_compare_which() -> None:
    with planned_for({GROUP: range(2)}):
        graph = with_same_plan(captured("llama"), [GROUP])
        before = value_flow.read(graph, Numbers())
        first = next(node for node in operators(graph.graph) if "all_reduce" in str(node.target))
        with graph.graph.inserting_after(first):
            again = graph.graph.node_copy(first)
        later = next(iter(reversed(first.users)))
        later.replace_input_with(first, again)
        after = graph.replace(phase={**graph.phase, again.name: graph.phase[first.name]})
        with pytest.raises(
            VerifyError, match=f"collectives of '{GROUP}' run again, and its ranks do not compare which"
        ):
            value_flow.check(after, before, retain.NAME)
        value_flow.check(after.replace(agreements=(Agreement(GROUP, (), (), (), ""),)), before, retain.NAME)


def test_what_is_read_with_scores_by_class_is_compared() -> None:
    """A weight of each class, and the gradient of the loss."""
    graph = test_shard_loss.captured(lambda: Model(LOSSES["scores by class"]), 2, by_class=True)
    after = test_shard_loss.on_shards(graph, 2)
    ports = zip(placeholders(after.graph), after.inputs, strict=True)
    (tangent,) = [node.name for node, port in ports if port.role is Role.TANGENT]
    (agreement,) = after.agreements
    assert tangent in agreement.inputs
    for name in agreement.inputs:
        left = without(after, inputs=tuple(other for other in agreement.inputs if other != name))
        with pytest.raises(VerifyError, match=f"do not compare {name}, which"):
            shard_judge.check(graph, left, "shard")


class Scaled(nn.Module):
    """A model whose embeddings are scaled by what one rank has, or by what the ranks have, each a part."""

    def __init__(self, scale: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.scale = build("llama", 1), scale
        self.model.tokens.register_forward_hook(lambda module, args, rows: rows * self.scale(self.factor))
        self.register_buffer("factor", torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens)
        return loss


@pytest.mark.parametrize(
    "scale",
    [
        lambda x: COLLECTIVES.broadcast(x, 0, GROUP),
        lambda x: COLLECTIVES.all_gather_into_tensor(x[: WIDTH // 2], 2, GROUP),
        lambda x: COLLECTIVES.all_gather_into_tensor_coalesced([x[: WIDTH // 2]], 2, GROUP)[0],
        lambda x: COLLECTIVES.all_reduce(x, "max", GROUP),
        lambda x: COLLECTIVES.all_reduce_coalesced([x], "sum", GROUP)[0],
    ],
    ids=["broadcast", "gather", "gathers", "maximum", "sums"],
)
def test_what_the_ranks_get_from_each_other_is_not_compared(scale: Callable[[Tensor], Tensor]) -> None:
    with planned_for({GROUP: range(2)}):
        graph = normal_form(split(Scaled(scale), 0, 2), (batch(),))
        after = shard.apply(graph, shard.decide(graph, SEQUENCE))
        shard_judge.check(graph, after, "shard")
    names = {node.name: port.name for node, port in zip(placeholders(after.graph), after.inputs, strict=True)}
    (agreement,) = after.agreements
    compared = {names[name] for name in agreement.inputs}
    assert "factor" not in compared, compared


def test_a_number_is_no_group() -> None:
    """Torch names groups "0", "1" and so on."""
    graph = traced(lambda x: COLLECTIVES.all_gather_into_tensor(x, 2, "1"), torch.zeros(4))
    (gather,) = operators(graph.graph)
    key = ("operator", gather.target, *literals(gather, lambda argument: argument.name))
    assert [is_same(key, group) for group in ("0", "1", "2")] == [False, True, False]


def test_parts_of_a_head_are_not_compared() -> None:
    """The gradient of a loss that a step makes itself has the shape of the loss, which the ranks have added up."""
    with planned_for({GROUP: range(2)}):
        model = test_shard_loss.part(Model(LOSSES["class weights"]), 0, 2, by_class=True)
        batch = test_shard_loss.tokens_and_labels("none")
        graph = captured_step(model, batch, lambda model, *inputs: model(*inputs), torch.optim.SGD).graph
        graph = normalize.apply(graph, normalize.decide(graph, Options()))
        after = test_shard_loss.on_shards(graph, 2)
    names = {node.name: port.name for node, port in zip(placeholders(after.graph), after.inputs, strict=True)}
    (agreement,) = after.agreements
    compared = {names[name] for name in agreement.inputs}
    assert {"weights", "batch[0]", "batch[1]", "norm.weight"} <= compared
    assert compared.isdisjoint({"head.weight", "up.weight", "down.weight"})

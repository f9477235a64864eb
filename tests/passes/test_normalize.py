"""normalize: aliases and dead ends go; random, writing and ordered operators stay, and so do all results.

Dropouts come apart, which nobody can tell from the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

from roamc import compat
from roamc.errors import PlanError
from roamc.graph import Phase, Port, Role, TrainGraph, operators, placeholders
from roamc.graph.storage_ids import number
from roamc.graph.verify import check_graph, constraints
from roamc.operators import ops
from roamc.options import Options
from roamc.passes import normalize
from tests.graphs import assert_same, clones, graph_and_inputs, run_real, traced
from tests.random_graphs import random_model

aten = torch.ops.aten
X = torch.randn(4, 4)


def normalized(graph: TrainGraph) -> TrainGraph:
    return normalize.apply(graph, normalize.decide(graph, Options()))


def text(graph: TrainGraph) -> str:
    return str(graph.graph)


def test_dead_chain_goes_up_to_what_is_used() -> None:
    graph = traced(lambda x: ((y := x.sin()), y.cos().t().sum(), y + 1)[2], X)
    FileCheck().check("aten.sin").check("aten.cos").check("aten.t.default").check("aten.sum").check("aten.add").run(
        text(graph)
    )
    after = text(normalized(graph))
    FileCheck().check("%sin").check_next("%add").check_next("return (add,)").run(after)


def test_aliases_are_replaced_by_what_they_name() -> None:
    graph = traced(lambda x: torch.ops.aten.alias(x.sin().detach()).cos(), X)
    FileCheck().check("aten.sin").check("aten.alias").check("aten.cos").run(text(graph))
    FileCheck().check_not("detach").check_not("alias").check("%sin").check("%cos").check_same("args = (%sin,)").run(
        text(normalized(graph))
    )


def test_writes_and_random_numbers_stay_though_nobody_reads_them() -> None:
    def function(x: Tensor) -> Tensor:
        x.add_(1)
        torch.rand_like(x)
        x.cos()
        return x.sum()

    after = text(normalized(traced(function, X)))
    FileCheck().check("aten.add_").check("aten.rand_like").check_not("aten.cos").check("aten.sum").run(after)


def test_write_through_a_view_keeps_the_view() -> None:
    after = text(normalized(traced(lambda x: ((y := x * 2), y.t()[0].zero_(), y.sum())[2], X)))
    FileCheck().check("%mul").check("%t").check("%select").check("aten.zero_").check_same("%select").check("%sum").run(
        after
    )


def test_unread_results_of_several_go_and_the_operator_stays() -> None:
    after = text(normalized(traced(lambda x: ((v := x.max(dim=1)), v.indices.float(), v.values)[2], X)))
    FileCheck().check_count("aten.max.dim", 1, exactly=True).run(after)
    FileCheck().check_count("getitem](args", 1, exactly=True).run(after)


def dropouts(share: float, train: bool | None = True) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Twice, so that the second finds the generator where the first has left it; then something else that draws."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y, mask = aten.native_dropout(x, share, train)
        z, _ = aten.native_dropout(y.cos(), share, train)
        return y, mask, z, torch.rand_like(x)

    return function


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 1.0])
def test_dropout_comes_apart_and_gives_the_same_bits(dtype: torch.dtype, share: float) -> None:
    x = torch.randn(33, 40)
    x[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    converted = x.to(dtype)
    graph = traced(dropouts(share), converted)
    kept = constraints(graph)
    after = normalized(graph)
    FileCheck().check_count("roamc.dropout_mask", 2, exactly=True).run(text(after))
    FileCheck().check_not("aten.native_dropout.default").check_not("getitem").run(text(after))
    check_graph(after, "normalize", kept, deep=True)
    torch.manual_seed(3)
    expected = dropouts(share)(converted)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    got, _ = run_real(after, [converted])
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours.signbit(), theirs.signbit())
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize(
    ("function", "x"),
    [
        pytest.param(dropouts(0.0), X, id="nothing to drop"),
        pytest.param(dropouts(0.3, False), X, id="evaluation"),
        pytest.param(dropouts(0.3), X[:, :1].expand(4, 4), id="expanded"),
        pytest.param(dropouts(0.3), X.t(), id="transposed"),
        pytest.param(dropouts(0.3), X[:0], id="no elements"),
    ],
)
def test_other_dropouts_stay_whole(function: Callable[..., Any], x: Tensor) -> None:
    assert "native_dropout" not in normalize.decide(traced(function, x), Options()).dropouts


def test_dropout_on_a_gpu_stays_one_kernel() -> None:
    mode = compat.FakeTensorMode()
    with mode:
        x = torch.empty(4, 4, device="cuda")
    module = compat.trace(dropouts(0.3), [x], mode)
    number(module.graph)
    inputs = tuple(Port(node.name, Role.INPUT) for node in placeholders(module.graph))
    FileCheck().check_count("aten.native_dropout.default", 2, exactly=True).run(str(module.graph))
    phase = dict.fromkeys((node.name for node in operators(module.graph)), Phase.FORWARD)
    outputs = tuple(Port(f"output[{i}]", Role.OUTPUT) for i in range(4))
    graph = TrainGraph(name="gpu", module=module, inputs=inputs, outputs=outputs, phase=phase)
    assert not normalize.decide(graph, Options()).dropouts


def test_what_only_an_unread_dropout_reads_goes() -> None:
    after = text(normalized(traced(lambda x: (aten.native_dropout(x.sin(), 0.3, True)[1], x.cos())[1], X)))
    FileCheck().check_not("aten.sin").check("dropout_mask").check_not("native_dropout_backward").check("cos").run(after)


def test_saved_mask_and_result_keep_their_places() -> None:
    def function(x: Tensor) -> Tensor:
        y, mask = aten.native_dropout(x, 0.3, True)
        return (y * mask).sum()

    graph = traced(function, X, phases="FFFBB", saved=("getitem_1", "getitem"), boundary=True)
    after = normalized(graph)
    assert after.saved == ("native_dropout", "native_dropout_by_mask")
    check_graph(after, "normalize", deep=True)


def test_what_is_saved_for_an_unread_dropout_of_a_checkpointed_part_goes() -> None:
    def part(x: Tensor, w: Tensor) -> Tensor:
        nn.functional.dropout(x.relu(), 0.25)
        return w.exp()

    def loss(w: Tensor) -> Tensor:
        return checkpoint(part, w * 2, w, use_reentrant=False).sum()

    gradients = []
    for call in (loss, torch.compile(loss, backend="roamc", dynamic=False, options={"strict": True})):
        w = X.clone().requires_grad_()
        call(w).backward()
        gradients.append(w.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounded_is_what_a_tensor_holds(dtype: torch.dtype) -> None:
    values = [0.0, 1.0, 1 / 0.9, 1 / 0.7, 2.0**-20, 3.0e4, *(1 / (1 - i / 97) for i in range(97))]
    values += [1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8]  # halfway between two numbers of bfloat16: to even
    for value in values:
        assert normalize.rounded(value, dtype) == torch.tensor(value, dtype=dtype).item(), value


def test_plan_that_names_another_dropout_is_refused() -> None:
    for name in ("nobody", "sin"):
        with pytest.raises(PlanError, match=name):
            normalize.apply(traced(lambda x: x.sin(), X), normalize.Decision((), (), (name,)))


def test_plan_that_takes_another_operator_for_an_alias_is_refused() -> None:
    graph = traced(lambda x: aten.native_dropout(x, 0.3, True)[0].sin().view(16).cos(), X)
    for name in ("getitem", "sin", "view"):
        with pytest.raises(PlanError, match=f"the plan names '{name}', which this graph does not have as such"):
            normalize.apply(graph, normalize.Decision((name,), (), ()))


def test_assertion_stays() -> None:
    after = text(normalized(traced(lambda x: (torch._assert_async(x.sum() == x.sum()), x.sin())[1], X)))
    FileCheck().check("aten._assert_async").check("aten.sin").run(after)


def test_alias_that_is_handed_out_or_saved_keeps_its_name() -> None:
    graph = traced(lambda x: x.sin().detach(), X)
    name = operators(graph.graph)[-1].name
    assert f"return ({name},)" in text(normalized(graph))
    alias = operators(traced(lambda x: x.sin().detach().cos(), X).graph)[1].name  # detach, from torch 2.14 on alias
    saved = traced(lambda x: x.sin().detach().cos(), X, phases="FFB", saved=(alias,), boundary=True)
    assert f"%{alias}" in text(normalized(saved))


def test_phases_are_those_of_the_nodes_that_are_left() -> None:
    graph = normalized(traced(lambda x: ((y := x.sin()), y.cos(), y + 1)[2], X))
    assert set(graph.phase) == {node.name for node in operators(graph.graph)} == {"sin", "add"}


def test_decide_changes_nothing() -> None:
    graph = traced(lambda x: ((y := x.sin()), y.cos(), y + 1)[2], X)
    before = text(graph)
    decision = normalize.decide(graph, Options())
    assert (decision.aliases, decision.dead) == ((), ("cos",))
    assert text(graph) == before


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(10))
def test_random_graph_gives_the_same_bits_and_keeps_effects(seed: int, route: str) -> None:
    graph, inputs = graph_and_inputs(*random_model(seed), route)
    used = clones(inputs)
    torch.manual_seed(seed)
    expected, _ = run_real(graph, used)
    effects = effects_of(graph)
    kept = constraints(graph)
    after = normalized(graph)
    check_graph(after, "normalize", kept, deep=True)
    assert effects_of(after) == effects, f"seed {seed}, {route}"
    torch.manual_seed(seed)
    got, _ = run_real(after, inputs)
    assert_same((*expected, *used), (*got, *inputs), f"seed {seed}, {route}")


def effects_of(graph: TrainGraph) -> list[str]:
    rules = [(node.name, ops.rule(node.target)) for node in operators(graph.graph)]
    return [name for name, rule in rules if rule.random or rule.mutates or rule.ordered or rule.collective]


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(10, 15))
def test_applied_twice_is_applied_once(seed: int, route: str) -> None:
    graph, _ = graph_and_inputs(*random_model(seed), route)
    once = normalized(graph)
    before = text(once)
    assert normalize.decide(once, Options()) == normalize.Decision((), (), ()), f"seed {seed}, {route}"
    assert text(normalized(once)) == before


def test_nothing_dead_is_left() -> None:
    graph, _ = graph_and_inputs(*random_model(3), "step")
    left = [node.name for node in operators(normalized(graph).graph) if not node.users]
    assert set(left) <= set(effects_of(graph))

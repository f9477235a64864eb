"""The judge of values accepts what leaves every value as it is, and refuses by name what does not."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from roamc import Options
from roamc.errors import PlanError, VerifyError
from roamc.graph import Phase, Port, Role, TrainGraph, operators, output_node
from roamc.graph.memory import build_memory
from roamc.graph.storage_ids import number_result
from roamc.graph.value_flow import check, read
from roamc.graph.value_numbers import Flow, Numbers
from roamc.operators.random import replay, save_rng_state
from roamc.options import parse_options
from roamc.passes import normalize, reuse
from roamc.passes.retain.compress import Code, compress
from roamc.planning import search
from roamc.planning.plan import Plan
from roamc.rewriting.rerun import rerun
from roamc.rewriting.reruns import Rerun
from tests.end_to_end.helpers import assert_steps_equal, noise, sgd, square
from tests.graphs import aten, captured_step, graph_and_inputs, node_named, traced
from tests.passes.retain.test_search import tower
from tests.random_graphs import random_model

X = torch.randn(8, 8)


def values(graph: TrainGraph) -> Flow:
    return read(graph, Numbers())


def refused(graph: TrainGraph, before: Flow, *says: str) -> None:
    """The judge's one line has all of ``says`` and names the pass."""
    with pytest.raises(VerifyError) as caught:
        check(graph, before, "broken")
    text = str(caught.value)
    assert text.count("\n") == 0
    assert "after pass 'broken'" in text
    for said in says:
        assert re.search(said, text), text


def move(graph: TrainGraph, name: str, behind: str) -> None:
    node_named(graph, behind).append(node_named(graph, name))


# -- what leaves every value as it is ------------------------------------------------------------------


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", range(2))
def test_plans_of_random_models_keep_the_values(seed: int, route: str) -> None:
    captured = graph_and_inputs(*random_model(seed), route)[0]
    graph = normalize.apply(
        captured, normalize.decide(captured, Options())
    )  # later nodes may have names of erased ones
    before = values(graph)
    trials = search.PlanSearch(graph, Options())
    for planned in (trials.first, trials.lowest()):
        after = check(planned.graph, before, "all")
        assert len(before.operators.keys() & after.operators.keys()) > 50


def test_dropout_is_its_mask_and_a_product() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        graph = traced(lambda x: torch.native_dropout(x, 0.3, True), X.to(dtype))
        before = values(graph)
        apart = normalize.apply(graph, normalize.decide(graph, Options()))
        assert [node.target for node in operators(apart.graph)][-1] is aten.native_dropout_backward.default
        check(apart, before, "normalize")


def test_dropout_with_another_scale_is_refused() -> None:
    graph = traced(lambda x: torch.native_dropout(x, 0.3, True), X)
    before = values(graph)
    apart = normalize.apply(graph, normalize.decide(graph, Options()))
    product = operators(apart.graph)[-1]
    product.args = (*product.args[:2], 1.5)
    refused(apart, before, r"output 0 .* through native_dropout_by_mask, which would run with other arguments than")


def test_batch_norm_without_statistics_gives_what_it_gave_with_them() -> None:
    def function(x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        y = aten._native_batch_norm_legit.default(x, None, None, mean, var, True, 0.1, 1e-5)[0]
        return y.sum(), y.cos()

    graph = traced(function, X, torch.zeros(8), torch.ones(8))
    before = values(graph)
    first = operators(graph.graph)[0].name
    again = Rerun(f"{first}_1", first, "forward", ((f"{first}#0", ("cos",)),))
    check(rerun(graph, [again]), before, "retain")


# -- what does not -------------------------------------------------------------------------------------


def stale() -> TrainGraph:
    """``scale`` is written between a read of it and the reader of that."""

    def function(x: Tensor, scale: Tensor) -> Tensor:
        kept = scale.clone()
        first = x.mul(kept)
        scale.mul_(0.5)
        return first + x.sub(kept)

    return traced(function, X, torch.ones(8), phases="FFFBB")


CLONE = Rerun("clone_1", "clone", "forward", (("clone", ("sub",)),))


def test_rerun_behind_an_in_place_write_of_its_input() -> None:
    graph = stale()
    before = values(graph)
    after = rerun(graph, [CLONE])
    move(after, "clone_1", behind="mul_")
    refused(after, before, "sub would read what mul_ has written", "not scale_1 as the caller")


def test_rerun_in_front_of_the_write_is_accepted() -> None:
    graph = stale()
    before = values(graph)
    check(rerun(graph, [CLONE]), before, "retain")


def test_rerun_in_backward_of_a_read_of_what_forward_has_written() -> None:
    """Another forward may have written it since."""

    def function(x: Tensor, scale: Tensor) -> Tensor:
        kept = x * scale.mul_(0.5)
        return kept.sin() + kept.cos()

    late = (Port("output[0]", Role.OUTPUT, Phase.BACKWARD),)
    for boundary in (False, True):
        graph = traced(function, X, torch.ones(8), phases="FFFBB", boundary=boundary, outputs=late)
        before = values(graph)
        after = rerun(graph, [Rerun("mul_1", "mul", "backward", (("mul", ("cos",)),))])
        if boundary:
            refused(after, before, "cos through mul_1", "what another forward may have written since and not")
        else:
            check(after, before, "retain")


def test_rerun_in_backward_of_a_read_of_what_the_caller_overwrites() -> None:
    def function(x: Tensor, scale: Tensor) -> Tensor:
        kept = x * scale
        return kept.sin() + kept.cos()

    for overwritten in (True, False):
        inputs = (Port("x", Role.INPUT), Port("scale", Role.PARAMETER, overwritten=overwritten))
        late = (Port("output[0]", Role.OUTPUT, Phase.BACKWARD),)
        graph = traced(function, X, torch.ones(8), phases="FFBB", boundary=True, inputs=inputs, outputs=late)
        before = values(graph)
        after = rerun(graph, [Rerun("mul_1", "mul", "backward", (("mul", ("cos",)),))])
        if overwritten:
            refused(after, before, "cos through mul_1", "what the caller has written since and not scale_1")
        else:
            check(after, before, "retain")


def reduced_twice() -> TrainGraph:
    """Two collectives; backward reads the result of the first."""
    all_reduce = torch.ops.roamc_collective.all_reduce.default

    def function(x: Tensor) -> Tensor:
        first = all_reduce(x, "sum", "0")
        second = all_reduce(first.sin(), "sum", "0")
        return first.cos() + second

    return traced(function, X, phases="FFFBB")


def test_rerun_of_a_collective_is_refused() -> None:
    graph = reduced_twice()
    before = values(graph)
    first, *_, cos, _ = operators(graph.graph)
    with graph.graph.inserting_before(cos):
        again = graph.graph.node_copy(first, lambda node: node)
    again.meta["val"] = first.meta["val"].clone()
    number_result(again)
    cos.args = (again,)
    refused(graph, before, r"cos through all_reduce_2, which would run an operator again that may give other bits")


def test_collectives_in_another_order_are_refused() -> None:
    graph = traced(lambda x: tuple(torch.ops.roamc_collective.all_reduce(x, op, "0") for op in ("sum", "max")), X)
    before = values(graph)
    first, second = operators(graph.graph)[:2]
    move(graph, first.name, second.name)
    refused(graph, before, rf"{second.name} runs where {first.name} ran")


class Scaled(nn.Module):
    """A buffer is read, then written, in front of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) * self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.5)
        return y


def scaled(optimizer: Any = torch.optim.SGD) -> TrainGraph:
    torch.manual_seed(0)
    return captured_step(Scaled(), (X,), lambda m, x: m(x).square().sum(), optimizer).graph


def with_reruns(plan: Plan, order: Sequence[str], *reruns: tuple[Any, ...]) -> Plan:
    kept = {**plan.decisions["retain"], "reruns": reruns}
    ordered = {**plan.decisions["reorder"], "order": tuple(order)}
    decisions = {name: decision for name, decision in plan.decisions.items() if name in ("normalize", "layout")}
    return dataclasses.replace(plan, decisions={**decisions, "retain": kept, "reorder": ordered})


def test_plan_from_a_file_with_a_stale_rerun_is_refused() -> None:
    first = search.run(scaled(), Options(order="program", disable=("reuse",)))
    names = [node.name for node in operators(first.graph.graph)]
    clone = next(node for node in operators(first.graph.graph) if node.target is aten.clone.default)
    reader = [user.name for user in clone.users][-1]
    write = next(n.name for n in operators(first.graph.graph) if n.target in (aten.copy_.default, aten.mul_.Tensor))
    assert names.index(clone.name) < names.index(write) < names.index(reader)
    order = list(first.plan.decisions["reorder"]["order"])
    order.insert(order.index(reader), "clone_1")
    again = ("clone_1", clone.name, "backward", ((clone.name, (reader,)),), 0.0)
    kept = with_reruns(first.plan, order, again)
    said = rf"^after pass 'reorder': {write} must stay behind clone_1|{reader} would read what \w+ has written and not "
    with pytest.raises(VerifyError, match=said):
        search.run(scaled(), Options(), Plan.from_json(kept.to_json()), deep=True)


def test_rerun_behind_the_update_of_its_weight() -> None:
    def function(x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        y = x @ weight
        z = y.sin()
        weight.sub_(gradient)
        return z * y.cos()

    graph = traced(function, X, torch.ones(8, 8), torch.ones(8, 8), phases="FFUUU")
    before = values(graph)
    after = rerun(graph, [Rerun("mm_1", "mm", "update", (("mm", ("cos",)),))])
    assert [op.node.name for op in build_memory(after).operators] == ["mm", "sin", "mm_1", "sub_", "cos", "mul"]
    check(after, before, "retain")
    move(after, "mm_1", behind="sub_")
    refused(after, before, "cos through mm_1, which would read what sub_ has written and not weight_1 as the caller")


def test_order_swapped_around_a_write() -> None:
    graph = traced(lambda x: ((a := x * 2), a.sum(), a.add_(1), a.cos())[1:], X)
    before = values(graph)
    move(graph, "sum_1", behind="add_")
    refused(graph, before, "sum_1 would read what add_ has written and not the result of mul")


def test_read_of_another_view_in_front_of_the_write() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        a = x * 2
        view = a.t()
        a.add_(1)
        return a, view.cos()

    graph = traced(function, X)
    before = values(graph)
    move(graph, "cos", behind="t")
    refused(graph, before, "cos would read the result of mul and not what add_")


def test_result_written_over_a_value_that_is_read_later() -> None:
    graph = traced(lambda x: ((a := x.sin()), (b := a.cos()), a.exp() + b)[2], X)
    before = values(graph)
    refused(graph.replace(reuse={"cos": 0}), before, "exp would read the result of cos and not the result of sin")


def test_result_written_over_an_output() -> None:
    graph = traced(lambda x: ((a := x.sin()), a.cos()), X)
    before = values(graph)
    refused(graph.replace(reuse={"cos": 0}), before, "output 0 .* would read the result of cos and not .* of sin")


def test_result_written_over_its_argument_at_the_last_use_is_accepted() -> None:
    graph = traced(lambda x: x.sin().cos(), X)
    before = values(graph)
    check(reuse.apply(graph, reuse.Decision((("cos", 0),), 256)), before, "reuse")


def test_dropped_copy_to_a_tensor_of_the_caller() -> None:
    def function(x: Tensor, state: Tensor) -> Tensor:
        state.copy_(x.sin())
        return x.cos()

    graph = traced(function, X, X.clone())
    before = values(graph)
    copy = node_named(graph, "copy_")
    copy.replace_all_uses_with(copy.args[0])
    graph.graph.erase_node(copy)
    refused(graph, before, "state_1 .* would read nothing and not what copy_ has written")


def test_write_that_nobody_asked_for() -> None:
    graph = traced(lambda x: x.cos(), X)
    before = values(graph)
    cos = node_named(graph, "cos")
    with graph.graph.inserting_before(cos):
        more = graph.graph.call_function(aten.neg_.default, (cos.args[0],))
    more.meta["val"] = cos.args[0].meta["val"]
    number_result(more)
    refused(graph, before, r"cos would read what neg_.* has written and not x_1 as the caller gives it")


def test_swapped_draws() -> None:
    graph = traced(lambda x: (torch.rand_like(x), torch.randn_like(x)), X)
    before = values(graph)
    move(graph, "rand_like", behind="randn_like")
    refused(
        graph, before, "randn_like would read a generator that has drawn nothing and not a generator that rand_like"
    )


def again(state_before: str) -> tuple[TrainGraph, Flow]:
    """Two draws; the first is made again from the state kept in front of ``state_before``."""
    graph = traced(lambda x: ((a := torch.rand_like(x)), torch.rand_like(x), a.sin(), a.cos())[1:], X, phases="FFFB")
    before = values(graph)
    after = rerun(graph, [Rerun("rand_like_2", "rand_like", "backward", (("rand_like", ("cos",)),))])
    state = next(node for node in operators(after.graph) if node.target is save_rng_state)
    node_named(after, state_before).prepend(state)
    return after, before


def test_replay_of_the_state_of_the_first_draw_is_accepted() -> None:
    after, before = again("rand_like")
    assert any(node.target is replay for node in operators(after.graph))
    check(after, before, "retain")


def test_replay_with_the_state_of_another_draw() -> None:
    after, before = again("rand_like_1")
    refused(after, before, r"cos through rand_like_\d+, which would read a generator that rand_like has drawn from")


@pytest.mark.parametrize("name", ["_assert_async", "_assert_async_1"])
def test_check_that_is_gone_or_checks_something_else(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        torch._assert_async(x.sum() == x.sum())
        torch._assert_async(x.amax() == x.amax())
        return x.sin()

    graph = traced(function, X)
    before = values(graph)
    graph.graph.erase_node(node_named(graph, name))
    refused(graph, before, "operators with an effect|runs where")


def test_literal_argument_of_another_type() -> None:
    graph = traced(lambda x: x + 1, X)
    before = values(graph)
    node = operators(graph.graph)[0]
    node.args = (node.args[0], True)
    refused(graph, before, "add would run with other arguments than in the captured graph")


def test_another_part_of_the_same_storage() -> None:
    graph = traced(lambda x: ((a := x.sin()), a[:4].cos(), a[4:].exp())[1:], X)
    before = values(graph)
    low, high = (node for node in operators(graph.graph) if node.target is aten.slice.Tensor)
    next(iter(high.users)).replace_input_with(high, low)
    refused(graph, before, "exp would read a tensor that lies as")


def test_output_is_another_value() -> None:
    graph = traced(lambda x: (x.sin(), x.cos()), X)
    before = values(graph)
    end = output_node(graph.graph)
    end.args = (end.args[0][::-1],)
    refused(graph, before, r"output 0 \(output\[0\]\) of the step would read the result of cos and not .* of sin")


# -- codes ---------------------------------------------------------------------------------------------


def relu_and_backward(more: Callable[[Tensor, Tensor], Tensor] | None = None) -> TrainGraph:
    """A relu, in front of backward read in full, in backward by its sign and by ``more``."""

    def function(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        y = x.relu()
        return (y.exp(), aten.threshold_backward(gradient, y, 0), *([more(y, gradient)] if more else []))

    return traced(function, X, X, phases="FFBB" if more else "FFB")


def test_sign_is_enough_for_a_reader_of_the_sign() -> None:
    graph = relu_and_backward()
    before = values(graph)
    after = compress(graph, [Code("relu", "signs")])
    assert any("decode" in node.name for node in after.graph.nodes)
    check(after, before, "retain")


def test_sign_is_not_enough_for_a_reader_of_the_elements() -> None:
    with pytest.raises(PlanError, match="codec 'signs' does not fit relu"):
        compress(relu_and_backward(lambda y, g: y * g), [Code("relu", "signs")])
    graph = relu_and_backward()
    after = compress(graph, [Code("relu", "signs")])
    reader = node_named(after, "threshold_backward")
    reader.args = (*reader.args[:2], 0.5)  # no longer a comparison with zero
    wanted = relu_and_backward()
    node_named(wanted, "threshold_backward").args = (*node_named(wanted, "threshold_backward").args[:2], 0.5)
    flow = values(wanted)
    refused(after, flow, "threshold_backward would read the result of relu_decode.* and not the result of relu,")


def mask_and_backward() -> TrainGraph:
    def function(x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        a, b = x > 0, other > 0
        return torch.where(a, x, other), torch.where(b, x, other), torch.where(a, other, x), torch.where(b, other, x)

    return traced(function, X, X, phases="FFFFBB")


def test_decoded_masks_are_the_masks() -> None:
    graph = mask_and_backward()
    before = values(graph)
    check(compress(graph, [Code("gt", "bits"), Code("gt_1", "bits")]), before, "retain")


def test_code_of_another_value() -> None:
    graph = mask_and_backward()
    before = values(graph)
    after = compress(graph, [Code("gt", "bits"), Code("gt_1", "bits")])
    encodes = [node for node in operators(after.graph) if node.name.startswith("gt_encode")]
    for node in encodes:
        node.replace_input_with(node_named(after, "gt"), node_named(after, "gt_1"))
    refused(after, before, "gt_encode is a view of gt_1, and lies in another storage")
    coded = [node for node in operators(after.graph) if node.name.startswith(("gt_encode", "gt_decode"))]
    for node in coded:
        with node.meta["val"].fake_mode:
            node.meta["val"] = node.target(*fx.map_arg(node.args, lambda argument: argument.meta["val"]))
        number_result(node)
    refused(after, before, "where_2 would read the result of gt_decode.* and not the result of gt,")


def part_written(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    y[:, :4].mul_(0.5)
    return y @ x, y.split(4, 1)[1].sin()


def test_view_of_another_part() -> None:
    graph = traced(part_written, X)
    before = values(graph)
    node_named(graph, "slice_1").args = (node_named(graph, "exp"), 1, 4, 8)
    refused(graph, before, "slice_1 is a view of exp, and lies elsewhere in it than its arguments say")


def test_view_that_cannot_be_made() -> None:
    graph = traced(lambda x: x.sum(0, keepdim=True).expand(8, 8).sin(), X)
    before = values(graph)
    node_named(graph, "expand").args = (node_named(graph, "sum_1"), [8, 5])
    refused(graph, before, "expand cannot run on what it reads: The expanded size of the tensor")


def test_another_result_is_picked() -> None:
    graph = traced(part_written, X)
    before = values(graph)
    picked = next(node for node in graph.graph.nodes if node.target is operator.getitem and node.users)
    picked.args = (picked.args[0], 1 - picked.args[1])
    refused(graph, before, "is a view of split, and is not its result")


def test_code_that_is_decoded_in_another_way() -> None:
    graph = mask_and_backward()
    before = values(graph)
    after = compress(graph, [Code("gt", "bits")])
    shift = next(n for n in operators(after.graph) if n.target is aten.bitwise_right_shift.Tensor)
    shift.target = aten.bitwise_left_shift.Tensor
    refused(after, before, "where_2 would read the result of gt_decode.* and not the result of gt,")


def test_shape_is_enough_for_a_reader_of_the_shape() -> None:
    def function(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return F.avg_pool2d(y, 2), aten.avg_pool2d_backward(gradient, y, [2, 2], [], [0, 0], False, True, None)

    graph = traced(function, torch.randn(2, 3, 8, 8), torch.randn(2, 3, 4, 4), phases="FFB")
    before = values(graph)
    check(compress(graph, [Code("sin", "shapes")]), before, "retain")


def test_plan_with_codes_and_replays_is_accepted() -> None:
    graph = graph_and_inputs(*tower(), "step")[0]
    before = values(graph)
    planned = search.run(graph, parse_options({"memory_budget": "30%"}))
    kept = planned.plan.decisions["retain"]
    assert kept["reruns"]
    assert kept["codes"]
    check(planned.graph, before, "all")


def test_a_copy_in_other_strides_is_not_what_was_copied() -> None:
    """The elements are the same, and the bytes are not: who reads the bytes of the one as if they were the other's."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.t().sin()
        z = torch.empty(6, 6).copy_(y)
        return z.cos(), y.exp()

    graph = traced(function, torch.randn(6, 6))
    before = values(graph)
    cos, sin, copy = (node_named(graph, name) for name in ("cos", "sin", "copy_"))
    with graph.graph.inserting_before(cos):
        other = graph.graph.call_function(aten.as_strided.default, (sin, [6, 6], [6, 1], 0))
    with sin.meta["val"].fake_mode:
        other.meta["val"] = aten.as_strided.default(sin.meta["val"], [6, 6], [6, 1], 0)
    number_result(other)
    cos.replace_input_with(copy, other)
    after = graph.replace(phase={**graph.phase, other.name: graph.phase["cos"]})
    refused(after, before, "cos would read the result of sin and not what copy_ has written")


class Turned(nn.Module):
    """Backward takes the conjugate of a number, which is no view of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x)
        return (y * 1j).abs() + torch.exp(1j * y).real


@pytest.mark.parametrize("budget", [None, "min"])
def test_conjugates_of_numbers_are_values_of_their_own(budget: str | None) -> None:
    torch.manual_seed(0)
    assert_steps_equal(Turned(), square, sgd, [(noise(6, 8),)] * 2, memory_budget=budget)


def test_rows_that_lie_apart_are_told_from_bytes_of_them() -> None:
    numbers = Numbers()
    rows = numbers.in_rows((8, 50), torch.bfloat16)
    apart = numbers.padded(numbers.of("rows"), rows, 64)
    for dtype, same in ((torch.bfloat16, True), (torch.int16, True), (torch.int8, False)):
        lies = numbers.of("place", (8, 10), (64, 1), 64, dtype, False, False)
        moved = numbers.of("rows"), numbers.of("place", (8, 10), (50, 1), 50, dtype, False, False)
        assert numbers.unpadded(apart, lies) == (moved if same else (apart, lies))

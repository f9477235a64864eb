"""Kinds of readers: what the table says of single operators, and the walk from products to updates alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from roamc import compat
from roamc.capture.step import capture_step
from roamc.capture.step_trace import StepRequest
from roamc.graph import Port, Role, TrainGraph, operators
from roamc.graph.memory import build_memory
from roamc.graph.reader_kinds import ReaderKinds, position_in
from roamc.operators import ops
from roamc.operators.schemas import name_of
from roamc.operators.table import ROWS, Kind
from roamc.passes import fuse
from roamc.passes.fuse import Decision
from roamc.passes.retain.fits import values
from tests.graphs import aten, model_graph, node_calling, traced
from tests.passes.retain.test_compress import ROUTES, cleaned, squares

X, Y, Z = (torch.randn(8, 8) for _ in range(3))


def kinds_in(graph: TrainGraph) -> dict[tuple[str, int], set[Kind]]:
    """Name of an operator and position of an argument to the kinds of late readers of saved values."""
    kinds, read = ReaderKinds(graph), dict[tuple[str, int], set[Kind]]()
    for value in values(build_memory(graph)):
        for late in value.saved.late:
            place = name_of(late.reader.target).removeprefix("aten."), late.position
            read.setdefault(place, set()).add(kinds.of(late.reader, late.position))
    return read


@pytest.mark.parametrize("route", ROUTES)
def test_every_reader_of_a_gpt_has_its_kind(route: str) -> None:
    read = kinds_in(model_graph("nanogpt-dropout", route)[0])
    assert read["mm.default", 1] == {Kind.WEIGHT}
    assert read["gelu_backward.default", 1] == {Kind.SLOPE}
    assert read["native_layer_norm_backward.default", 1] == {Kind.NORM}
    assert read["native_dropout_backward.default", 1] == {Kind.ANY}
    others = set().union(*(kinds for (name, _), kinds in read.items() if "bmm" in name or "softmax" in name))
    assert others == {Kind.ANY}


@pytest.mark.parametrize("route", ROUTES)
def test_attention_and_convolutions_have_theirs(route: str) -> None:
    read = kinds_in(model_graph("llama", route)[0])
    attention = "_scaled_dot_product_flash_attention_for_cpu_backward.default"
    assert [read[attention, position] for position in range(1, 6)] == [{Kind.ATTENTION}] * 4 + [{Kind.ANY}]
    assert read["silu_backward.default", 1] == {Kind.SLOPE}
    read = kinds_in(model_graph("mobilenetv2", route)[0])
    assert read["convolution_backward.default", 1] == {Kind.WEIGHT}
    assert read["native_batch_norm_backward.default", 1] == {Kind.NORM}


def test_rows_name_arguments_that_are_tensors() -> None:
    """By the names that torch gives them: the gradient that comes in, and what is not an activation, have no kind."""
    of_kind = {
        Kind.SLOPE: {"self", "output"},
        Kind.NORM: {"input"},
        Kind.ATTENTION: {"query", "key", "value", "out"},
    }
    rows = {name: row for name, row in ROWS.items() if row.kinds or row.multiplies}
    assert len(rows) > 25
    for name, row in rows.items():
        space, _, stem = name.partition("::")
        packet = getattr(getattr(torch.ops, space), stem)
        schema = packet.default._schema
        for position, kind in row.kinds.items():
            assert schema.arguments[position].name in of_kind[kind], name
        for position, results in row.multiplies.items():
            assert str(schema.arguments[position].type) == "Tensor", name
            assert max(results) < len(schema.returns), name


class Layer(nn.Module):
    """A linear layer whose weight the loss uses in some way of its own."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(8, 8, bias=False), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.linear, torch.tanh(x * 3))


def twice(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(linear(x).tanh()).sum()


WAYS: dict[str, tuple[Callable[..., Tensor], Kind]] = {
    "plain": (lambda linear, x: linear(x).square().sum(), Kind.WEIGHT),
    "transposed": (lambda linear, x: (x @ linear.weight).square().sum(), Kind.WEIGHT),
    "used twice": (twice, Kind.WEIGHT),
    "added to what has no error": (lambda linear, x: linear(x).square().sum() + linear.weight.sum(), Kind.WEIGHT),
    "scaled weight": (lambda linear, x: (x @ (2 * linear.weight)).square().sum(), Kind.WEIGHT),
    "squared weight": (lambda linear, x: (x @ linear.weight.square()).square().sum(), Kind.ANY),
    "product of activations": (lambda linear, x: (x @ torch.tanh(linear(x))).square().sum(), Kind.ANY),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("way", WAYS)
def test_product_is_of_kind_weight_if_updates_alone_read_it(way: str, route: str) -> None:
    function, kind = WAYS[way]
    graph, _ = cleaned(Layer(function), (X,), lambda model, x: model(x), route)
    read = kinds_in(graph)
    of_products = set().union(*(kinds for (name, _), kinds in read.items() if name == "mm.default"))
    assert (of_products == {Kind.WEIGHT}) is (kind is Kind.WEIGHT)


def test_gradient_of_an_input_is_no_weight() -> None:
    """torch.compile returns it as a gradient, too, but to another part of the model."""

    def loss(model: nn.Module, x: Tensor, other: Tensor) -> Tensor:
        return (model(x) @ other).square().sum()

    batch = X, X.clone().requires_grad_()
    read = kinds_in(cleaned(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), batch, loss, "joint")[0])
    assert Kind.ANY in read["mm.default", 0] | read.get(("mm.default", 1), set())


def test_gradient_that_is_clipped_is_of_kind_weight() -> None:
    """The norm of all gradients is part of the update: what errs there stays there."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    leaves, spec = compat.flatten((X,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    request = StepRequest(
        model, squares, optimizer, tuple(leaves), lambda flat: compat.unflatten(flat, spec), clip_grad_norm=1.0
    )
    assert kinds_in(capture_step(request).graph)["mm.default", 1] == {Kind.WEIGHT}


def test_mean_over_ranks_is_of_kind_weight_and_a_product_of_gradients_is_not() -> None:
    """As DistributedDataParallel averages gradients, and as nobody does."""

    def step(w: Tensor, x: Tensor, g: Tensor, factor: Callable[[Tensor], Tensor | float]) -> tuple[Tensor, ...]:
        gradient = torch.tanh(x).t() @ g
        mean = torch.ops.roamc_collective.all_reduce.default(gradient * factor(gradient), "sum", "0")
        w.sub_(mean)
        return ()

    def averaged(w: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return step(w, x, g, lambda _: 0.5)

    def squared(w: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return step(w, x, g, lambda gradient: gradient)

    for function, kind in ((averaged, Kind.WEIGHT), (squared, Kind.ANY)):
        graph = traced(function, X, torch.randn(64, 8), torch.randn(64, 8), phases="FBBBBU")
        graph = graph.replace(inputs=(Port("w", Role.PARAMETER), *graph.inputs[1:]))
        assert ReaderKinds(graph).of(node_calling(graph, aten.mm.default), 0) is kind


def test_copies_casts_sums_and_groups_read_as_their_readers_do() -> None:
    def function(g: Tensor, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        slope = aten.gelu_backward.default(g, x.double().clone())
        both = x + r
        return slope, aten.silu_backward.default(g, both), aten.tanh_backward.default(g, both), (x * 2).to(torch.int32)

    graph = traced(function, X, Y, Z)
    kinds = ReaderKinds(graph)
    assert kinds.of(node_calling(graph, aten._to_copy.default), 0) is Kind.SLOPE
    assert kinds.of(node_calling(graph, aten.clone.default), 0) is Kind.SLOPE
    assert kinds.of(node_calling(graph, aten.add.Tensor), 1) is Kind.SLOPE
    assert kinds.of(node_calling(graph, aten._to_copy.default, 1), 0) is Kind.ANY, "an integer is no copy"
    assert kinds.of(node_calling(graph, aten.mul.Tensor), 0) is Kind.ANY


def test_reader_with_the_argument_twice_is_any() -> None:
    graph = traced(lambda x: aten.gelu_backward.default(x, x), X)
    node = node_calling(graph, aten.gelu_backward.default)
    assert position_in(node, node.all_input_nodes[0]) == -1
    assert ReaderKinds(graph).of(node, -1) is Kind.ANY


def test_members_of_a_group_say_what_the_group_reads() -> None:
    """Of a group with a slope and nothing else that reads the value, and of one with another reader."""

    def one_kind(g: Tensor, x: Tensor) -> Tensor:
        return aten.gelu_backward.default(g * 2, x) * 3

    def two_kinds(g: Tensor, x: Tensor) -> Tensor:
        return aten.gelu_backward.default(g * 2, x) * x

    for function, kind in ((one_kind, Kind.SLOPE), (two_kinds, Kind.ANY)):
        graph = fuse.apply(traced(function, X, Y), Decision((("mul", "gelu_backward", "mul_1"),)))
        group = operators(graph.graph)[-1]
        kinds = ReaderKinds(graph)
        read = {argument.name: kinds.of(group, at) for at, argument in enumerate(group.all_input_nodes)}
        assert read == {"g_1": Kind.ANY, "x_1": kind}


def test_every_kind_has_a_word_of_its_own() -> None:
    assert len({kind.value for kind in Kind}) == len(Kind)
    assert all(kind.name in (inspect.getdoc(Kind) or "") for kind in Kind)
    assert ops.rule(aten.mul.Tensor).kinds == {}

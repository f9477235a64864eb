"""Emitted source: what stands where, and every kind of argument and name that a graph can hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.testing import FileCheck

from roamc import compat
from roamc.codegen.source import Program, emit, entries_of
from roamc.errors import PlanError
from roamc.graph import Phase, Port, Role, TrainGraph, operators
from roamc.graph.layout import Layout, Trim
from roamc.graph.memory import Place, build_memory
from roamc.graph.rewrite import Writer
from roamc.graph.storage_ids import number
from roamc.options import Options
from roamc.planning import search
from roamc.runtime.program import Whole
from tests.graphs import captured_step, clones, graph_and_inputs, joint_graph, run_real, traced
from tests.planning.test_pipeline import run_program

X = torch.randn(16, 16)
aten = torch.ops.aten
KEEP = Options(disable=("reorder",))


def program(graph: TrainGraph, *apart: str) -> Program:
    """The program with all temporaries but ``apart`` one behind the other: no solver has a say in what is tested."""
    sizes = {s.name: s.nbytes for s in build_memory(graph).counted if s.place is Place.TEMPORARY}
    offset, end = {}, 0
    for name, count in sizes.items():
        if name not in apart:
            offset[name], end = end, end + -(-count // 64) * 64
    return emit(graph.replace(layout=Layout(end, 64, offset, frozenset(apart), peak_bytes=0, needed_bytes=0)))


def source(function: Callable[..., Any], *apart: str) -> str:
    return program(traced(function, X), *apart).source


def same_bits(function: Callable[..., Any], *inputs: Tensor) -> str:
    """The emitted program gives what the function gives; its source."""
    torch.manual_seed(1)
    expected = function(*clones(inputs))
    planned = search.run(traced(function, *inputs), KEEP)
    torch.manual_seed(1)
    got = Whole(planned)(clones(inputs))
    for a, b in zip(expected if isinstance(expected, tuple) else (expected,), got, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    return emit(planned.graph).source


# -- statements ------------------------------------------------------------------------------------


def test_planned_tensors_are_views_made_once_before_the_step() -> None:
    text = source(lambda x: (x.sin() + x).cos())
    check = FileCheck().check("def bind(arena):").check('sin = arena.view("sin", 0, (16, 16), (16, 1), torch.float32)')
    check.check('add = arena.view("add", 1024,').check_not("arena.view").check("def step(args):").check("(x_1,) = args")
    check.check_next("args.clear()").check_next("aten_sin_out(x_1, out=sin)").check_next(
        "aten_add_out(sin, x_1, out=add)"
    )
    check.check_next("del x_1").check_next("cos = aten_cos(add)").check_next("return (cos,)")
    check.check('return {"step": step}').run(text)


def test_unread_result_that_is_written_over_an_argument_is_deleted() -> None:
    """A draw that nobody reads stays, for the generator; its bytes do not."""
    text = same_bits(lambda x: (x.sin().bernoulli_(0.5), torch.rand_like(x.cos()), x + 1)[2], X)
    FileCheck().check("rand_like = cos").check_next("run_rand_like(cos").check_next("del cos, rand_like").run(text)


def test_constant_that_is_returned_is_a_constant_of_the_program() -> None:
    """A mesh of DTensor's, for one, which AOTAutograd returns beside every gradient."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    double = graph.call_function(aten.mul.Tensor, (x, 2))
    mesh = graph.get_attr("mesh")
    graph.output((double, mesh))
    like = next(iter(traced(lambda x: x, X).graph.nodes)).meta["val"]
    x.meta["val"], double.meta["val"], mesh.meta["val"] = like, like.new_empty(like.shape), None
    number(graph)
    ports = (Port("output[0]", Role.OUTPUT), Port("output[1]", Role.OUTPUT))
    root = fx.GraphModule({"mesh": nn.Module()}, graph)
    hand = TrainGraph("hand", root, (Port("x", Role.INPUT),), ports, {double.name: Phase.FORWARD})
    result, returned = Whole(search.run(hand, KEEP))([X])
    assert torch.equal(result, X * 2)
    assert returned is root.mesh


def test_views_of_planned_tensors_are_planned_too_and_cost_no_statement() -> None:
    text = source(lambda x: (x * 2).t()[1:, ::2].sum())
    FileCheck().check('slice_2 = arena.view("slice_2", 4, (15, 8), (1, 32), torch.float32)').check(
        "def step"
    ).check_next("= args").check_next("clear").check_next("out=mul)").check_next("del x_1").check_next(
        "= aten_sum(slice_2)"
    ).run(text)
    assert "aten_t(" not in text
    assert "aten_slice" not in text


def test_views_of_inputs_are_made_each_time_and_dropped_at_last_use() -> None:
    text = source(lambda x: (x.t().sin(), x.sum()))
    FileCheck().check("t = aten_t(x_1)").check("sin = aten_sin(t)").check_next("del t").check(
        "aten_sum(x_1)"
    ).check_next("del x_1").run(text)


def test_several_results_go_to_several_keywords() -> None:
    text = source(lambda x: ((v := x.topk(3)), v[0].sum() + v[1].sum())[1])
    FileCheck().check('topk_0 = arena.view("topk_0", ').check('topk_1 = arena.view("topk_1", ').check_same(
        "torch.int64"
    ).check("aten_topk_values(x_1, 3, values=topk_0, indices=topk_1)").run(text)


def test_kernel_of_ours_fills_its_planned_result() -> None:
    text = source(lambda x: (torch.zeros_like(x) + x.sum()).cos())
    FileCheck().check("zeros(x_1, pin_memory=False, out=zeros_like)").check("sum_all(x_1, out=sum_1)").run(text)


def test_result_with_the_allocator_is_a_local_deleted_at_its_last_use() -> None:
    text = source(lambda x: F.layer_norm(x, (16,)).cos().sum(), *(f"native_layer_norm#{i}" for i in range(3)))
    check = FileCheck().check("native_layer_norm = aten_native_layer_norm(x_1, [16], None, None, 1e-05)")
    check.check("getitem = native_layer_norm[0]").check("del native_layer_norm")
    check.check("aten_cos_out(getitem, out=cos)").check_next("del getitem").run(text)


def test_result_without_an_out_form_is_copied_to_its_place() -> None:
    text = source(lambda x: F.layer_norm(x, (16,)).cos().sum(), "native_layer_norm#1")
    check = FileCheck().check("native_layer_norm = aten_native_layer_norm(x_1,")
    check.check_next("native_layer_norm_0.copy_(native_layer_norm[0])")
    check.check_next("native_layer_norm_2.copy_(native_layer_norm[2])")
    check.check_next("native_layer_norm = (None, native_layer_norm[1], None,)")
    check.check("del native_layer_norm").check("aten_cos_out(getitem, out=cos)").run(text)


def test_result_with_the_allocator_of_an_operator_with_an_out_form_is_a_plain_call() -> None:
    text = source(lambda x: x.sin().cos().sum(), "sin")
    FileCheck().check("sin = aten_sin(x_1)").check("aten_cos_out(sin, out=cos)").check_next("del sin").run(text)


def test_kernel_that_takes_less_than_its_operator_makes_results_that_are_handed_out_too() -> None:
    text = same_bits(lambda x: aten.native_dropout_backward(x, x > 0, 2.0), X)
    FileCheck().check("native_dropout_backward = torch.empty_strided((16, 16), (16, 1), ").check_next(
        "run_native_dropout_backward(x_1, gt, 2.0, out=native_dropout_backward)"
    ).run(text)


def test_result_of_several_that_is_handed_out_has_memory_of_its_own() -> None:
    text = same_bits(lambda x: ((v := x.topk(3)), v[0], v[1].sum())[1:], X)
    FileCheck().check('topk = (torch.empty_strided((16, 3), (3, 1), dtype=torch.float32, device="cpu"), None,)').check(
        "aten_topk_values(x_1, 3, values=topk[0], indices=topk_1)"
    ).run(text)


def test_result_that_is_handed_out_twice_or_as_a_view() -> None:
    same_bits(lambda x: ((y := x.sin()), y, y.t(), y[2:], y)[1:], X)


def test_input_that_is_handed_out_and_input_that_nobody_reads() -> None:
    text = same_bits(lambda x, y: (x, x.t()), X, X.clone())
    FileCheck().check("args.clear()").check_next("del y_1").check("return (x_1, t,)").run(text)


def test_write_in_place_is_a_plain_call_on_the_planned_tensor() -> None:
    text = same_bits(lambda x: ((y := x * 2).add_(1), y[:, ::2].zero_(), y.cos())[2], X)
    FileCheck().check("aten_mul_out(x_1, 2, out=mul)").check("aten_add__Tensor(mul, 1)").check("aten_zero_(slice_").run(
        text
    )


def test_write_to_an_input_reaches_the_callers_tensor() -> None:
    planned = search.run(traced(lambda x, y: (x.add_(y), y.sum())[1], X, X.clone()), KEEP)
    mine, other = X.clone(), torch.ones(16, 16)
    Whole(planned)([mine, other])
    assert torch.equal(mine, X + 1)


def test_comment_names_the_line_of_the_model() -> None:
    text = program(captured_step(TwoLayers(), (torch.randn(3, 4),), lambda m, x: m(x).sum()).graph).source
    FileCheck().check("aten_tanh").check_same(f"# test_source.py:{TwoLayers.forward.__code__.co_firstlineno + 1}").run(
        text
    )


def test_empty_graph() -> None:
    assert "return ()" in program(traced(lambda x: (), X)).source


def test_graph_without_layout_is_refused() -> None:
    with pytest.raises(PlanError, match="no layout; run the layout pass first"):
        emit(traced(lambda x: x.sin(), X))


# -- two functions ---------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.first(x).tanh(), 0.5))


def test_graph_with_a_boundary_has_two_functions_over_one_arena() -> None:
    graph = joint_graph(TwoLayers(), (torch.randn(3, 4),))
    emitted = program(graph)
    assert set(emitted.entries) == {"forward", "backward"}
    forward, backward = entries_of(graph)
    assert forward.phases == {Phase.FORWARD}
    assert [n.name for n in forward.results[-len(graph.saved) :] if n is not None] == list(graph.saved)
    assert [n.name for n in backward.parameters[: len(graph.saved)]] == list(graph.saved)
    FileCheck().check("def forward(args):").check("native_dropout").check("return (addmm_1, ").check(
        "def backward(args):"
    ).check("= args").check("native_dropout_backward").check("return (").check(
        'return {"forward": forward, "backward": backward, "saved": lambda: ('
    ).run(emitted.source)


def test_saved_tensors_in_the_arena_arrive_in_backward_and_are_ignored() -> None:
    text = program(joint_graph(TwoLayers(), (torch.randn(3, 4),))).source
    backward = text[text.index("def backward") :]
    assert "(_, " in backward or ", _," in backward
    assert "del _" not in backward


def test_whole_step_has_one_function() -> None:
    graph = captured_step(TwoLayers(), (torch.randn(3, 4),), lambda m, x: m(x).sum()).graph
    assert set(program(graph).entries) == {"step"}


# -- names and literals ----------------------------------------------------------------------------

WORDS = ["lambda", "class", "None"]
OURS = ["torch", "arena", "args", "bind", "step", "forward", "backward"]
LIKE = ["view", "zeros", "out", "aten_sin", "aten_sin_out", "constant_1", "x_", "sin_result", "_", "print", "run_zeros"]


def hand_made(names: list[str], calls: Callable[[Writer, fx.Node], fx.Node]) -> TrainGraph:
    """A graph whose nodes are renamed to ``names``, the input last."""
    mode = compat.FakeTensorMode()
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = mode.from_tensor(X)
    writer = Writer(graph, mode, Phase.FORWARD)
    graph.output((calls(writer, x),))
    for node, name in zip([*operators(graph), x], names, strict=False):
        node.name = name
    phase = dict.fromkeys((node.name for node in operators(graph)), Phase.FORWARD)
    module = fx.GraphModule({}, graph)
    number(graph)
    return TrainGraph("hand", module, (Port("x", Role.INPUT),), (Port("y", Role.OUTPUT),), phase)


@pytest.mark.parametrize("name", [*WORDS, *OURS, *LIKE])
@pytest.mark.parametrize("where", ["operator", "input", "result"])
def test_node_with_an_odd_name(name: str, where: str) -> None:
    names = {"operator": [name, "b", "c", "x"], "input": ["a", "b", "c", name], "result": ["a", "b", name, "x"]}[where]

    def calls(w: Writer, x: fx.Node) -> fx.Node:
        return w.call(aten.add.Tensor, w.call(aten.sin.default, w.call(aten.zeros_like.default, x)), x)

    planned = search.run(hand_made(names, calls), KEEP)
    assert torch.equal(Whole(planned)([X.clone()])[0], X)


@pytest.mark.parametrize(
    ("function", "holds"),
    [
        (lambda x: aten.clamp.default(x, None, 0.5), "None, 0.5"),
        (lambda x: aten.clamp.default(x, -math.inf), "constant_"),
        (lambda x: x.masked_fill(x > 0, -math.inf), "constant_"),
        (lambda x: torch.full((2, 3), math.nan), "constant_"),
        (lambda x: x * 1e-300, "1e-300"),
        (lambda x: x[:, 1:9223372036854775807] + 1, ""),
        (lambda x: x.double().to(torch.bfloat16) + 1, "dtype=torch.bfloat16"),
        (lambda x: torch.arange(5, device="cpu").cos(), 'torch.device("cpu")'),
        (lambda x: x.view(1, 4, 4, 16).clone(memory_format=torch.channels_last).cos(), "torch.channels_last"),
        (lambda x: x.sum((0, 1), keepdim=True).cos(), "[0, 1]"),
        (lambda x: aten.index.Tensor(x, [None, torch.tensor([0, 2])]).cos(), "[None, "),
        (lambda x: torch.cat([x, x.t(), x * 2]).cos(), "[x_1, t, mul]"),
        (lambda x: F.gelu(x, approximate="tanh").cos(), "approximate='tanh'"),
        (lambda x: torch.stack([x, x * 2], 1).cos(), "[x_1, mul]"),
        (lambda x: aten.scalar_tensor.default(True, dtype=torch.bool).float() + x, "True"),
        (lambda x: torch.zeros((), layout=torch.strided) + x, ""),
        (lambda x: torch.ones(3, dtype=torch.complex64) * 2j, "constant_"),
    ],
    ids=range(17),
)
def test_argument_is_written_as_python(function: Callable[[Tensor], Tensor], holds: str) -> None:
    assert holds in same_bits(function, X)


# -- constants -------------------------------------------------------------------------------------


class WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.weight - torch.tensor([1.0, -2.0, 3.5])) * torch.tensor([2.0, 2.0, 2.0])).square()


@pytest.mark.parametrize("route", ["step", "joint"])
def test_constant_made_in_forward_is_a_constant_of_the_program(route: str) -> None:
    model, batch = WithConstant(), (torch.randn(4, 3),)
    graph, inputs = graph_and_inputs(model, batch, lambda m, x: m(x).sum(), route)
    expected, _ = run_real(graph, clones(inputs))
    planned = search.run(graph, Options(), deep=True)
    emitted = emit(planned.graph)
    assert any(isinstance(value, Tensor) for value in emitted.constants.values())
    for _ in range(2):  # a constant is not used up, nor written
        got = run_program(planned, clones(inputs))
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True) if a is not None)
    assert torch.equal(expected[0].detach(), model(*batch).sum().detach())


class WritesToConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        count = torch.tensor([1.0, 2.0, 3.0])
        count += 1
        return (x * self.weight + count).sum()


@pytest.mark.parametrize("route", ["step", "joint"])
def test_constant_that_the_model_writes_is_fresh_every_step(route: str) -> None:
    model, batch = WritesToConstant(), (torch.randn(4, 3),)
    graph, inputs = graph_and_inputs(model, batch, lambda m, x: m(x), route)
    planned = search.run(graph, Options())
    for step in range(3):
        got = run_program(planned, clones(inputs))
        assert torch.equal(got[0], model(*batch).detach()), f"{route}, step {step}"


def test_ranges_of_the_arena_go_and_come_between_statements() -> None:
    graph = traced(lambda x: x.sin().cos().tan().exp().sum(), X)
    trims = (Trim(64, 128, "sin", "tan"), Trim(0, 64, "exp", ""), Trim(0, 64, "", "sin"))
    offset = {name: 128 * number for number, name in enumerate(("sin", "cos", "tan", "exp"))}
    layout = Layout(1024, 64, offset, frozenset(), peak_bytes=0, needed_bytes=0, trims=trims)
    check = FileCheck().check("arena.open(0, 64)").check_next("sin_out(").check_next("arena.close(64, 128)")
    check = check.check("cos_out(").check_next("arena.open(64, 128)").check_next("tan_out(").check_next("exp_out(")
    check.check_next("arena.close(0, 64)").run(emit(graph.replace(layout=layout)).source)

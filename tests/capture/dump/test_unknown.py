"""Operators that no table has, sizes that depend on data, generators' states, and collectives from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roamc.capture.dump import files, graphs
from roamc.capture.dump.recognise import PRINTED, is_dump
from roamc.errors import DumpError
from roamc.graph import TrainGraph
from roamc.graph.printed import printed
from roamc.operators.ops import UNKNOWN_COST, rule
from roamc.operators.random import state_bytes
from roamc.options import parse_options
from roamc.planning import search
from roamc.planning.planned import Planned
from tests.capture.dump.test_text import CLASS, PEAK, instead, read

OWN = instead("torch.ops.mylib.fast_relu.default(mm, 'a name', torch.ops.aten.relu.default)")
SEVERAL = CLASS.replace(
    'relu: "f32[8, 16][16, 1]cpu" = torch.ops.aten.relu.default(mm);  mm = None',
    "both = torch.ops.higher_order.auto_functionalized_v2(torch.ops.tg.log.default, s = 'x', _all_bases = [mm])\n"
    '        relu: "f32[8, 16][16, 1]cpu" = both[1];  both = mm = None',
)
JOINT = """\
def forward(self, primals, tangents):
    primals_1: "f32[8, 16][16, 1]cpu"  # PlainAOTInput(idx=0)
    tangents_1: "f32[8, 16][16, 1]cpu"  # TangentAOTInput(output=PlainAOTOutput(idx=0))
    primals_1, tangents_1, = fx_pytree.tree_flatten_spec([primals, tangents], self._in_spec)
    {forward}
    mul_9: "f32[8, 16][16, 1]cpu" = torch.ops.aten.mul.Tensor(tangents_1, 2)
    return pytree.tree_unflatten([{result}, mul_9], self._out_spec)
"""


def joint(*forward: str, result: str) -> str:
    return JOINT.format(forward="\n    ".join(forward), result=result)


def planned(graph: TrainGraph, **options: object) -> Planned:
    return search.run(graph, parse_options(options))


def peak(graph: TrainGraph, **options: object) -> int:
    return planned(graph, **options).plan.peak_bytes


def order_of(graph: TrainGraph, **options: object) -> list[str]:
    return [node.name for node in planned(graph, **options).graph.graph.nodes]


def test_an_unknown_operator_is_a_row_with_its_name(tmp_path: Path) -> None:
    graph = read(tmp_path, OWN)
    assert peak(graph) == PEAK
    assert "mylib.fast_relu(mm" in printed(graph)
    assert any("1 calls of operators that roamc does not know (1 of mylib.fast_relu.default)" in n for n in graph.notes)


@pytest.mark.parametrize("name", ["mm", "sort", "_scaled_dot_product_flash_attention"])
def test_an_unknown_operator_costs_nothing_of_one_of_atens_with_its_name(name: str, tmp_path: Path) -> None:
    """Some files leave the overload out."""
    graph = read(tmp_path, instead(f"torch.ops.mylib.{name}(mm, 'a name')"))
    row = next(node for node in graph.graph.nodes if node.name == "relu")
    assert rule(row.target).cost == UNKNOWN_COST
    assert peak(graph) == PEAK


def test_the_results_that_are_picked_are_those_of_the_file(tmp_path: Path) -> None:
    graph = read(tmp_path, SEVERAL)
    node = next(node for node in graph.graph.nodes if node.name == "both")
    assert [None if each is None else tuple(each.shape) for each in node.meta["val"]] == [None, (8, 16)]
    assert peak(graph) == PEAK
    assert any("higher_order.auto_functionalized_v2(tg.log.default)" in note for note in graph.notes)


def test_an_unknown_operator_never_runs_again(tmp_path: Path) -> None:
    text = joint(
        'a: "f32[8, 16][16, 1]cpu" = {}.default(primals_1)',
        'b: "f32[8, 16][16, 1]cpu" = torch.ops.aten.mul.Tensor(a, primals_1)',
        'c: "f32[64, 16][16, 1]cpu" = torch.ops.aten.cat.default([b, b, b, b, b, b, b, b])',
        'd: "f32[16][1]cpu" = torch.ops.aten.sum.dim_IntList(c, [0])',
        result="d",
    ).replace("aten.mul.Tensor(tangents_1, 2)", "aten.mul.Tensor(tangents_1, a)")
    own, sine = text.replace("{}", "torch.ops.mylib.sine"), text.replace("{}", "torch.ops.aten.sin")
    assert peak(read(tmp_path, sine), memory_budget="min") < peak(read(tmp_path, sine))
    assert peak(read(tmp_path, own), memory_budget="min") == peak(read(tmp_path, own)) == peak(read(tmp_path, sine))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("relu = torch.ops.mylib.one.default(mm)", "does not say which shape relu has, a result of mylib.one.default"),
        (
            "both = torch.ops.mylib.two.default(mm)\n        relu = both[1]",
            "does not say which shape relu has, a result of mylib.two.default",
        ),
        ('relu: "f32[8, 16]" = torch.ops.mylib.two.default(mm)[0]', "no operator, result or constant"),
        (
            'both = torch.ops.mylib.two.default(mm)\n        relu: "f32[8, 16]" = both[99999]',
            "both has more than 4096 results",
        ),
    ],
)
def test_a_result_without_a_shape_is_refused_where_it_is_read(line: str, message: str, tmp_path: Path) -> None:
    text = CLASS.replace('relu: "f32[8, 16][16, 1]cpu" = torch.ops.aten.relu.default(mm);  mm = None', line)
    with pytest.raises(DumpError, match=rf"graph\.txt:\d+: .*{message}"):
        read(tmp_path, text)


def test_a_size_that_depends_on_data_is_the_one_that_was_given(tmp_path: Path) -> None:
    text = joint(
        'some: "i64[u0, 2][2, 1]cpu" = torch.ops.aten.nonzero.default(primals_1)',
        'size: "Sym(u0)" = torch.ops.aten.sym_size.int(some, 0)',
        'enough: "Sym(u0 >= 0)" = size >= 0',
        "check = torch.ops.aten._assert_scalar.default(enough, 'u0 >= 0')",
        'part: "f32[][]cpu" = torch.ops.aten.sum.default(some)',
        'total: "f32[8, 16][16, 1]cpu" = torch.ops.aten.add.Tensor(primals_1, part)',
        result="total",
    )
    with pytest.raises(DumpError, match="give --set u0=N"):
        read(tmp_path, text)
    small, large = (peak(read(tmp_path, text, u0=size)) for size in (800, 1600))
    assert large - small == 800 * 2 * 8


def test_a_wait_for_what_was_not_started_takes_no_memory(tmp_path: Path) -> None:
    waits = [
        'sent: "f32[8, 16][16, 1]cpu" = torch.ops._c10d_functional.all_reduce.default(primals_1, "sum", "12")',
        'own: "f32[8, 16][16, 1]cpu" = torch.ops._c10d_functional.wait_tensor.default(sent)',
        'again: "f32[8, 16][16, 1]cpu" = torch.ops._c10d_functional.wait_tensor.default(own)',
        'outside: "f32[8, 16][16, 1]cpu" = torch.ops._c10d_functional.wait_tensor.default(primals_1)',
        'total: "f32[8, 16][16, 1]cpu" = torch.ops.aten.add.Tensor(again, outside)',
    ]
    once = [waits[0], waits[1], waits[4].replace("again, outside", "own, primals_1")]
    graph, plain = (read(tmp_path, joint(*lines, result="total")) for lines in (waits, once))
    assert peak(graph) == peak(plain)
    assert any("2 waits for what no collective of the graph has started" in note for note in graph.notes)


def test_an_unknown_operator_stays_between_the_collectives_that_it_stands_between(tmp_path: Path) -> None:
    """It may talk to other ranks: nothing says that it does not."""
    send = '{}: "f32[8, 16][16, 1]cpu" = torch.ops._c10d_functional.all_reduce.default({}, "sum", "12")'
    wait = '{}: "f32[8, 16][16, 1]cpu" = torch.ops._c10d_functional.wait_tensor.default({})'
    text = joint(
        send.format("a", "primals_1"),
        wait.format("b", "a"),
        'c: "f32[8, 16][16, 1]cpu" = torch.ops.mylib.fast_relu.default(primals_1)',
        send.format("d", "c"),
        'e: "f32[8, 16][16, 1]cpu" = torch.ops.mylib.fast_relu.default(b)',
        wait.format("f", "d"),
        'g: "f32[8, 16][16, 1]cpu" = torch.ops.aten.add.Tensor(f, e)',
        result="g",
    )
    order = order_of(read(tmp_path, text))
    assert order.index("c") > order.index("a")
    assert order.index("d") > order.index("c")


HALVES = """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 16][16, 1]{device}"{more}):
        {first}
        mul: "f32[8, 16][16, 1]{device}" = torch.ops.aten.mul.Tensor(primals_1, drawn)
        return (mul, {saved})

class GraphModule(torch.nn.Module):
    def forward(self, {saved}{type}, tangents_1: "f32[8, 16][16, 1]{device}"{state}):
        anew: "f32[8, 16][16, 1]{device}" = {again}
        mul_1: "f32[8, 16][16, 1]{device}" = torch.ops.aten.mul.Tensor(tangents_1, anew)
        return (mul_1,)
"""


def test_a_random_operator_runs_again_with_the_state_that_was_kept(tmp_path: Path) -> None:
    draw, size = "torch.ops.aten.rand.default, [8, 16]", state_bytes(torch.device("cpu"))
    text = HALVES.format(
        device="cpu",
        more="",
        first=f"pair = torch.ops.higher_order.run_and_save_rng_state({draw})\n"
        f'        held: "u8[{size}][1]cpu" = pair[0]\n'
        '        drawn: "f32[8, 16][16, 1]cpu" = pair[1]',
        saved="held",
        type=f': "u8[{size}][1]cpu"',
        state="",
        again=f"torch.ops.higher_order.run_with_rng_state(held, {draw})",
    )
    graph = read(tmp_path, text)
    assert "roamc.operators.random.replay" in printed(graph)
    assert not any("does not know" in note for note in graph.notes)
    assert peak(graph) == 3 * 512 + size


CUT = """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 16][16, 1]cpu"):
        pair = torch.ops.higher_order.run_and_save_rng_state(
            torch.ops.aten.native_dropout.default, primals_1, 0.1, True)
        held: "u8[s57][1]cpu" = pair[0]
        both = pair[1]
        drawn: "f32[8, 16][16, 1]cpu" = both[0]
        return (drawn, primals_1, held)

class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 16][16, 1]cpu", rng_state_output_0: "u8[s57][1]cpu", tangents_1: "f32[8, 16]"):
        anew = torch.ops.higher_order.run_with_rng_state(
            rng_state_output_0, torch.ops.aten.native_dropout.default, primals_1, 0.1, True)
        # ac_graph_id: 4 - POLICY File: net.py:3 in forward, code: x = checkpoint(layer, x)
        mask: "b8[8, 16][16, 1]cpu" = anew[1]
        # No stacktrace found for following nodes
        mul_1: "f32[8, 16][16, 1]cpu" = torch.ops.aten.mul.Tensor(tangents_1, mask)
        return (mul_1,)
"""
"""Halves of a checkpointed dropout as torch cuts them: the state has a symbol for its size and a second name."""


@pytest.mark.parametrize(("policy", "count"), [("PREFER_RECOMPUTE", 0), ("MUST_SAVE", 1)])
def test_halves_of_a_checkpoint_with_dropout_are_one_step(policy: str, count: int, tmp_path: Path) -> None:
    graph = read(tmp_path, CUT.replace("POLICY", policy))
    assert "roamc.operators.random.replay" in printed(graph)
    assert peak(graph) == state_bytes(torch.device("cpu")) + 3 * 512 + 128
    assert sum("min-cut ignores the mark" in note and "(mask)" in note for note in graph.notes) == count


def test_inductors_generators_on_a_gpu_are_states_of_16_bytes(tmp_path: Path) -> None:
    draw = (
        "torch.ops.higher_order.graphsafe_run_with_rng_state(torch.ops.aten.rand_like.default, primals_1, rng_state = "
    )
    text = HALVES.format(
        device="cuda:0",
        more=", fwd_rng_state_0",
        first=f'drawn: "f32[8, 16][16, 1]cuda:0" = {draw}fwd_rng_state_0)',
        saved="primals_1",
        type=': "f32[8, 16][16, 1]cuda:0"',
        state=", bwd_rng_state_0",
        again=f"{draw}bwd_rng_state_0)",
    )
    graph = read(tmp_path, text)
    assert "roamc.operators.random.replay" in printed(graph)
    assert {tuple(node.meta["val"].shape) for node in graph.graph.nodes if "rng_state" in node.name} == {(16,)}


def test_the_folder_of_a_compilation_has_each_half_in_a_folder_of_its_own(tmp_path: Path) -> None:
    draw = HALVES.format(
        device="cpu",
        more="",
        first='drawn: "f32[8, 16][16, 1]cpu" = torch.ops.aten.sin.default(primals_1)',
        saved="drawn",
        type=': "f32[8, 16]"',
        state="",
        again="torch.ops.aten.neg.default(drawn)",
    )
    forward, backward = draw.split("\n\n")
    for folder, text in (("model__0_forward_1.0", forward), ("model__0_backward_3.1", backward)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / PRINTED).write_text(text, encoding="utf-8")
    assert is_dump(str(tmp_path))
    (dump,) = files.read(str(tmp_path))
    assert dump.piece == "model__0"
    whole = tmp_path / "both.txt"
    whole.write_text(draw, encoding="utf-8")
    together = files.read(str(whole))[0]
    assert peak(graphs.train_graph(dump, "x", {})) == peak(graphs.train_graph(together, "x", {})) > 0
    (tmp_path / "model__0_forward_1.0" / PRINTED).unlink()
    with pytest.raises(DumpError, match="1 backwards without the forward"):
        files.read(str(tmp_path))

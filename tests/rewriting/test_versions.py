"""Versions: who reads which run of an operator, and what is taken out because nobody reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from tests.rewriting.cases import At, chain, check


def test_what_read_a_version_reads_the_newest_when_it_runs_again() -> None:
    """A rerun in front of the first reader, too: else that version would live until the second rerun reads it."""

    def function(x: Tensor) -> Tensor:
        sine, total = x.sin(), x.sum()
        cosine = sine.t().cos()
        return (cosine * (cosine.sum() * total)).sum()

    graph, inputs = chain(function, "")
    names = [op.node.name for op in build_memory(graph).operators]
    assert names == ["sin", "sum_1", "cos", "sum_2", "mul", "mul_1", "sum_3"]
    again = [At(before, name, (name,)) for before, name in (("cos", "sin"), ("mul_1", "sin"), ("mul_1", "cos"))]
    after = build_memory(check(graph, inputs, again, "a version read twice"))
    runs = [op.node.name for op in after.operators]
    assert runs == ["sum_1", "sin_1", "cos", "sum_2", "mul", "sin_2", "cos_1", "mul_1", "sum_3"]
    assert live_bytes(after).tolist()[runs.index("mul")] == 12


def test_first_run_that_nobody_reads_any_more_is_taken_out() -> None:
    graph, inputs = chain(lambda x: ((y := x.sin()), (x.sum() + y).sum())[1], "FFBB")
    after = check(graph, inputs, [At("add", "sin", ("sin",))], "sin later")
    assert [op.node.name for op in build_memory(after).operators] == ["sum_1", "sin_1", "add", "sum_2"]


def test_views_are_made_again_of_the_new_version() -> None:
    graph, inputs = chain(lambda x: ((y := x.sin().t()), y.sum() + y[::3].exp().sum())[1], "")
    last = next(op.node.name for op in build_memory(graph).operators if op.node.name == "exp")
    check(graph, inputs, [At(last, "sin", ("sin",))], "views")


def test_one_result_of_several_is_renewed_and_the_others_stay() -> None:
    def norm(x: Tensor) -> Tensor:
        y, mean, rstd = torch.ops.aten.native_layer_norm(x, [8], None, None, 1e-5)
        return (y * mean).sum() + (y + rstd).sum()

    graph, inputs = chain(norm, "")
    names = [op.node.name for op in build_memory(graph).operators]
    after = check(graph, inputs, [At("add", "native_layer_norm", ("native_layer_norm#0",))], "layer norm")
    add = next(node for node in after.graph.nodes if node.name == "add")
    assert [str(argument.args[0]) for argument in add.args] == ["native_layer_norm_1", "native_layer_norm"]
    assert len(names) + 1 == len(build_memory(after).operators)

"""Writes in place of dynamo's graph, found again in the joint graph of the same log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from roamc.capture.dump import files, graphs, phases, writes
from roamc.capture.dump.annotations import Sizes
from roamc.capture.dump.build import Builder
from roamc.graph.memory import WROTE_OVER
from tests.capture.dump.test_text import CLASS

DYNAMO = """\
    def forward(self, L_x_: "f32[8, 16]"):
        # File: net.py:3 in forward, code: return (x @ w).relu_()
        relu_: "f32[8, 16]" = mm.relu_();  mm = None
"""
LOST = '        sigmoid_: "f32[8, 16]" = relu_.sigmoid_();  relu_ = None\n'
GONE = """\
        # File: net.py:9 in forward, code: x.neg_()
        neg_: "f32[8, 16]" = x.neg_();  x = None
"""


def notes_of(tmp_path: Path, dynamo: str) -> str:
    file = tmp_path / "graph.txt"
    file.write_text(CLASS, "utf-8")
    return "; ".join(graphs.train_graph(replace(files.read(str(file))[0], dynamo=dynamo), "graph", {}).notes)


def test_a_write_that_is_not_found_is_told_apart_from_one_that_torch_has_left_out(tmp_path: Path) -> None:
    assert "writes in place" not in notes_of(tmp_path, DYNAMO)
    assert "1 writes in place of the model were not found in its graph" in notes_of(tmp_path, DYNAMO + LOST)
    left_out = notes_of(tmp_path, DYNAMO + GONE)
    assert f"1 writes in place are no part of the graph, {graphs.LEFT_OUT}" in left_out
    assert "not found" not in left_out


SQUEEZED = """\
    # File: net.py:4 in forward, code: x[:4].unsqueeze(1).neg_()
    slice_1: "f32[4, 16][16, 1]cpu" = torch.ops.aten.slice.Tensor(mm, 0, 0, 4)
    unsqueeze: "f32[4, 1, 16][16, 16, 1]cpu" = torch.ops.aten.unsqueeze.default(slice_1, 1);  slice_1 = None
    neg: "f32[4, 1, 16][16, 16, 1]cpu" = torch.ops.aten.neg.default(unsqueeze);  unsqueeze = None
    squeeze: "f32[4, 16][16, 1]cpu" = torch.ops.aten.squeeze.dim(neg, 1);  neg = None
    slice_scatter: "f32[8, 16][16, 1]cpu" = torch.ops.aten.slice_scatter.default(mm, squeeze, 0, 0, 4);  squeeze = None
    # File: net.py:5 in forward, code: return (x @ w).relu()
"""


def test_what_brings_a_written_view_to_its_base_is_part_of_the_write(tmp_path: Path) -> None:
    file = tmp_path / "graph.txt"
    before, relu, after = CLASS.partition("        relu: ")
    text = "".join(f"    {line}\n" for line in SQUEEZED.splitlines())
    file.write_text(before + text + relu + after.replace("relu.default(mm)", "relu.default(slice_scatter)"), "utf-8")
    dump = files.read(str(file))[0]
    graph = Builder(Sizes({}, "graph"), "graph").module(dump.first).graph
    phases.tag(graph)
    dynamo = "        # File: net.py:4 in forward, code: x[:4].unsqueeze(1).neg_()\n        neg_ = unsqueeze.neg_()\n"
    assert writes.mark(graph, dynamo) == (0, 0)
    assert [node.name for node in graph.nodes if node.meta.get(WROTE_OVER)] == ["neg", "squeeze", "slice_scatter"]

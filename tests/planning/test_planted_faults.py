"""Faults planted in what a pass leaves: the judges of graphs, values and layouts refuse each before the first step."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from roamc.errors import VerifyError
from roamc.graph import TrainGraph, tensors_of
from roamc.graph.storage_ids import STORAGES
from roamc.options import Options
from roamc.planning import pipeline, search
from tests.graphs import node_calling, traced

X = torch.randn(64, 64)
aten = torch.ops.aten


def function(x: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Reads a buffer before and after it is written, draws twice, and has chains that can be written in place."""
    a = x.sin() - buffer
    buffer.mul_(2)
    b = (a.cos() - buffer) * torch.rand_like(x)
    c = (b @ a).tanh().neg()
    return c - torch.rand_like(x), (c / 3).exp()


def left_out(target: object, graph: TrainGraph) -> TrainGraph:
    node = node_calling(graph, target)
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.graph.erase_node(node)
    return graph.replace(phase={name: phase for name, phase in graph.phase.items() if name != node.name})


def arguments_exchanged(graph: TrainGraph) -> TrainGraph:
    node = node_calling(graph, aten.sub.Tensor)
    node.args = (node.args[1], node.args[0])
    return graph.replace()


def other_operator(graph: TrainGraph) -> TrainGraph:
    node_calling(graph, aten.cos.default).target = aten.sin.default
    return graph.replace()


def other_number(graph: TrainGraph) -> TrainGraph:
    node = node_calling(graph, aten.div.Tensor)
    node.args = (node.args[0], 3.0)
    return graph.replace()


def other_tensor_of_the_same_shape(graph: TrainGraph) -> TrainGraph:
    node = node_calling(graph, aten.mm.default)
    node.args = (node.args[0], node.args[0])
    return graph.replace()


def read_behind_the_write(graph: TrainGraph) -> TrainGraph:
    node_calling(graph, aten.mul_.Tensor).append(node_calling(graph, aten.sub.Tensor))
    return graph.replace()


def draws_exchanged(graph: TrainGraph) -> TrainGraph:
    first, second = (node_calling(graph, aten.rand_like.default, number) for number in (0, 1))
    first.prepend(second)
    return graph.replace()


def read_before_it_is_made(graph: TrainGraph) -> TrainGraph:
    node_calling(graph, aten.sin.default).prepend(node_calling(graph, aten.cos.default))
    return graph.replace()


def outputs_exchanged(graph: TrainGraph) -> TrainGraph:
    end = node_calling(graph, "output")
    end.args = (tuple(reversed(end.args[0])),)  # type: ignore[arg-type]
    return graph.replace()


def noted_as_another_tensor(graph: TrainGraph) -> TrainGraph:
    cos, sin = node_calling(graph, aten.cos.default), node_calling(graph, aten.sin.default)
    cos.meta = {**cos.meta, STORAGES: sin.meta[STORAGES]}
    return graph.replace()


def written_over(target: object, graph: TrainGraph) -> TrainGraph:
    """The operator's result lies in its first argument."""
    return graph.replace(reuse={**graph.reuse, node_calling(graph, target).name: 0})


def written_over_no_tensor(graph: TrainGraph) -> TrainGraph:
    node = node_calling(graph, aten.neg.default)
    return graph.replace(reuse={**graph.reuse, node.name: 1})


def moved(by: int, graph: TrainGraph) -> TrainGraph:
    """One tensor of the arena begins ``by`` bytes before or behind its place."""
    assert graph.layout is not None
    offset = dict(graph.layout.offset)
    name = max(offset, key=lambda one: offset[one])
    return graph.replace(layout=dataclasses.replace(graph.layout, offset={**offset, name: offset[name] + by}))


def one_place_for_all(graph: TrainGraph) -> TrainGraph:
    assert graph.layout is not None
    return graph.replace(layout=dataclasses.replace(graph.layout, offset=dict.fromkeys(graph.layout.offset, 0)))


def with_layout(change: str, by: int, graph: TrainGraph) -> TrainGraph:
    assert graph.layout is not None
    value = getattr(graph.layout, change) + by
    return graph.replace(layout=dataclasses.replace(graph.layout, **{change: value}))


FAULTS: dict[str, tuple[str, Callable[[TrainGraph], TrainGraph], str]] = {
    "an operator is left out": ("normalize", functools.partial(left_out, aten.neg.default), "would read"),
    "a write is left out": ("normalize", functools.partial(left_out, aten.mul_.Tensor), "is gone"),
    "arguments are exchanged": ("normalize", arguments_exchanged, "sub.* would read"),
    "another operator": ("normalize", other_operator, "cos.* would"),
    "another number": ("normalize", other_number, "div would run with other arguments"),
    "another tensor of the same shape": ("retain", other_tensor_of_the_same_shape, "mm.* would read"),
    "a read behind the write": ("reorder", read_behind_the_write, "must stay behind"),
    "draws are exchanged": ("reorder", draws_exchanged, "must stay behind"),
    "read before it is made": ("reorder", read_before_it_is_made, "malformed"),
    "outputs are exchanged": ("reorder", outputs_exchanged, "output 0"),
    "noted as another tensor": ("reorder", noted_as_another_tensor, "would read|lies in another storage"),
    "written over what lives": (
        "reuse",
        functools.partial(written_over, aten.cos.default),
        "which was written over|lies elsewhere",
    ),
    "written over an input": (
        "reuse",
        functools.partial(written_over, aten.sin.default),
        "the caller gives|would read|written",
    ),
    "written over by an operator that may not": (
        "reuse",
        functools.partial(written_over, aten.mm.default),
        "may not write",
    ),
    "written over an argument that there is not": ("reuse", written_over_no_tensor, "is no tensor that it reads"),
    "one byte before its place": ("layout", functools.partial(moved, -1), "misaligned"),
    "one line before its place": ("layout", functools.partial(moved, -64), "overlap"),
    "beyond the arena": ("layout", functools.partial(moved, 64), "outside the arena"),
    "one place for all": ("layout", one_place_for_all, "overlap"),
    "a smaller peak than there is": ("layout", functools.partial(with_layout, "peak_bytes", -1), "above the"),
    "less needed than there is": ("layout", functools.partial(with_layout, "needed_bytes", -50_000), "above the"),
    "a larger arena than its tensors": ("layout", functools.partial(with_layout, "arena_bytes", 64), "ends at"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("arenas_of_any_size")
def test_fault_of_a_pass_is_refused_behind_it(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant, said = FAULTS[fault]

    def apply(graph: TrainGraph, decision: object, step: pipeline.Pass) -> TrainGraph:
        return plant(step.apply(graph, decision))

    planted = [
        dataclasses.replace(step, apply=functools.partial(apply, step=step)) if step.name == name else step
        for step in pipeline.PIPELINE
    ]
    monkeypatch.setattr(pipeline, "PIPELINE", tuple(planted))
    with pytest.raises(VerifyError, match=f"after pass '{name}': .*(?:{said})"):
        search.run(traced(function, X, X.clone()), Options())


@pytest.mark.parametrize(
    "fault", ["arguments are exchanged", "another operator", "another number", "another tensor of the same shape"]
)
def test_fault_of_a_pass_that_hands_its_own_graph_back(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has written into the graph all the same."""
    _, plant, said = FAULTS[fault]

    def apply(graph: TrainGraph, decision: object) -> TrainGraph:
        plant(graph)
        return graph

    step = next(step for step in pipeline.PIPELINE if step.name == "checkpoint")
    at = pipeline.PIPELINE.index(step)
    planted = dataclasses.replace(step, apply=apply)
    monkeypatch.setattr(pipeline, "PIPELINE", (*pipeline.PIPELINE[:at], planted, *pipeline.PIPELINE[at + 1 :]))
    with pytest.raises(VerifyError, match=f"after pass 'checkpoint': .*(?:{said})"):
        search.run(traced(function, X, X.clone()), Options())


@pytest.mark.usefixtures("arenas_of_any_size")
def test_there_is_what_faults_are_planted_in() -> None:
    graph = search.run(traced(function, X, X.clone()), Options()).graph
    assert graph.reuse
    assert graph.layout is not None
    assert len(graph.layout.offset) > 1
    assert all(dict(tensors_of(node)) for node in graph.graph.nodes if node.op == "call_function")
    assert re.search("rand", " ".join(graph.phase))

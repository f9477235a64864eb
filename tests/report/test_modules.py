"""Every byte of a peak belongs to a module of the model, whichever way the model is captured."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import roamc
from roamc.capture import joint
from roamc.frontends.workload import Workload, capture
from roamc.graph import Phase, TrainGraph, copied, module_of, operators
from roamc.graph.origin import folded, path_of
from roamc.options import Options
from roamc.planning import search
from roamc.report import text
from roamc.report.explain import Peak, explain, find_peak, groups, held, lives_of
from roamc.report.tables import BY
from tests.graphs import captured_step
from tests.models import make
from tests.report.models import UNet, mean_square
from tests.small_models import square

KNOWN = 0.99
"""Least share of the bytes of a peak that belong to a module."""

NAMES = ("gpt2", "llama", "bert", "vit", "unet")


def built(name: str) -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    if name == "unet":
        return UNet(), (torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32)), mean_square
    return make(name)


def check(peak: Peak) -> None:
    """Bytes by module add up to the peak, and nearly all are those of a module."""
    for by in BY:
        assert sum(group.nbytes for group in groups(peak, by)) == peak.live_bytes
    assert sum(storage.nbytes for storage in peak.storages if storage.module) >= KNOWN * peak.live_bytes


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_the_peak_have_modules(name: str, halves: bool) -> None:
    model, batch, loss = built(name)
    graph = capture(Workload(name, model, batch, loss), forward_backward=halves)
    peak = find_peak(graph, lives_of(graph, eager=True))
    check(peak)
    paths = {path for path, _ in model.named_modules()} | {type(model).__name__, "loss_fn"}
    assert {storage.module for storage in peak.storages} <= paths
    planned = search.run(graph, Options(layout_nodes=0)).graph
    check(find_peak(planned, lives_of(planned)))


@pytest.mark.parametrize("way", [lambda model: torch.compile(model, backend="roamc"), roamc.optimize])
@pytest.mark.parametrize("name", NAMES)
def test_pieces_that_dynamo_compiles_have_modules(name: str, way: Callable[[nn.Module], Any]) -> None:
    model, batch, loss = built(name)
    graphs: list[TrainGraph] = []
    stitch = joint.stitch

    def kept(*args: Any) -> TrainGraph:
        graph = stitch(*args)
        graphs.append(copied(graph))  # planning changes the other
        return graph

    torch._dynamo.reset()
    with mock.patch.object(joint, "stitch", kept):
        loss(way(model), *batch).backward()
    assert graphs
    for graph in graphs:
        check(find_peak(graph, lives_of(graph, eager=True)))


class Block(nn.Module):
    """A layer whose parts run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down(self.up(x).tanh())
        return x + inner


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.shared = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        result: Tensor = self.shared(self.shared(x).tanh())
        return result


def modules_of(graph: TrainGraph, phase: Phase) -> dict[str, list[str]]:
    """Module to the operators that it has in a phase."""
    targets: dict[str, list[str]] = {}
    for node in operators(graph.graph):
        if graph.phase[node.name] is phase:
            targets.setdefault(module_of(node), []).append(str(node.target))
    return targets


def test_what_runs_again_and_what_runs_twice_belong_to_their_modules() -> None:
    graph = captured_step(Net(), [torch.randn(3, 4)], square).graph
    forward, backward = (modules_of(graph, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    layers = {f"blocks.{at}.{part}" for at in range(2) for part in ("up", "down")}
    assert layers | {"shared", "Net", "loss_fn", "blocks.0", "blocks.1"} <= set(forward)
    assert layers | {"shared"} <= set(backward)
    assert forward["shared"].count("aten.addmm.default") == 2
    for at in range(2):
        assert "aten.addmm.default" in backward[f"blocks.{at}.up"]  # once more, by the checkpoint
        assert "aten.mm.default" in backward[f"blocks.{at}.up"]


def test_module_that_fails_leaves_no_path_behind() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("always")

    class Catching(Net):
        def __init__(self) -> None:
            super().__init__()
            self.failing = Failing()

        def forward(self, x: Tensor) -> Tensor:
            try:
                self.failing(x)
            except KeyError:
                return x.sin() * self.shared(x)
            return x

    call = nn.Module.__call__
    graph = captured_step(Catching(), [torch.randn(3, 4)], square).graph
    assert nn.Module.__call__ is call
    assert "failing" not in modules_of(graph, Phase.FORWARD)
    assert "aten.sin.default" in modules_of(graph, Phase.FORWARD)["Catching"]


def test_gradient_of_tied_weights_belongs_to_the_parameter() -> None:
    model, batch, loss = make("gpt2")
    graph = captured_step(model, batch, loss).graph
    nodes = {node.name: node for node in operators(graph.graph)}
    tied = [nodes[name] for name in graph.gradients if nodes[name].target is torch.ops.aten.add.Tensor]
    assert [module_of(node) for node in tied] == ["transformer.wte"]


def test_logits_are_called_by_what_they_are() -> None:
    model, batch, _ = make("gpt2")
    graph = capture(Workload("gpt2", model, batch))
    outputs = {node.meta.get("output_of_model"): node for node in graph.graph.nodes}
    assert module_of(outputs["output['logits']"]) == "lm_head"
    eager = find_peak(graph, lives_of(graph, eager=True))  # planning changes the graph
    planned = search.run(graph, Options(layout_nodes=0))
    storages = {storage.output: storage for storage in eager.storages}
    assert storages["output['logits']"].module == "lm_head"
    out = io.StringIO()
    shown = explain(eager, planned, lives_of(planned.graph))
    text.show_explanation(Console(file=out, width=80), shown, 500)
    assert ", output['logits']" in out.getvalue()


@pytest.mark.parametrize("halves", [False, True])
def test_what_is_held_has_modules_and_adds_up_to_what_is_fixed(halves: bool) -> None:
    model, batch, loss = make("gpt2")
    planned = search.run(capture(Workload("gpt2", model, batch, loss), forward_backward=halves), Options())
    rows, fixed = held(planned.graph), planned.plan.fixed_bytes
    for role, size in fixed.items():
        assert sum(row.roles.get(role, 0) for row in rows) == size
    assert sum(row.nbytes for row in rows) == sum(fixed.values())
    layers = [model.get_submodule(f"transformer.h.{layer}.mlp.c_fc") for layer in (0, 1)]
    weights = sum(parameter.nbytes for layer in layers for parameter in layer.parameters())
    (row,) = (row for row in rows if row.module == "transformer.h.*.mlp.c_fc")
    states = {} if halves else {"optimizer state": 2 * weights}
    assert (row.modules, row.roles) == (2, {"parameter": weights, **states})
    assert "lm_head" not in {row.module for row in rows}, "its weight is that of the embedding"
    assert {tuple(row.roles) for row in rows if not row.module} == {("input",)}


def test_what_is_held_is_shown_and_is_not_without_modules() -> None:
    planned = search.run(captured_step(nn.Linear(3, 4), [torch.randn(2, 3)], square).graph, Options())
    eager = find_peak(planned.graph, lives_of(planned.graph))
    shown = explain(eager, planned, lives_of(planned.graph))
    (listed,) = text.tables(shown)
    assert listed.headings == ("bytes", "share", "parameters", "inputs", "optimizer state", "module")
    assert listed.rows[0] == ("192 B", "88.9%", "64 B", "", "128 B", "Linear")
    assert listed.rows[1] == ("24 B", "11.1%", "", "24 B", "", "")
    assert shown.to_dict()["held"][0]["roles"] == {"parameter": 64, "optimizer state": 128}
    for node in planned.graph.graph.nodes:
        node.meta.pop("nn_module_stack", None)
        node.meta.pop("fwd_nn_module_stack", None)
    assert held(planned.graph) == ()


@pytest.mark.parametrize("by", BY)
def test_peak_is_summed_up_by(by: str) -> None:
    model, batch, loss = make("gpt2")
    graph = capture(Workload("gpt2", model, batch, loss))
    peak = find_peak(graph, lives_of(graph, eager=True))
    headings, rows = text.group_rows(peak, by)
    assert headings[-1] == by
    first = groups(peak, by)[0]
    assert rows[0][-1].startswith({"module": first.module, "line": first.source, "kind": first.kind}[by])
    assert ("transformer.h.*.mlp.c_fc x 2" in [row[-1] for row in rows]) is (by == "module")


def test_numbers_of_layers_are_folded_and_parts_of_a_sequence_are_not() -> None:
    fold = folded(["h.0.mlp.0", "h.0.mlp.2", "h.11", "h.11.mlp"])
    assert fold("h.11") == "h.*"
    assert fold("h.0.mlp.2") == "h.*.mlp.2"
    assert fold("Net") == "Net"


@pytest.mark.parametrize(
    ("noted", "path"),
    [
        ("h.0.mlp", "h.0.mlp"),
        ("L['self']", ""),
        ("L['self'].h.0", "h.0"),
        ("L['args'][0].h.0", "h.0"),
        ("L['fn'].__closure__[0].cell_contents.h.1", "h.1"),
        ("G['net'].a-b", "net.a-b"),
        ("L['self']._modules['h']._modules['0']", "h.0"),
        ("L['self']._modules['h']._parameters['weight']", "h.weight"),
        ("L['self']._buffers['count']", "count"),
        ("h.0._orig_mod.mlp", "h.0.mlp"),
    ],
)
def test_paths_are_those_of_named_modules(noted: str, path: str) -> None:
    assert path_of(noted) == path

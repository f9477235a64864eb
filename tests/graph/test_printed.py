"""A graph in words and as GraphML says of every operator and storage what the memory model says."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import Tensor, fx

from roamc.graph import Encoding, operators, output_values, placeholders
from roamc.graph.lifetimes import lifetimes
from roamc.graph.memory import build_memory
from roamc.graph.printed import operator_graph, printed, write_graphml
from roamc.operators.ops import Need
from roamc.options import parse_options
from roamc.planning import search
from tests.graphs import graph_and_inputs, model_graph, traced
from tests.random_graphs import random_model

ROUTES = ("step", "joint")


def section(text: str, name: str) -> list[str]:
    """The indented lines below the line ``name``."""
    _, _, rest = text.partition(f"\n{name}\n")
    lines = rest.splitlines()
    return [line[2:] for line in lines[: next((at for at, x in enumerate(lines) if x[0] != " "), len(lines))]]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("seed", range(5))
def test_every_input_operator_output_and_storage_has_its_line(seed: int, route: str) -> None:
    graph, _ = graph_and_inputs(*random_model(seed), route)
    memory, text = build_memory(graph), printed(graph)
    born, dead = lifetimes(memory)
    assert [line.partition(":")[0] for line in section(text, "inputs")] == [n.name for n in placeholders(graph.graph)]
    assert [line.split()[2] for line in section(text, "operators")] == [n.name for n in operators(graph.graph)]
    steps = [line.split()[1] for line in section(text, "operators")]
    assert [step for step in steps if step != "."] == [str(step) for step in range(len(memory.operators))]
    assert [line.partition(":")[0] for line in section(text, "outputs")] == [str(v) for v in output_values(graph.graph)]
    storages = section(text, "storages")
    for line, storage, first, end in zip(storages, memory.counted, born, dead, strict=True):
        assert line.startswith(f"{storage.name}: {storage.nbytes:,} B, ")
        assert (f"lives [{first}, {end})" if end > first else "never used") in line


def test_writes_keywords_constants_and_results_that_are_not_there() -> None:
    def step(x: Tensor, total: Tensor) -> tuple[Tensor, None]:
        total.add_(x.sum(), alpha=2)
        return x.to(torch.float64) * torch.tensor([1.0, 2.0]), None

    lines = section(printed(traced(step, torch.ones(2), torch.zeros(()))), "operators")
    assert any("add_ float32[] = aten.add_.Tensor(total_1, sum_1, alpha=2)  writes total_1" in line for line in lines)
    assert any("aten._to_copy(x_1, dtype=float64)" in line for line in lines)
    assert section(printed(traced(step, torch.ones(2), torch.zeros(()))), "outputs")[1].startswith("None: ")


@pytest.mark.usefixtures("arenas_of_any_size")
def test_places_of_a_planned_graph_are_named() -> None:
    graph, _ = model_graph("nanogpt-dropout", "step")
    planned = search.run(graph, parse_options({"profile": "cpu"})).graph
    lines = section(printed(planned), "storages")
    assert planned.layout is not None
    assert planned.layout.offset
    for storage, offset in planned.layout.offset.items():
        assert any(line.startswith(f"{storage}: ") and line.endswith(f"arena at {offset:,}") for line in lines)
    apart = [line.partition(":")[0] for line in lines if line.endswith("with the allocator")]
    assert set(apart) == planned.layout.with_allocator
    assert printed(planned).count("  over ") == len(planned.reuse) > 0


def test_encodings_are_named() -> None:
    graph = traced(lambda x: x.sin().cos(), torch.ones(2), phases="FB")
    codec = Encoding("sin", "bits", 0.0, Need.SIGN, fx.Graph(), fx.Graph())
    lines = section(printed(graph.replace(encodings=(codec,))), "operators")
    assert ["sin encoded by bits" in line for line in lines] == [True, False]


@pytest.mark.parametrize("route", ROUTES)
def test_graphml_holds_the_reads_and_writes(route: str, tmp_path: Path) -> None:
    graph, _ = graph_and_inputs(*random_model(3), route)
    memory = build_memory(graph)
    write_graphml(graph, tmp_path / "graph.graphml")
    read = nx.read_graphml(tmp_path / "graph.graphml", force_multigraph=True)
    names = [node.name for node in placeholders(graph.graph)] + [op.node.name for op in memory.operators]
    assert list(read) == names
    assert read.nodes[memory.operators[0].node.name]["step"] == 0
    edges = {(end, data["storage"], data["use"]) for _, end, data in read.edges(data=True)}
    for operator in memory.operators:
        for use, storages in (("read", operator.reads), ("write", operator.writes)):
            wanted = {memory.storages[index].name for index in storages}
            storage_names = {storage for end, storage, how in edges if end == operator.node.name and how == use}
            assert storage_names == wanted
    digraph = operator_graph(graph)
    assert sum(data["bytes"] for *_, data in digraph.edges(data=True)) > 0


def test_steps_follow_what_they_read() -> None:
    graph, _ = graph_and_inputs(*random_model(1), "joint")
    digraph = operator_graph(graph)
    for first, second, data in digraph.edges(data=True):
        if digraph.nodes[first]["kind"] == "operator" and data["use"] == "read":
            assert digraph.nodes[first]["step"] < digraph.nodes[second]["step"]

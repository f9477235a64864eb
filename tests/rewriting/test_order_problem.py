"""The graph as numbers: buffers stand for storages, and a boundary has an operator of its own."""

from roamc.graph.memory import build_memory
from roamc.rewriting.order_problem import HANDOVER, buffers_of, order_problem
from tests.graphs import graph_and_inputs
from tests.random_graphs import random_model
from tests.rewriting.cases import X, chain, cleaned


def test_buffers_are_the_storages_and_the_workspace_is_that_of_its_operator() -> None:
    graph, _ = chain(lambda x: x.sin().cos().sum(), "")
    memory = build_memory(graph)
    problem, names = order_problem(graph, memory, workspace=[1, 2, 3])
    assert names == ["sin", "cos", "sum_1"]
    assert [storage.name for storage in buffers_of(memory)] == names
    assert problem.size.tolist() == [X.nbytes, X.nbytes, 4]
    assert problem.workspace.tolist() == [1, 2, 3]


def test_tangents_are_made_at_the_boundary_by_an_operator_of_their_own() -> None:
    graph = cleaned(graph_and_inputs(*random_model(0), "joint")[0])
    memory = build_memory(graph)
    problem, names = order_problem(graph, memory)
    assert names.index(HANDOVER) == memory.boundary
    assert problem.num_ops == len(memory.operators) + 1
    assert problem.num_buffers == len(buffers_of(memory))

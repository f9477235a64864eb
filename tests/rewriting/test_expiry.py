"""Expiry: what may be dropped, and until when an operator may run again."""

import dataclasses

import torch
from torch import Tensor

from roamc.graph.memory import build_memory
from roamc.rewriting.expiry import droppable, expiries
from tests.rewriting.cases import chain


def overwritten(x: Tensor) -> Tensor:
    scale = x.exp()
    sine = scale.sin()
    scale.add_(1)
    return (sine + scale).sum()


def test_operator_expires_where_what_it_reads_is_overwritten() -> None:
    memory = build_memory(chain(overwritten, "")[0])
    names = [op.node.name for op in memory.operators]
    nodes = {op.node.name: op.node for op in memory.operators}
    until = dict(zip(names, expiries(memory, nodes, names, range(len(names)), boundary=False), strict=True))
    written = next(step for step, op in enumerate(memory.operators) if op.writes)
    assert until["sin"] == written + 1
    assert until["exp"] == len(names)


def test_operator_expires_with_forward_where_the_caller_overwrites_what_it_reads() -> None:
    graph, _ = chain(lambda x, scale: ((x * scale).sin() + x.exp()).cos(), "FFFFB", torch.ones(8), torch.ones(8))
    ports = tuple(dataclasses.replace(port, overwritten=at == 1) for at, port in enumerate(graph.inputs))
    memory = build_memory(graph.replace(inputs=ports))
    names = [op.node.name for op in memory.operators]
    nodes = {op.node.name: op.node for op in memory.operators}
    for boundary in (True, False):
        until = dict(zip(names, expiries(memory, nodes, names, range(len(names)), boundary=boundary), strict=True))
        assert until["mul"] == (memory.boundary if boundary else len(names))
        assert until["sin"] == until["exp"] == len(names)


def test_results_are_droppable_and_outputs_and_what_is_written_are_not() -> None:
    memory = build_memory(chain(overwritten, "")[0])
    may = {s.name: able for s, able in zip(memory.counted, droppable(memory, memory.counted), strict=True)}
    assert (may["sin"], may["exp"], may["sum_1"]) == (True, False, False)

"""What must be the same on all ranks of a group, so that a graph on shards gives what the captured graph gives.

The rows of a value can stand for it on every rank if all ranks have the same of it. So they have

- what a collective such as an all-reduce gives all of them, and
- what the same operators compute from such results and from inputs and random numbers that are the same.

From the values on shards the graph is walked back, through all that they are computed from, to collectives of the
first kind. What is met there must be the same: inputs, tensors that the graph holds, random numbers, and operators with
their arguments. What is not met may differ from rank to rank, such as parts of matrices and the dropout inside them.

Numbers of the optimizer, such as its learning rate, must be the same as well: parameters that are the same on all ranks
drift apart otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import fx

from roamc.graph import Agreement, Phase, Role, TrainGraph, maker_of, operators, placeholders, tensors_of
from roamc.graph.fingerprint import text_of
from roamc.graph.storage_ids import all_ids
from roamc.operators import ops
from roamc.operators.random import save_rng_state
from roamc.operators.schemas import group_of
from roamc.passes.shard.varying import SAME_AFTER, read


def agreement(graph: TrainGraph, group: object, names: Iterable[str], decision: str) -> Agreement:
    """Return what must be the same on all ranks of ``group``: names of inputs and constants, draws, a hash of the rest.

    Args:
        graph: the captured graph.
        group: the group's name, as operators are called with it.
        names: of the values of which a rank has rows or an addend, and of what is read with its own classes.
        decision: text of what was decided, the same on all ranks.
    """
    makers = {maker_of(name) for name in names}
    met = _met(graph, group, {node for node in graph.graph.nodes if node.name in makers})
    nodes = [node for node in graph.graph.nodes if node in met]
    called = [node for node in nodes if node.op == "call_function"]
    draws = {(graph.phase[node.name], device): None for node in called for device in _generators(node)}
    text = text_of(graph.module, called)
    ports = zip(placeholders(graph.graph), graph.inputs, strict=True)
    return Agreement(
        group,
        tuple(node.name for node, port in ports if node in met or port.role is Role.SCALAR),
        tuple(str(node.target) for node in nodes if node.op == "get_attr" and _is_tensor(node)),
        tuple(draws),
        hashlib.sha256(f"{decision}\n{text}".encode()).hexdigest(),
    )


def _generators(node: fx.Node) -> list[torch.device]:
    """The devices whose generators ``node`` draws from, or reads the state of."""
    if node.target is save_rng_state:
        return [torch.device(node.args[0])]  # type: ignore[arg-type]
    drawn = ops.draws(node.target, node.args, node.kwargs)
    return [tensor.device for _, tensor in tensors_of(node)] if drawn else []


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _met(graph: TrainGraph, group: object, roots: set[fx.Node]) -> set[fx.Node]:
    """``roots`` and all that these values are computed from, with what was written to their memory."""
    writers = [
        (node, all_ids(ops.mutated_arguments(node)))
        for node in operators(graph.graph)
        if ops.mutated_arguments(node) and graph.phase[node.name] is not Phase.UPDATE
    ]
    met: set[fx.Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node in met:
            continue
        met.add(node)
        if node.op == "call_function" and not (node.target in SAME_AFTER and group_of(node) == group):
            waiting += read(node)
        if not waiting and writers:
            ids = all_ids(met)
            waiting += [writer for writer, written in writers if not ids.isdisjoint(written)]
            writers = [pair for pair in writers if pair[0] not in waiting]
    return met

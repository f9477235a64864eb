"""normalize: take out what has no effect, so that later passes see only work that somebody uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from roamc import ops
from roamc.errors import PlanError
from roamc.graph import TrainGraph, operators, output_node
from roamc.options import Options

NAME = "normalize"

SAME = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default})
"""Operators whose result is their input, seen by nobody but autograd."""


@dataclass(frozen=True)
class Decision:
    """What to take out.

    Attributes:
        aliases: nodes that only give their input another name; their users read the input instead.
        dead: nodes without effect, users before their inputs.
    """

    aliases: tuple[str, ...]
    dead: tuple[str, ...]


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Find nodes whose results nobody reads and that change nothing else.

    Aliases are listed as dead too: nobody reads them once their users read their inputs.
    Random operators stay even when unread: without them the operators behind would draw other numbers.
    """
    named = {*graph.saved, *graph.gradients, *(node.name for node in output_node(graph.graph).all_input_nodes)}
    aliases = [n.name for n in operators(graph.graph) if n.target in SAME and n.name not in named]
    live: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        wanted = node.op in ("placeholder", "output") or (node.op == "call_function" and ops.has_effect(node.target))
        if wanted or not live.isdisjoint(node.users):
            live.add(node)
    skipped = set(aliases)
    dead = [n.name for n in reversed(graph.graph.nodes) if n not in live or n.name in skipped]
    return Decision(tuple(aliases), tuple(dead))


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Put inputs in the place of aliases, erase the dead nodes, and phases of nodes that are no more."""
    by_name = {node.name: node for node in graph.graph.nodes}
    unknown = [name for name in (*decision.aliases, *decision.dead) if name not in by_name]
    loose = [name for name in decision.aliases if name in by_name and not by_name[name].all_input_nodes]
    if unknown or loose:
        raise PlanError(f"normalize: the plan names {(unknown + loose)[0]!r}, which this graph does not have as such")
    for name in decision.aliases:
        by_name[name].replace_all_uses_with(by_name[name].all_input_nodes[0])
    for name in decision.dead:
        if by_name[name].users:
            raise PlanError(f"normalize: the plan takes out {name!r}, which other nodes read")
        graph.graph.erase_node(by_name[name])
    phase = {node.name: graph.phase[node.name] for node in operators(graph.graph)}
    return graph.replace(phase=phase)

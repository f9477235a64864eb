"""Capture from inside torch.compile: AOTAutograd's forward and backward, put together again as one graph.

AOTAutograd hands the joint graph to our partition function. torch's own default partition (everything
saved, nothing recomputed) fixes what is forward, what is saved, and in which order AOTAutograd passes it
on. The two halves are then stitched into one TrainGraph with a boundary between them, so that one plan
and one arena serve both.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from roamc.errors import CaptureError
from roamc.graph import Phase, Port, Role, TrainGraph, output_values, placeholders


def stitch(
    forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, static: Sequence[int], name: str
) -> TrainGraph:
    """One graph from the two halves of a partition.

    Args:
        forward: returns ``num_outputs`` values of the user (mutated inputs first), then what is saved.
        backward: takes what is saved, under the names it has in ``forward``, then tangents.
        num_outputs: as AOTAutograd counts them.
        static: positions of forward inputs that are parameters or buffers.
        name: for logs and reports.
    """
    graph = fx.Graph()
    env: dict[str, fx.Node] = {}
    phase: dict[str, Phase] = {}
    inputs = [Port(n.name, role_of(i, static)) for i, n in enumerate(placeholders(forward.graph))]
    _copy(graph, forward.graph, env, phase, Phase.FORWARD)
    saved = [node for node in output_values(forward.graph)[num_outputs:] if isinstance(node, fx.Node)]
    late = [node for node in placeholders(backward.graph) if node.name not in env]
    inputs += [Port(node.name, Role.TANGENT, Phase.BACKWARD) for node in late]
    _copy(graph, backward.graph, env, phase, Phase.BACKWARD)
    first = [_mapped(node, env) for node in output_values(forward.graph)[:num_outputs]]
    second = [_mapped(node, env) for node in output_values(backward.graph)]
    graph.output((*first, *second))
    outputs = [Port(f"output[{i}]", Role.OUTPUT) for i in range(len(first))]
    outputs += [Port(f"gradient[{i}]", Role.GRADIENT, Phase.BACKWARD) for i in range(len(second))]
    return TrainGraph(
        name=name,
        module=fx.GraphModule(_attributes(forward, backward), graph),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        phase=phase,
        boundary=True,
        saved=tuple(node.name for node in saved),
    )


def inference(module: fx.GraphModule, static: Sequence[int], name: str) -> TrainGraph:
    """A graph that is only run forward."""
    graph = fx.Graph()
    env: dict[str, fx.Node] = {}
    phase: dict[str, Phase] = {}
    _copy(graph, module.graph, env, phase, Phase.FORWARD)
    results = [_mapped(node, env) for node in output_values(module.graph)]
    graph.output(tuple(results))
    return TrainGraph(
        name=name,
        module=fx.GraphModule(_attributes(module), graph),
        inputs=tuple(Port(n.name, role_of(i, static)) for i, n in enumerate(placeholders(module.graph))),
        outputs=tuple(Port(f"output[{i}]", Role.OUTPUT) for i in range(len(results))),
        phase=phase,
    )


def role_of(position: int, static: Sequence[int]) -> Role:
    """Parameters and buffers stay where they are from call to call; the rest are inputs."""
    return Role.PARAMETER if position in static else Role.INPUT


def _copy(graph: fx.Graph, source: fx.Graph, env: dict[str, fx.Node], phase: dict[str, Phase], now: Phase) -> None:
    """Append the nodes of ``source``; a placeholder whose name is known stands for that node."""
    for node in source.nodes:
        if node.op == "output" or (node.op == "placeholder" and node.name in env):
            continue
        if node.op == "placeholder":
            last = next((n for n in reversed(env.values()) if n.op == "placeholder"), None)
            with graph.inserting_after(last) if last is not None else graph.inserting_before(None):
                copied = graph.create_node("placeholder", node.target, (), {}, name=node.name)
        else:
            copied = graph.create_node(
                node.op,
                node.target,
                fx.map_arg(node.args, lambda n: env[n.name]),
                fx.map_arg(node.kwargs, lambda n: env[n.name]),
                name=node.name,
            )
        if copied.name != node.name:
            raise CaptureError(f"two different nodes are named {node.name!r} in one step; please report this model")
        copied.meta = dict(node.meta)
        _correct(copied)
        env[node.name] = copied
        if node.op == "call_function":
            phase[node.name] = now


def _correct(node: fx.Node) -> None:
    """Mend fake results that are not what the real kernel gives.

    torch notes the new running statistics of a batch norm as float32 where its kernels keep their dtype.
    """
    if node.target is torch.ops.aten._native_batch_norm_legit_functional.default:
        told = list(node.meta["val"])
        for position in (3, 4):
            before = node.args[position].meta["val"]  # type: ignore[union-attr]
            if told[position].dtype != before.dtype:
                with before.fake_mode:
                    told[position] = torch.empty_like(before)
        node.meta["val"] = tuple(told)
    elif node.target is operator.getitem:
        source = node.args[0].meta["val"]  # type: ignore[union-attr]
        if isinstance(source, list | tuple):
            node.meta["val"] = source[node.args[1]]  # type: ignore[index]


def _mapped(node: Any, env: dict[str, fx.Node]) -> fx.Node | None:
    if node is None:
        return None
    if not isinstance(node, fx.Node):
        raise CaptureError(f"the graph returns {node!r}, which is not a tensor; fix symbolic shapes with dynamic=False")
    return env[node.name]


def _attributes(*modules: fx.GraphModule) -> dict[str, Any]:
    """Constants and submodules that get_attr nodes name."""
    found: dict[str, Any] = {}
    for module in modules:
        for node in module.graph.nodes:
            if node.op == "get_attr":
                value: Any = module
                for part in str(node.target).split("."):
                    value = getattr(value, part)
                found[str(node.target)] = value
    return found

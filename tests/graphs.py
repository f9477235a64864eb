"""Captured and hand-made graphs for tests, real inputs for them, and a runner that measures real storages."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from roamc import compat, compat_aot
from roamc.capture import joint
from roamc.capture.step import CapturedStep, capture_step
from roamc.capture.step_trace import StepRequest
from roamc.graph import Phase, Port, Role, TrainGraph, copied, operators, output_values, placeholders
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory, started_by
from roamc.graph.storage_ids import number
from roamc.operators import ops
from tests.models import make

aten = torch.ops.aten


class WithLoss(nn.Module):
    """A model whose output is its loss, for the route that knows no loss."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self.loss(self.model, *batch)


def captured_step(
    model: nn.Module,
    batch: Sequence[Any],
    loss: Callable[..., Tensor],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> CapturedStep:
    """Forward, loss, backward and update."""
    leaves, spec = compat.flatten(tuple(batch))
    updater = optimizer(model.parameters(), lr=0.01)
    return capture_step(StepRequest(model, loss, updater, tuple(leaves), lambda values: compat.unflatten(values, spec)))


def joint_graph(model: nn.Module, batch: Sequence[Any]) -> TrainGraph:
    """Forward and backward of ``model(*batch)`` as torch.compile gives them."""
    halves, outputs, static = compat_aot.forward_backward(model, batch)
    name = type(model).__name__
    return (
        joint.stitch(*halves, outputs, static, name) if len(halves) == 2 else joint.inference(halves[0], static, name)
    )


def model_graph(name: str, route: str) -> tuple[TrainGraph, list[Any]]:
    """A graph of ``tests.models`` by route ("step" or "joint"), and real inputs for it: the caller's to change."""
    graph, inputs = _captured(name, route)
    return copied(graph), clones(inputs)


@functools.cache
def _captured(name: str, route: str) -> tuple[TrainGraph, list[Any]]:
    """Captured once in a process: that is most of what planning takes."""
    model, batch, loss = make(name)
    return graph_and_inputs(model, batch, loss, route)


def graph_and_inputs(
    model: nn.Module,
    batch: Sequence[Any],
    loss: Callable[..., Tensor],
    route: str,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[TrainGraph, list[Any]]:
    """Graph by route, and real inputs: live parameters, buffers and batch, zero optimizer state, tangents of one."""
    if route == "step":
        graph = captured_step(model, batch, loss, optimizer).graph
    else:
        graph = joint_graph(WithLoss(model, loss), batch)
    tensors = iter([*model.parameters(), *model.buffers(), *(leaf for leaf in batch if isinstance(leaf, Tensor))])
    inputs = [_input(node, port, tensors) for node, port in zip(placeholders(graph.graph), graph.inputs, strict=True)]
    return graph, inputs


def _input(node: fx.Node, port: Port, tensors: Any) -> Any:
    value = node.meta["val"]
    if port.role is Role.SCALAR:
        return value
    if port.role in (Role.OPTIMIZER_STATE, Role.TANGENT):
        fill = torch.ones if port.role is Role.TANGENT else torch.zeros
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(fill(value.shape))
    return next(tensors).detach().clone()


def traced(function: Callable[..., Any], *inputs: Tensor, phases: str = "", **fields: Any) -> TrainGraph:
    """A small graph of ``function(*inputs)``, traced without autograd.

    ``phases`` has a letter of "FBU" per operator node in graph order; all are FORWARD if it is empty. All outputs
    are plain, and leave in the part of the step that makes them, unless ``fields`` says otherwise.
    """
    mode = compat.FakeTensorMode()
    with torch.no_grad():
        module = compat.trace(function, [mode.from_tensor(tensor) for tensor in inputs], mode)
    end = next(node for node in module.graph.nodes if node.op == "output")
    end.args = (tuple(end.args[0]) if isinstance(end.args[0], tuple | list) else (end.args[0],),)
    module.graph.set_codegen(fx.graph.CodeGen())
    letters = dict(zip("FBU", Phase, strict=True))
    number(module.graph)
    nodes = operators(module.graph)
    phase = {n.name: letters[p] for n, p in zip(nodes, phases or "F" * len(nodes), strict=True)}
    parts = [phase.get(getattr(value, "name", ""), Phase.FORWARD) for value in end.args[0]]
    described = {
        "inputs": tuple(Port(node.name, Role.INPUT) for node in placeholders(module.graph)),
        "outputs": tuple(Port(f"output[{i}]", Role.OUTPUT, part) for i, part in enumerate(parts)),
    }
    return TrainGraph(name="traced", module=module, phase=phase, **{**described, **fields})


def assert_same(a: Sequence[Any], b: Sequence[Any], said: str) -> None:
    """Outputs, and inputs that may have been written, bit for bit."""
    for one, other in zip(a, b, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, said


def clones(inputs: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in inputs]


def compact(tensor: Tensor) -> Tensor:
    """The same shape, strides and values in the smallest storage."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


# Given a slice of a larger tensor these clone the larger one; a program fills the slice alone.
CLONES_ALL_OF_A_BASE = {
    aten.copy.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
}


def run_real(graph: TrainGraph, inputs: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Run the graph's operators on real tensors in graph order, by the book.

    A tensor is kept until the last node that needs it; results of several are unpacked at once, and those
    that nobody picks are dropped. Views that lead to no operator and no output are not made.

    Returns:
        The outputs, and for every operator the bytes of the distinct real storages alive while it runs: its results,
        and what it is the last to read. Of the inputs only tangents are counted, in backward.
    """
    runner = _Runner(graph, inputs)
    measured = [runner.step(node) for node in graph.graph.nodes if node in runner.needed and node.op != "output"]
    outputs = [None if node is None else runner.values[node.name, None] for node in output_values(graph.graph)]
    return outputs, [count for count in measured if count is not None]


Key = tuple[str, int | None]  # a node's result, or one of its several results


class _Runner:
    def __init__(self, graph: TrainGraph, inputs: Sequence[Any]) -> None:
        self.graph = graph
        self.inputs = iter(inputs)
        ports = zip(placeholders(graph.graph), graph.inputs, strict=True)
        self.late = {node for node, port in ports if port.role is Role.TANGENT}
        self.tangents: set[int] = set()
        self.values: dict[Key, Any] = {}
        self.foreign: set[int] = set()  # storages that the graph did not make
        self.needed = _needed(graph)
        last: dict[Key, fx.Node] = {}
        for node in graph.graph.nodes:
            if node in self.needed:
                last.update((key, node) for key in self._keys(node))
        self.last = last

    def _keys(self, node: fx.Node) -> list[Key]:
        """What ``node`` needs: its arguments, and those of the operator for whose end it waits."""
        start = started_by(node)
        rest = start.all_input_nodes if start is not None else []
        return [*(self._key(node, argument) for argument in node.all_input_nodes), *((n.name, None) for n in rest)]

    def _key(self, node: fx.Node, argument: fx.Node) -> Key:
        """What ``node`` needs of ``argument``."""
        return (argument.name, node.args[1] if node.target is operator.getitem else None)

    def step(self, node: fx.Node) -> int | None:
        """Run one node; bytes alive while it ran, or None if it made nothing and did nothing."""
        before = self._alive()
        result = self._result(node)
        several = isinstance(result, tuple | list)
        mine = {(node.name, i): item for i, item in enumerate(result)} if several else {(node.name, None): result}
        self.values.update(mine)
        alive = self._alive()
        if node.op != "call_function":
            (self.tangents if node in self.late else self.foreign).update(alive.keys() - before.keys())
        alone = not ops.is_view(node.target) or started_by(node) is not None
        works = node.op == "call_function" and (alone or alive.keys() - before.keys())
        for key in [*self._keys(node), *mine]:
            if self.last.get(key, node) is node:
                del self.values[key]
        if not works:
            return None
        early = self.graph.phase[node.name] is Phase.FORWARD
        others = self.foreign | self.tangents if early else self.foreign
        return sum(count for storage, count in alive.items() if storage not in others)

    def _alive(self) -> dict[int, int]:
        """Bytes of every storage that a kept tensor lies in."""
        tensors = [value for value in self.values.values() if isinstance(value, Tensor)]
        return {int(t.untyped_storage()._cdata): t.untyped_storage().nbytes() for t in tensors}

    def _result(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return next(self.inputs)
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.graph.module)
        if node.target is operator.getitem:
            return self.values[node.args[0].name, node.args[1]]
        arguments = (fx.map_arg(part, lambda n: self.values[n.name, None]) for part in (node.args, node.kwargs))
        with torch.no_grad():
            result = node.target(*next(arguments), **next(arguments))
            if node.name in self.graph.reuse:
                return self._written_over(node, result)
            return compact(result) if node.target in CLONES_ALL_OF_A_BASE else result

    def _written_over(self, node: fx.Node, result: Tensor) -> Tensor:
        """The tensor that the result takes the place of, with the values of the result."""
        place: Tensor = self.values[node.args[self.graph.reuse[node.name]].name, None]
        assert (place.shape, place.stride(), place.dtype) == (result.shape, result.stride(), result.dtype)
        return place.copy_(result).view(result.shape)


def _needed(graph: TrainGraph) -> set[fx.Node]:
    """All nodes but views that lead to no operator and no output, and wait for none."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        works = node.op != "call_function" or not ops.is_view(node.target) or ops.must_run(node.target)
        if works or not needed.isdisjoint(node.users):
            needed.add(node)
    return needed


def peak(graph: TrainGraph) -> int:
    """The most live bytes at a step."""
    return int(live_bytes(build_memory(graph)).max(initial=0))


def saved_bytes(graph: TrainGraph) -> int:
    """The bytes that forward leaves for backward."""
    return sum(storage.nbytes for storage in build_memory(graph).saved)


def node_named(graph: TrainGraph, name: str) -> fx.Node:
    """The node of that name."""
    return next(node for node in graph.graph.nodes if node.name == name)


def node_calling(graph: TrainGraph, target: object, number: int = 0) -> fx.Node:
    """The node with that number, from 0, among those that call ``target``."""
    return [node for node in graph.graph.nodes if node.target is target][number]

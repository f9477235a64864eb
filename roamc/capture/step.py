"""Capture a whole training step: forward, loss, backward and the optimizer's update as one ATen graph.

Everything runs under fake tensors: no weight is allocated or read, so that a step of a model far larger
than this machine can be planned. Parameters may be on the meta device.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from roamc import compat, compat_dynamo
from roamc.capture import fully_sharded
from roamc.capture.addresses import memories
from roamc.capture.attributes import Change
from roamc.capture.closures import check_written, join_constants
from roamc.capture.collectives import join, name_own_parts
from roamc.capture.hooks import check_hooks
from roamc.capture.in_place_values import as_values
from roamc.capture.leaves import check_dtypes
from roamc.capture.optimizers import (
    Group,
    Rule,
    check_dense,
    check_state,
    fresh_state,
    rule_for,
    runs_foreach,
    structure,
)
from roamc.capture.parts import check_clipping, check_placements, clipped
from roamc.capture.projected import Projected, project
from roamc.capture.questions import Question
from roamc.capture.replicas import Replica, average
from roamc.capture.step_trace import StepRequest, Trace, phases_of, returned_values
from roamc.capture.value_check import values_kept
from roamc.compat_dtensor import part_of
from roamc.errors import CaptureError
from roamc.graph import Phase, Port, Role, TrainGraph, operators, output_node, output_values, placeholders
from roamc.graph.memory import FOREACH
from roamc.graph.origin import module_of, put_module
from roamc.graph.rewrite import Writer
from roamc.graph.storage_ids import number
from roamc.operators.corrections import correct
from roamc.operators.fakes import fake_kernel
from roamc.units import format_bytes


@dataclass(frozen=True)
class Source:
    """Where the value of one graph input comes from at every step.

    Attributes:
        kind: "parameter", "buffer", "state" (of the optimizer), "scalar" (of the optimizer) or "batch".
        name: of the parameter or buffer; for a state, of its parameter; for a scalar, its name in
            :attr:`roamc.capture.optimizers.Rule.scalars`; empty for a batch tensor.
        key: for a state, its key in ``optimizer.state[p]``.
        index: for a batch tensor, its position among the leaves of the batch; for a scalar, the number of its cohort:
            cohorts are numbered from 0 as they first appear in :attr:`CapturedStep.cohorts`. Else -1.
    """

    kind: str
    name: str = ""
    key: str = ""
    index: int = -1


@dataclass(frozen=True)
class Cohort:
    """What decides which scalars, such as learning rate and step count, the update of a parameter reads.

    Parameters with equal cohorts share these inputs of the graph.

    Attributes:
        group: position of its group in ``optimizer.param_groups``.
        step: steps that the parameter has made. It is 0 for a fused optimizer, whose kernel reads the count itself,
            and for an optimizer that counts none.
        first: whether the next step makes its state, for optimizers that count no steps (SGD with momentum).
    """

    group: int
    step: float
    first: bool


@dataclass(frozen=True)
class CapturedStep:
    """One step as a graph, and how to feed it.

    Attributes:
        graph: inputs in the order of ``sources``; outputs are the loss and the gradients of ``handed``.
        sources: one per input of the graph.
        cohorts: parameter name to its cohort at capture, for every parameter that the step updates.
        replicas: the DistributedDataParallel modules of the model.
        reduced: names of the parameters whose gradients they average, in the order of the collectives.
        sent: what ``fully_shard`` gathers and reduces, in the order of the collectives; empty without it.
        groups: names of the groups of ranks that do so.
        changes: attributes of modules that forward set to tensors of the trace; capture has put their old values back.
        handed: positions among the leaves of the batch of the tensors whose gradients the graph returns.
        questions: what the step has asked of batch and buffers; it serves those with the same answers only.
        streams: name of each parameter whose gradient is projected to the stream of its projections.
    """

    graph: TrainGraph
    sources: tuple[Source, ...]
    cohorts: dict[str, Cohort]
    replicas: tuple[Replica, ...] = ()
    reduced: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    handed: tuple[int, ...] = ()
    questions: tuple[Question, ...] = ()
    streams: Mapping[str, int] = field(default_factory=dict)


def capture_step(request: StepRequest) -> CapturedStep:
    """Return the step of ``request`` as one graph: forward, loss, backward and update, traced under fake tensors.

    Parameters, buffers and the optimizer's state keep their values.

    Raises:
        CaptureError: the step cannot be one graph: the loss is not a scalar, control flow depends on data, the
            optimizer is not supported, inputs are on another device, or the like; one line that says what to do.
        VerifyError: what capture has rewritten in the graph would change a value.
    """
    rule = rule_for(request.optimizer)
    parameters = dict(request.model.named_parameters())
    buffers = dict(request.model.named_buffers())
    check_devices(request.leaves, list(parameters.values()))
    check_hooks(request.model)
    check_placements({**parameters, **buffers})
    trained = _trained(request, parameters)
    mode = compat.CaptureMode({name: parameters[name] for name in trained}, fake_kernel, buffers)
    traced = Trace(request, parameters, buffers, trained)
    module = traced.run(mode)
    check_written(module.graph, [*parameters, *buffers], mode.read_past)
    return _Assembly(request, rule, mode, module, traced).build()


def check_devices(leaves: Sequence[Any], parameters: Sequence[torch.Tensor]) -> None:
    """Refuse a batch tensor that is on a device where no parameter is.

    Tensors of no dimension may be anywhere; nothing is refused where a parameter is on the meta device.

    Args:
        leaves: tensors and other values of the batch.
        parameters: all parameters of the model.

    Raises:
        CaptureError: names both devices.
    """
    devices = {parameter.device for parameter in parameters}
    if not devices or any(device.type == "meta" for device in devices):
        return
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.device not in devices:
            at = ", ".join(sorted(map(str, devices)))
            raise CaptureError(f"an input is on {leaf.device}, the parameters are on {at}; move the input with .to()")


def _trained(request: StepRequest, parameters: dict[str, nn.Parameter]) -> list[str]:
    """Names of the parameters that the optimizer updates, in its order."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    trained: dict[str, None] = {}
    for group in request.optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CaptureError(
                    "the optimizer holds a parameter that the model does not; make the optimizer from "
                    "model.parameters() of this very model, after any change to it"
                )
            name = names[id(parameter)]
            check_dtypes(name, parameter)
            if name in trained:
                raise CaptureError(
                    f"the optimizer holds {name!r} more than once, and torch updates it as often at every step; give "
                    "each parameter to one group, and once"
                )
            if parameter.requires_grad:
                trained[name] = None
    if not trained:
        frozen = any(group["params"] for group in request.optimizer.param_groups)
        raise CaptureError(
            f"the optimizer holds {'frozen parameters only' if frozen else 'no parameters'}, and a step would change "
            f"nothing: {'set requires_grad_(True), or ' if frozen else ''}make the optimizer from model.parameters()"
        )
    return list(trained)


class _Assembly:
    """Adds optimizer state, scalars and updates to a traced forward and backward, and describes inputs and phases."""

    def __init__(
        self, request: StepRequest, rule: Rule, mode: compat.FakeTensorMode, module: fx.GraphModule, traced: Trace
    ) -> None:
        self.request = request
        self.rule = rule
        self.mode = mode
        self.module = module
        self.traced = traced
        self.ports: list[Port] = []
        self.sources: list[Source] = []
        self.cohorts: dict[str, Cohort] = {}
        self.names = {node.name for node in module.graph.nodes}

    def build(self) -> CapturedStep:
        graph = self.module.graph
        join_constants(graph, self.mode)
        join(self.module)
        correct(graph)
        with values_kept(_bare(self.module)):
            as_values(graph, self.mode)
        inputs = placeholders(graph)
        self._describe_inputs(inputs)
        end = output_node(graph)
        loss, *gradients = returned_values(end)
        name_own_parts(graph)
        phase = phases_of(graph, loss)
        grads = dict(zip(self.traced.updated, gradients, strict=False))
        self._name_modules(grads)
        parameters = dict(zip(self.traced.parameters, inputs, strict=False))
        groups = self._groups(parameters)
        handed = gradients[len(grads) :]
        feeds = self._add_inputs(graph, inputs[-1], groups)
        writer = Writer(graph, self.mode, Phase.BACKWARD)
        projected = project(writer, grads, self.rule, feeds, groups, self.traced.parameters)
        grads = projected.gradients
        waits: dict[str, str] = {}
        with graph.inserting_before(end):
            if self.request.clip_grad_norm is not None:
                check_clipping(graph, {name: self.traced.parameters[name] for name in grads}, self._averaged())
            grads, reduced = average(writer, grads, self.traced.replicas, self.request.reduced)
            writer.current = Phase.UPDATE
            for name, grad in self._clip(writer, grads).items():
                last = end.prev
                self.rule.write(writer, parameters[name], grad, *feeds[name], groups[name])
                for call, node in enumerate(_between(last, end)):
                    waits[node.name] = grads[name].name
                    if groups[name]["foreach"]:
                        node.meta[FOREACH] = (*groups[name]["foreach"], call)
        end.args = ((loss, *handed),)
        graph.set_codegen(fx.graph.CodeGen())
        self.module.recompile()
        number(graph)
        captured = TrainGraph(
            name=type(compat_dynamo.original(self.request.model)).__name__,
            module=self.module,
            inputs=tuple(self.ports),
            outputs=(Port("loss", Role.LOSS), *self._handed_ports()),
            phase={**phase, **writer.phase},
            gradients=tuple(dict.fromkeys(grad.name for grad in {**grads, **projected.originals}.values())),
            waits=waits,
            notes=self._notes(grads, projected),
        )
        traced = self.traced
        return CapturedStep(
            captured, tuple(self.sources), self.cohorts, tuple(traced.replicas), reduced,
            fully_sharded.sequence(graph), fully_sharded.groups_of(traced.shardings), tuple(traced.changes),
            traced.handed, tuple(traced.questions), projected.streams,
        )  # fmt: skip

    def _name_modules(self, gradients: Mapping[str, fx.Node]) -> None:
        """Gradients that no single call makes, as of tied weights, belong to the module of their parameter."""
        model = type(compat_dynamo.original(self.request.model)).__name__
        for name, gradient in gradients.items():
            if gradient.op == "call_function" and not module_of(gradient):
                put_module(gradient, name.rpartition(".")[0], model)

    def _handed_ports(self) -> Iterator[Port]:
        for index in self.traced.handed:
            yield Port(f"gradient of batch[{index}]", Role.GRADIENT, Phase.BACKWARD)

    def _describe_inputs(self, inputs: list[fx.Node]) -> None:
        kept = (*self.traced.parameters.values(), *self.traced.buffers.values())
        batch = [self.request.leaves[index] for index in self.traced.tensor_leaves]
        for name in self.traced.parameters:
            self._describe(Port(name, Role.PARAMETER), Source("parameter", name))
        for name in self.traced.buffers:
            self._describe(Port(name, Role.BUFFER), Source("buffer", name))
        for index in self.traced.tensor_leaves:
            self._describe(Port(f"batch[{index}]", Role.INPUT), Source("batch", index=index))
        if len(inputs) != len(self.ports):
            raise CaptureError(f"tracing gave {len(inputs)} inputs for {len(self.ports)} tensors")
        shared = zip(self.ports, memories(kept, batch), strict=True)
        self.ports = [port if memory is None else replace(port, memory=memory) for port, memory in shared]

    def _describe(self, port: Port, source: Source) -> None:
        self.ports.append(port)
        self.sources.append(source)

    def _groups(self, inputs: Mapping[str, fx.Node]) -> dict[str, dict[str, Any]]:
        """Parameter name to its group, with its number under "index" and the parameter's stream under "stream".

        Under "foreach" it has the first two numbers of :data:`roamc.graph.memory.FOREACH` where eager updates lists of
        tensors, else None. ``inputs`` maps names of parameters to nodes.
        """
        names = {id(parameter): name for name, parameter in self.traced.parameters.items()}
        groups = {}
        for index, group in enumerate(self.request.optimizer.param_groups):
            lists = self._lists(group, [names[id(parameter)] for parameter in group["params"]], inputs)
            streams = None if self.rule.shape is None else group["streams"]
            for parameter, stream in zip(group["params"], streams or itertools.repeat(None), strict=False):
                name = names[id(parameter)]
                foreach = (index, lists[name]) if name in lists else None
                groups[name] = {**group, "index": index, "stream": stream, "foreach": foreach}
        return groups

    def _lists(self, group: Group, names: Sequence[str], inputs: Mapping[str, fx.Node]) -> dict[str, int]:
        """Name of each parameter that eager updates in a list to the number of the list: one a device and dtype.

        ``names`` are those of the parameters of ``group``, ``inputs`` maps them to nodes.
        """
        updated = set(self.traced.updated)
        values = {name: inputs[name].meta["val"] for name in names if name in updated}
        live = [self.traced.parameters[name] for name in values]
        planned_for = self.request.runs_on
        there = planned_for if planned_for is not None and planned_for.type != "cpu" else None
        devices = {there or value.device for value in values.values()}
        if not all(runs_foreach(group, live, device) for device in devices):
            return {}
        numbers: dict[tuple[torch.device, torch.dtype], int] = {}
        return {name: numbers.setdefault((value.device, value.dtype), len(numbers)) for name, value in values.items()}

    def _add_inputs(
        self, graph: fx.Graph, last: fx.Node, groups: dict[str, dict[str, Any]]
    ) -> dict[str, tuple[dict[str, fx.Node], dict[str, fx.Node]]]:
        """Add placeholders for optimizer state and scalars; return both, by their keys, for each updated parameter."""
        feeds = {}
        scalars: dict[Cohort, dict[str, fx.Node]] = {}
        self.last = last
        for name in self.traced.updated:
            group = groups[name]
            check_dense(name, part_of(self.traced.parameters[name]), group)
            check_state(self.request.optimizer, self.rule, name, self.traced.parameters[name], group)
            cohort = cohort_of(self.request.optimizer, self.traced.parameters[name], group, group["index"], self.rule)
            self.cohorts[name] = cohort
            if cohort not in scalars:
                scalars[cohort] = self._scalar_inputs(graph, cohort, len(scalars), group)
            feeds[name] = (self._state_inputs(graph, name, group), scalars[cohort])
        return feeds

    def _scalar_inputs(self, graph: fx.Graph, cohort: Cohort, number: int, group: dict[str, Any]) -> dict[str, fx.Node]:
        nodes = {}
        for key, value in self.rule.scalars(group, 1.0, True).items():
            nodes[key] = self._placeholder(graph, f"{key}_{number}", value)
            self._describe(Port(f"group {cohort.group}: {key}", Role.SCALAR), Source("scalar", key, index=number))
        return nodes

    def _state_inputs(self, graph: fx.Graph, name: str, group: dict[str, Any]) -> dict[str, fx.Node]:
        nodes = {}
        real = self.traced.parameters[name]
        device = self.request.device or torch.device("cpu")
        plain = compat.fake_input(self.mode, part_of(real).detach(), device)
        for key in self.rule.states(group):
            with self.mode:
                value = fresh_state(self.rule, group, plain)
            nodes[key] = self._state(graph, name, key, value)
        if self.rule.has_step and group.get("fused"):
            with self.mode:
                count = torch.zeros((), dtype=torch.float32, device=plain.device)
                nodes["step"] = self._state(graph, name, "step", count)
        return nodes

    def _state(self, graph: fx.Graph, name: str, key: str, value: torch.Tensor) -> fx.Node:
        node = self._placeholder(graph, re.sub(r"\W", "_", f"state_{name}_{key}"), value)
        self._describe(Port(f"{name}: {key}", Role.OPTIMIZER_STATE), Source("state", name, key))
        return node

    def _placeholder(self, graph: fx.Graph, name: str, value: object) -> fx.Node:
        while name in self.names:
            name += "_"
        self.names.add(name)
        with graph.inserting_after(self.last):
            self.last = graph.placeholder(name)
        self.last.meta["val"] = value
        return self.last

    def _averaged(self) -> set[str]:
        return {name for replica in self.traced.replicas for name in replica.parameters}

    def _clip(self, writer: Writer, grads: dict[str, fx.Node]) -> dict[str, fx.Node]:
        limit = self.request.clip_grad_norm
        return grads if limit is None or not grads else clipped(writer, grads, limit, self.traced.parameters)

    def _notes(self, gradients: Mapping[str, fx.Node], projected: Projected) -> tuple[str, ...]:
        sharded = (fully_sharded.EAGER,) if self.traced.shardings else ()
        if self.request.clip_grad_norm is None:
            return (*sharded, *projected.notes())
        sizes = {id(node): node.meta["val"].numel() * node.meta["val"].itemsize for node in gradients.values()}
        holds = f"clip_grad_norm holds all gradients ({format_bytes(sum(sizes.values()))}) until the norm is known"
        also = "; of projected gradients it takes the norm as they are" if projected.streams else ""
        return (holds + also, *sharded, *projected.notes())


def cohort_of(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, group: Mapping[str, Any], index: int, rule: Rule
) -> Cohort:
    """Return the cohort of a parameter as the optimizer's state is now, before the next step.

    Args:
        optimizer: holds the parameter.
        parameter: of the live model.
        group: the parameter's group in ``optimizer.param_groups``.
        index: position of the group there.
        rule: of the optimizer.
    """
    state = optimizer.state.get(parameter, {})
    # A fused kernel reads the step count itself, on its device; reading it here would wait for the device.
    step = float(state["step"]) if "step" in state and not group.get("fused") else 0.0
    first = not rule.has_step and bool(rule.states(group)) and state.get(rule.states(group)[0]) is None
    return Cohort(index, step, first)


def optimizer_key(
    optimizer: torch.optim.Optimizer, rule: Rule, parameters: Sequence[torch.Tensor]
) -> tuple[object, ...]:
    """Return a hashable key of the optimizer; a captured step serves only while it stays equal.

    Args:
        optimizer: its hyperparameters count as :func:`roamc.capture.optimizers.structure` says.
        rule: of the optimizer.
        parameters: all parameters of the model, always in the same order.

    Returns:
        For each group, its structure and the position of each of its parameters in ``parameters``, None where missing.
    """
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    return tuple(
        (structure(rule, group), tuple(places.get(id(parameter)) for parameter in group["params"]))
        for group in optimizer.param_groups
    )


def _between(node: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of a graph behind ``node`` and in front of ``end``."""
    while (node := node.next) is not end:
        yield node


def _bare(module: fx.GraphModule) -> TrainGraph:
    """A traced forward and backward as a graph whose inputs and outputs have no roles yet."""
    graph = module.graph
    inputs = tuple(Port(node.name, Role.INPUT) for node in placeholders(graph))
    outputs = tuple(Port(f"output[{i}]", Role.OUTPUT) for i in range(len(output_values(graph))))
    return TrainGraph("step", module, inputs, outputs, {node.name: Phase.FORWARD for node in operators(graph)})

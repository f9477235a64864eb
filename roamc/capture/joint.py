"""Capture from inside torch.compile: AOTAutograd's forward and backward, put together again as one graph.

AOTAutograd hands the joint graph to our partition function. torch's own default partition (everything
saved, nothing recomputed but what the user's ``checkpoint`` asks for) fixes what is forward, what is saved,
and in which order AOTAutograd passes it on. The two halves are then stitched into one TrainGraph with a
boundary between them, so that one plan and one arena serve both. What functionalization has made of
writes in place is undone behind that, see :mod:`roamc.capture.reinplace`.

A checkpointed part that updates a buffer, such as a running mean, runs again in backward: eager updates the buffer
twice, once in each run. Under torch.compile, by roamc as by any backend, AOTAutograd keeps the writes of forward alone:
the buffer is updated once, and gradients are those of eager's second run, which reads the buffer as forward left it.
``roamc.train_step`` traces what eager does and updates it twice.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from roamc import compat_aot, compat_dynamo, compat_hooks
from roamc.capture import attributes, communication, module_paths, recurrent, refusals, user_line
from roamc.capture.addresses import memories
from roamc.capture.batch import put_together, take_apart, tensors_in
from roamc.capture.collectives import join, name_own_parts
from roamc.capture.own_gradients import own_gradients
from roamc.capture.reinplace import reinplace
from roamc.capture.tokens import without_tokens
from roamc.compat import FakeTensorMode, HigherOrderOperator, has_open_size, lazy_module, with_bits
from roamc.errors import CaptureError
from roamc.graph import (
    Phase,
    Port,
    Role,
    TrainGraph,
    attribute,
    copy_origin,
    module_of,
    output_values,
    placeholders,
    source_line,
    tensors_of,
)
from roamc.graph.memory import WROTE_OVER
from roamc.graph.origin import OUTPUT, put_module
from roamc.graph.rewrite import given, mode_of, value_of
from roamc.graph.storage_ids import StorageId, addresses, addresses_of, number
from roamc.interruptions import TRACED, uninterrupted
from roamc.locks import CAPTURE
from roamc.operators import ops
from roamc.operators.corrections import correct
from roamc.operators.random import replay, save_rng_state, state_bytes
from roamc.operators.schemas import name_of


def capture(
    model: nn.Module,
    batch: Sequence[Any],
    named: Mapping[str, Any],
    name: str,
    look: Callable[[Any], None] = lambda output: None,
    root: nn.Module | None = None,
) -> TrainGraph:
    """Trace ``model(*batch, **named)`` and its backward under fake tensors, as torch.compile does.

    Args:
        model: may be on the meta device; the graph is then that of a CPU.
        batch: positional arguments.
        named: keyword arguments.
        name: of the graph, for logs and reports.
        look: called with what the model has returned, each time that it has run; what it raises ends the capture.
        root: the part of ``model`` that paths of modules begin at; None for all of it.

    Returns:
        The graph as :func:`stitch` makes it, with tangents named after the outputs, as "gradient of output['logits']",
        and inputs after the arguments, as "batch[0]" and "batch['labels']"; as :func:`inference` makes it where nothing
        requires a gradient.

    Raises:
        CaptureError: the graph cannot be planned, as where the model reads a value; says what to do.
        VerifyError: what capture has rewritten in the graph would change a value.
    """
    leaves, nest = take_apart((tuple(batch), dict(named)))
    paths: list[str] = []

    def call(model: nn.Module, *values: Any) -> Any:
        args, kwargs = put_together(values, nest)
        with module_paths.noted(root or model, outputs=False), module_paths.inside(module_paths.LOSS):
            result = model(*args, **kwargs)
        look(result)
        returned = tensors_in(result)
        paths[:] = [path for path, _ in returned]
        return [tensor for _, tensor in returned]

    with (
        CAPTURE.now,
        uninterrupted(TRACED, traces=True),
        refusals.in_one_line(),
        recurrent.decomposed(),
        compat_dynamo.unchecked_distributions(),
        compat_aot.writes_marked(WROTE_OVER),
        user_line.noted(),
        compat_hooks.off_meta(),
        communication.followed(),
        attributes.put_back(tuple(model.modules())),
    ):
        halves, outputs, static = compat_aot.forward_backward(model, leaves, call)
    places = compat_aot.output_places(halves[0].graph)
    arguments: list[tuple[int | str, Any]] = [*enumerate(batch), *named.items()]
    inputs = [*static, *(key for key, value in arguments for _ in tensors_in(value))]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    shared = memories((*model.parameters(), *model.buffers()), tensors)
    if len(halves) == 1:
        return _named(inference(halves[0], static, name), paths, inputs, places, shared)
    return _named(stitch(halves[0], halves[1], outputs, static, name), paths, inputs, places, shared)


def _named(
    graph: TrainGraph,
    outputs: Sequence[str],
    inputs: Sequence[int | str],
    places: Mapping[int, int],
    shared: Sequence[StorageId | None],
) -> TrainGraph:
    """Name ``graph``'s values as the user does: outputs by their paths, tangents after them, inputs after arguments.

    Args:
        graph: of a model.
        outputs: paths of what the model returned.
        inputs: keys of the arguments that inputs come from, with static ones in front.
        places: from a position among ``outputs`` to one among the graph's results.
        shared: memory of each argument that it shares with another, which its input is told of; else None.
    """
    results = output_values(graph.graph)
    for position, place in places.items():
        if (node := results[place]) is not None:
            node.meta[OUTPUT] = f"output{outputs[position]}"

    def port(node: fx.Node, port: Port) -> Port:
        if port.role is Role.TANGENT:
            position = compat_aot.output_of(node)
            return port if position is None else replace(port, name=f"gradient of output{outputs[position]}")
        position = compat_aot.input_of(node)
        if position is None:
            return port
        name = f"batch[{inputs[position]!r}]" if port.role is Role.INPUT else port.name
        return replace(port, name=name, memory=shared[position])

    return graph.replace(inputs=tuple(map(port, placeholders(graph.graph), graph.inputs)))


def stitch(
    forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, static: Sequence[int], name: str
) -> TrainGraph:
    """Put the two halves of a partition together as one graph; ``forward`` and ``backward`` stay as they are.

    Args:
        forward: returns ``num_outputs`` values of the user (mutated inputs first), then what is saved.
        backward: takes what is saved, then tangents.
        num_outputs: AOTAutograd's ``num_fwd_outputs``: how many results of ``forward`` are not saved values.
        static: positions of forward inputs that are parameters or buffers.
        name: for logs and reports.

    Returns:
        A graph with a boundary. Its inputs are those of ``forward``, then the tangents; its outputs are the first
        ``num_outputs`` results of ``forward``, then the results of ``backward``, the gradients. An output may be None.

    Raises:
        CaptureError: an operator of the graph cannot be planned; the caller falls back.
        VerifyError: what capture has rewritten in the graph would change a value.
    """
    overwritten = compat_aot.overwritten_inputs(forward.graph)
    forward, backward = without_tokens(forward), without_tokens(backward)
    _check_meta(forward.graph, name)
    builder = _Stitcher(mode_of(forward.graph))
    inputs = [
        Port(node.name, role_of(i, static), overwritten=node.name in overwritten)
        for i, node in enumerate(placeholders(forward.graph))
    ]
    builder.copy(forward.graph, Phase.FORWARD)
    first = [builder.mapped(node) for node in output_values(forward.graph)[:num_outputs]]
    saved = [builder.env[node.name] for node in output_values(forward.graph)[num_outputs:] if isinstance(node, fx.Node)]
    late = builder.feed(backward.graph, saved)
    inputs += [Port(node.name, Role.TANGENT, Phase.BACKWARD) for node in late]
    builder.copy(backward.graph, Phase.BACKWARD)
    _in_model(builder.graph, name)
    places = compat_aot.output_places(forward.graph)
    for tangent in [builder.env[node.name] for node in late]:
        output = first[places[position]] if (position := compat_aot.output_of(tangent)) in places else None
        if output is not None:
            copy_origin(tangent, output)
    second = [builder.mapped(node) for node in output_values(backward.graph)]
    if builder.mode is not None:
        second = own_gradients(builder.graph, second, inputs, builder.mode, builder.phase)
    builder.graph.output((*first, *second))
    outputs = [Port(f"output[{i}]", Role.OUTPUT) for i in range(len(first))]
    outputs += [Port(f"gradient[{i}]", Role.GRADIENT, Phase.BACKWARD) for i in range(len(second))]
    module = lazy_module(_attributes(forward, backward), builder.graph)
    stitched = TrainGraph(name, module, tuple(inputs), tuple(outputs), builder.phase, boundary=True)
    reinplace(stitched, builder.mode, builder.phase, saved)
    stands_for = join(module)
    results = output_values(builder.graph)[: len(first)]
    traced = {node: tensor.dtype for node in results if node is not None for _, tensor in tensors_of(node)}
    copies = correct(builder.graph)
    _check_outputs(traced)
    phase = _phases(builder.phase, stands_for, copies, name_own_parts(builder.graph))
    names = dict.fromkeys(stands_for.get(node.name, node.name) for node in saved)
    left = {node.name for node in builder.graph.nodes}
    number(builder.graph)
    return stitched.replace(phase=phase, saved=tuple(name for name in names if name in left))


def _check_outputs(traced: Mapping[fx.Node, torch.dtype]) -> None:
    """Refuse outputs of another dtype than torch traced: backward was traced for gradients of that one."""
    for node, dtype in traced.items():
        actual = node.meta["val"].dtype
        if actual is not dtype:
            raise CaptureError(
                f"{node.name} ({name_of(node.target)}) gives {actual} where torch traced {dtype}, for which it made "
                "backward; give the operator arguments of one dtype"
            )


def inference(module: fx.GraphModule, static: Sequence[int], name: str) -> TrainGraph:
    """Make the graph of a forward that has no backward and saves nothing for one; ``module`` stays as it is.

    Args:
        module: AOTAutograd's forward.
        static: positions of its inputs that are parameters or buffers.
        name: for logs and reports.

    Returns:
        A graph without a boundary, with the inputs and outputs of ``module``. An output may be None.

    Raises:
        CaptureError: an operator of the graph cannot be planned; the caller falls back.
        VerifyError: what capture has rewritten in the graph would change a value.
    """
    module = without_tokens(module)
    _check_meta(module.graph, name)
    builder = _Stitcher(mode_of(module.graph))
    builder.copy(module.graph, Phase.FORWARD)
    _in_model(builder.graph, name)
    results = [builder.mapped(node) for node in output_values(module.graph)]
    builder.graph.output(tuple(results))
    inputs = tuple(Port(node.name, role_of(i, static)) for i, node in enumerate(placeholders(module.graph)))
    outputs = tuple(Port(f"output[{i}]", Role.OUTPUT) for i in range(len(results)))
    copied = TrainGraph(name, lazy_module(_attributes(module), builder.graph), inputs, outputs, builder.phase)
    reinplace(copied, builder.mode, builder.phase)
    stands_for = join(copied.module)
    copies = correct(builder.graph)
    phase = _phases(builder.phase, stands_for, copies, name_own_parts(builder.graph))
    number(builder.graph)
    return copied.replace(phase=phase)


def _in_model(graph: fx.Graph, name: str) -> None:
    """Note where dynamo notes no module: what the function or the model that it compiled, ``name``, does itself."""
    for node in graph.nodes:
        if node.op == "call_function" and source_line(node) and not module_of(node):
            put_module(node, "", name.partition(" (graph")[0])


def _check_meta(forward: fx.Graph, name: str) -> None:
    """Refuse inputs and results on the meta device; :func:`capture` has moved those that are only planned."""
    if any(_on_meta(node) for node in placeholders(forward)):
        raise CaptureError(
            f"{name!r} is called on the meta device, where nothing is computed: roamc.plan(model, *batch) plans it; to "
            "run it, use model.to_empty(device=...) and a batch on that device"
        )
    for node in output_values(forward):
        if isinstance(node, fx.Node) and _on_meta(node):
            line = source_line(node)
            raise CaptureError(
                f"{name!r} returns a tensor on the meta device{f', made at {line}' if line else ''}, where nothing is "
                "computed: make it on the device of the model"
            )


def _on_meta(node: fx.Node) -> bool:
    return any(tensor.device.type == "meta" for _, tensor in tensors_of(node))


def _phases(
    phase: Mapping[str, Phase], replaced: Mapping[str, str], copies: Mapping[str, str], renamed: Mapping[str, str]
) -> dict[str, Phase]:
    """Return ``phase`` without nodes in ``replaced``, and with ``copies`` in the phases of the views that read them.

    Nodes in ``renamed`` have new names.
    """
    left = {name: its_phase for name, its_phase in phase.items() if name not in replaced}
    left |= {copy: left[view] for copy, view in copies.items()}
    return {renamed.get(name, name): its_phase for name, its_phase in left.items()}


def role_of(position: int, static: Sequence[int]) -> Role:
    """Return PARAMETER for the position of a parameter or buffer, which is in ``static``; INPUT for any other."""
    return Role.PARAMETER if position in static else Role.INPUT


class _Stitcher:
    """Appends the nodes of one half after the other to a new graph.

    Attributes:
        env: node name in a half to its node in the new graph.
        pairs: node name of a ``run_and_save_rng_state`` in a half to the two nodes that :meth:`_random_pair` makes.
        phase: node name in the new graph to phase.
        fresh: nodes of the new graph whose values are not those of the halves: views of them are new as well.
    """

    def __init__(self, mode: FakeTensorMode | None) -> None:
        self.graph = fx.Graph()
        self.mode = mode
        self.env: dict[str, fx.Node] = {}
        self.pairs: dict[str, tuple[fx.Node, fx.Node]] = {}
        self.phase: dict[str, Phase] = {}
        self.fresh: set[fx.Node] = set()
        self.last: fx.Node | None = None

    def copy(self, source: fx.Graph, phase: Phase) -> None:
        """Append every node but placeholders that are fed already, and the output."""
        for node in source.nodes:
            if node.op == "output" or (node.op == "placeholder" and node.name in self.env):
                continue
            self.env[node.name] = self._input(node, phase) if node.op == "placeholder" else self._append(node, phase)

    def feed(self, backward: fx.Graph, saved: Sequence[fx.Node]) -> list[fx.Node]:
        """Match backward's placeholders with what forward saves, by name, then by order; return the tangents."""
        named = {node.name: node for node in saved}
        entries = placeholders(backward)
        used = {named[entry.name] for entry in entries if entry.name in named}
        spare = iter([node for node in saved if node not in used])
        late = []
        for position, entry in enumerate(entries):
            if entry.name in named:
                self.env[entry.name] = named[entry.name]
            elif position < len(saved):
                self.env[entry.name] = next(spare)
            else:
                late.append(entry)
        return late

    def mapped(self, node: Any) -> fx.Node | None:
        """Return the new node for one value that a half returns; None for None."""
        if node is None:
            return None
        if not isinstance(node, fx.Node):
            raise CaptureError(f"the graph returns {node!r}, and what is planned may return tensors only")
        return self.env[node.name]

    def _input(self, node: fx.Node, phase: Phase) -> fx.Node:
        before = addresses(placeholders(self.graph)) if phase is Phase.BACKWARD else set()
        with self.graph.inserting_after(self.last) if self.last is not None else self.graph.inserting_before(None):
            self.last = self.graph.create_node("placeholder", node.target, (), {}, name=node.name)
        self.last.meta = dict(node.meta)
        if phase is Phase.BACKWARD and isinstance(self.last.meta.get("val"), torch.Tensor):
            self._moved(self.last, shared=not before.isdisjoint(addresses_of(self.last)))
        return self.last

    def _moved(self, tangent: fx.Node, *, shared: bool) -> None:
        """Give a tangent the storage that it has when it is handed in: that of a view is traced as a view, too.

        Args:
            tangent: an input of backward.
            shared: whether it was traced in the storage of another input.
        """
        value = value_of(tangent)
        with self.mode or contextlib.nullcontext():
            own = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        if not shared and own.untyped_storage().nbytes() == value.untyped_storage().nbytes():
            return
        tangent.meta["val"] = with_bits(own, conj=value.is_conj(), neg=value.is_neg())
        self.fresh.add(tangent)

    def _append(self, node: fx.Node, phase: Phase) -> fx.Node:
        if node.target is operator.getitem and node.all_input_nodes[0].name in self.pairs:
            state, drawn = self.pairs[node.all_input_nodes[0].name]
            return state if node.args[1] == 0 else drawn
        kind = node.target.name() if isinstance(node.target, HigherOrderOperator) else ""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.env[n.name])
        if kind == "run_and_save_rng_state":
            return self._random_pair(node, args, kwargs, phase)
        target = replay if kind == "run_with_rng_state" else node.target
        copy = self._create(node, target, args, kwargs, phase)
        again = copy.name != node.name or target in (replay, operator.getitem) or "val" not in copy.meta
        if again or (ops.rule(target).view_of and not self.fresh.isdisjoint(copy.all_input_nodes)):
            self._derive(copy)
        _check_size(copy)
        return copy

    def _create(self, node: fx.Node, target: Any, args: Any, kwargs: Any, phase: Phase) -> fx.Node:
        again = node.op == "call_function" and node.name in self.env
        if again and ops.draws(target, args, kwargs):
            raise CaptureError(f"{node.name!r} would draw random numbers again in backward; please report this model")
        copy = self.graph.create_node(node.op, target, args, kwargs, name=node.name)
        copy.meta = dict(node.meta)
        if copy.op == "call_function":
            self.phase[copy.name] = phase
        return copy

    def _random_pair(self, node: fx.Node, args: Any, kwargs: Any, phase: Phase) -> fx.Node:
        """``run_and_save_rng_state(op, ...)`` as two nodes: the generator's state, then the operator."""
        named = torch.device(kwargs.get("device") or "cpu")
        device = next((value_of(a).device for a in args[1:] if isinstance(a, fx.Node)), named)
        state = self._create(node, save_rng_state, (device,), {}, phase)
        drawn = self._create(node, args[0], tuple(args[1:]), kwargs, phase)
        for part in (state, drawn):
            self._derive(part)
        self.pairs[node.name] = (state, drawn)
        return drawn

    def _derive(self, node: fx.Node) -> None:
        """Derive the fake value of a node that both halves have, of a view of such a node, or where torch left none."""
        if node.op != "call_function":
            return
        self.fresh.add(node)
        args, kwargs = given(node)
        if node.target is operator.getitem:
            node.meta["val"] = args[0][args[1]]
            return
        target: Any = args[1] if node.target is replay else node.target
        operands = args[2:] if node.target is replay else args
        with self.mode or contextlib.nullcontext():
            if node.target is save_rng_state:
                node.meta["val"] = torch.empty(state_bytes(args[0]), dtype=torch.uint8)
            else:
                node.meta["val"] = target(*operands, **kwargs)


def _check_size(node: fx.Node) -> None:
    """Refuse sizes that depend on data (``nonzero``, an index by a mask, ``item`` as a size): no plan can know them."""
    if any(has_open_size(value) for _, value in tensors_of(node)):
        line = source_line(node)
        where = f" ({line})" if line else ""
        raise CaptureError(f"the size of {node.name}{where} depends on data, and plans need sizes that are known")


def _attributes(*modules: fx.GraphModule) -> dict[str, Any]:
    """Return the constants and submodules that ``get_attr`` nodes of ``modules`` name, by that name."""
    by_name: dict[str, Any] = {}
    for module in modules:
        for node in module.graph.nodes:
            if node.op == "get_attr":
                by_name[str(node.target)] = attribute(module, str(node.target))
    return by_name

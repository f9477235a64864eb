"""Values that a step asks for while it is traced, to decide what to do next: ``if mask.all():``, ``int(ends[0])``.

Fake tensors have none. The operators traced so far say where a value comes from, and run for real when it is asked for:

    numbers and sizes only         positions from arange, masks of them: the answer is that of every step
    tensors made before the step   of a closure, a module's attribute: asked for again at every step, see
                                   :meth:`Question.ask`
    batch and buffers as well      so is an answer of yes or no; any other is refused, as each would need a graph of
                                   its own
    parameters, random numbers,
    what the step has written      refused

The graph keeps its operators. What runs for an answer is dropped with its last use.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roamc import compat
from roamc.capture import user_line
from roamc.capture.python_keys import of_plain
from roamc.capture.refusals import value_read
from roamc.errors import CaptureError
from roamc.graph import attribute, tensors_of
from roamc.operators import ops

aten = torch.ops.aten

_OF_GEOMETRY = tuple(
    getattr(aten, name).default
    for name in ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
"""Operators that read no element of their first argument."""


@dataclass(frozen=True)
class Question:
    """A question about batch, buffers and tensors made before the step, whose answer decided what was traced.

    Attributes:
        nodes: operators that lead to the answer, in their sequence; the last one's result is the answer.
        tensors: the constants among ``nodes``.
        inputs: those of ``nodes`` that stand for tensors of the caller, by name: of a buffer, or ``"batch[2]"``.
        answer: yes or no, or a number where nothing is fed.
    """

    nodes: Sequence[fx.Node]
    tensors: Mapping[fx.Node, torch.Tensor]
    inputs: Mapping[str, fx.Node]
    answer: object

    def ask(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the answer is still the same for ``tensors``, by the names of ``inputs``."""
        inputs = {node: tensors[name] for name, node in self.inputs.items()}
        return of_plain(_run(self.nodes, {**self.tensors, **inputs})) == of_plain(self.answer)


class Questions:
    """Answers what one trace asks.

    Args:
        names: of the inputs of the traced graph, in their sequence.
        tensors: of those inputs that a question may be about, by name.

    Attributes:
        asked: the questions so far whose answers hold for ``tensors`` only.
    """

    def __init__(self, names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> None:
        self._names = names
        self._tensors = tensors
        self._graph: fx.Graph | None = None
        self.asked: list[Question] = []

    def begin(self) -> None:
        """Begin with the graph that is being traced now, of which nothing has been asked."""
        self._graph = compat.graph_so_far()
        self.asked = []

    def answer(self, mode: compat.CaptureMode, node: fx.Node) -> Any:
        """Return the value that operator ``node`` of the graph that ``mode`` traces reads from its arguments.

        Raises:
            CaptureError: it depends on what has no value before the step, or is no yes or no for every step.
        """
        nodes = _leading_to(node)
        names = dict(zip(node.graph.find_nodes(op="placeholder"), self._names, strict=False))
        own = names if node.graph is self._graph else {}
        inputs = {own.get(part, ""): part for part in nodes if part.op == "placeholder"}
        self._check(node, nodes, inputs)
        assert mode.tracer is not None
        constants = {part: attribute(mode.tracer.root, str(part.target)) for part in nodes if part.op == "get_attr"}
        fixed = not inputs and all(map(_is_fresh, constants))
        of_values = set(nodes)
        shapes = {part: _shaped(part) for user in nodes for part in user.all_input_nodes if part not in of_values}
        nodes, constants = [*shapes, *nodes], {**constants, **shapes}
        if fixed:
            return _run(nodes, constants)
        if any(map(mode.has_written, constants.values())):
            _refuse(node, "what the step has written to a tensor made before it")
        if inputs and not _is_yes_or_no(node):
            _refuse(node, f"{' and '.join(inputs)}: only yes or no may, no number")
        if any(value.is_meta or compat.is_traced(value) for value in map(self._tensors.__getitem__, inputs)):
            _refuse(node, f"{' and '.join(inputs)}, of which only the shape is given here")
        answer = _run(nodes, {**constants, **{part: self._tensors[name] for name, part in inputs.items()}})
        self.asked.append(_copied(nodes, constants, inputs, answer))
        return answer

    def _check(self, node: fx.Node, nodes: Sequence[fx.Node], inputs: Collection[str]) -> None:
        for name in inputs:
            if name not in self._tensors:
                _refuse(node, f"parameter {name!r}" if name in self._names else "what a layer is called with")
        callers = {storage for part in nodes if part.op == "placeholder" for storage in _storages(part)}
        for part in nodes:
            if part.op == "call_function" and (cause := _unrepeatable(part)):
                _refuse(node, cause)
            if not callers.isdisjoint(_written(part)):
                _refuse(node, "what the step has written to its batch or buffers")


def _unrepeatable(node: fx.Node) -> str:
    """What a value depends on that operator ``node`` gives; empty if another run gives the same."""
    if not isinstance(node.target, compat.OpOverload):
        return "" if node.target is operator.getitem else str(node.target)
    rule = ops.rule(node.target)
    if rule.random:
        return f"random numbers ({node.target})"
    return str(node.target) if rule.unknown or node.target.namespace not in ("aten", "prims") else ""


def _refuse(node: fx.Node, cause: str) -> None:
    raise CaptureError(value_read(user_line.in_front_now(), node.target, cause))


def _leading_to(node: fx.Node) -> list[fx.Node]:
    """``node`` and what it needs, in their sequence, operators among them that write to what is read later."""
    needed, storages = {node}, set(_storages(node))
    leading = []
    for part in reversed(node.graph.nodes):
        if part not in needed and not (storages & set(_written(part))):
            continue
        leading.append(part)
        needed.discard(part)
        needed.update(_read(part))
        storages.update(_storages(part))
        if not needed:
            break
    return leading[::-1]


def _read(node: fx.Node) -> list[fx.Node]:
    """The nodes of whose results ``node`` reads elements."""
    return [] if node.target in _OF_GEOMETRY else node.all_input_nodes


def _storages(node: fx.Node) -> Iterator[int]:
    for part in (node, *_read(node)):
        yield from (compat.identity(tensor) for _, tensor in tensors_of(part))


def _written(node: fx.Node) -> Iterator[int]:
    if node.op == "call_function" and isinstance(node.target, compat.OpOverload):
        for argument in ops.mutated_arguments(node):
            yield from (compat.identity(tensor) for _, tensor in tensors_of(argument))


def _is_fresh(node: fx.Node) -> bool:
    """Whether a constant was made by the step, of numbers, as ``torch.tensor`` does."""
    return all(user.target is aten.lift_fresh_copy.default for user in node.users)


def _is_yes_or_no(node: fx.Node) -> bool:
    if node.target is not aten._local_scalar_dense.default:
        return node.target in (aten.equal.default, aten.allclose.default, aten.is_nonzero.default)
    read: torch.Tensor = node.all_input_nodes[0].meta["val"]
    return read.dtype is torch.bool


def _copied(
    nodes: Sequence[fx.Node], constants: Mapping[fx.Node, torch.Tensor], inputs: Mapping[str, fx.Node], answer: object
) -> Question:
    """A question in nodes of its own: those of the trace are rewritten."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {}
    return Question(
        tuple(copies.values()),
        {copies[node]: tensor for node, tensor in constants.items()},
        {name: copies[node] for name, node in inputs.items()},
        answer,
    )


def _run(nodes: Sequence[fx.Node], tensors: Mapping[fx.Node, torch.Tensor]) -> Any:
    """Return the last result of ``nodes``, run for real on ``tensors``: what placeholders and constants stand for."""
    last = {part: index for index, node in enumerate(nodes) for part in (node, *node.all_input_nodes)}
    dropped: dict[int, list[fx.Node]] = {}
    for part, index in last.items():
        dropped.setdefault(index, []).append(part)
    values: dict[fx.Node, Any] = {}
    result: Any = None
    with compat.for_real():
        for index, node in enumerate(nodes):
            if node in tensors:
                result = tensors[node].detach()
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                result = node.target(*args, **{name: _at_hand(value) for name, value in kwargs.items()})  # type: ignore[operator]
            values[node] = result
            for part in dropped.get(index, ()):
                del values[part]
    return result


def _shaped(node: fx.Node) -> torch.Tensor:
    """A tensor of the geometry of a node's result, with one element in memory; its value is not read."""
    like: torch.Tensor = node.meta["val"]
    return torch.empty((), dtype=like.dtype, device=_at_hand(like.device)).expand(like.shape)


def _at_hand(argument: Any) -> Any:
    """``argument``, the CPU in the place of a device that this machine lacks: such a step is only planned here."""
    if isinstance(argument, torch.device) and argument.type == "cuda" and not torch.cuda.is_available():
        return torch.device("cpu")
    return argument

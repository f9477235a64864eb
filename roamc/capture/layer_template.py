"""A layer traced on its own, forward and backward: the nodes that tracing each layer like it would give."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from roamc import compat, compat_repeats
from roamc.capture import module_paths, python_keys
from roamc.capture.alike import PLAIN, Group, geometry, is_whole
from roamc.capture.layer_state import LayerState, kept
from roamc.compat import CaptureMode, identity
from roamc.operators import ops


class NoTemplateError(Exception):
    """Copies of a layer would not do; the message says why."""


@dataclass(frozen=True)
class Result:
    """What a layer returns.

    Attributes:
        leaves: tensors and other values.
        nest: how ``leaves`` make the result.
    """

    leaves: Sequence[Any]
    nest: Any

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the result with other tensors in the place of its own."""
        rest = iter(tensors)
        return compat.unflatten([next(rest) if isinstance(x, torch.Tensor) else x for x in self.leaves], self.nest)


@dataclass(frozen=True)
class Template:
    """A layer, traced on its own; the modules of its nodes have paths that begin at the layer.

    Attributes:
        inputs: nodes of what it reads: arguments, parameters, buffers.
        forward: the nodes of forward, in order.
        outputs: nodes of the tensors that it returns.
        tangents: nodes that stand for the gradients of ``outputs``.
        backward: the nodes of backward, in order.
        gradients: node of each input's gradient; None for an input that has none.
        result: what it returned.
        calls: how often it has called each of its parts that count their calls, in the order of ``modules()``.
    """

    inputs: Sequence[fx.Node]
    forward: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    tangents: Sequence[fx.Node]
    backward: Sequence[fx.Node]
    gradients: Sequence[fx.Node | None]
    result: Result
    calls: Sequence[int]

    def check(self) -> None:
        """Check that copies are all that the layer does.

        Raises:
            NoTemplateError: it writes to what it reads, a result has no memory of its own, or backward draws or repeats
                what a checkpoint has marked: a copy could not tell what it repeats.
        """
        nodes = (*self.forward, *self.backward)
        results = [*self.outputs, *filter(None, self.gradients)]
        if not set(results) <= set(nodes):
            raise NoTemplateError("a result or gradient is an argument")
        if any(node.op != "call_function" for node in nodes):
            raise NoTemplateError("it reads a constant")
        if any("ac_graph_id" in node.meta for node in nodes) or any(map(_may_draw, self.backward)):
            raise NoTemplateError("backward runs a part of forward again")
        read = {_storage_of(node) for node in (*self.inputs, *self.tangents)}
        own = {_storage_of(node) for node in results}
        if len(own) < len(results) or read & own:
            raise NoTemplateError("results or gradients share memory")
        if any(_writes(node, read) for node in nodes):
            raise NoTemplateError("it writes to what it reads")


def _storage_of(node: fx.Node) -> int:
    return identity(node.meta["val"])


def _may_draw(node: fx.Node) -> bool:
    return ops.rule(node.target).may_draw


def _writes(node: fx.Node, read: set[int]) -> bool:
    """Whether ``node`` writes to storages in ``read``, or to more than its first argument."""
    mutates = ops.rule(node.target).mutates
    written = node.args[0] if mutates == (0,) else None
    return bool(mutates) and (not isinstance(written, fx.Node) or _storage_of(written) in read)


@dataclass(frozen=True)
class Call:
    """A call of a layer.

    Attributes:
        group: the layers that are alike.
        layer: one of them.
        forward: its own forward.
        leaves: what it is called with, tensors and other values.
        nest: how ``leaves`` make its arguments.
    """

    group: Group
    layer: nn.Module
    forward: Callable[..., Any]
    leaves: Sequence[Any]
    nest: Any

    def named(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by name."""
        return dict((*self.layer.named_parameters(), *self.layer.named_buffers()))

    def read(self) -> list[torch.Tensor]:
        """Return what the layer reads: the tensors among its arguments, parameters, buffers."""
        return [*(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)), *self.named().values()]

    def run(self, read: Sequence[torch.Tensor]) -> Result:
        """Run the layer, without its numbers, on ``read`` in the place of what it reads.

        Raises:
            NoTemplateError: it sets attributes, or changes a list, dict or set that is one.
        """
        rest = iter(read)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = compat.unflatten(leaves, self.nest)
        parameters = dict(zip(self.named(), rest, strict=True))
        with (
            compat.reparametrized(self.layer, parameters), self.group.without_numbers(self.layer),
            module_paths.noted(self.layer, outputs=False), module_paths.inside("", type(self.layer).__name__),
        ):  # fmt: skip
            state = LayerState(self.layer)
            result = Result(*compat.flatten(self.forward(*args, **kwargs)))
            if state.has_changed():
                raise NoTemplateError("it changes attributes")
        return result

    def key(self) -> Hashable:
        """Return what calls of the group have in common if they do the same; None if that is not known.

        It is not for a tensor that is not traced, has hooks, shares memory with another or begins within its memory,
        and for an argument that has no simple value.
        """
        read = self.read()
        others = [leaf for leaf in self.leaves if not isinstance(leaf, torch.Tensor)]
        if not all(map(_is_traced, read)) or not all(type(value) in PLAIN for value in others):
            return None
        if len({identity(tensor) for tensor in read}) < len(read):
            return None
        geometries = tuple((geometry(tensor), tensor.is_leaf) for tensor in read)
        values = tuple(map(python_keys.of_plain, others))
        return self.group.key_of(self.layer), self.nest, values, geometries, compat_repeats.surroundings()


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a plain one of the trace, from the beginning of its memory on, without hooks."""
    if type(tensor) not in (compat.FakeTensor, nn.Parameter) or compat.node_of(tensor) is None:
        return False
    return is_whole(tensor) and not tensor._backward_hooks


def template_of(call: Call, mode: CaptureMode) -> Template:
    """Trace the layer of ``call`` on its own, while the step that calls it is traced; the layer stays as it is.

    Args:
        call: of which :meth:`Call.key` is known.
        mode: the fake mode of the trace.

    Raises:
        NoTemplateError: copies would not do, or the layer fails: then the trace of the step tells why.
    """
    tracing = _Tracing(call, mode)
    fakes = compat_repeats.untraced_like(call.read(), mode)
    with kept(call.layer) as state:
        try:
            graph = compat_repeats.nested_trace(tracing.step, fakes, mode)
        except NoTemplateError:
            raise
        except Exception as error:
            raise NoTemplateError(str(error)) from error
        template = tracing.template(graph, state.calls())
    template.check()
    return template


class _Tracing:
    """What the trace of a layer on its own notes.

    Attributes:
        ends: how many nodes there were before forward, behind it, and before backward.
    """

    def __init__(self, call: Call, mode: CaptureMode) -> None:
        self.call, self.mode = call, mode
        self.ends: list[int] = []
        self.read: list[fx.Node | None] = []
        self.outputs: list[fx.Node | None] = []
        self.tangents: list[fx.Node | None] = []
        self.gradients: list[fx.Node | None] = []
        self.result = Result((), None)

    def step(self, *fakes: torch.Tensor) -> list[torch.Tensor]:
        """Run forward and backward of the layer; return the gradients."""
        read = [_like(fake, real) for fake, real in zip(fakes, self.call.read(), strict=True)]
        self._end()
        self.result = self.call.run(read)
        self._end()
        outputs = _checked(self.result)
        tangents = [compat_repeats.placeholder_like(output, self.mode) for output in outputs]
        self._end()
        gradients = _backward(outputs, tangents, read)
        self.read, self.outputs = list(map(_node_of, read)), list(map(_node_of, outputs))
        self.tangents, self.gradients = list(map(_node_of, tangents)), list(map(_node_of, gradients))
        return [gradient for gradient in gradients if gradient is not None]

    def template(self, graph: fx.Graph, calls: Sequence[int]) -> Template:
        """Return the template that ``graph``, the trace of :meth:`step`, makes."""
        first, middle, last = self.ends
        nodes = list(graph.nodes)
        return Template(
            inputs=_known(self.read), forward=nodes[first:middle], outputs=_known(self.outputs),
            tangents=_known(self.tangents), backward=nodes[last:-1], gradients=self.gradients,
            result=self.result, calls=calls,
        )  # fmt: skip

    def _end(self) -> None:
        self.ends.append(len(compat.graph_so_far().nodes))


def _checked(result: Result) -> list[torch.Tensor]:
    """The tensors of ``result``, which all require a gradient."""
    tensors = result.tensors()
    others = [leaf for leaf in result.leaves if not isinstance(leaf, torch.Tensor)]
    if not tensors or not all(tensor.requires_grad for tensor in tensors):
        raise NoTemplateError("it returns no tensor, or one without gradient")
    if not all(type(value) in PLAIN for value in others):
        raise NoTemplateError("it returns something else than tensors and simple values")
    return tensors


def _backward(
    outputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor], read: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradient of each tensor in ``read``; None where there is none."""
    for output in outputs:
        compat.number_backward(output)
    asking = [tensor for tensor in read if tensor.requires_grad]
    with compat_repeats.without_callers(), module_paths.of_backward():
        gradients = iter(torch.autograd.grad(outputs, asking, tangents, allow_unused=True))
    return [next(gradients) if tensor.requires_grad else None for tensor in read]


def _like(fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """``fake`` as autograd sees ``real``: a leaf, or what some operator has made; autocast tells them apart."""
    if not real.requires_grad:
        return fake
    leaf = fake.detach().requires_grad_()
    if real.is_leaf:
        return leaf
    copy = leaf.clone()
    if copy.stride() != real.stride():
        raise NoTemplateError(f"no operator makes a tensor of strides {real.stride()}")
    return copy


def _node_of(tensor: torch.Tensor | None) -> fx.Node | None:
    return None if tensor is None else compat.node_of(tensor)


def _known(nodes: Sequence[fx.Node | None]) -> list[fx.Node]:
    if None in nodes:
        raise NoTemplateError("it returns a tensor that is not traced")
    return [node for node in nodes if node is not None]

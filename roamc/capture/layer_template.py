"""A layer traced by itself, forward and backward: the nodes that tracing each layer like it would give."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from roamc import compat, compat_repeats
from roamc.capture.alike import PLAIN, Group, geometry
from roamc.compat import CaptureMode, identity
from roamc.operators import ops

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Template:
    """A layer, traced by itself.

    Attributes:
        inputs: nodes of what it reads: arguments, parameters, buffers.
        forward: the nodes of forward, in order.
        outputs: nodes of its results.
        tangents: nodes that stand for the gradients of ``outputs``.
        backward: the nodes of backward, in order.
        gradients: node of each input's gradient; None for an input that has none.
        returned: what the layer returns, a leaf each: the position of a tensor among ``outputs`` and None, or -1 and
            another value.
        nest: how ``returned`` makes the layer's result.
    """

    inputs: Sequence[fx.Node]
    forward: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    tangents: Sequence[fx.Node]
    backward: Sequence[fx.Node]
    gradients: Sequence[fx.Node | None]
    returned: Sequence[tuple[int, Any]]
    nest: Any

    def result(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Return the layer's result, made of ``outputs``."""
        return compat.unflatten([outputs[at] if at >= 0 else value for at, value in self.returned], self.nest)

    def is_sound(self) -> bool:
        """Whether copies are all that the layer does: what it reads stays as it is, results have memory of their own.

        What runs again in backward is left to a trace: a copy could not tell what it repeats.
        """
        nodes = (*self.forward, *self.backward)
        results = [*self.outputs, *filter(None, self.gradients)]
        if not set(results) <= set(nodes) or any(node.op != "call_function" for node in nodes):
            return False
        if any("ac_graph_id" in node.meta for node in nodes) or any(map(_may_draw, self.backward)):
            return False
        read = {_storage_of(node) for node in (*self.inputs, *self.tangents)}
        own = {_storage_of(node) for node in results}
        return len(own) == len(results) and not read & own and not any(_writes(node, read) for node in nodes)


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
        layer: the layer.
        forward: its own forward.
        leaves: what it is called with, tensors and other values.
        nest: how ``leaves`` make its arguments.
    """

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

    def run(self, read: Sequence[torch.Tensor]) -> Any:
        """Run the layer on ``read`` in the place of what it reads."""
        rest = iter(read)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = compat.unflatten(leaves, self.nest)
        with compat.reparametrized(self.layer, dict(zip(self.named(), rest, strict=True))):
            return self.forward(*args, **kwargs)

    def kind(self) -> Hashable:
        """Return what calls of layers that are alike have in common if they do the same; None if that is not known.

        It is not for a tensor that is not traced, that shares memory with another or begins within its memory, and for
        an argument that has no simple value.
        """
        read = self.read()
        others = [leaf for leaf in self.leaves if not isinstance(leaf, torch.Tensor)]
        apart = len({identity(tensor) for tensor in read}) == len(read)
        traced = all(type(x) in (compat.FakeTensor, nn.Parameter) and compat.node_of(x) is not None for x in read)
        whole = not any(tensor.storage_offset() or tensor.is_conj() or tensor.is_neg() for tensor in read)
        if not apart or not traced or not whole or not all(isinstance(value, PLAIN) for value in others):
            return None
        values = tuple((type(value), value) for value in others)
        geometries = tuple((geometry(tensor), tensor.is_leaf) for tensor in read)
        return self.nest, values, geometries, compat_repeats.surroundings()


def traced_by_itself(call: Call, group: Group, mode: CaptureMode) -> Template | None:
    """Trace the layer of ``call`` by itself while the step that calls it is traced.

    Args:
        call: of which :meth:`Call.kind` is known.
        group: the layers that are alike; ``call`` is of one of them.
        mode: the fake mode of the trace.

    Returns:
        The template; None where copies of it would not do, or where the trace fails: then that of the step tells why.
    """
    tracing = _Tracing(call, group)
    before = _attributes(call.layer)
    fakes = compat_repeats.untraced_like(call.read(), mode)
    try:
        graph = compat_repeats.traced_apart(lambda *read: tracing.step(read, mode), fakes, mode)
    except Exception as error:  # the trace of the step meets it again, unless it comes of tracing the layer by itself
        log.debug("each %s is traced: %s", type(call.layer).__name__, error)
        return None
    if not tracing.nodes or _attributes(call.layer) != before:
        return None
    first, middle, last = tracing.ends
    nodes = list(graph.nodes)
    parts: dict[str, Any] = {**tracing.nodes, "forward": nodes[first:middle], "backward": nodes[last:-1]}
    template = Template(returned=tracing.returned, nest=tracing.nest, **parts)
    return template if template.is_sound() else None


class _Tracing:
    """What the trace of a layer by itself notes.

    Attributes:
        nodes: fields of the template to nodes; empty if it has none.
        returned: the template's.
        nest: the template's.
        ends: how many nodes there were before forward, behind it, and before backward.
    """

    def __init__(self, call: Call, group: Group) -> None:
        self.call, self.group = call, group
        self.nodes: dict[str, list[fx.Node | None]] = {}
        self.returned: list[tuple[int, Any]] = []
        self.nest: Any = None
        self.ends: list[int] = []

    def step(self, fakes: Sequence[torch.Tensor], mode: CaptureMode) -> list[torch.Tensor]:
        """Run forward and backward of the layer; return the gradients."""
        reals = self.call.read()
        read = [_like(fake, real) for fake, real in zip(fakes, reals, strict=True)]
        self._end()
        with self.group.unnumbered(self.call.layer):
            returned, self.nest = compat.flatten(self.call.run(read))
        self._end()
        outputs = [leaf for leaf in returned if isinstance(leaf, torch.Tensor)]
        others = [leaf for leaf in returned if not isinstance(leaf, torch.Tensor)]
        if not outputs or not all(x.requires_grad for x in outputs) or not all(isinstance(x, PLAIN) for x in others):
            return []
        places = iter(range(len(outputs)))
        self.returned = [(next(places), None) if isinstance(leaf, torch.Tensor) else (-1, leaf) for leaf in returned]
        tangents = [compat_repeats.placeholder_like(output, mode) for output in outputs]
        self._end()
        for output in outputs:
            compat.number_backward(output)
        asking = [tensor for tensor in read if tensor.requires_grad]
        with compat_repeats.without_callers():
            gradients = iter(torch.autograd.grad(outputs, asking, tangents, allow_unused=True))
        of_each = [next(gradients) if tensor.requires_grad else None for tensor in read]
        groups: dict[str, Sequence[torch.Tensor | None]] = {
            "inputs": read, "outputs": outputs, "tangents": tangents, "gradients": of_each,
        }  # fmt: skip
        self.nodes = {name: list(map(_node_of, tensors)) for name, tensors in groups.items()}
        return [gradient for gradient in of_each if gradient is not None]

    def _end(self) -> None:
        self.ends.append(len(compat.graph_so_far().nodes))


def _like(fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """``fake`` as autograd sees ``real``: a leaf, or what some operator has made; autocast tells them apart."""
    if not real.requires_grad:
        return fake
    leaf = fake.detach().requires_grad_()
    if real.is_leaf:
        return leaf
    copy = leaf.clone()
    if copy.stride() != real.stride():
        raise ValueError(f"no operator makes a tensor of strides {real.stride()}")
    return copy


def _node_of(tensor: torch.Tensor | None) -> fx.Node | None:
    return None if tensor is None else compat.node_of(tensor)


def _attributes(layer: nn.Module) -> dict[tuple[int, str], list[int]]:
    """Identities of what each module of ``layer`` has as each attribute, and in lists, dicts and sets there."""
    values = {(id(part), name): value for part in layer.modules() for name, value in vars(part).items()}
    return {at: [id(value), *map(id, _inside(value))] for at, value in values.items()}


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list | set) else []

"""Layers that are alike, traced once: tracing is what plans of deep models spend most of their time on.

    once        a layer is traced by itself, forward and backward, for arguments as it is called with
    each layer  its nodes are copied to where the layer is called, and to where backward reaches it

The copies are the nodes that tracing each layer would give, in the same order and under the same names. Where that is
not certain nothing is copied: for a layer that sets attributes, reads its own number, writes to what it reads, returns
it, or draws in backward. Where it shows only later, as for gradients that others are added to, the whole step is traced
again. A layer that reads what no attribute of it says, such as a global counter, is taken for like the others; so steps
that are to run are traced whole, and only plans are made like this.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from roamc import compat, compat_repeats
from roamc.capture.alike import Group, geometry, groups_of
from roamc.capture.layer_template import Call, Template, traced_by_itself
from roamc.capture.tensor_parallel import Calls
from roamc.compat import CaptureMode
from roamc.compat_repeats import Copies

aten = torch.ops.aten


class DiffersError(Exception):
    """A copy is not what tracing the layer would give, which showed when the trace had begun."""


class _Again(torch.autograd.Function):
    """A layer's nodes, copied; its backward copies those of the layer's."""

    @staticmethod
    def forward(ctx: Any, template: Template, copies: Copies, *read: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.template, ctx.copies = template, copies
        ctx.set_materialize_grads(False)
        copies.append(template.forward)
        return tuple(map(copies.tensor, template.outputs))

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        template: Template = ctx.template
        for tangent, like in zip(tangents, template.tangents, strict=True):
            node = None if tangent is None else compat.node_of(tangent)
            if tangent is None or node is None or geometry(tangent) != geometry(like.meta["val"]):
                raise DiffersError
            ctx.copies.give(like, node)
        ctx.copies.append(template.backward)
        gradients = [None if node is None else ctx.copies.tensor(node) for node in template.gradients]
        return None, None, *gradients


class Repeats:
    """Copies layers of a model that are alike while a step of it is traced.

    Args:
        model: the model, as it is outside of the trace.
        mode: the fake mode of the trace.
    """

    def __init__(self, model: nn.Module, mode: CaptureMode) -> None:
        self._mode = mode
        self._groups = groups_of(model)
        self._templates: dict[Hashable, Template | None] = {}
        self._copied: list[tuple[Template, Copies]] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Context manager inside the trace: layers that are alike are copied."""
        with contextlib.ExitStack() as patches:
            for group in self._groups:
                for layer in group.layers:
                    call = functools.partial(self._call, group, layer, layer.forward)
                    patches.enter_context(mock.patch.object(layer, "forward", call))
            yield

    def check(self, graph: fx.Graph, held: Mapping[str, Any]) -> None:
        """Refuse a traced ``graph`` in which a copy may differ from what a trace of its layer gives.

        Args:
            graph: the whole graph.
            held: the tensors of its ``get_attr`` nodes, by target.

        Raises:
            DiffersError: a gradient of a layer is added to others, which a trace does as soon as each is there; or a
                tensor of a layer that was traced by itself was kept somewhere, and is used.
        """
        if self._copied and any(isinstance(value, compat.FakeTensor) for value in held.values()):
            raise DiffersError
        own = {node for _, copies in self._copied for node in copies.node_of.values()}
        for template, copies in self._copied:
            gradients = [copies.node_of[node] for node in template.gradients if node in copies.node_of]
            users = [user for node in gradients for user in node.users]
            if any(user.target is aten.add.Tensor and user not in own for user in users):
                raise DiffersError

    def _call(self, group: Group, layer: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        leaves, nest = compat.flatten((args, named))
        call = Call(layer, forward, leaves, nest)
        template = self._template_of(group, call)
        if template is None:
            return forward(*args, **named)
        count_calls(layer)
        read = call.read()
        copies = Copies(self._mode, template.inputs, [compat.node_of(tensor) for tensor in read])
        self._copied.append((template, copies))
        outputs: Sequence[torch.Tensor] = _Again.apply(template, copies, *read)  # type: ignore[no-untyped-call]
        return template.result(outputs)

    def _template_of(self, group: Group, call: Call) -> Template | None:
        if not torch.is_grad_enabled() or compat.saved_tensor_hooks_active() or compat_repeats.has_global_hooks():
            return None
        kind = call.kind()
        if kind is None:
            return None
        key = id(group), kind
        if key not in self._templates:
            self._templates[key] = traced_by_itself(call, group, self._mode)
        return self._templates[key]


def count_calls(layer: nn.Module) -> None:
    """Count a call of each part of ``layer`` that counts its calls."""
    for part in layer.modules():
        for value in vars(part).values():
            if isinstance(value, Calls):
                value.count += 1

"""Layers that are alike, traced once: tracing is what plans of deep models spend most of their time on.

    once        a layer is traced on its own, forward and backward, for arguments as it is called with
    each layer  its nodes are copied to where the layer is called, and to where backward reaches it

The copies are the nodes that tracing each layer would give, in the same order and under the same names. Where that is
not certain nothing is copied, see :class:`roamc.capture.layer_template.NoTemplateError`. Where it shows only later, the
whole step is traced again, see :class:`DiffersError`. What a layer reads past its arguments and attributes does not
show: only layers of packages that are known are copied, see :mod:`roamc.capture.alike`, only for plans, and steps that
are to run are traced whole.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from roamc import compat, compat_dynamo, compat_repeats
from roamc.capture.alike import Group, geometry, groups_of, is_whole
from roamc.capture.layer_template import Call, NoTemplateError, Template, template_of
from roamc.capture.tensor_parallel import calls_of
from roamc.compat import CaptureMode
from roamc.compat_repeats import Copies
from roamc.graph.origin import put_under

aten = torch.ops.aten
log = logging.getLogger(__name__)


class DiffersError(Exception):
    """A copy is not what tracing the layer would give, which showed when the trace had begun; the message says why."""


class _CopiedLayer(torch.autograd.Function):
    """A layer's nodes, copied; its backward copies those of the layer's."""

    @staticmethod
    def forward(ctx: Any, copied: _Copied, *read: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.copied = copied
        ctx.set_materialize_grads(False)
        copied.append(copied.template.forward)
        return tuple(map(copied.copies.tensor, copied.template.outputs))

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        template, copies = ctx.copied.template, ctx.copied.copies
        if torch.is_grad_enabled() or template.tangents[0] in copies.node_of:
            raise DiffersError("a gradient is differentiated, or backward runs twice")
        for tangent, like in zip(tangents, template.tangents, strict=True):
            node = None if tangent is None else compat.node_of(tangent)
            if (
                tangent is None
                or node is None
                or not is_whole(tangent)
                or geometry(tangent) != geometry(like.meta["val"])
            ):
                raise DiffersError("a result has no gradient, or one of another geometry")
            copies.bind(like, node)
        ctx.copied.append(template.backward)
        gradients = [None if node is None else copies.tensor(node) for node in template.gradients]
        return None, *gradients


@dataclass(frozen=True)
class _Copied:
    """A copied layer.

    Attributes:
        template: what it was copied from.
        copies: its nodes.
        path: that of the layer in the model.
        parameters: nodes of its parameters and buffers.
    """

    template: Template
    copies: Copies
    path: str
    parameters: Sequence[fx.Node | None]

    def append(self, nodes: Sequence[fx.Node]) -> None:
        """Copy ``nodes`` of the template; the copies belong to the modules of this layer."""
        self.copies.append(nodes)
        for node in nodes:
            put_under(self.copies.node_of[node], self.path)


def _check_users(copied: _Copied, own: Collection[fx.Node]) -> None:
    """Check who reads the parameters and gradients of a copied layer; ``own`` are the nodes of all copied layers.

    Raises:
        DiffersError: parameters are read elsewhere, as autocast has cast them for the layer; a gradient is not asked
            for; or is added to others: autograd adds each as soon as it is there, inside of a layer, too.
    """
    readers = {user for node in copied.parameters if node is not None for user in node.users}
    if not readers <= copied.copies.own:
        raise DiffersError("a parameter of a copied layer is read elsewhere")
    node_of = copied.copies.node_of
    for gradient in (node_of[node] for node in copied.template.gradients if node in node_of):
        if not gradient.users:
            raise DiffersError("a gradient of a copied layer is not asked for")
        if any(user.target is aten.add.Tensor and user not in own for user in gradient.users):
            raise DiffersError("a gradient of a copied layer is added to others")


class Repeats:
    """Copies layers of a model that are alike while a step of it is traced.

    Args:
        model: the model, as it is outside of the trace.
        trained: the parameters whose gradients the step asks for; nothing is copied if others require one.
        mode: the fake mode of the trace.
    """

    def __init__(self, model: nn.Module, trained: Iterable[nn.Parameter], mode: CaptureMode) -> None:
        self._mode = mode
        asked = set(map(id, trained))
        needed = all(id(parameter) in asked for parameter in model.parameters() if parameter.requires_grad)
        self._groups = groups_of(model) if needed else []
        self._paths = {id(module): path for path, module in compat_dynamo.original(model).named_modules()}
        self._templates: dict[Hashable, Template | None] = {}
        self._copied: list[_Copied] = []
        self._versions: list[tuple[torch.Tensor, int]] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Context manager inside the trace: layers that are alike are copied."""
        with contextlib.ExitStack() as patches:
            for group in self._groups:
                for layer in group.layers:
                    patches.enter_context(mock.patch.object(layer, "forward", self._copying(group, layer)))
            yield

    def check(self, held: Mapping[str, Any]) -> None:
        """Check that a traced graph is the one that tracing every layer gives.

        Args:
            held: the tensors of its ``get_attr`` nodes, by target.

        Raises:
            DiffersError: a layer that was traced on its own has left a tensor elsewhere; what it reads or returns was
                written to, which may be an error of autograd, or has a hook by now; or as :func:`_check_users`.
        """
        if self._templates and any(isinstance(value, compat.FakeTensor) for value in held.values()):
            raise DiffersError("a tensor of a layer that was traced on its own is used")
        if any(tensor._version != version for tensor, version in self._versions):
            raise DiffersError("what a copied layer reads or returns was written to")
        if any(tensor.retains_grad for tensor, _ in self._versions):
            raise DiffersError("a result of a copied layer keeps its gradient")
        own = {node for copied in self._copied for node in copied.copies.own}
        for copied in self._copied:
            _check_users(copied, own)

    def _copying(self, group: Group, layer: nn.Module) -> Callable[..., Any]:
        """The forward of ``layer``, or copies of what it does."""
        forward: Callable[..., Any] = layer.forward

        @functools.wraps(forward)
        def call(*args: Any, **named: Any) -> Any:
            asked = Call(group, layer, forward, *compat.flatten((args, named)))
            template = self._template_of(asked)
            return forward(*args, **named) if template is None else self._copy(asked, template)

        return call

    def _copy(self, call: Call, template: Template) -> Any:
        for calls, more in zip(calls_of(call.layer), template.calls, strict=True):
            calls.count += more
        read = call.read()
        copies = Copies(self._mode, template.inputs, [compat.node_of(tensor) for tensor in read])
        parameters = tuple(map(compat.node_of, call.named().values()))
        copied = _Copied(template, copies, self._paths[id(call.layer)], parameters)
        outputs: Sequence[torch.Tensor] = _CopiedLayer.apply(copied, *read)  # type: ignore[no-untyped-call]
        self._copied.append(copied)
        self._versions += [(tensor, tensor._version) for tensor in (*read, *outputs)]
        return template.result.with_tensors(outputs)

    def _template_of(self, call: Call) -> Template | None:
        key = call.key() if compat_repeats.is_plain_call() else None
        if key is None:
            return None
        if (id(call.group), key) not in self._templates:
            try:
                self._templates[id(call.group), key] = template_of(call, self._mode)
            except NoTemplateError as error:
                log.debug("every %s is traced: %s", type(call.layer).__name__, error)
                self._templates[id(call.group), key] = None
        return self._templates[id(call.group), key]

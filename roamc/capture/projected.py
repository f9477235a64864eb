"""Gradients in a random subspace, which the update of :class:`roamc.optim.CompAct` reads in the place of whole ones.

    eager      dW = dY^T x        [m, n]
    written    g = mm(dW, p)      [m, r]   with p = projection(counter, ...), the same for weights of one stream

These are the values of eager's update, operator by operator. Pass ``project`` makes ``g`` without ``dW``. Weights whose
products read one input share a stream, and with it ``p``: then one product of the input serves them all.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from roamc.capture.hooks import hooks_on
from roamc.capture.optimizers import Group, Rule, shape_of
from roamc.errors import CaptureError
from roamc.graph.rewrite import Writer
from roamc.operators import ops
from roamc.operators.projection import OF, projection

aten = torch.ops.aten

MOST_NAMES = 4
"""Names that a note has at most."""

Feeds = Mapping[str, tuple[dict[str, fx.Node], dict[str, fx.Node]]]
"""Parameter name to the nodes of its states and scalars, by their keys."""


@dataclass(frozen=True)
class Projected:
    """The gradients that updates read.

    Attributes:
        gradients: parameter name to the node of its gradient, projected where its update asks for that.
        streams: name of each projected parameter to the stream of its projections.
        whole: names of the projected parameters whose whole gradients have to be made first.
    """

    gradients: dict[str, fx.Node]
    streams: dict[str, int] = field(default_factory=dict)
    whole: tuple[str, ...] = ()

    def notes(self) -> tuple[str, ...]:
        """Return what the user of a plan should know."""
        if not self.whole:
            return ()
        names = ", ".join(self.whole[:MOST_NAMES]) + (", ..." if len(self.whole) > MOST_NAMES else "")
        return (
            f"the gradients of {names} are made whole before they are projected: no product makes them as they are, as "
            "of embeddings, of weights that are used twice or not as they are, and under autocast",
        )


def project(
    writer: Writer,
    gradients: Mapping[str, fx.Node],
    rule: Rule,
    feeds: Feeds,
    groups: Mapping[str, Group],
    parameters: Mapping[str, torch.Tensor],
) -> Projected:
    """Write the projection of each gradient whose update asks for one behind the gradient.

    Args:
        writer: writes into the graph of the step.
        gradients: parameter name to the node of its gradient.
        rule: of the optimizer.
        feeds: states and scalars of each parameter; gets the projection, transposed, as state "projection".
        groups: parameter name to its group, and its "stream", which is None where the update asks for no projection.
        parameters: name to live parameter.

    Raises:
        CaptureError: a hook of the user reads the gradient of a projected weight.
    """
    wanted = {
        name: shape_of(rule, groups[name], grad.meta["val"].shape)
        for name, grad in gradients.items()
        if groups[name]["stream"] is not None
    }
    if not wanted:
        return Projected(dict(gradients))
    _check_hooks(wanted, parameters)
    streams = _streams(gradients, wanted, groups)
    projections: dict[tuple[object, ...], tuple[fx.Node, fx.Node]] = {}
    results = dict(gradients)
    position = {node: index for index, node in enumerate(writer.graph.nodes)}
    for name in sorted(wanted, key=lambda each: position[gradients[each]]):
        grad, group, (states, scalars) = gradients[name], groups[name], feeds[name]
        value = grad.meta["val"]
        numbers = group["seed"], streams[name], value.shape[1], wanted[name][1], group["basis"]
        key = (scalars["counter"], *numbers, value.dtype, value.device)
        writer.like = grad
        with writer.graph.inserting_before(grad.next):
            if key not in projections:
                p = writer.call(projection, scalars["counter"], *numbers, dtype=value.dtype, device=value.device)
                projections[key] = p, writer.call(aten.t.default, p)
            p, states["projection"] = projections[key]
            results[name] = writer.call(aten.mm.default, grad, p)
            results[name].meta[OF] = name
    writer.like = None
    whole = tuple(name for name in wanted if _input_of(gradients[name]) is None)
    return Projected(results, streams, whole)


def _check_hooks(names: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
    for name in names:
        if hooks_on(parameters[name]):
            raise CaptureError(
                f"parameter {name!r} has a gradient hook, and CompAct projects it: its gradient never exists in a "
                "planned step; remove the hook, name the weight in dense=, or use roamc.optimize"
            )


def _streams(gradients: Mapping[str, fx.Node], names: Mapping[str, Any], groups: Mapping[str, Group]) -> dict[str, int]:
    """Streams of projected weights: one for all that read one input, unless an earlier step has given them out."""
    of_input: dict[fx.Node, int] = {}
    streams = {}
    for name in sorted(names, key=lambda each: not groups[each]["shared"]):
        own = streams[name] = groups[name]["stream"]
        source = _input_of(gradients[name])
        if source is not None and groups[name]["shared"]:
            of_input.setdefault(source, own)
        elif source is not None:
            streams[name] = of_input.setdefault(source, own)
    return streams


def _input_of(gradient: fx.Node) -> fx.Node | None:
    """What the product that makes a gradient multiplies from the right, whole; None if no product alone makes it."""
    product, turns = _viewed(gradient)
    if product.target is not aten.mm.default or turns % 2:
        return None
    factor: Any = product.args[1]
    return _viewed(factor)[0]


def _viewed(node: fx.Node) -> tuple[fx.Node, int]:
    """What ``node`` is a view of, through any number of views, and how many of them exchange two dimensions."""
    turns = 0
    while node.op == "call_function" and ops.is_view(node.target) and node.target is not operator.getitem:
        turns += node.target is aten.t.default
        node = node.all_input_nodes[0]
    return node, turns

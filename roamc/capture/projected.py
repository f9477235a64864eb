"""Gradients in a random subspace, which the update of :class:`roamc.optim.CompAct` reads in the place of whole ones.

    eager      dW = dY^T x        [m, n]
    written    g = mm(dW, p)      [m, r]   with p = projection(counter, ...), the same for weights of one stream

These are the values of eager's update, operator by operator. Pass ``project`` makes ``g`` without ``dW``. Weights whose
products read one input share a stream, and with it ``p``: then one product of the input serves them all.

Under autocast the product is of a lower precision than the weight, and eager casts ``dW`` before it projects. Here the
product is projected as it is, by a ``p`` of its dtype, and ``g`` is cast: else no ``g`` could do without ``dW``.
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
from roamc.graph.reader_kinds import chain_to_product
from roamc.graph.rewrite import Writer
from roamc.operators import ops
from roamc.operators.projection import PROJECTED_WEIGHT, projection

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
        originals: name of each projected parameter to the node that is projected.
        streams: name of each projected parameter to the stream of its projections.
        whole: names of the projected parameters whose whole gradients have to be made first.
    """

    gradients: dict[str, fx.Node]
    originals: dict[str, fx.Node] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)
    whole: tuple[str, ...] = ()

    def notes(self) -> tuple[str, ...]:
        """Return what the user of a plan should know."""
        if not self.whole:
            return ()
        names = ", ".join(self.whole[:MOST_NAMES]) + (", ..." if len(self.whole) > MOST_NAMES else "")
        return (
            f"the gradients of {names} are made whole before they are projected: no product makes them as they are, as "
            "of embeddings, and of weights that are used twice or not as they are; in dense= they get AdamW",
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
    sources = {name: _source(gradients[name]) for name in wanted}
    streams = _streams({name: source for name, (_, source) in sources.items()}, groups)
    position = {node: index for index, node in enumerate(writer.graph.nodes)}
    written: dict[tuple[object, ...], fx.Node] = {}
    results, originals = dict(gradients), dict[str, fx.Node]()

    def projection_of(like: fx.Node, *numbers: Any) -> fx.Node:
        value = like.meta["val"]
        key = (*numbers, value.dtype, value.device)
        if key not in written:
            written[key] = writer.call(projection, *numbers, dtype=value.dtype, device=value.device)
        return written[key]

    for name in sorted(wanted, key=lambda each: position[gradients[each]]):
        grad, group, (states, scalars) = gradients[name], groups[name], feeds[name]
        whole = originals[name] = sources[name][0]
        shape = grad.meta["val"].shape[1], wanted[name][1]
        numbers = scalars["counter"], group["seed"], streams[name], *shape, group["basis"]
        writer.like = grad
        with writer.graph.inserting_before(grad.next):
            g = writer.call(aten.mm.default, whole, projection_of(whole, *numbers))
            results[name] = g if whole is grad else writer.call(grad.target, g, **grad.kwargs)
            states["projection"] = writer.call(aten.t.default, projection_of(grad, *numbers))
        g.meta[PROJECTED_WEIGHT] = name
        if whole is not grad and not grad.users:
            writer.graph.erase_node(grad)
    writer.like = None
    unfound = tuple(name for name, (_, source) in sources.items() if source is None)
    return Projected(results, originals, streams, unfound)


def _check_hooks(names: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
    for name in names:
        if hooks_on(parameters[name]):
            raise CaptureError(
                f"parameter {name!r} has a gradient hook, and CompAct projects it: its gradient never exists in a "
                "planned step; remove the hook, name the weight in dense=, or use roamc.optimize"
            )


def _streams(sources: Mapping[str, fx.Node | None], groups: Mapping[str, Group]) -> dict[str, int]:
    """Streams of projected weights: one for all that read one input, unless an earlier step has given them out."""
    of_input: dict[fx.Node, int] = {}
    streams = {}
    for name in sorted(sources, key=lambda each: not groups[each]["shared"]):
        own, source = groups[name]["stream"], sources[name]
        streams[name] = own
        if source is not None and groups[name]["shared"]:
            of_input.setdefault(source, own)
        elif source is not None:
            streams[name] = of_input.setdefault(source, own)
    return streams


def _source(gradient: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """What is projected of a gradient, and what the product that makes it multiplies from the right, whole.

    The first is the gradient, or what it is cast from; the second is None if no product makes it as it is.
    """
    cast: Any = gradient.args[0] if gradient.target is aten._to_copy.default else None
    is_cast = cast is not None and cast.meta["val"].device == gradient.meta["val"].device
    whole = cast if is_cast else gradient
    chain = chain_to_product(whole)
    if not chain:
        return gradient, None
    source: Any = chain[-1].args[1]
    while source.op == "call_function" and (_is_view(source) or source.target is aten._to_copy.default):
        source = source.all_input_nodes[0]
    return whole, source


def _is_view(node: fx.Node) -> bool:
    return ops.is_view(node.target) and node.target is not operator.getitem

"""Gradients of parameters that another gradient is a view of become tensors of their own, as autograd has them.

    before                               after
    w = view(g, [32])                    w = view(g, [32])
    return g, w                          c = clone(g)
                                         return c, w

``g`` is the gradient of ``p`` and ``w`` that of ``q`` in ``y + p + q.view_as(y)``. In eager, autograd still holds ``g``
for the operators in front of the sum when it comes to ``p``, and copies it to ``p.grad``. A program returns all
gradients at once, when nobody holds ``g`` any more: ``p.grad`` and ``q.grad`` would be one memory, and what scales
gradients in place, such as clipping, would scale it twice. Two views of one tensor share its memory in eager, too, and
stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from roamc.capture.sharing import base_of
from roamc.compat import FakeTensorMode
from roamc.graph import Phase, Port, Role, copy_origin
from roamc.graph.rewrite import derived

aten = torch.ops.aten


def own_gradients(
    graph: fx.Graph,
    gradients: Sequence[fx.Node | None],
    inputs: Sequence[Port],
    mode: FakeTensorMode,
    phase: dict[str, Phase],
) -> list[fx.Node | None]:
    """Append a copy of each parameter's gradient that another parameter's gradient is a view of.

    Args:
        graph: a graph without an output node; the copies are put at its end.
        gradients: what backward returns: the gradient of each of ``inputs``, None for those that need none.
        inputs: those of forward, in their order.
        mode: the fake mode of the graph's tensors.
        phase: node name to phase, changed in place: the copies are added.

    Returns:
        ``gradients``, with the copies in the places of what they copy.
    """
    pairs = zip(gradients, inputs, strict=False)
    own = dict.fromkeys(node for node, port in pairs if node is not None and port.role is Role.PARAMETER)
    viewed = {base for node in own for base in _bases(node)}
    copies: dict[fx.Node | None, fx.Node] = {}
    for base in [node for node in own if node in viewed]:
        copy = copies[base] = graph.call_function(aten.clone.default, (base,))
        copy_origin(copy, base)
        copy.meta["val"] = derived(copy, mode)
        phase[copy.name] = Phase.BACKWARD
    return [copies.get(node, node) for node in gradients]


def _bases(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that ``node`` is a view of, directly or through other views."""
    bases = []
    while (base := base_of(node)) is not None:
        bases.append(node := base)
    return bases

"""Operators that change a tensor's shape in place, as views: nothing of them is left in a captured step.

    before                          after
    squeeze_ = squeeze_(x, [1])     squeeze_ = squeeze(x, [1])
    ... x ...                       ... squeeze_ ...

``torch.func.vmap`` traces to such operators, and models have them (``x.unsqueeze_(0)``). They write no element, so
that to the planner ``x`` is one value before and another behind.
"""

from __future__ import annotations

import torch
from torch import fx

from roamc.compat import OpOverload
from roamc.errors import CaptureError

aten = torch.ops.aten

AS_VIEWS: dict[OpOverload, OpOverload] = {
    aten.as_strided_.default: aten.as_strided.default,
    aten.detach_.default: aten.detach.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.swapaxes_.default: aten.transpose.int,
    aten.swapdims_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}
"""Operator that changes its argument's shape in place to the operator that makes a view of that shape."""


def as_views(graph: fx.Graph) -> None:
    """Replace, in ``graph`` itself, operators that change their argument's shape in place by operators that make views.

    ``AS_VIEWS`` lists both. Later readers of the argument read the view.

    Raises:
        CaptureError: an operator changes the shape of an input of the step, which is a tensor of the caller's.
    """
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        seen.add(node)
        if node.target not in AS_VIEWS:
            continue
        before = node.all_input_nodes[0]
        if before.op == "placeholder" and node.target is not aten.detach_.default:
            name = node.target._schema.name.removeprefix("aten::")
            raise CaptureError(
                f"the step changes the shape of one of its inputs in place ({name}); write x = x.{name[:-1]}(...), or "
                "use roamc.optimize or torch.compile"
            )
        node.target = AS_VIEWS[node.target]
        before.replace_all_uses_with(node, lambda user: user not in seen)

"""products: matrix products in float32 on a CPU by the library that is faster on this machine.

    rewrite:  y = aten.mm(a, b)  -->  y = roamc.onednn_mm(a, b)
    checks:   every operator that the decision names is a product that oneDNN can take: float32 tensors on a CPU, no
              size of 0, no factors; the user allows another order of sums: ``numerics="fast"``; and ranks that hold
              copies of parameters plan together

torch multiplies with MKL, which on AMD's processors takes two to four times as long as oneDNN, see
:mod:`roamc.compat_onednn`. Which is faster is measured once for each form of product, see :mod:`roamc.cost.products`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from roamc.compat_onednn import product_into
from roamc.cost.products import Form, faster_by_onednn, form_of
from roamc.errors import PlanError
from roamc.graph import TrainGraph, operators
from roamc.graph.ranks import plans_apart
from roamc.operators.call import tensors_in
from roamc.operators.onednn import ONEDNN
from roamc.options import Options

NAME = "products"

MISSING = "the plan has products by oneDNN, which this torch does not offer: torch's own products run in their place"
"""Note on a graph whose decision this torch cannot carry out."""


@dataclass(frozen=True)
class Decision:
    """A decision names the products that oneDNN makes.

    Attributes:
        onednn: names of their operators, in graph order.
    """

    onednn: tuple[str, ...] = ()


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Choose the products whose form oneDNN multiplies faster; ``graph`` stays as it is.

    Forms that were never timed on this machine are timed now, for some seconds at most, and the times are written to a
    file; products of a form without a time stay with torch. The decision is empty unless ``options.numerics`` is
    "fast", oneDNN is switched on (``torch.backends.mkldnn.flags``) and this torch offers oneDNN's product; and where
    the ranks of tensor parallelism plan apart: each would follow its own times, and their copies drift apart.
    """
    if options.numerics != "fast" or not torch.backends.mkldnn.enabled or product_into() is None:
        return Decision()
    if plans_apart(graph) is not None:
        return Decision()
    forms = {node.name: _form(node) for node in operators(graph.graph) if _fits(node)}
    faster = faster_by_onednn(forms.values())
    return Decision(tuple(name for name, form in forms.items() if form in faster))


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Let the products that the decision names call oneDNN; the FX graph is changed in place.

    If this torch does not offer oneDNN's product, the returned graph has :data:`MISSING` among its ``notes``, and
    torch's own product runs in each call.

    Raises:
        PlanError: a name in the decision is no operator of the graph, or no product that oneDNN can take; or ranks that
            hold copies of parameters plan apart.
    """
    apart = plans_apart(graph) if decision.onednn else None
    if apart is not None:
        raise PlanError(
            f"the ranks of {apart!r} plan apart, and another rank may leave {decision.onednn[0]!r} to torch"
        )
    nodes = {node.name: node for node in operators(graph.graph)}
    for name in decision.onednn:
        if name not in nodes or not _fits(nodes[name]):
            raise PlanError(f"{name!r} is no product of float32 matrices on a CPU in this graph")
        nodes[name].target = ONEDNN[nodes[name].target]  # type: ignore[index]
    if decision.onednn and product_into() is None:
        return graph.replace(notes=(*graph.notes, MISSING))
    return graph


def _fits(node: fx.Node) -> bool:
    """Whether oneDNN can take this call: its operator, no factors, float32 on a CPU, every size above 0."""
    if node.target not in ONEDNN or node.kwargs or not all(isinstance(value, fx.Node) for value in node.args):
        return False
    tensors = [*tensors_in([value.meta["val"] for value in node.args]), node.meta["val"]]  # type: ignore[union-attr]
    return all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.numel() for tensor in tensors)


def _form(node: fx.Node) -> Form:
    first, second = (value.meta["val"] for value in node.args[-2:])  # type: ignore[union-attr]
    return form_of(first, second)

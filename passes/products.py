"""products: matrix products that torch multiplies slowly, another way.

    rewrite:  y = aten.mm(a, b)  -->  y = roamc.onednn_mm(a, b)      in float32 on a CPU
              y = aten.mm(a, b)  -->  y = roamc.aligned_mm(a, b)     in 16 bits on a GPU
    checks:   every operator that the decision names is such a product: no size of 0, no factors; for oneDNN float32
              tensors on a CPU, else 16 bits on a GPU and rows that are not aligned; the user allows another order of
              sums: ``numerics="fast"``; and for oneDNN, ranks that hold copies of parameters plan together

torch multiplies with MKL, which on AMD's processors takes two to four times as long as oneDNN, see
:mod:`roamc.compat_onednn`. Which is faster is measured once for each form of product, see :mod:`roamc.cost.products`.
On a GPU matrices whose rows do not begin at multiples of 16 bytes are copied, see :mod:`roamc.operators.aligned`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from roamc.compat_onednn import product_into
from roamc.cost.products import Form, faster_by_onednn, form_of
from roamc.cost.slow_products import is_large, slow_for_rows, tensors_of_product
from roamc.errors import PlanError
from roamc.graph import TrainGraph, operators
from roamc.graph.ranks import plans_apart
from roamc.operators.aligned import BY_COPIES
from roamc.operators.onednn import ONEDNN
from roamc.options import Options

NAME = "products"

MISSING = "the plan has products by oneDNN, which this torch does not offer: torch's own products run in their place"
"""Note on a graph whose decision this torch cannot carry out."""


@dataclass(frozen=True)
class Decision:
    """A decision names the products that are not torch's.

    Attributes:
        onednn: names of the operators of those by oneDNN, in graph order.
        aligned: names of the operators of those by aligned copies, in graph order.
    """

    onednn: tuple[str, ...] = ()
    aligned: tuple[str, ...] = ()


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Choose the products that another way is faster for; ``graph`` stays as it is.

    The decision is empty unless ``options.numerics`` is "fast". Products on a GPU follow from their shapes.

    Forms of products on a CPU that were never timed on this machine are timed now, for some seconds at most, and the
    times are written to a file; products of a form without a time stay with torch. So do all where oneDNN is switched
    off (``torch.backends.mkldnn.flags``) or this torch does not offer oneDNN's product, and where the ranks of tensor
    parallelism plan apart: each would follow its own times, and their copies drift apart.
    """
    if options.numerics != "fast":
        return Decision()
    aligned = tuple(node.name for node in operators(graph.graph) if slow_for_rows(node) and is_large(node))
    if not torch.backends.mkldnn.enabled or product_into() is None or plans_apart(graph) is not None:
        return Decision(aligned=aligned)
    forms = {node.name: _form(node) for node in operators(graph.graph) if _fits(node)}
    faster = faster_by_onednn(forms.values())
    return Decision(tuple(name for name, form in forms.items() if form in faster), aligned)


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Let the products that the decision names run the other way; the FX graph is changed in place.

    If this torch does not offer oneDNN's product, the returned graph has :data:`MISSING` among its ``notes``, and
    torch's own product runs in each call.

    Raises:
        PlanError: a name in the decision is no operator of the graph, or no such product; or ranks that hold copies of
            parameters plan apart.
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
    for name in decision.aligned:
        if name not in nodes or not slow_for_rows(nodes[name]):
            raise PlanError(f"{name!r} is no product in 16 bits on a GPU with rows that are not aligned in this graph")
        nodes[name].target = BY_COPIES[nodes[name].target]  # type: ignore[index]
    if decision.onednn and product_into() is None:
        return graph.replace(notes=(*graph.notes, MISSING))
    return graph


def _fits(node: fx.Node) -> bool:
    """Whether oneDNN can take this call: its operator, no factors, float32 on a CPU, every size above 0."""
    tensors = tensors_of_product(node) if node.target in ONEDNN else []
    return bool(tensors) and all(each.dtype is torch.float32 and each.device.type == "cpu" for each in tensors)


def _form(node: fx.Node) -> Form:
    first, second = (value.meta["val"] for value in node.args[-2:])  # type: ignore[union-attr]
    return form_of(first, second)

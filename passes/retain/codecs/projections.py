"""projections: what backward makes of a value by random projections alone is made in forward, and waits in its place.

    x = ...                             x = ...
    y = mm(x, w)                        y = mm(x, w)
    ...                                 p = projection(...); z = mm(x, p)       x's bytes are free here
    p = projection(...)                 ...
    z = mm(x, p)                        ...
    g = mm(dy_t, z)                     g = mm(dy_t, z)

These are the same products of the same matrices. Pass ``project`` leaves them where their first readers are: see there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from roamc.operators import ops
from roamc.operators.projection import projection
from roamc.passes.retain.codecs.codec import Read, Saved
from roamc.units import Bytes

aten = torch.ops.aten

NAME = "projections"
"""Used as codec name of a value of which readers behind forward need only projections."""


class Products(NamedTuple):
    """The projections of one value that move to forward.

    Attributes:
        nodes: the products, first to last.
    """

    nodes: tuple[fx.Node, ...]

    @property
    def nbytes(self) -> Bytes:
        """Bytes of their results."""
        return sum(int(node.meta["val"].numel() * node.meta["val"].itemsize) for node in self.nodes)


def fit(saved: Saved) -> Products | None:
    """Return the products that are all that reads elements of a value behind forward; None if something else does."""
    nodes = tuple(dict.fromkeys(read.reader for read in saved.late))
    return Products(nodes) if nodes and all(_projects(read, saved.node) for read in saved.late) else None


def projection_of(product: fx.Node) -> fx.Node:
    """Return the projection that a product reads."""
    p = product.args[1]
    assert isinstance(p, fx.Node)
    return p


def views_of(product: fx.Node, value: fx.Node) -> list[fx.Node]:
    """Return the views through which ``product`` reads ``value``, from the value on."""
    views: list[fx.Node] = []
    node = product.args[0]
    while isinstance(node, fx.Node) and node is not value:
        views.append(node)
        node = node.args[ops.rule(node.target).view_of[0]]
    return views[::-1]


def _projects(read: Read, value: fx.Node) -> bool:
    """Whether a reader is the product of a value with a projection that is made of inputs alone."""
    if read.reader.target is not aten.mm.default or read.position != 0:
        return False
    p = read.reader.args[1]
    if not isinstance(p, fx.Node) or p.target is not projection:
        return False
    inputs = all(node.op == "placeholder" for node in p.all_input_nodes)
    return inputs and all(len(view.all_input_nodes) == 1 for view in views_of(read.reader, value))

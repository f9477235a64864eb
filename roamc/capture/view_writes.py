"""Writes to a view, as functionalization leaves them: the copy in the middle is what is copied.

    before                               after
    v = slice(x, 1, 0, 4)                y = slice_scatter(x, expand(s, shape of v), 1, 0, 4)
    c = copy(v, s)
    y = slice_scatter(x, c, 1, 0, 4)

``copy`` makes ``s`` as a tensor with the strides of ``v``: as many bytes as lie between the first element of ``v`` and
its last, so that a write to four columns of ``x`` costs nearly the bytes of ``x``. The scatter reads elements only.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from roamc import ops
from roamc.compat import FakeTensorMode
from roamc.memory import identities, identity
from roamc.rewrite import derived

aten = torch.ops.aten

COPIES = frozenset({aten.copy.default, aten.fill.Tensor})
"""Operators whose result is their second argument in the shape of the first."""


def without_copies(graph: fx.Graph, mode: FakeTensorMode, named: Collection[str]) -> None:
    """Make such copies views of what they copy.

    Args:
        graph: changed in place.
        mode: the fake mode of its tensors.
        named: nodes that others know by name; they stay.
    """
    places = {node: place for place, node in enumerate(graph.nodes)}
    writes = [(places[node], storage) for node in graph.nodes for storage in identities(ops.mutated_arguments(node))]
    for node in graph.nodes:
        if node.target in COPIES and node.name not in named and _is_scattered(node) and _is_plain(node):
            source = node.args[1]
            last = max(places[reader] for reader in node.users)
            storage = identity(source.meta["val"])
            if not any(places[node] < place <= last for place, written in writes if written == storage):
                node.target, node.args = aten.expand.default, (source, list(node.meta["val"].shape))
                node.kwargs = {}
                node.meta["val"] = derived(node, mode)


def _is_scattered(node: fx.Node) -> bool:
    """Whether all that is done with ``node`` is to put its elements into another tensor."""
    return bool(node.users) and all(
        ops.rule(reader.target).patches and reader.args[1] is node and reader.args[0] is not node
        for reader in node.users
    )


def _is_plain(node: fx.Node) -> bool:
    """Whether ``node`` has the elements that it copies, bit for bit."""
    source = node.args[1]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    result = node.meta["val"]
    return bool(value.dtype == result.dtype and value.device == result.device)

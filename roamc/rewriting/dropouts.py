"""Dropouts in two steps: an operator makes the mask alone, and the result is a product of the input with that mask.

    y, mask = native_dropout(x, p)   -->  mask = MASK(...)
                                          y = native_dropout_backward(x, mask, 1 / (1 - p))

Passes differ in what makes the mask. The product is the operator of dropout's backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from roamc.graph import TrainGraph
from roamc.graph.storage_ids import STORAGES, id_of, ids_of
from roamc.operators.random import replay

aten = torch.ops.aten


@dataclass(frozen=True)
class Dropout:
    """What a call of ``aten.native_dropout``, or a replay of one, takes and makes.

    Attributes:
        x: the input.
        keep: probability with which an element is kept.
        dropped: fake tensor of the result.
        mask: fake tensor of the mask.
    """

    x: fx.Node
    keep: float
    dropped: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class MaskCall:
    """What is called for the mask: an operator with its positional and keyword arguments."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def dropout_of(node: fx.Node) -> Dropout | None:
    """Return the dropout that ``node`` calls or replays; None for another node, or a call that cannot be split.

    A call can be split if it drops, and its input, result and mask lie in three storages.
    """
    again = node.target is replay and len(node.args) == 5 and node.args[1] is aten.native_dropout.default
    if node.target is not aten.native_dropout.default and not again:
        return None
    source, share, train = node.args[2:] if again else (*node.args, None)[:3]
    if len(node.args) < 3 or train is False or not share or not isinstance(source, fx.Node):
        return None
    dropped, mask = node.meta["val"]
    x: torch.Tensor = source.meta["val"]
    if len({id_of(source), *ids_of(node)}) != 3 or x.dtype != dropped.dtype:
        return None
    return Dropout(source, 1.0 - float(share), dropped, mask)  # type: ignore[arg-type]


def take_apart(graph: fx.Graph, node: fx.Node, call: MaskCall, scale: float) -> dict[str, str]:
    """Turn the dropout ``node``, in place, into its mask, with a product behind it if its result is read.

    Args:
        graph: the graph of ``node``.
        node: of which :func:`dropout_of` says that it can be split; it becomes the call that makes the mask.
        call: the call that makes the mask.
        scale: what elements that are kept are multiplied by.

    Returns:
        Names of the nodes that picked its results, mapped to the names of the nodes that replace them.
    """
    dropout = dropout_of(node)
    assert dropout is not None, f"{node.name} is no dropout that can be split"
    of_dropped, of_mask = ids_of(node)
    picks: dict[fx.Node, Any] = {pick: pick.args[1] for pick in node.users}
    node.target, node.args, node.kwargs = call.target, call.args, dict(call.kwargs)
    node.meta = {**node.meta, "val": dropout.mask, STORAGES: (of_mask,)}
    parts = {1: node}
    if 0 in picks.values():
        with graph.inserting_after(node):
            product = aten.native_dropout_backward.default
            name = f"{node.name}_by_mask"
            parts[0] = graph.create_node("call_function", product, (dropout.x, node, scale), name=name)
        parts[0].meta = {**node.meta, "val": dropout.dropped, STORAGES: (of_dropped,)}
    for pick, position in picks.items():
        pick.replace_all_uses_with(parts[position])
        graph.erase_node(pick)
    return {pick.name: parts[position].name for pick, position in picks.items()}


def renamed(graph: TrainGraph, names: Mapping[str, str]) -> TrainGraph:
    """Return ``graph`` with ``names`` (old to new) replaced in ``saved``, ``gradients`` and ``waits``."""
    return graph.replace(
        saved=tuple(dict.fromkeys(names.get(name, name) for name in graph.saved)),
        gradients=tuple(dict.fromkeys(names.get(name, name) for name in graph.gradients)),
        waits={node: names.get(gradient, gradient) for node, gradient in graph.waits.items()},
    )

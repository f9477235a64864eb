"""Judge of a step whose parameters ``fully_shard`` holds in parts: it counts again what the trace says.

It looks at operators, groups and sizes alone, and shares nothing with what traces and moves gathers:

    a part        is read by casts, padding and gathers of its own group, and by nothing else
    a gather      joins as many parts as the group has ranks, and is read in the parameter's shape
    a gradient    is reduced over the ranks that have parts, then over those that have copies, and is their mean
    backward      reads a gather of its own, where forward's is to be given up
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from roamc.compat_fsdp import Sharding
from roamc.errors import VerifyError
from roamc.graph import output_node, placeholders

aten = torch.ops.aten
collective = torch.ops.roamc_collective
GATHER, SCATTER = collective.all_gather_into_tensor.default, collective.reduce_scatter_tensor.default
REDUCE = collective.all_reduce.default
CASTS = (aten._to_copy.default, aten.detach.default, aten.alias.default, aten.view.default, aten.clone.default)
PADS = (aten.constant_pad_nd.default, aten.slice.Tensor)


def check(graph: fx.Graph, names: Sequence[str], updated: Sequence[str], shardings: Mapping[str, Sharding]) -> None:
    """Check the gathers and reductions of a traced step.

    Args:
        graph: forward and backward; its first inputs are the parameters, its outputs the loss and the gradients.
        names: of the parameters, in the order of the inputs.
        updated: names of the parameters that have a gradient, in the order of the outputs.
        shardings: name of each parameter in parts to how it is held.

    Raises:
        VerifyError: names the parameter and the operator, and what is wrong with it.
    """
    inputs = dict(zip(names, placeholders(graph), strict=False))
    results: list[fx.Node] = list(output_node(graph).args[0])  # type: ignore[arg-type]
    gradients = dict(zip(updated, results[1:], strict=True))
    behind = _behind(graph, results[0])
    for name, sharding in shardings.items():
        if sharding.group:
            _check_gathers(inputs[name], name, sharding, behind)
        if name in gradients:
            _check_gradient(gradients[name], inputs[name], name, sharding)


def _behind(graph: fx.Graph, loss: fx.Node) -> set[fx.Node]:
    """All operators of backward: what stands behind the loss."""
    last = loss.all_input_nodes[0] if loss.target in CASTS else loss
    nodes = list(graph.nodes)
    return set(nodes[nodes.index(last) + 1 :])


def _check_gathers(part: fx.Node, name: str, sharding: Sharding, behind: set[fx.Node]) -> None:
    gathers = list(_gathers(part, name))
    for gather in gathers:
        _, ranks, group = gather.args
        _demand(group == sharding.group, name, gather, f"gathers over group {group}, not over {sharding.group}")
        _demand(ranks == sharding.ranks, name, gather, f"joins {ranks} parts of {sharding.ranks}")
        sent = gather.args[0].meta["val"]  # type: ignore[union-attr]
        _demand(sent.shape[sharding.dim] == sharding.rows, name, gather, "sends parts that are not of one length")
        _demand(sent.dtype is sharding.dtype, name, gather, f"sends {sent.dtype}, not {sharding.dtype}")
        for whole in _wholes(gather, sharding):
            _demand(
                tuple(whole.meta["val"].shape) == sharding.shape, name, whole,
                f"is read in shape {tuple(whole.meta['val'].shape)}, not {sharding.shape}",
            )  # fmt: skip
            late = [user for user in whole.users if user in behind] if gather not in behind else []
            if sharding.gathered_again and late:
                _demand(False, name, late[0], "reads in backward what forward has gathered")


def _gathers(node: fx.Node, name: str) -> Iterator[fx.Node]:
    """The gathers that read a part, through casts and padding."""
    for user in node.users:
        if user.target is GATHER:
            yield user
        elif user.target in (*CASTS, *PADS):
            yield from _gathers(user, name)
        else:
            _demand(user.op == "output", name, user, "reads a part as if it were the whole")


def _wholes(gather: fx.Node, sharding: Sharding) -> list[fx.Node]:
    """The nodes that stand for the whole: the gather, a slice of it, or its pieces joined along another dimension."""
    if sharding.dim:
        pieces = [piece for user in gather.users for piece in user.users]
        return list({joined: None for piece in pieces for joined in piece.users if joined.target is aten.cat.default})
    if tuple(gather.meta["val"].shape) == sharding.shape:
        return [gather]
    return list(gather.users)


def _check_gradient(gradient: fx.Node, part: fx.Node, name: str, sharding: Sharding) -> None:
    """Walk back from the gradient of a part to that of the whole."""
    scale, node = 1.0, gradient
    expected = {"part": part.meta["val"].shape, "dtype": part.meta["val"].dtype}
    _demand(gradient.meta["val"].shape == expected["part"], name, gradient, "has not the shape of the part")
    _demand(gradient.meta["val"].dtype is expected["dtype"], name, gradient, f"is not in {expected['dtype']}")
    node, scale = _back(node, scale, (*CASTS, *PADS) if sharding.group else CASTS, sharding.after)
    if sharding.copies_group:
        node, scale = _reduction(node, scale, name, REDUCE, sharding.copies, sharding.copies_group)
    if sharding.group:
        _demand(node.target is SCATTER, name, node, "gives a gradient that the ranks have not added up")
        _demand(node.args[2] == sharding.ranks, name, node, f"gives {node.args[2]} parts to {sharding.ranks} ranks")
        node, scale = _reduction(node, scale, name, SCATTER, sharding.ranks, sharding.reduced_by)
    if sharding.before not in (None, 1):
        node, scale = _back(node, scale, (), sharding.before)
    factor = (sharding.after or 1) * (sharding.before or 1)
    share = 1 / factor if sharding.reduction == "sum" and factor != 1 else 1 / (sharding.ranks * sharding.copies)
    _demand(abs(scale - share) < 1e-12, name, gradient, f"is {scale} times the sum over the ranks, not {share}")
    length = sharding.rows * sharding.ranks
    if sharding.group and not sharding.dim:
        _demand(node.meta["val"].shape[0] == length, name, node, f"is not padded to {length} rows")


def _back(node: fx.Node, scale: float, through: Sequence[Any], divisor: float | None) -> tuple[fx.Node, float]:
    """The first node in front of ``node`` that is no cast; divided once by ``divisor`` where there is one."""
    divides = divisor not in (None, 1)
    while node.target in through or (divides and node.target is aten.div.Tensor):
        if node.target is aten.div.Tensor:
            scale, divides = scale / float(node.args[1]), False  # type: ignore[arg-type]
        node = node.all_input_nodes[0]
    return node, scale


def _reduction(node: fx.Node, scale: float, name: str, target: Any, ranks: int, group: str) -> tuple[fx.Node, float]:
    """What a reduction reads, with ``scale`` divided where it gives a mean."""
    _demand(node.target is target, name, node, f"stands where {target} was to reduce over group {group}")
    _demand(node.args[-1] == group, name, node, f"reduces over group {node.args[-1]}, not over {group}")
    kind = node.args[1]
    _demand(kind in ("avg", "sum"), name, node, f"reduces by {kind}")
    return node.all_input_nodes[0], scale / ranks if kind == "avg" else scale


def _demand(holds: object, name: str, node: fx.Node, words: str) -> None:
    if not holds:
        raise VerifyError(f"fully_shard: {node.name} ({node.target}), for parameter {name!r}, {words}")

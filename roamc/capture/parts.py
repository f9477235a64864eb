"""DTensors in a training step: tensors of which every rank of a device mesh holds a part.

    before the step    parameters, buffers, optimizer state and batch: the part of this rank goes into the graph
    in the trace       DTensors are made of the parts again; what they send are collectives of the graph
    gradients          brought to the placements of their parameters as soon as they exist, then taken apart
    clipping           norms of parts are summed over the ranks that share a parameter
    update             element by element, on the parts; no rule of an optimizer here reads other elements

The live parameters and their optimizer state stay DTensors: the step writes to the memory of their parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from roamc import compat_dtensor
from roamc.compat_dtensor import is_dtensor
from roamc.compat_operators import foreach_order
from roamc.errors import CaptureError
from roamc.graph import operators
from roamc.graph.memory import WROTE_OVER
from roamc.graph.rewrite import Writer
from roamc.operators import ops

aten = torch.ops.aten


def check_placements(named: Mapping[str, torch.Tensor]) -> None:
    """Refuse DTensors that are sums over the ranks (``Partial``): an update of the addends is none of the sum.

    Args:
        named: name to parameter or buffer.

    Raises:
        CaptureError: names the first.
    """
    for name, tensor in named.items():
        if compat_dtensor.is_partial(tensor):
            raise CaptureError(
                f"{name} is placed as {compat_dtensor.describe(tensor)}: each rank holds an addend, which no optimizer "
                "can update; redistribute it to Shard or Replicate"
            )


def stand_in(part: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return what stands for ``real`` in the trace: a leaf of autograd made of ``part``, or ``part`` itself.

    A DTensor ``real`` gets a DTensor of the same mesh and placements; a plain tensor without gradient gets ``part``.

    Args:
        part: the traced part of this rank; all of the tensor where ``real`` is no DTensor.
        real: the live parameter, buffer or batch tensor.
    """
    if is_dtensor(real):
        return compat_dtensor.with_part(real, part.detach(), requires_grad=real.requires_grad)
    return part.detach().requires_grad_() if real.requires_grad else part


def place_gradient(tensor: torch.Tensor) -> None:
    """Register a hook on the traced DTensor ``tensor`` that brings its gradient to the placements of ``tensor``.

    Hooks that were registered before see the gradient as backward gives it, perhaps as a sum over the ranks. Nothing is
    done if ``tensor`` is no DTensor or requires no gradient.
    """
    if is_dtensor(tensor) and tensor.requires_grad:
        tensor.register_hook(lambda gradient: compat_dtensor.placed_as(gradient, tensor))


def check_clipping(graph: fx.Graph, parameters: Mapping[str, torch.Tensor], averaged: Collection[str]) -> None:
    """Refuse to clip gradients by their norm where nothing says which of them are parts of larger ones.

    Replicas that each rank clips by another norm would grow apart, silently.

    Args:
        graph: forward and backward.
        parameters: those that have gradients, by name.
        averaged: names of the parameters whose gradients DistributedDataParallel averages.

    Raises:
        CaptureError: the step calls collectives of its own, and no parameter is a DTensor.
    """
    if any(map(is_dtensor, parameters.values())) or parameters.keys() <= set(averaged):
        return
    if any(ops.rule(node.target).collective for node in operators(graph)):
        raise CaptureError(
            "clip_grad_norm needs to know which parameters are parts of larger ones, and this model sends between "
            "ranks without DTensors: use parallelize_module, or leave clip_grad_norm out"
        )


def clipped(
    writer: Writer, grads: Mapping[str, fx.Node], limit: float, parameters: Mapping[str, torch.Tensor]
) -> dict[str, fx.Node]:
    """Append ``clip_grad_norm_`` of the model's parameters, operator by operator; return the clipped gradients.

    A gradient in parts counts once, whatever the number of ranks, and so does one that every rank holds whole. As in
    torch the norms are added up in the order of the parameters, those of one dtype together. Torch clips in place, as
    ``meta[WROTE_OVER]`` of the clipped gradients says; here two parameters may share one gradient.

    Args:
        writer: writes into the graph, behind backward.
        grads: parameter name to the node of its gradient, on this rank; not empty.
        limit: the largest norm of all gradients together.
        parameters: name to live parameter, for all of the model's, in its order.
    """
    ordered = [name for name in parameters if name in grads]
    places = foreach_order([grads[name].meta["val"] for name in ordered])
    norms = {
        ordered[place]: writer.call(aten.linalg_vector_norm.default, grads[ordered[place]], 2.0) for place in places
    }
    shared: dict[tuple[str, ...], list[str]] = {}
    for name in norms:
        shared.setdefault(compat_dtensor.split_groups(parameters[name]), []).append(name)
    for groups, names in shared.items():
        if groups:
            norms.update(zip(names, _over_ranks(writer, [norms[name] for name in names], groups), strict=True))
    total = writer.call(aten.linalg_vector_norm.default, writer.call(aten.stack.default, list(norms.values())), 2.0)
    shifted = writer.call(aten.add.Tensor, total, 1e-6)
    ratio = writer.call(aten.mul.Tensor, writer.call(aten.reciprocal.default, shifted), limit)
    factor = writer.call(aten.clamp.default, ratio, None, 1.0)
    results = {name: writer.call(aten.mul.Tensor, grad, factor) for name, grad in grads.items()}
    for node in results.values():
        node.meta[WROTE_OVER] = True
    return results


def _over_ranks(writer: Writer, norms: Sequence[fx.Node], groups: Sequence[str]) -> list[fx.Node]:
    """Append the norms of whole gradients, of the ``norms`` of their parts on this rank, all in one collective a group.

    Each is squared, summed over the ranks, and its root taken, as torch does for DTensors.
    """
    squares = writer.call(aten.pow.Tensor_Scalar, writer.call(aten.stack.default, list(norms)), 2)
    for group in groups:
        squares = writer.call(torch.ops.roamc_collective.all_reduce.default, squares, "sum", group)
    whole = writer.call(aten.pow.Tensor_Scalar, squares, 0.5)
    return [writer.call(aten.select.int, whole, 0, index) for index in range(len(norms))]

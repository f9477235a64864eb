"""Workspace: memory that an operator takes for itself while it runs, beside its results; estimated.

No interface of torch tells how much. The rules here were read off the heap with torch 2.13; ``benchmarks/workspace.py``
measures it again. Where torch converts or copies an argument the rule is exact. Where the bytes depend on values
the estimate is at the upper end. Some operators take buffers for each of torch's threads.

    mul(float, bool)               a copy of the mask as floats
    mm, bmm in half precision      see :mod:`roamc.operators.costs.products`
    attention                      see :mod:`roamc.operators.costs.attention`
    convolutions                   see :mod:`roamc.operators.costs.convolutions`
    factors, inverses, powers      see :mod:`roamc.operators.costs.linear_algebra`
    by index, or sorted            see :mod:`roamc.operators.costs.lookups`
    collectives                    see :mod:`roamc.operators.costs.collectives`
    on a GPU                       see :mod:`roamc.operators.costs.gpu`
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

import numpy as np
import torch
from torch import fx

from roamc.compat_operators import tensors_in
from roamc.cost.kind import kind_of
from roamc.cost.tensor_objects import OBJECT
from roamc.graph import tensors_of
from roamc.graph.memory import Int64s, Operator, started_by
from roamc.operators import ops
from roamc.operators.blocks import widest
from roamc.operators.call import Call, call_of, fakes, tensor_at
from roamc.operators.costs.arguments import channels_last
from roamc.operators.costs.cost import Cost
from roamc.operators.costs.kinds import CONVERTING
from roamc.operators.fused import Fused
from roamc.operators.kernels import PIECE, kernel_of
from roamc.operators.random import replay
from roamc.units import Bytes


def workspace_bytes(node: fx.Node, threads: int, *, eager: bool = False) -> Bytes:
    """Estimate the most bytes that ``node`` allocates beside its arguments and results while it runs.

    Args:
        node: a ``call_function`` node with fake tensors in its metadata.
        threads: number of threads that torch computes with on a CPU.
        eager: estimate for eager PyTorch. Otherwise for an emitted program, in which kernels of
            :mod:`roamc.operators.kernels` may run in the place of torch's.

    Returns:
        Bytes; 0 where no workspace is known, as for every node that makes no tensor.
    """
    if isinstance(node.target, Fused):
        return group_workspace(node.target, threads)
    result = next(tensors_in(node.meta.get("val")), None)
    if result is None or node.target is operator.getitem:
        return 0
    call = call_of(node)
    cost = ops.rule(call.target).cost
    if result.device.type != "cpu":
        return 0 if cost.buffers is None else cost.buffers(call, result)
    copied = _copied(call, cost) + _fixed(call, result)
    if cost.thread_workspace is not None:
        copied += threads * cost.thread_workspace(call, result)
    single = cost.single_workspace if threads == 1 else None
    by_torch = eager or node.target is replay  # which calls the operator itself
    workspace = (cost.eager_workspace if by_torch else None) or single or cost.workspace
    if workspace is not None:
        return copied + workspace(call, result)
    if all(tensor.dtype == result.dtype for argument in node.all_input_nodes for _, tensor in tensors_of(argument)):
        return copied
    converts = not cost.any_dtypes and kind_of(node) in CONVERTING
    return copied + (_converted(call, result) if converts else 0)


def group_workspace(group: Fused, threads: int) -> Bytes:
    """Return the bytes that ``group`` takes for itself while it runs on a CPU with ``threads`` threads, or on a GPU.

    On a CPU these are the bytes of the values inside the group, of the views that are its blocks, and of its largest
    member. What a member takes beside its buffers for each thread, and those that it has for any number of rows, is in
    proportion to the rows of a block. On a GPU they are the bytes of partial sums over rows.
    """
    if not group.in_blocks:
        return group.block_bytes(threads)
    rows, count = group.block_rows(threads), group.matrix.rows
    largest: Bytes = 0
    for member in group.nodes:
        whole = workspace_bytes(member, 0)
        fixed = _fixed(call_of(member), next(tensors_in(member.meta["val"])))
        # Ours may work in pieces, which are as large in a block.
        least = 0 if kernel_of(member.target) is None else PIECE * widest([member])
        part = min(whole - fixed, max(-(-(whole - fixed) * rows // count), least))
        largest = max(largest, part + fixed + workspace_bytes(member, threads) - whole)
    views: int = -(-count // rows) * (1 + sum(node.op == "placeholder" for node in group.body.nodes))
    inside: Bytes = group.block_bytes(threads)
    return inside + largest + OBJECT * views


def workspaces(operators: Iterable[Operator], threads: int, *, eager: bool = False) -> Int64s:
    """Return :func:`workspace_bytes` of the node of each of n operators, int64[n]; arguments as there.

    What an operator takes that ends later than it starts is there at each operator until the one that waits for it.

    Args:
        operators: in the order in which they run.
        threads: as for :func:`workspace_bytes`.
        eager: as for :func:`workspace_bytes`.
    """
    nodes = [operator.node for operator in operators]
    own = np.array([workspace_bytes(node, threads, eager=eager) for node in nodes], dtype=np.int64)
    waits = [(start, at) for at, node in enumerate(nodes) if (start := started_by(node)) is not None]
    index = {node: at for at, node in enumerate(nodes)} if waits else {}
    total = own.copy()
    for start, wait in waits:
        total[index[start] + 1 : wait + 1] += own[index[start]]
    return total


def _fixed(call: Call, result: torch.Tensor) -> Bytes:
    """Return the bytes that a call takes on a CPU for any number of rows."""
    formula = ops.rule(call.target).cost.fixed_workspace
    return 0 if formula is None else formula(call, result)


def _copied(call: Call, cost: Cost) -> Bytes:
    """Return the bytes of the arguments that a CPU's kernel copies because their strides do not fit it."""
    arguments = [(tensor_at(call, at), fits) for at, fits in cost.read_as.items() if at < len(call.args)]
    again = [tensor for tensor, fits in arguments if not fits(tensor)]
    if cost.like_first and channels_last(tensor_at(call, 1)) != channels_last(tensor_at(call, 0)):
        again.append(tensor_at(call, 1))
    return sum(tensor.numel() * tensor.itemsize for tensor in again)


def _converted(call: Call, result: torch.Tensor) -> Bytes:
    """Return the bytes of the arguments of a pointwise operator, converted to the dtype that it computes in."""
    read = [tensor for tensor in tensors_in(fakes([*call.args, *call.kwargs.values()])) if tensor.dim()]
    if not read:
        return 0
    computed = functools.reduce(torch.promote_types, [tensor.dtype for tensor in read])
    if result.dtype.is_floating_point and not (computed.is_floating_point or computed.is_complex):
        computed = result.dtype
    return sum(tensor.numel() * computed.itemsize for tensor in read if tensor.dtype != computed)

"""padding: on a GPU, wide matrices get rows that begin at multiples of 128 bytes, which products read and write fast.

    rewrite:  y = aten.mm(a, b)            -->  y = roamc.padded_mm(a, b)       in 16 bits, of 50,257 columns, say
              x = op(...); z = mm(x, w)    -->  x = op(...); r = roamc.padded_rows(x); z = mm(r, w)
    checks:   what the decision names is a tensor of its own, in 16 bits on a GPU, with rows that are not aligned; no
              output of the graph and never written in place; all readers give what they gave, and views stay views;
              the user allows another order of sums: ``numerics="fast"``

Logits and their gradient are such matrices where the vocabulary is no multiple of 8. A copy joins the kernel that makes
the gradient, see pass ``fuse``, and costs nothing; behind an operator that moves rows, as of shifted labels, it runs
alone. What has no padded rows behind this pass, such as a user's output, is copied piece by piece by pass ``products``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roamc.compat_operators import tensors_in
from roamc.cost.slow_products import is_large, may_be_slow, slow_for_rows, tensors_of_product
from roamc.errors import PlanError
from roamc.graph import TrainGraph, operators, tensors_of
from roamc.graph.keep import is_kept
from roamc.graph.memory import fills_storage
from roamc.graph.rewrite import Writer, derived, mode_of
from roamc.graph.storage_ids import lie_in, number_result
from roamc.operators import ops
from roamc.operators.aligned import ALIGNED, is_aligned
from roamc.operators.blocks import base_of
from roamc.operators.gpu.printed import printed
from roamc.operators.padded import WITH_PADDED_ROWS, padded_like, pitch_of, rows_padded
from roamc.options import Options
from roamc.rewriting.versions import up_to_date

NAME = "padding"

MOST = 9 / 8
"""Rows are padded that take at most so many times the memory; few columns would take much more."""


@dataclass(frozen=True)
class Decision:
    """A decision names the tensors that get padded rows.

    Attributes:
        tensors: names of the operators that make them, in graph order.
    """

    tensors: tuple[str, ...] = ()


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Find what large products read or write that gets faster with padded rows; ``graph`` stays as it is.

    The decision is empty unless ``options.numerics`` is "fast", and on a CPU; and where pass ``fuse`` is left out, for
    ATen's kernels of norms and losses copy what has rows apart. A product's result is padded only where both factors
    are aligned, or padded as well; another operator's only if a kernel may make it, so that no copy is made. Nothing is
    padded that would take more than :data:`MOST` times the memory.
    """
    if options.numerics != "fast" or "fuse" in options.disable:
        return Decision()
    slow = [node for node in operators(graph.graph) if slow_for_rows(node) and is_large(node)]
    fitting: dict[fx.Node, None] = {}
    for node in sorted({base for product in slow for base in _bases(product)}):
        if node.target in WITH_PADDED_ROWS:
            cheap = all(base in fitting for base in _bases(node) if base is not node)
        else:
            cheap = printed(node.target) is not None
        if cheap and _fits(graph, node) and _growth(node.meta["val"]) <= MOST:
            fitting[node] = None
    return Decision(tuple(node.name for node in fitting))


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Pad the rows of the tensors that the decision names; the FX graph is changed in place.

    Raises:
        PlanError: a name in the decision is no operator of the graph, or its result cannot have padded rows.
    """
    if not decision.tensors:
        return graph
    nodes = {node.name: node for node in operators(graph.graph)}
    mode = mode_of(graph.graph)
    phase = dict(graph.phase)
    for name in decision.tensors:
        if mode is None or name not in nodes or not _fits(graph, nodes[name]):
            raise PlanError(f"{name!r} is no tensor in 16 bits on a GPU whose rows can be padded in this graph")
        node = nodes[name]
        if node.target in WITH_PADDED_ROWS:
            node.target = WITH_PADDED_ROWS[node.target]
        else:
            writer = Writer(graph.graph, mode, phase[name])
            writer.like = node
            with graph.graph.inserting_before(node.next):
                copy = writer.call(rows_padded, node)
            node.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)  # type: ignore[misc]
            phase |= writer.phase
            node = copy
        for each in (node, *_views(node)):
            each.meta["val"] = derived(each, mode)
            number_result(each)
    return up_to_date(graph, phase)


def _bases(product: fx.Node) -> list[fx.Node]:
    """What makes the matrices of a product, it included, that have rows which are not aligned."""
    matrices = [value for value in (*product.args[-2:], product) if isinstance(value, fx.Node)]
    return [base_of(value) for value in matrices if not is_aligned(value.meta["val"])]


def _growth(tensor: torch.Tensor) -> float:
    """How many times the memory of a tensor it takes with padded rows."""
    columns = int(tensor.shape[-1])
    return pitch_of(columns, tensor.itemsize) / columns


def _views(base: fx.Node) -> list[fx.Node]:
    """The views of a node, and views of these, in graph order."""
    mine = [user for user in base.users if ops.is_view(user.target)]
    return sorted({*mine, *(view for node in mine for view in _views(node))})


def _fits(graph: TrainGraph, node: fx.Node) -> bool:
    """Whether the result of ``node`` may have padded rows: nobody sees them but views and operators that stay the same.

    The result is a tensor of its own, as plain as can be, and no output.
    """
    value, mode = node.meta.get("val"), mode_of(graph.graph)
    if not isinstance(value, torch.Tensor) or node.op != "call_function" or is_kept(node):
        return False
    if ops.is_view(node.target) or ops.rule(node.target).mutates:
        return False
    plain = value.dim() > 1 and value.is_contiguous() and fills_storage(value) and bool(value.numel())
    if not plain or not may_be_slow(value) or value.shape[-1] * value.itemsize % ALIGNED == 0:
        return False
    if node.target in WITH_PADDED_ROWS and not tensors_of_product(node):  # it has factors
        return False
    assert mode is not None, "a graph with a tensor has a fake mode"
    with mode:
        values: dict[fx.Node, torch.Tensor] = {node: padded_like(value, value.shape)}
        return all(_stays(reader, values, value) for reader in _behind(node))


def _behind(node: fx.Node) -> list[fx.Node]:
    """What reads a node or views of it, the views included, in graph order."""
    return sorted({user for base in (node, *_views(node)) for user in base.users})


def _stays(reader: fx.Node, values: dict[fx.Node, torch.Tensor], rows: torch.Tensor) -> bool:
    """Whether an operator gives what it gave with other memory for what ``values`` has; of a view its value is noted.

    A view has to be one still, of the same elements of ``rows``, and everything else has to lie as it lay.
    """
    rule = ops.rule(reader.target) if reader.op == "call_function" else None
    if rule is None or rule.mutates or rule.may_draw or rule.collective:
        return False
    blind = (*rule.dense, *((0,) if rule.whole_storage else ()))  # to strides: it reads memory as it comes
    if any(at in blind for at, argument in enumerate(reader.args) if _reads(argument, values)):
        return False

    def value(node: fx.Node) -> Any:
        return values.get(node, node.meta["val"])

    try:
        result = reader.target(*fx.map_arg(reader.args, value), **fx.map_arg(reader.kwargs, value))  # type: ignore[operator]
    except (RuntimeError, ValueError):  # no view of such memory
        return False
    if ops.is_view(reader.target):
        values[reader] = result
        is_one = isinstance(result, torch.Tensor) and lie_in(values[reader.all_input_nodes[0]], [result])
        return is_one and _has_same_elements(result, reader.meta["val"], rows)
    after = [(tensor.shape, tensor.stride()) for tensor in tensors_in(result)]
    return after == [(tensor.shape, tensor.stride()) for _, tensor in tensors_of(reader)]


def _reads(argument: object, values: dict[fx.Node, torch.Tensor]) -> bool:
    """Whether an argument is a node that ``values`` has."""
    return isinstance(argument, fx.Node) and argument in values


def _has_same_elements(view: torch.Tensor, before: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether a view of padded rows has the elements that it had of ``rows``, none of them from behind a row."""
    columns, pitch = rows.shape[-1], pitch_of(rows.shape[-1], rows.itemsize)
    row, column = divmod(int(view.storage_offset()), pitch)
    steps = [divmod(int(stride), pitch) for stride in view.stride()]
    last = column + sum((size - 1) * near for size, (_, near) in zip(view.shape, steps, strict=True))
    apart = all(not near or not far for far, near in steps)  # no step to another row and another column
    strides = tuple(far * columns + near for far, near in steps)
    lies = (strides, row * columns + column, view.itemsize)
    return apart and last < columns and lies == (before.stride(), before.storage_offset(), rows.itemsize)

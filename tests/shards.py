"""Tensor parallelism without processes: the graph of one rank, captured by itself, and all ranks run in lockstep."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from roamc.graph import TrainGraph, copied, output_values, placeholders
from roamc.operators import ops
from roamc.operators.counter import own_seeds
from roamc.operators.shards import FOREIGN, own_classes, own_indices, own_part
from roamc.options import Options
from roamc.passes import normalize
from tests.graphs import joint_graph
from tests.parallel import COLUMNS, ROWS, Model, batch, build

GROUP = "ranks of this test"  # and no process group of another one
COLLECTIVES: Any = torch.ops.roamc_collective


class _Enter(torch.autograd.Function):
    """All ranks read the argument; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return COLLECTIVES.all_reduce(grad, "sum", GROUP)  # type: ignore[no-any-return]


class _Leave(torch.autograd.Function):
    """The sum of what the ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return COLLECTIVES.all_reduce(x, "sum", GROUP)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)


class Columns(nn.Module):
    """The outputs of a linear layer that rank ``rank`` of ``ranks`` has."""

    def __init__(self, whole: nn.Linear, rank: int, ranks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks, 0)[rank].clone())
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().chunk(ranks, 0)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_Enter.apply(x), self.weight, self.bias)


class Rows(nn.Module):
    """A linear layer of which every rank has a part of the inputs; the bias is added once."""

    def __init__(self, whole: nn.Linear, rank: int, ranks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks, 1)[rank].clone())
        self.bias = whole.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Leave.apply(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class _Beside(torch.autograd.Function):
    """What the ranks have, side by side along the last dimension; the gradient of a rank is its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, ranks: int) -> Tensor:
        ctx.rank, ctx.size = rank, x.shape[-1]
        whole = torch.cat(COLLECTIVES.all_gather_into_tensor(x, ranks, GROUP).split(x.shape[0]), -1)
        return torch.ops.aten.slice.Tensor(whole, -1, 0, whole.shape[-1])  # as DTensor cuts what it gathers

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad.split(ctx.size, -1)[ctx.rank].contiguous(), None, None


class Classes(Columns):
    """A linear layer of which every rank has a part of the outputs, which all ranks then read."""

    def __init__(self, whole: nn.Linear, rank: int, ranks: int) -> None:
        super().__init__(whole, rank, ranks)
        self.rank, self.ranks = rank, ranks

    def forward(self, x: Tensor) -> Tensor:
        return _Beside.apply(super().forward(x), self.rank, self.ranks)  # type: ignore[no-any-return]


def split(model: nn.Module, rank: int, ranks: int) -> nn.Module:
    """The part of ``model`` that rank ``rank`` has; its layers named COLUMNS and ROWS are replaced."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name in COLUMNS + ROWS:
                setattr(parent, name, (Columns if name in COLUMNS else Rows)(child, rank, ranks))
    return model


def normal_form(model: nn.Module, tokens: Sequence[Any]) -> TrainGraph:
    """Forward and backward of ``model(*tokens)`` as pass shard gets them."""
    graph = joint_graph(model, tokens)
    return normalize.apply(graph, normalize.decide(graph, Options()))


@functools.cache
def _captured(kind: str, ranks: int, layers: int, length: int) -> TrainGraph:
    return normal_form(split(build(kind, layers), 0, ranks), (batch(length=length),))


def captured(kind: str, ranks: int = 2, layers: int = 1, length: int = 12) -> TrainGraph:
    """The graph of one rank of a model of ``tests.parallel``: the caller's to change."""
    return copied(_captured(kind, ranks, layers, length))


def inputs_of(kind: str, ranks: int, layers: int = 1, length: int = 12) -> list[list[Any]]:
    """What each rank calls its graph with: its parameters, the batch, and a tangent of one."""
    models = [split(build(kind, layers), rank, ranks) for rank in range(ranks)]
    return [[*(p.detach() for p in model.parameters()), batch(length=length), torch.ones(())] for model in models]


def one_rank(kind: str, layers: int = 1) -> tuple[Model, Tensor]:
    """The model after a backward of eager PyTorch on one rank, and its loss."""
    model = build(kind, layers)
    torch.manual_seed(0)
    loss = model(batch())
    loss.backward()
    return model, loss.detach()


@torch.no_grad()
def run_ranks(graph: TrainGraph, inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Run ``graph`` on all ranks, one operator after the other; random numbers are the same on all.

    Returns:
        For each rank what the graph returns.
    """
    ranks = len(inputs)
    values: dict[fx.Node, list[Any]] = {
        node: [rank_inputs[at] for rank_inputs in inputs] for at, node in enumerate(placeholders(graph.graph))
    }
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        calls = [
            (
                fx.map_arg(node.args, lambda n, r=rank: values[n][r]),
                fx.map_arg(node.kwargs, lambda n, r=rank: values[n][r]),
            )
            for rank in range(ranks)
        ]
        values[node] = _run(node, calls)
    outputs = output_values(graph.graph)
    return [[None if node is None else values[node][rank] for node in outputs] for rank in range(ranks)]


def _run(node: fx.Node, calls: Sequence[tuple[Any, Any]]) -> list[Any]:
    target: Any = node.target
    if target is own_part:
        return [args[0].chunk(args[1])[rank].clone() for rank, (args, _) in enumerate(calls)]
    if target is own_indices:
        return [args[0].chunk(args[3])[rank].clone() for rank, (args, _) in enumerate(calls)]
    if target is own_seeds:
        return [args[0] + torch.tensor([0, rank * args[1]]) for rank, (args, _) in enumerate(calls)]
    if target is own_classes:
        return [_own_classes(*args, rank=rank) for rank, (args, _) in enumerate(calls)]
    if getattr(target, "namespace", "") == "roamc_collective":
        kind = target._schema.name.rpartition("::")[2].removeprefix("start_")
        return _communicate(kind, [args for args, _ in calls])
    if ops.rule(target).may_draw:
        state, drawn = torch.get_rng_state(), []
        for args, kwargs in calls:
            torch.set_rng_state(state)
            drawn.append(target(*args, **kwargs))
        return drawn
    return [target(*args, **kwargs) for args, kwargs in calls]


def _own_classes(target: Tensor, classes: int, ignored: int, ranks: int, group: object, *, rank: int) -> Tensor:
    own = (target // classes == rank) & (target != ignored)
    return torch.where(own, target % classes, FOREIGN)


def _communicate(kind: str, args: Sequence[Any]) -> list[Any]:
    inputs = [each[0] for each in args]
    if kind == "all_reduce" and args[0][1] == "max":
        return [torch.stack(inputs).amax(0) for _ in inputs]
    if kind == "all_reduce":
        return [sum(inputs[1:], inputs[0]).clone() for _ in inputs]
    if kind == "all_reduce_coalesced":
        return [[sum(part[1:], part[0]) for part in zip(*inputs, strict=True)] for _ in inputs]
    if kind == "all_gather_into_tensor":
        return [torch.cat(inputs) for _ in inputs]
    if kind == "all_gather_mm":
        gathered = torch.cat(inputs)
        results = []
        for _, others, _, _, whole, biases in args:
            products = [_product(gathered, *pair) for pair in zip(others, biases or [None] * len(others), strict=True)]
            results.append([*products, *([gathered] if whole else [])])
        return results
    if kind == "mm_reduce_scatter":
        sums = []
        for lefts, others, bias, *_ in args:
            first, *rest = zip(lefts, others, strict=True)
            sums.append((sum((a @ b for a, b in rest), _product(*first, bias)),))
        return _communicate("reduce_scatter_tensor", sums)
    if kind == "reduce_scatter_tensor":
        return [part.clone() for part in sum(inputs[1:], inputs[0]).chunk(len(inputs))]
    raise AssertionError(kind)


def _product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return left @ right if bias is None else torch.addmm(bias, left, right)


def counted(graph: TrainGraph) -> dict[tuple[str, str], int]:
    """How many collectives there are, split or not: (phase, operator) to a number."""
    counts: dict[tuple[str, str], int] = {}
    for node in graph.graph.nodes:
        if getattr(node.target, "namespace", "") == "roamc_collective":
            key = graph.phase[node.name].name, node.target._schema.name.rpartition("::")[2].removeprefix("start_")
            counts[key] = counts.get(key, 0) + 1
    return counts


def joined(parts: list[Tensor], shape: torch.Size) -> Tensor:
    """The tensor of this shape of which every rank has a part, or the same as all others."""
    dims = [dim for dim, size in enumerate(shape) if parts[0].shape[dim] != size]
    return torch.cat(parts, dims[0]) if dims else parts[0]

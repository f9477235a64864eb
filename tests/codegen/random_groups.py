"""Random functions for groups on a CPU, most on square matrices, where rows and columns are mixed up unnoticed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from roamc.operators import blocks, ops
from roamc.operators.fused import Fused, fuse
from tests.graphs import traced

aten = torch.ops.aten
Unary = Callable[[Tensor], Tensor]

UNARY: tuple[Unary, ...] = (
    torch.sin,
    torch.neg,
    lambda x: x * 2,
    torch.sigmoid,
    lambda x: x.double(),
    lambda x: x.float(),
    lambda x: x.abs() + 1,
)
BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: aten.silu_backward(x.float().expand_as(x * y), (x * y).float()),
)
ALONG: tuple[Unary, ...] = (
    lambda x: x.sum(-1, keepdim=True),
    lambda x: x.mean(-1, keepdim=True),
    lambda x: x.amax(-1),
    lambda x: x.sum(-1),
    lambda x: x.sum(-1).unsqueeze(-1),
    lambda x: x.sum(-1).unsqueeze(0),
    lambda x: x.sum(0),
    lambda x: x.amax(-2, keepdim=True),
    lambda x: torch.softmax(x, -1),
    lambda x: torch.softmax(x, 0),
    lambda x: torch.log_softmax(x, -1),
)
VIEWS: tuple[Unary, ...] = (
    lambda x: x.transpose(-1, -2),
    lambda x: x.reshape(-1, x.shape[-1]),
    lambda x: x.unsqueeze(-1),
    lambda x: x.unsqueeze(0),
    lambda x: x.expand(2, *x.shape),
    lambda x: x[1:],
    lambda x: x.view(x.shape[::-1]),
)
STEPS = {"unary": UNARY, "binary": BINARY, "along": ALONG, "view": VIEWS}


def operands(rng: random.Random) -> list[Tensor]:
    """Up to three tensors that broadcast to one shape: the first has all its elements."""
    size = rng.choice((4, 6, 9))
    shape = rng.choice(((size, size), (size, size), (size, 3 * size), (2, size, size), (size, size, size), (3, 4, 8)))
    kinds: dict[str, Callable[[], Tensor]] = {
        "all": lambda: torch.randn(shape),
        "row": lambda: torch.randn(*shape[:-1], 1),
        "column": lambda: torch.randn(shape[-1]),
        "one": lambda: torch.randn([1] * len(shape)),
        "number": lambda: torch.randn(()),
        "transposed": lambda: torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2),
        "expanded": lambda: torch.randn(*shape[:-1], 1).expand(shape),
    }
    return [kinds["all"](), *(kinds[rng.choice(list(kinds))]() for _ in range(rng.randint(0, 2)))]


def function(rng: random.Random) -> Callable[..., Tensor]:
    """A function of two to six steps, each on earlier values."""
    kinds = ("unary", "unary", "binary", "binary", "binary", "along", "along", "view")
    steps = [(rng.choice(kinds), rng.random(), rng.random(), rng.random()) for _ in range(rng.randint(2, 6))]

    def run(*inputs: Tensor) -> Tensor:
        values = list(inputs)
        for kind, which, other, late in steps:
            x = values[-1] if late < 0.7 else values[int(late * 31) % len(values)]
            step: Any = STEPS[kind][int(which * len(STEPS[kind]))]
            values.append(step(x, values[int(other * len(values))]) if kind == "binary" else step(x))
        return values[-1]

    return run


@dataclass(frozen=True)
class Case:
    """A group, whether it may be one or not.

    Attributes:
        group: all operators of a random function.
        misfit: why pass fuse would not make it; "" if it would.
        arguments: of the group.
        wanted: what the operators give one by one.
    """

    group: Fused
    misfit: str
    arguments: Sequence[Tensor]
    wanted: Tensor


def random_case(seed: int) -> Case | None:
    """A group made of all operators of a random function; None if the function fails or has no rows to go through."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    run, inputs = function(rng), operands(rng)
    try:
        graph = traced(run, *inputs).graph
    except (RuntimeError, IndexError, ValueError):  # shapes that do not go together
        return None
    graph.eliminate_dead_code()
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    while nodes and ops.is_view(nodes[0].target):
        nodes = nodes[1:]
    matrix = Fused.frame(nodes[-1]) if nodes and not ops.is_view(nodes[-1].target) else None
    if matrix is None:
        return None
    fit = all(ops.is_view(node.target) or blocks.fits(node, matrix) for node in nodes)
    misfit = Fused.misfit(nodes, matrix, 1) if fit else "an operator does not fit"
    values = _Values(fx.GraphModule({}, graph))
    values.run(*inputs)
    try:
        group, read = fuse(nodes[-1], nodes)
        _ = group.text, group.block_rows(1)
    except (ValueError, AttributeError):  # what does not fit has no text
        assert misfit, "a group that fits has a text"
        return None
    return Case(group, misfit, [values.of[node.name] for node in read], values.of[nodes[-1].name])


class _Values(fx.Interpreter):
    """Runs a graph and keeps the value of every node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.of: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.of[n.name] = value = super().run_node(n)
        return value

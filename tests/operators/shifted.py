"""Kernels of random groups that move columns, under Triton's interpreter and judged. Run as a program.

What is compared, and how, says :mod:`tests.operators.interpreted`.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import argparse
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from roamc.codegen.group_verdicts import GroupFault, Place
from roamc.codegen.kernel_judge import judge_kernel
from roamc.operators import blocks, ops
from roamc.operators.fused import fuse
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.launch import jit_functions
from roamc.operators.gpu.lines import DoesNotPrintError
from tests.operators.interpreted import DTYPES, ERROR, difference

aten = torch.ops.aten

Operands = Sequence[Tensor]
Move = Callable[[Tensor, Operands], Tensor]


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def rotary(x: Tensor, others: Operands) -> Tensor:
    return x * others[0] + rotated(x) * others[1]


def rotary_backward(x: Tensor, others: Operands) -> Tensor:
    sizes, half = list(x.shape), x.shape[-1] // 2
    product = x * others[1]
    right = aten.slice_backward(-product[..., : x.shape[-1] - half], sizes, x.dim() - 1, half, 2**63 - 1, 1)
    left = aten.slice_backward(product[..., x.shape[-1] - half :], sizes, x.dim() - 1, 0, half, 1)
    return right + left + x * others[0]


def partial(x: Tensor, others: Operands) -> Tensor:
    """The rotary embedding of GPT-NeoX: of the first columns alone."""
    first = max(2, x.shape[-1] // 3)
    turned, passed = x[..., :first], x[..., first:]
    return torch.cat([turned * others[0][..., :first] + rotated(turned) * others[1][..., :first], passed], -1)


def three(x: Tensor, others: Operands) -> Tensor:
    one, two = x.shape[-1] // 4, x.shape[-1] // 2
    return torch.cat([x[..., two:] * 2, others[0].expand_as(x)[..., :one], x[..., one:two].sigmoid()], -1)


def gated(x: Tensor, others: Operands) -> Tensor:
    left, right = x.chunk(2, -1)
    width = right.shape[-1]
    return torch.cat([left[..., :width] * right, right, x[..., 2 * width :], x[..., : x.shape[-1] % 2 * 0]], -1)


def padded(x: Tensor, others: Operands) -> Tensor:
    width = max(2, x.shape[-1] // 3)
    return x - aten.slice_backward((x * 2)[..., :width], list(x.shape), x.dim() - 1, 1, 1 + width, 1)


def with_largest(x: Tensor, others: Operands) -> Tensor:
    return torch.cat([x[..., 1:], x.amax(-1, keepdim=True)], -1) * others[0]


def normed(x: Tensor, others: Operands) -> Tensor:
    """A norm of each head, as in Qwen3, in front of the rotary embedding."""
    return rotary(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1), others)


MOVES: dict[str, Move] = {
    "rotary": rotary,
    "backward": rotary_backward,
    "partial": partial,
    "three": three,
    "gated": gated,
    "padded": padded,
    "largest": with_largest,
    "normed": normed,
}
PLAIN: tuple[Move, ...] = (
    lambda x, others: x * 0.5 + 1,
    lambda x, others: -x,
    lambda x, others: x.float() - others[1],
    lambda x, others: x * others[0].abs(),
)


def inputs(rng: random.Random) -> list[Tensor]:
    """Heads, laid out head by head or token by token, and two tensors that broadcast to them, such as cos and sin."""
    columns, dtype = rng.choice((4, 6, 7, 16, 33, 40)), rng.choice(DTYPES)
    if rng.random() < 0.3:
        shape = [rng.choice((1, 5)), columns]
        heads = torch.randn(shape).to(dtype)
    else:
        shape = [2, 3, 5, columns]
        kind = rng.choice(("plain", "transposed", "part"))
        heads = torch.randn(2, 5, 3, 2 * columns).to(dtype)[..., 3 : 3 + columns].transpose(1, 2)
        heads = heads if kind == "part" else heads.contiguous()
        heads = heads.transpose(1, 2).contiguous().transpose(1, 2) if kind == "transposed" else heads
    sizes = rng.choice((shape[-2:], shape[-1:], [*shape[:-1], 1], shape))
    return [heads, *(torch.randn(sizes).to(dtype) for _ in range(2))]


def random_case(rng: random.Random) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A function with one to three moves of columns, among other operators, and its operands."""
    steps: list[Move] = [rng.choice(list(MOVES.values())) for _ in range(rng.choice((1, 1, 2)))]
    steps += [rng.choice(PLAIN) for _ in range(rng.randint(0, 3))]
    rng.shuffle(steps)

    order = rng.choice(([0, 1, 2, 3], [0, 2, 1, 3], [1, 0, 2, 3], [2, 1, 0, 3]))

    def run(x: Tensor, *others: Tensor) -> Tensor:
        for step in steps:
            x = step(x, [other.expand(x.shape) if other.shape[-1] == 1 else other for other in others])
        return x.permute(order).clone(memory_format=torch.contiguous_format) if x.dim() == 4 else x

    return run, inputs(rng)


class Values(fx.Interpreter):
    """Runs a graph and keeps the value of every node by its name."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule({}, graph))
        self.of: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.of[n.name] = value = super().run_node(n)
        return value


def compare(function: Callable[..., Tensor], operands: Sequence[Tensor]) -> str | None:
    """Say how the kernel of ``function`` differs from it; "" if it does not, and None if it does not print."""
    graph = make_fx(function, tracing_mode="fake")(*operands).graph
    graph.eliminate_dead_code()
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    members = [node for node in nodes if not ops.is_view(blocks.base_of(node).target) and blocks.base_of(node) in nodes]
    group, read = fuse(members[-1], members, FusedKernel, members[-1:])
    try:
        text = group.text
    except (DoesNotPrintError, AssertionError):
        return None
    values = Values(graph)
    values.run(*operands)
    args, want = [values.of[node.name] for node in read], values.of[members[-1].name]
    places = [Place(one.untyped_storage().data_ptr(), one.storage_offset() * one.itemsize) for one in args]
    try:
        judge_kernel(group.body, text, places, [Place("out")])
    except GroupFault as fault:
        return f"the judge of kernels refuses: {fault}\n{text.source}"
    fake = blocks.only_tensor(group.results[0])
    out = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).fill_(float("nan"))
    jit_functions(text)(args, [out])
    narrowest = max(ERROR[one.dtype] for one in (*args, want))
    said = difference(out, want, narrowest * (1 + len(group.nodes) / 4), group.nodes)
    return f"{said}:\n{text.source}" if said else ""


def main() -> None:
    """Compare ``--count`` random groups; exits with 1 if a kernel differs, or few of them print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    how = parser.parse_args()
    wrong, printed = [], 0
    for number in range(how.count):
        rng = random.Random(how.seed * 100_000 + number)
        torch.manual_seed(number)
        function, operands = random_case(rng)
        said = compare(function, operands)
        printed += said is not None
        lies = [(tuple(one.shape), one.stride(), one.dtype) for one in operands]
        wrong += [f"{number}, {lies}: {said}"] if said else []
    wrong += [f"only {printed} of {how.count} print"] if 2 * printed < how.count else []
    print(f"{len(wrong)} wrong, {printed} printed\n" + "\n\n".join(wrong[:3]))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

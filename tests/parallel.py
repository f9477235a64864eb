"""Small models for several ranks, four ways to split them, and their gradients gathered for a comparison with one rank.

| split              | what a rank has                        | who communicates                                  |
|--------------------|----------------------------------------|---------------------------------------------------|
| parallelize_module | a part of every matrix, as DTensor     | DTensor: functional collectives in the graph      |
| plain collectives  | a part of every matrix                 | autograd functions of ours around dist.all_reduce |
| DDP                | the model, and a part of the batch     | torch's reducer, outside the graph                |
| fully_shard        | a part of every parameter and of batch | FSDP's hooks, between graphs                      |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WIDTH, HEADS, VOCAB = 32, 8, 48
COLUMNS, ROWS = ("q", "k", "v", "up", "gate"), ("o", "down")
"""Names of the linear layers that are cut along their outputs, and of those that are cut along their inputs."""


class Block(nn.Module):
    """One layer. ``kind``: "gpt" (causal, norm first), "llama" (grouped keys, rotary, gated) or "bert" (norm last)."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind, self.size = kind, WIDTH // HEADS
        llama = kind == "llama"
        keys = WIDTH // 2 if llama else WIDTH  # two queries share a key
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=not llama), nn.Linear(WIDTH, WIDTH, bias=not llama)
        self.k, self.v = nn.Linear(WIDTH, keys, bias=not llama), nn.Linear(WIDTH, keys, bias=not llama)
        self.up, self.down = nn.Linear(WIDTH, 64, bias=not llama), nn.Linear(64, WIDTH, bias=not llama)
        self.gate = nn.Linear(WIDTH, 64, bias=False) if llama else None
        self.drop = nn.Dropout(dropout)

    def attend(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (part(x).view(b, s, -1, self.size).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.kind == "llama":
            q, k = rotated(q), rotated(k)
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.kind != "bert")
        return self.o(y.transpose(1, 2).reshape(b, s, -1))

    def feed(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "bert":
            x = self.norm1(x + self.drop(self.attend(x)))
            return self.norm2(x + self.drop(self.feed(x)))
        x = x + self.drop(self.attend(self.norm1(x)))
        return x + self.drop(self.feed(self.norm2(x)))


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding over the last two dimensions of (batch, heads, length, size)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * 0.5 ** torch.arange(half)[None]
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1)


class Model(nn.Module):
    """Embedding, blocks, head; ``model(tokens)`` is the loss."""

    def __init__(self, kind: str, layers: int = 2) -> None:
        super().__init__()
        dropout = 0.1 if kind == "bert" else 0.0
        self.tokens, self.drop = nn.Embedding(VOCAB, WIDTH), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(kind, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.roll(-1, 1).flatten())


@contextlib.contextmanager
def some_group() -> Iterator[None]:
    """A process group of this process alone, unless it has one: cases of collectives' kernels leave theirs."""
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if ours:
            dist.destroy_process_group()


KINDS = ("gpt", "llama", "bert")

BOUND = 5e-7
"""Largest relative error of a gradient, against that of one rank."""


def build(kind: str, layers: int = 2) -> Model:
    """The same weights in every process."""
    torch.manual_seed(0)
    return Model(kind, layers)


SHORT = 12
"""Tokens in a row of the batch, where nothing else is said."""


def batch(size: int = 4, length: int = SHORT) -> Tensor:
    """The whole batch."""
    return torch.randint(0, VOCAB, (size, length), generator=torch.Generator().manual_seed(1))


class _Enter(torch.autograd.Function):
    """Every rank reads the whole argument; its gradient is the sum of what they give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Leave(torch.autograd.Function):
    """The sum of what the ranks have; all get its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Columns(nn.Module):
    """This rank's outputs of a linear layer."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(own(whole.weight, 0))
        self.bias = None if whole.bias is None else nn.Parameter(own(whole.bias, 0))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_Enter.apply(x), self.weight, self.bias)


class Rows(nn.Module):
    """A linear layer of which every rank has a part of the inputs."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(own(whole.weight, 1))
        self.bias = whole.bias

    def forward(self, x: Tensor) -> Tensor:
        y = _Leave.apply(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


def own(whole: Tensor, dim: int) -> Tensor:
    """This rank's part."""
    return whole.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def split_by_hand(model: Model) -> Model:
    """Tensor parallelism without DTensor."""
    for block in model.blocks:
        for names, part in ((COLUMNS, Columns), (ROWS, Rows)):
            for name in names:
                if getattr(block, name) is not None:
                    setattr(block, name, part(getattr(block, name)))
    return model


def split_by_dtensor(model: Model) -> Model:
    """Tensor parallelism by torch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS if getattr(block, name) is not None}
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in ROWS})
    return model


def sharded(model: Model) -> Model:
    """Every block by itself, then what is left."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


SPLITS: dict[str, Callable[[Model], nn.Module]] = {
    "parallelize_module": split_by_dtensor,
    "plain collectives": split_by_hand,
    "DDP": DistributedDataParallel,
    "fully_shard": sharded,
}
BY_BATCH = ("DDP", "fully_shard")
"""Splits in which every rank has its own part of the batch, and of the random numbers."""


def run_backward(model: nn.Module, split: str, length: int = SHORT) -> float:
    """Forward and backward of this rank's part of the batch, with the random numbers that belong to it; the loss."""
    rank = dist.get_rank() if split in BY_BATCH else 0
    whole = batch(length=length)
    mine = whole.chunk(dist.get_world_size())[rank] if split in BY_BATCH else whole
    model.zero_grad()
    torch.manual_seed(rank)
    loss = model(mine)
    loss.backward()
    return float(loss.detach())


def reference(kind: str, split: str, ranks: int, layers: int = 2, length: int = SHORT) -> dict[str, Tensor]:
    """The gradients of one rank, without a process group and without compilation."""
    model = build(kind, layers)
    whole = batch(length=length)
    parts = whole.chunk(ranks) if split in BY_BATCH else (whole,)
    for seed, part in enumerate(parts):
        torch.manual_seed(seed)
        (model(part) / len(parts)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def whole_gradients(model: nn.Module, split: str) -> dict[str, Tensor]:
    """All gradients in their full size; every rank must call this at the same place."""
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name.removeprefix("module.")] = whole(name, parameter.grad, split)
    return gradients


def whole(name: str, part: Tensor, split: str) -> Tensor:
    """All of the gradient, or other tensor, of a parameter; every rank must call this at the same place."""
    if split == "plain collectives":
        part = _gathered(name, part)
    return part.full_tensor() if isinstance(part, DTensor) else part


def _gathered(name: str, grad: Tensor) -> Tensor:
    layer, _, kind = name.rpartition(".")
    layer = layer.rpartition(".")[2]
    if layer not in COLUMNS and (layer not in ROWS or kind == "bias"):
        return grad
    parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, grad.contiguous())
    return torch.cat(parts, 0 if layer in COLUMNS else 1)


def worst_error(grads: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative error of a gradient, in the 2-norm.

    A key's bias is left out: softmax does not depend on it, its gradient is rounding error.
    """
    assert grads.keys() == wanted.keys()
    errors = [
        float((grads[name] - grad).norm() / grad.norm()) for name, grad in wanted.items() if not name.endswith("k.bias")
    ]
    return max(errors) if all(error == error for error in errors) else float("nan")

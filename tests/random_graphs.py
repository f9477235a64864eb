"""Random models from a seed: views, several results, writes in place, random numbers, dead ends, casts, reductions.

    model, batch, loss = random_model(7)
    loss(model, *batch)          # a finite scalar; the same operators and weights for the same seed

The recipe is drawn when the model is built, so that forward is plain code over fixed choices. Every value is a float32
matrix of one of a few shapes. What is written in place is a fresh value that autograd has not saved.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8
SHAPES = ((4, WIDTH), (4, WIDTH), (6, WIDTH), (4, 12), (6, 5))


def random_model(seed: int, size: int = 20) -> tuple[RandomModel, tuple[Tensor, ...], Callable[..., Tensor]]:
    """A model of ``size`` random pieces in training mode, its batch and its loss."""
    torch.manual_seed(seed)
    return RandomModel(seed, size).train(), (torch.randn(4, WIDTH), torch.randint(0, WIDTH, (4,))), loss


def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the first output, and something of the second."""
    first, second = model(x)
    return F.cross_entropy(first, labels) + 0.1 * second.double().square().mean().float()


class RandomModel(nn.Module):
    """Applies pieces of ``PIECES`` to values chosen among those made so far."""

    def __init__(self, seed: int, size: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        names = list(PIECES)
        self.recipe = [(draw.choice(names), draw.randrange(99), draw.randrange(99)) for _ in range(size)]
        self.shapes = [draw.choice(SHAPES) for _ in range(size)]
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in range(3))
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = [x, x @ self.weights[0]]
        for (name, first, second), shape in zip(self.recipe, self.shapes, strict=True):
            # Recent values more often than old ones, or most of the graph would be dead.
            a, b = values[-1 - first % min(4, len(values))], values[-1 - second % len(values)]
            values.append(fit(PIECES[name](self, a, fit(b, a.shape)), shape))
        return sum((fit(v, x.shape) for v in values[-3:]), values[1]), values[-2]


def fit(x: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Cut and pad to ``shape``: a slice, a pad, or nothing."""
    rows, columns = shape[0] - x.shape[0], shape[1] - x.shape[1]
    return F.pad(x, (0, columns, 0, rows)) if (rows or columns) else x


def wide(x: Tensor) -> Tensor:
    return fit(x, (x.shape[0], WIDTH))


def split(m: RandomModel, a: Tensor, b: Tensor) -> Tensor:
    left, middle, _ = a.split([1, a.shape[1] - 2, 1], dim=1)  # the last part is never read
    return left.expand(-1, middle.shape[1]) * middle


def unbind(m: RandomModel, a: Tensor, b: Tensor) -> Tensor:
    rows = a.unbind(0)
    return torch.stack([rows[0] + rows[1], *rows[2:], rows[0]])


def max_of(m: RandomModel, a: Tensor, b: Tensor) -> Tensor:
    values, indices = a.max(dim=1, keepdim=True)
    return (a - values).gather(1, indices) + b


def var_mean(m: RandomModel, a: Tensor, b: Tensor) -> Tensor:
    variance, mean = torch.var_mean(a, dim=1, keepdim=True)
    return (a - mean) * (variance + 1).rsqrt()


def write_slice(m: RandomModel, a: Tensor, b: Tensor) -> Tensor:
    fresh = a * 0.5
    fresh[:, ::2] = b[:, ::2]
    return fresh


def write_between_reads(m: RandomModel, a: Tensor, b: Tensor) -> Tensor:
    fresh = a * 0.5
    view = fresh.t()
    before = view.sum(0)
    fresh.add_(b)
    return fresh - before[:, None] + view.mean(1)


def write_chain(m: RandomModel, a: Tensor, b: Tensor) -> Tensor:
    fresh = torch.zeros_like(a)
    fresh.add_(a).mul_(0.7)
    return fresh.sub_(b, alpha=0.3).relu_()


def update_buffers(m: RandomModel, a: Tensor, b: Tensor) -> Tensor:
    result = wide(a) + m.mean  # reads the old value, and autograd does not save it
    with torch.no_grad():
        m.mean.mul_(0.9).add_(result.mean(0), alpha=0.1)
        m.steps.add_(1)
    return result


def dead_end(m: RandomModel, a: Tensor, b: Tensor) -> Tensor:
    torch.sin(a).t().sum()
    torch.rand_like(a)
    return a + b


def shared(m: RandomModel, a: Tensor, b: Tensor) -> Tensor:
    once = torch.tanh(a)
    return once * once + once.t().reshape(once.shape) * torch.tanh(a)


def embed(m: RandomModel, a: Tensor, b: Tensor) -> Tensor:
    return F.embedding(wide(a).argmax(1), m.table) * wide(b)


def convolve(m: RandomModel, a: Tensor, b: Tensor) -> Tensor:
    return F.conv1d(a.reshape(1, 1, -1), m.weights[2].view(WIDTH, 1, WIDTH), padding=4)[0, :4]


PIECES: dict[str, Callable[[RandomModel, Tensor, Tensor], Tensor]] = {
    "linear": lambda m, a, b: F.linear(wide(a), m.weights[1], m.norm.bias),
    "matmul": lambda m, a, b: a @ b.t() / 4,
    "gelu": lambda m, a, b: F.gelu(a) + b,
    "softmax": lambda m, a, b: a.softmax(1) * b,
    "where": lambda m, a, b: torch.where(a > b, a, b.neg()),
    "transpose": lambda m, a, b: a.t() * 0.9,
    "reshape": lambda m, a, b: a.t().reshape(a.shape) + b,
    "slice": lambda m, a, b: a[1:, ::2] * b[:-1, 1::2][:, : a[:, ::2].shape[1]].mean(),
    "expand": lambda m, a, b: a[:1].expand(6, -1) * 1.1,
    "split": split,
    "unbind": unbind,
    "max": max_of,
    "topk": lambda m, a, b: a.topk(3, dim=1).values,
    "sort": lambda m, a, b: a.sort(dim=1).values + b,
    "layer_norm": lambda m, a, b: m.norm(wide(a)),
    "batch_norm": lambda m, a, b: m.batch_norm(wide(a)),
    "var_mean": var_mean,
    "write_slice": write_slice,
    "write_between_reads": write_between_reads,
    "write_chain": write_chain,
    "update_buffers": update_buffers,
    "dead_end": dead_end,
    "shared": shared,
    "reduce": lambda m, a, b: a - a.mean(0) + b.logsumexp(1, keepdim=True) / 4,
    "dropout": lambda m, a, b: F.dropout(a, 0.3) + b,
    "bernoulli": lambda m, a, b: a * torch.bernoulli(torch.full_like(a, 0.5)),
    "noise": lambda m, a, b: a + 0.1 * torch.randn_like(b) * torch.rand_like(b),
    "float64": lambda m, a, b: (a.double() * b.double()).tanh().float(),
    "bfloat16": lambda m, a, b: (a.bfloat16() @ b.bfloat16().t()).tanh().float(),
    "embedding": embed,
    "convolution": convolve,
}
